"""The staged samples of an unfinished build: written chunk by chunk, then read in any order.

Counting leaves one file per chunk (`staging/parts/000012.arrow`), renamed into place when complete, so that a
killed build finds what it has already done, and beside it the content of the files that came with the records
(`staging/blobs/000012.bin`). `merge_parts` makes one mapped file of the parts, in which the writers find any sample in
constant time and memory, by its position: its 0-based place among all records of the dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.records import COUNT_COLUMNS
from packer.count import STAGED_SCHEMA, Counted
from packer.media import Media


@dataclass(frozen=True, slots=True)
class StagedSample:
    """What the writers need of a sample."""

    counts: dict[str, int]
    """Column of `balance.records.Counts` -> value."""
    input_ids: NDArray[np.int32]
    loss_spans: NDArray[np.int32]
    images: list[Media]
    image_widths: list[int]
    image_heights: list[int]
    image_tokens: list[int]
    audios: list[Media]
    audio_lengths: list[int]
    audio_tokens: list[int]


class Staging:
    """The folder of an unfinished build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = folder / "samples.arrow"
        """All parts in one file, once everything is counted."""
        self.blobs = folder / "blobs"
        """Content of files that came with the records, one file per chunk."""
        self._parts = folder / "parts"

    def prepare(self) -> None:
        """Make the folders."""
        for folder in (self._parts, self.blobs):
            folder.mkdir(parents=True, exist_ok=True)

    def part(self, chunk: int) -> Path:
        """File of a chunk's rows."""
        return self._parts / f"{chunk:06d}.arrow"

    def blob_name(self, chunk: int) -> str:
        """Name of a chunk's blob."""
        return f"{chunk:06d}.bin"

    def save(self, chunk: int, counted: Counted) -> None:
        """Write a chunk's rows as one record batch, whole or not at all; the blob first, so that it is there."""
        if counted.blob:
            _write(self.blobs / self.blob_name(chunk), counted.blob)
        path = self.part(chunk)
        temporary = path.with_suffix(".tmp")
        table = counted.table
        with pa.ipc.new_file(temporary, STAGED_SCHEMA) as writer:
            writer.write_batch(table.combine_chunks().to_batches()[0] if len(table) else _empty_batch())
        temporary.replace(path)

    def merge(self, num_chunks: int, records_per_part: Sequence[int]) -> None:
        """One file of all parts, one record batch each, in order; whole or not at all. The parts are then removed."""
        schema = STAGED_SCHEMA.with_metadata({"records_per_part": json.dumps(list(records_per_part))})
        temporary = self.samples.with_suffix(".tmp")
        parts = [self.part(chunk) for chunk in range(num_chunks)]
        with pa.ipc.new_file(temporary, schema) as writer:
            for part in parts:
                with pa.memory_map(str(part)) as source:
                    writer.write_batch(pa.ipc.open_file(source).get_batch(0))
        os.replace(temporary, self.samples)
        for part in parts:
            part.unlink()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def part_sizes(path: Path) -> tuple[int, int]:
    """(records read, records rejected) of a chunk's part."""
    with pa.memory_map(str(path)) as source:
        reason = pa.ipc.open_file(source).get_batch(0).column("reason")
        return len(reason), len(reason) - reason.null_count


def _empty_batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=STAGED_SCHEMA)


class StagedSamples:
    """Random access to the samples of a merged file, by position."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        rows = [self._reader.get_batch(batch).num_rows for batch in range(self._reader.num_record_batches)]
        self._starts = np.concatenate([[0], np.cumsum(rows)])
        self._columns = lru_cache(maxsize=256)(self._read_columns)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, position: int) -> StagedSample:
        batch = int(np.searchsorted(self._starts, position, side="right")) - 1
        row = int(position - self._starts[batch])
        columns = self._columns(batch)
        images, audios = columns["images"][row].as_py(), columns["audios"][row].as_py()
        return StagedSample(
            counts={name: columns[name][row].as_py() for name in COUNT_COLUMNS},
            input_ids=columns["input_ids"][row].values.to_numpy(),
            loss_spans=columns["loss_spans"][row].values.to_numpy().reshape(-1, 2),
            images=[_media(image) for image in images],
            image_widths=[image["width"] for image in images],
            image_heights=[image["height"] for image in images],
            image_tokens=[image["tokens"] for image in images],
            audios=[_media(audio) for audio in audios],
            audio_lengths=[audio["length"] for audio in audios],
            audio_tokens=[audio["tokens"] for audio in audios],
        )

    def _read_columns(self, batch: int) -> dict[str, pa.Array]:
        data = self._reader.get_batch(batch)
        return {name: data.column(name) for name in data.schema.names}


def _media(row: dict[str, Any]) -> Media:
    return Media(row["name"], row["container"], row["offset"], row["size"])
