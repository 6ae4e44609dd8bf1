"""index.arrow, written and read: where every group is and what it costs.

One row per group. While a build is unfinished, each shard has an `IndexPart`, written after it, so
that a part means that its shard is complete; `merge_index` joins them.

Readers map the file (`GroupIndex`): opening costs nothing per group, and the ranks of a machine
share the pages. So 100 million groups (6 GB of index) need a few megabytes per process.
"""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import DamagedShard, first_line
from balance.types import COUNT_COLUMNS, IntArray
from shards.checksums import FileChecksum, group_checksum
from shards.manifest import BuildFile
from shards.stored_group import ByteRange, PackedBlock

INDEX_NAME = "index.arrow"
BATCH_ROWS = 65_536
"""Rows of a record batch of index.arrow, except the last one; docs/design.md."""
MANY = 8
"""A column is gathered as a whole for at least a share of 1 / MANY of its rows: 10 million random
rows take .2 s, by record batch .8 s.
"""
_PLACE = [("shard", pa.int32()), ("offset", pa.int64()), ("length", pa.int64())]
_LOADS = [(name, pa.int32()) for name in ("num_samples", *COUNT_COLUMNS)]
_IDS = ("sample_ids", pa.list_(pa.string()))
INDEX_SCHEMA = pa.schema([*_PLACE, ("checksum", pa.uint64()), *_LOADS, _IDS])
_CHECKSUM = INDEX_SCHEMA.get_field_index("checksum")

LostSample = tuple[int, str, str]
"""A sample that was left out of its shard: row of the counts table, reason, detail."""


@dataclass(slots=True)
class IndexPart:
    """Rows of the index for one shard, and the samples that were left out of it."""

    shard: int
    rows: list[pa.Table] = field(default_factory=list)
    lost: list[LostSample] = field(default_factory=list)
    file: BuildFile | None = None
    """The shard, once it is finished."""

    def add(self, block: PackedBlock, ranges: list[ByteRange]) -> None:
        """The groups of a block, which were written at `ranges`."""
        if not ranges:
            return
        firsts = block.group_offsets[:-1]
        columns = {
            "shard": np.full(len(ranges), self.shard),
            "offset": [offset for offset, _ in ranges],
            "length": [length for _, length in ranges],
            "checksum": np.zeros(len(ranges), np.uint64),  # filled in once the shard is closed
            "num_samples": np.diff(block.group_offsets),
            **{name: np.add.reduceat(block.counts[name], firsts) for name in COUNT_COLUMNS},
            "sample_ids": pa.ListArray.from_arrays(
                pa.array(block.group_offsets, pa.int32()), pa.array(block.sample_ids, pa.string())
            ),
        }
        self.rows.append(pa.table(columns).cast(INDEX_SCHEMA))

    def finish(self, name: str, written: Path) -> None:
        """Fill in the checksums of the groups and of the shard `name`, which is read once."""
        with pa.memory_map(str(written)) as source:
            content = memoryview(source.read_buffer())
        whole, done = FileChecksum(), 0
        for number, table in enumerate(self.rows):
            checksums = []
            for row in table.select(["offset", "length"]).to_pylist():
                # group by group, so that the bytes come from memory once for both checksums
                start, end = row["offset"], row["offset"] + row["length"]
                whole.update(content[done:end])
                checksums.append(group_checksum(content[start:end]))
                done = end
            column = pa.array(checksums, pa.uint64())
            self.rows[number] = table.set_column(_CHECKSUM, INDEX_SCHEMA.field(_CHECKSUM), column)
        whole.update(content[done:])
        self.file = BuildFile(name=name, size=len(content), checksum=whole.hexdigest())

    def save(self, path: Path) -> None:
        """Write the rows, whole or not at all; after `finish`, and after the shard is in place."""
        shard = self.file.to_json() if self.file else {}
        metadata = {"rejected": json.dumps(self.lost), "shard": json.dumps(shard)}
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *self.rows]).combine_chunks()
        _write(table.replace_schema_metadata(metadata), path)


def read_lost(part: Path) -> list[LostSample]:
    """The samples that were left out while a shard was written."""
    return [(row, reason, detail) for row, reason, detail in _metadata(part, b"rejected")]


def read_shard_file(part: Path) -> BuildFile:
    """The shard as it was when it was written, so that nobody need read it again."""
    return BuildFile.from_json(_metadata(part, b"shard"))


def _metadata(part: Path, key: bytes) -> Any:
    with pa.memory_map(str(part)) as source:
        return json.loads(pa.ipc.open_file(source).schema.metadata[key])


def merge_index(parts: Iterable[Path], target: Path) -> pa.Table:
    """One index of the rows of all parts; returns it. Written whole or not at all."""
    tables = [INDEX_SCHEMA.empty_table()]
    for part in parts:
        with pa.OSFile(str(part), "rb") as source:
            tables.append(pa.ipc.open_file(source).read_all().replace_schema_metadata(None))
    table = pa.concat_tables(tables).combine_chunks()
    _write(table, target, BATCH_ROWS)
    return table


def _write(table: pa.Table, path: Path, batch_rows: int | None = None) -> None:
    """Write an IPC file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with pa.ipc.new_file(temporary, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    temporary.replace(path)


class GroupIndex:
    """The index of a finished build, mapped: reads only the rows asked for. Thread-safe."""

    def __init__(self, source: Path | pa.NativeFile, num_groups: int) -> None:
        """`source` is the file's path, or the file, mapped."""
        self._path = source if isinstance(source, Path) else INDEX_NAME
        self._num_groups = num_groups
        try:
            file = pa.memory_map(str(source)) if isinstance(source, Path) else source
            self._reader = pa.ipc.open_file(file)
        except (OSError, pa.ArrowInvalid) as error:
            advice = "run `packer verify`, or build again"
            raise DamagedShard(f"{self._path}: cannot be opened ({error}); {advice}") from None
        if self._reader.num_record_batches != -(-num_groups // BATCH_ROWS):
            raise self._damaged(f"{self._reader.num_record_batches} record batches")
        self._batches: dict[int, pa.RecordBatch] = {}
        self._views: dict[tuple[int, str], NDArray[np.integer[Any]]] = {}
        self._cells: dict[tuple[int, tuple[str, ...]], list[memoryview[int]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_groups

    def column(self, name: str, groups: IntArray | None = None) -> IntArray:
        """Values of an integer column for `groups` (rows; None: all), int64, same shape."""
        num_batches = self._reader.num_record_batches
        if groups is None or num_batches == 1 or len(groups) * MANY >= self._num_groups:
            views = [self._view(batch, name) for batch in range(num_batches)]
            whole = views[0] if num_batches == 1 else np.concatenate(views or [np.zeros(0, int)])
            return (whole if groups is None else whole[groups]).astype(np.int64)
        # by record batch; NumPy sorts 16 bits by counting, so this is linear
        batches = (groups // BATCH_ROWS).astype(np.uint16)
        order = np.argsort(batches, kind="stable")
        ends = np.flatnonzero(np.diff(batches[order], append=-1)) + 1
        values = np.empty(len(groups), dtype=np.int64)
        for start, end in pairwise([0, *ends.tolist()]):
            places = order[start:end]
            view = self._view(int(batches[places[0]]), name)
            values[places] = view[groups[places] % BATCH_ROWS]
        return values

    def seq_len(self, groups: IntArray) -> IntArray:
        """LLM tokens of `groups`, int64, same shape."""
        image, text, audio = (
            self.column(f"num_{kind}_tokens", groups) for kind in ("image", "text", "audio")
        )
        return image + text + audio

    def row(self, group: int, *names: str) -> tuple[int, ...]:
        """Integer columns of one group."""
        batch, row = divmod(group, BATCH_ROWS)
        cells = self._cells.get((batch, names))
        if cells is None:
            # elements of a memoryview are Python's own numbers, in a third of the time
            cells = self._cells[batch, names] = [
                memoryview(self._view(batch, name))  # type: ignore[arg-type]
                for name in names
            ]
        return tuple([cell[row] for cell in cells])

    def sample_ids(self, group: int) -> tuple[str, ...]:
        """Ids of the samples of one group, in order."""
        batch, row = divmod(group, BATCH_ROWS)
        with self._lock:
            return tuple(self._batch(batch).column("sample_ids")[row].as_py())

    def _view(self, batch: int, name: str) -> NDArray[np.integer[Any]]:
        view = self._views.get((batch, name))
        if view is None:
            with self._lock:
                # not `to_numpy`, which imports pandas where it is installed: .2 s and 50 MB
                made: NDArray[Any] = np.from_dlpack(self._batch(batch).column(name))
                view = self._views[batch, name] = made
        return view

    def _batch(self, number: int) -> pa.RecordBatch:
        mapped = self._batches.get(number)
        if mapped is None:
            try:
                mapped = self._reader.get_batch(number)
            except (OSError, pa.ArrowException) as error:
                reason = f"not readable ({first_line(error)}); run `packer verify`"
                raise DamagedShard(f"{self._path}: {reason}") from None
            if mapped.num_rows != min(BATCH_ROWS, self._num_groups - number * BATCH_ROWS):
                raise self._damaged(f"{mapped.num_rows} rows in record batch {number}")
            self._batches[number] = mapped
        return mapped

    def _damaged(self, found: str) -> DamagedShard:
        problem = f"{found}, which does not fit the manifest's {self._num_groups} groups"
        return DamagedShard(f"{self._path}: {problem}; run `packer verify`, or build again")
