"""What all ranks of a run get, step by step: in this process (`steps_of`), or in one that is killed
(`serve`).
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from isobatch.loaders import MicroBatch, StreamingLoader
from support.builds.shard_fixture import IMAGE_TOKEN
from support.servers import _die_with_parent

EPOCHS = 3
PATCH_TOKENS = 4
"""LLM tokens of an image patch of the model `tiny`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One step of all ranks, or the end of an epoch, which gives nothing."""

    epoch: int
    samples: list[str]
    """`mark` of each sample, as it arrived."""
    contents: list[int]
    """Checksum of each sample's pixels and positions."""
    num_dropped: int
    """Samples that were left out since the record before."""
    state: dict[str, Any]
    """The loaders' state behind this step."""


def mark(sample_id: str, input_ids: list[int], labels: list[int]) -> str:
    """A sample and its tokens in one short string, so that a wrong token is a wrong sample."""
    return f"{sample_id} {zlib.crc32(repr((input_ids, labels)).encode()):08x}"


def open_ranks(
    world: int, state: dict[str, Any] | None = None, **options: Any
) -> list[StreamingLoader]:
    """The loaders of all ranks, at `state` if there is one; `options` are the loaders'."""
    ranks = [
        StreamingLoader(dp_rank=rank, dp_world_size=world, pixel_dtype=torch.uint8, **options)
        for rank in range(world)
    ]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    return ranks


def steps_of(ranks: list[StreamingLoader]) -> Iterator[Given]:
    """Steps of all ranks, epoch after epoch until EPOCHS are complete. Checks what holds for every
    step.
    """
    dropped = ranks[0].num_dropped_samples
    while ranks[0].epoch < EPOCHS:
        for step in zip(*ranks, strict=True):  # strict: all ranks have the same number of steps
            if (
                ranks[0].epoch == EPOCHS
            ):  # the state was behind the very last step, but before the epoch's end
                break
            batches = [batch for rank in step for batch in rank]
            _check(batches)
            yield _given(ranks, batches, dropped)
            dropped = ranks[0].num_dropped_samples
        yield _given(ranks, [], dropped)
        dropped = ranks[0].num_dropped_samples


def _given(ranks: list[StreamingLoader], batches: list[MicroBatch], dropped: int) -> Given:
    (state,) = {json.dumps(loader.state_dict(), sort_keys=True) for loader in ranks}
    (dropped_now,) = {loader.num_dropped_samples for loader in ranks}
    return Given(
        epoch=ranks[0].epoch,
        samples=[*chain(*map(_marks, batches))],
        contents=[*chain(*map(_contents, batches))],
        num_dropped=dropped_now - dropped,
        state=json.loads(state),
    )


def _marks(batch: MicroBatch) -> Iterator[str]:
    sizes = batch.cu_seqlens.diff().tolist()
    parts = zip(
        batch.sample_ids, batch.input_ids.split(sizes), batch.labels.split(sizes), strict=True
    )
    return (mark(sample_id, ids.tolist(), labels.tolist()) for sample_id, ids, labels in parts)


def _contents(batch: MicroBatch) -> Iterator[int]:
    sizes = batch.cu_seqlens.diff().tolist()
    patches = [
        int((ids == IMAGE_TOKEN).sum()) // PATCH_TOKENS for ids in batch.input_ids.split(sizes)
    ]
    parts = zip(batch.position_ids.split(sizes), batch.pixel_values.split(patches), strict=True)
    return (
        zlib.crc32(pixels.contiguous().numpy().tobytes(), zlib.crc32(positions.numpy().tobytes()))
        for positions, pixels in parts
    )


def _check(batches: list[MicroBatch]) -> None:
    """The step's sums are global, and every image token has its pixels."""
    num_labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
    num_samples = sum(batch.num_samples for batch in batches)
    assert {(batch.num_loss_tokens, batch.num_step_samples) for batch in batches} <= {
        (num_labels, num_samples)
    }
    num_image_tokens = sum(int((batch.input_ids == IMAGE_TOKEN).sum()) for batch in batches)
    assert num_image_tokens == PATCH_TOKENS * sum(len(batch.pixel_values) for batch in batches)


def serve(connection: Connection, build: Path) -> None:
    """Run what `connection` asks for, each in a fork: answers its pid, and when it has ended its
    status.

    A process of its own, because forks need one without threads or connections to a store; and one
    that has done a step already, because the imports and kernels of a first one take seconds.
    """
    _die_with_parent()
    torch.set_num_threads(1)
    next(steps_of(open_ranks(1, url=build, workers=0)))
    with contextlib.suppress(EOFError):  # the tests have ended
        while True:
            task = connection.recv()
            pid = os.fork()
            if pid == 0:
                _consume_and_exit(*task)
            connection.send(pid)
            connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _consume_and_exit(*task: Any) -> NoReturn:
    status = 1
    try:
        _die_with_parent()  # else a run that never ends would outlive tests that were interrupted
        consume(*task)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def consume(
    run: dict[str, Any], environment: dict[str, str], folder: Path, save_every: int
) -> None:
    """A run to be killed: every `save_every` steps it writes what came since, with the state, as
    one file of `folder`.

    `run`: arguments of `open_ranks`. The file `told` grows by a byte with each step, before that is
    saved.
    """
    os.environ.update(environment)
    unsaved: list[dict[str, Any]] = []
    for number, given in enumerate(steps_of(open_ranks(**run)), start=1):
        unsaved.append(asdict(given))
        with (folder / "told").open("ab") as told:
            told.write(b".")
        if number % save_every == 0:
            (folder / "unfinished").write_text(json.dumps(unsaved))
            (folder / "unfinished").rename(folder / f"saved-{number:05d}.json")
            unsaved.clear()
