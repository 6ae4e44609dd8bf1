"""Staged samples of an unfinished build: written in chunks, read in any order.

Counting leaves one file per chunk (`staging/parts/000012.arrow`), renamed into place when complete,
so that a killed build finds what it has done, and next to it the content of the files that came
with the records (`staging/blobs/000012.bin`). `Staging.merge` makes one mapped file of the parts,
in which the writers find a sample by its position: its 0-based place among the dataset's records.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.common.types import IntArray
from isobatch.counting.record_counter import never_read_in
from isobatch.counting.records.extras import Kinds, joined_kinds, types_of
from isobatch.counting.records.fields import NeverRead, add_never_read
from isobatch.counting.sample_counter import (
    EXTRA_KINDS,
    STAGED_SCHEMA,
    Counted,
    blob_name,
    staged_schema,
)
from isobatch.shards.stored_group import EXTRAS, ExtraTypes
from isobatch.shards.tables import COUNTS_SCHEMA, REJECTED_SCHEMA

MERGED_PARTS = 32
"""Parts in one record batch of the merged file: writers look into each batch, so few are better."""


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
        with pa.ipc.new_file(temporary, counted.table.schema) as writer:
            writer.write_batch(_one_batch(counted.table))
        temporary.replace(path)

    def merge(self, chunks: Sequence[int], records_per_part: Sequence[int]) -> None:
        """One file of the parts of chunks, whole or not at all. The parts are then removed."""
        temporary = self.samples.with_suffix(".tmp")
        parts = [self.part(chunk) for chunk in chunks]
        schema = _read_part(parts[0]).schema if parts else STAGED_SCHEMA
        if EXTRAS in schema.names:
            schema = staged_schema(joined_kinds(map(_extra_kinds, parts)))
        records = {"records_per_part": json.dumps(list(records_per_part))}
        schema = schema.with_metadata((schema.metadata or {}) | records)
        with pa.ipc.new_file(temporary, schema) as writer:
            for first in range(0, len(parts), MERGED_PARTS):
                batches = [_read_part(part) for part in parts[first : first + MERGED_PARTS]]
                writer.write_batch(pa.concat_batches(batches))
        os.replace(temporary, self.samples)
        for part in parts:
            part.unlink()


def _read_part(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).get_batch(0)


def _extra_kinds(path: Path) -> Kinds:
    kinds: Kinds = json.loads(_read_part(path).schema.metadata[EXTRA_KINDS])
    return kinds


def count_staged(part: Path) -> int:
    """Number of records of a chunk, rejected ones included."""
    return len(_read_part(part))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


class StagedSamples:
    """Access to the samples of a merged file, by position."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = map(self._reader.get_batch, range(self._reader.num_record_batches))
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

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
        table = pa.Table.from_batches(parts, self._reader.schema).combine_chunks()
        return _one_batch(table.take(pa.array(inverse)))


def split_staged(staged: Path) -> tuple[pa.Table, pa.Table, list[int]]:
    """(counts, rejected, records per part) of a build's staged samples, in source order."""
    counts, rejected = [COUNTS_SCHEMA.empty_table()], [REJECTED_SCHEMA.empty_table()]
    position = 0
    with pa.memory_map(str(staged)) as source:
        reader = pa.ipc.open_file(source)
        records_per_part = json.loads(reader.schema.metadata[b"records_per_part"])
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            positions = pa.array(np.arange(position, position + len(batch)), pa.int64())
            batch = batch.append_column("position", positions)
            position += len(batch)
            usable = pc.is_null(batch.column("reason"))
            lost = batch.select(REJECTED_SCHEMA.names).filter(pc.invert(usable))
            counts.append(_counts_of(batch.filter(usable)))
            rejected.append(pa.Table.from_batches([lost]))
    tables = [pa.concat_tables(parts).combine_chunks() for parts in (counts, rejected)]
    return tables[0], tables[1], records_per_part


def usable_counts(rows: pa.Table | None) -> pa.Table:
    """Counts of the usable samples of staged rows, of which the positions mean nothing."""
    if rows is None:
        return COUNTS_SCHEMA.empty_table()
    batch = _one_batch(rows)
    batch = batch.append_column("position", pa.array(np.arange(len(batch)), pa.int64()))
    return _counts_of(batch.filter(pc.is_null(batch.column("reason"))))


def staged_extras(staged: Path, names: Sequence[str]) -> ExtraTypes:
    """Types of those of the kept columns that have a value in any sample."""
    return types_of(names, staged_kinds(staged))


def staged_kinds(staged: Path) -> Kinds:
    """Kinds of the values of the kept columns."""
    with pa.memory_map(str(staged)) as source:
        metadata = pa.ipc.open_file(source).schema.metadata
    kinds: Kinds = json.loads(metadata.get(EXTRA_KINDS, "{}"))  # without a record, without kinds
    return kinds


def staged_never_read(
    staged: Path, names: Sequence[str], records_per_part: Sequence[int]
) -> dict[str, NeverRead]:
    """Part of the dataset -> what its usable records have that was never read, if anything."""
    by_part: dict[str, NeverRead] = {}
    ends = np.cumsum(records_per_part)
    position = 0
    with pa.memory_map(str(staged)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            edges = [position, *ends[(ends > position) & (ends < position + len(batch))].tolist()]
            edges.append(position + len(batch))
            for start, end in pairwise(edges):
                part = int(np.searchsorted(ends, start, side="right"))
                rows = batch.slice(start - position, end - start)
                add_never_read(by_part.setdefault(names[part], {}), never_read_in(rows))
            position += len(batch)
    return {name: paths for name, paths in by_part.items() if paths}


def has_videos(staged: Path) -> bool:
    """Whether any sample has a video."""
    with pa.memory_map(str(staged)) as source:
        reader = pa.ipc.open_file(source)
        batches = map(reader.get_batch, range(reader.num_record_batches))
        frames = (batch.column("images").flatten().field("num_frames") for batch in batches)
        return any((pc.max(counts).as_py() or 0) > 0 for counts in frames)


def _counts_of(batch: pa.RecordBatch) -> pa.Table:
    parts = [batch.column(f"num_{kind}_tokens").to_numpy() for kind in ("image", "text", "audio")]
    media_bytes = _sizes(batch.column("images")) + _sizes(batch.column("audios"))
    columns = {
        **{name: batch.column(name) for name in COUNTS_SCHEMA.names[:-2]},
        "seq_len": pa.array(np.sum(parts, axis=0), pa.int32()),
        "media_bytes": pa.array(media_bytes, pa.int64()),
    }
    return pa.table(columns, schema=COUNTS_SCHEMA)


def _sizes(files: pa.ListArray) -> IntArray:
    """Bytes of all files of each row."""
    sizes = files.flatten().field("size").to_numpy()
    running = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    lengths = pc.list_value_length(files).fill_null(0).to_numpy()
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.asarray(running[ends[1:]] - running[ends[:-1]])
