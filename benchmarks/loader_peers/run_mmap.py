"""The fair limit of reading: plain pyarrow on the shards of our own build, mapped, with nothing
around it.

For each group, in the order of the loader's first epoch: `get_batch`, one view per image and per
column of tokens, which are then touched as what the loader gives. No checksums: nor does the loader
compute any after its first pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pyarrow as pa
from run_ours import open_loader, write

TOKENS = ("input_ids", "labels")


class Mapped:
    """All groups of a build, `BATCH` samples at a time."""

    def __init__(self, task: measure.Task) -> None:
        names = sorted(Path(task.place, "shards").iterdir())
        readers = [pa.ipc.open_file(pa.memory_map(str(name))) for name in names]
        stored = [
            (reader, place) for reader in readers for place in range(reader.num_record_batches)
        ]
        with contextlib.closing(open_loader(task)) as loader:
            ids = [batch.sample_ids[0] for step in loader for batch in step if batch.sample_ids]
        # samples are numbered in the order in which they are stored
        self._places = [stored[int(sample_id) // measure.GROUP] for sample_id in ids]

    def __iter__(self) -> Iterator[Any]:
        places = iter(self._places)
        while batch := list(islice(places, measure.BATCH // measure.GROUP)):
            images: list[Any] = []
            tokens: list[Any] = []
            for reader, place in batch:
                group = reader.get_batch(place)
                images += [
                    np.frombuffer(image.as_buffer(), np.uint8)
                    for image in group.column("images").flatten()
                ]
                tokens += [group.column(name).flatten().to_numpy() for name in TOKENS]
            yield images, tokens


if __name__ == "__main__":
    measure.main(write, Mapped, parts=lambda batch: batch)
