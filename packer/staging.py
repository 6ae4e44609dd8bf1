"""The staged samples of an unfinished build: written chunk by chunk, then read in any order.

Counting leaves one file per chunk (`staging/parts/part-000012.arrow`), renamed into place when complete, so that a
killed build finds what it has already done. `merge_parts` makes one mapped file of them, in which the writers find
any sample in constant time and memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.records import COUNT_COLUMNS
from packer.count import STAGED_SCHEMA


@dataclass(frozen=True, slots=True)
class StagedSample:
    """What the writers need of a sample."""

    sample_id: str
    counts: dict[str, int]
    """Column of `balance.records.Counts` -> value."""
    input_ids: NDArray[np.int32]
    loss_spans: NDArray[np.int32]
    images: list[str]
    image_widths: list[int]
    image_heights: list[int]
    image_tokens: list[int]
    image_bytes: list[int]


def part_path(staging: Path, chunk: int) -> Path:
    """File of a chunk's staged samples."""
    return staging / "parts" / f"part-{chunk:06d}.arrow"


def write_part(path: Path, table: pa.Table) -> None:
    """Write a part as one record batch, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with pa.ipc.new_file(temporary, STAGED_SCHEMA) as writer:
        writer.write_batch(table.combine_chunks().to_batches()[0] if len(table) else _empty_batch())
    temporary.replace(path)


def part_sizes(path: Path) -> tuple[int, int]:
    """(records read, records rejected) of a part."""
    with pa.memory_map(str(path)) as source:
        reason = pa.ipc.open_file(source).get_batch(0).column("reason")
        return len(reason), len(reason) - reason.null_count


def merge_parts(parts: Sequence[Path], target: Path) -> None:
    """All parts in one IPC file, one record batch each, in order; whole or not at all."""
    temporary = target.with_suffix(".tmp")
    with pa.ipc.new_file(temporary, STAGED_SCHEMA) as writer:
        for part in parts:
            with pa.memory_map(str(part)) as source:
                writer.write_batch(pa.ipc.open_file(source).get_batch(0))
    os.replace(temporary, target)


def _empty_batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=STAGED_SCHEMA)


class StagedSamples:
    """Random access to the samples of a merged file, by row number among the samples that can be used."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        usable = [self._usable_rows(batch) for batch in range(self._reader.num_record_batches)]
        self._rows = usable
        self._starts = np.concatenate([[0], np.cumsum([len(rows) for rows in usable])])
        self._columns = lru_cache(maxsize=256)(self._read_columns)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> StagedSample:
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        place = int(self._rows[batch][row - self._starts[batch]])
        columns = self._columns(batch)
        return StagedSample(
            sample_id=columns["sample_id"][place].as_py(),
            counts={name: columns[name][place].as_py() for name in COUNT_COLUMNS},
            input_ids=columns["input_ids"][place].values.to_numpy(),
            loss_spans=columns["loss_spans"][place].values.to_numpy().reshape(-1, 2),
            images=columns["images"][place].as_py(),
            image_widths=columns["image_widths"][place].as_py(),
            image_heights=columns["image_heights"][place].as_py(),
            image_tokens=columns["image_tokens"][place].as_py(),
            image_bytes=columns["image_bytes"][place].as_py(),
        )

    def _usable_rows(self, batch: int) -> NDArray[np.int64]:
        reason = self._reader.get_batch(batch).column("reason")
        return np.flatnonzero(reason.is_null().to_numpy(zero_copy_only=False))

    def _read_columns(self, batch: int) -> dict[str, pa.Array]:
        data = self._reader.get_batch(batch)
        return {name: data.column(name) for name in data.schema.names}
