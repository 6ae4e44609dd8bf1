"""The staged samples of an unfinished build: written chunk by chunk, then read in any order.

Counting leaves one file per chunk (`staging/parts/000012.arrow`), renamed into place when complete,
so that a killed build finds what it has done, and next to it the content of the files that came
with the records (`staging/blobs/000012.bin`). `Staging.merge` makes one mapped file of the parts,
in which the writers find a sample by its position: its 0-based place among the dataset's records.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.types import COUNT_COLUMNS, IntArray
from packer.count.sample_counter import STAGED_SCHEMA, Counted, blob_name
from packer.records.media import Media

MERGED_PARTS = 32
"""Parts in one record batch of the merged file: writers look into each batch, so few are better."""


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """The images or the audio files of some samples, one sample's after the other's."""

    offsets: IntArray
    """Borders of the samples among the files, shape (num_samples + 1,)."""
    media: list[Media]
    numbers: dict[str, IntArray]
    """Numbers of each file: `tokens`, and `width` and `height` or `length`."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """What the writers need of some samples, columnar."""

    counts: dict[str, IntArray]
    """Values per sample, by column of `balance.types.Counts`."""
    id_offsets: IntArray
    """Borders of the samples in `input_ids`, shape (num_samples + 1,)."""
    input_ids: NDArray[np.int32]
    """Tokens, one per image or audio file."""
    loss_spans: IntArray
    """Shape (num_spans, 2): first token in `input_ids` with a label, and the one after the last."""
    images: StagedFiles
    audios: StagedFiles

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> StagedBlock:
        """The block of some rows (`StagedSamples.take`)."""
        id_offsets = _borders(rows.column("input_ids"))
        spans = rows.column("loss_spans")
        starts = np.repeat(id_offsets[:-1], np.diff(_borders(spans)) // 2)
        return cls(
            counts={name: rows.column(name).to_numpy().astype(np.int64) for name in COUNT_COLUMNS},
            id_offsets=id_offsets,
            input_ids=rows.column("input_ids").flatten().to_numpy(),
            loss_spans=spans.flatten().to_numpy().reshape(-1, 2) + starts[:, None],
            images=_files(rows.column("images"), ("tokens", "width", "height")),
            audios=_files(rows.column("audios"), ("tokens", "length")),
        )


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

    def remove(self) -> None:
        """Remove the folder, if it is there."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def part(self, chunk: int) -> Path:
        """File of a chunk's rows."""
        return self._parts / f"{chunk:06d}.arrow"

    def save(self, chunk: int, counted: Counted) -> None:
        """Write a chunk's blob, then its rows as one record batch; each whole or not at all."""
        if counted.blob:
            blob = self.blobs / blob_name(chunk)
            blob.with_suffix(".tmp").write_bytes(counted.blob)
            blob.with_suffix(".tmp").replace(blob)
        path = self.part(chunk)
        temporary = path.with_suffix(".tmp")
        with pa.ipc.new_file(temporary, STAGED_SCHEMA) as writer:
            writer.write_batch(_one_batch(counted.table))
        temporary.replace(path)

    def merge(self, num_chunks: int, records_per_part: Sequence[int]) -> None:
        """One file of all parts, in order; whole or not at all. The parts are then removed."""
        records = {"records_per_part": json.dumps(list(records_per_part))}
        schema = STAGED_SCHEMA.with_metadata(records)
        temporary = self.samples.with_suffix(".tmp")
        parts = [self.part(chunk) for chunk in range(num_chunks)]
        with pa.ipc.new_file(temporary, schema) as writer:
            for first in range(0, num_chunks, MERGED_PARTS):
                batches = [_read_part(part) for part in parts[first : first + MERGED_PARTS]]
                writer.write_batch(pa.concat_batches(batches))
        os.replace(temporary, self.samples)
        for part in parts:
            part.unlink()


def _read_part(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).get_batch(0)


def part_sizes(path: Path) -> tuple[int, int]:
    """(records read, records rejected) of a chunk's part."""
    reason = _read_part(path).column("reason")
    return len(reason), len(reason) - reason.null_count


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=STAGED_SCHEMA)


class StagedSamples:
    """Access to the samples of a merged file, by position."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = map(self._reader.get_batch, range(self._reader.num_record_batches))
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, positions: IntArray) -> pa.RecordBatch:
        """The rows of some samples, in the order of `positions`."""
        order = np.argsort(positions, kind="stable")
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        # batch by batch, so that each is read once, and then back into the wanted order
        batch_of = np.searchsorted(self._starts, positions[order], side="right") - 1
        batches, firsts = np.unique(batch_of, return_index=True)
        runs = np.split(positions[order], firsts[1:])
        parts = [
            self._reader.get_batch(int(batch)).take(pa.array(run - self._starts[batch]))
            for batch, run in zip(batches, runs, strict=True)
        ]
        table = pa.Table.from_batches(parts, STAGED_SCHEMA).combine_chunks()
        return _one_batch(table.take(pa.array(inverse)))


def _borders(lists: pa.ListArray) -> IntArray:
    """Start of each row's values among all of them, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)])


def _files(lists: pa.ListArray, numbers: tuple[str, ...]) -> StagedFiles:
    files = lists.flatten()
    place = [files.field(name).to_pylist() for name in ("name", "container", "offset", "size")]
    return StagedFiles(
        offsets=_borders(lists),
        media=list(starmap(Media, zip(*place, strict=True))),
        numbers={name: files.field(name).to_numpy().astype(np.int64) for name in numbers},
    )
