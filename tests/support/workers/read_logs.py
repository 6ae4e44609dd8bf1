"""What tools have written, read back: TensorBoard's events, and the file of an offline W&B run."""

import json
import struct
from collections import defaultdict

BLOCK, HEADER = 32_768, 7
"""Of LevelDB's log format, which `.wandb` files have."""


def read_events(folder):
    """Name -> (step, value) of all scalars."""
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
        EventAccumulator,
    )

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def read_wandb(file):
    """Name -> values of the run's history."""
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    history = defaultdict(list)
    for content in _entries(file.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(content)
        if entry.WhichOneof("record_type") == "history":
            for item in entry.history.item:
                name = item.key or "/".join(item.nested_key)
                history[name].append(json.loads(item.value_json))
    return history


def _entries(data):
    """Entries of a log: in blocks, each in one piece (type 1) or in several (2, 3 ..., 4)."""
    place, parts = HEADER, []
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEADER])
        parts.append(data[place + HEADER : place + HEADER + length])
        place += HEADER + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
