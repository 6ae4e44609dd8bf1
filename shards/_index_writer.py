"""The index: one row per group, columnar, so that a loader maps it and never parses it.

Each shard's writer leaves its rows beside the staged samples; `merge_index` makes one file of them
in shard order. The rows of a shard are written after the shard itself, so their presence means that
the shard is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from balance.types import COUNT_COLUMNS
from shards.block import GroupPlace, PackedBlock
from shards.checksums import FileChecksum, group_checksum

INDEX_BATCH_ROWS = 65_536
INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("checksum", pa.uint64()),
        ("num_samples", pa.int32()),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("sample_ids", pa.list_(pa.string())),
    ]
)


@dataclass(slots=True)
class ShardIndex:
    """Rows of the index for one shard, the samples that were lost while writing it, and what it is
    once written.
    """

    shard: int
    tables: list[pa.Table] = field(default_factory=list)
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    """(row number in the counts table, reason, detail)."""
    described: dict[str, Any] = field(default_factory=dict)
    """Name, size and checksum of the shard."""

    def add(
        self, block: PackedBlock, groups: list[GroupPlace], places: list[tuple[int, int]]
    ) -> None:
        """Groups that were written at `places`, (offset, length); all samples of the block, in
        order.
        """
        if not groups:
            return
        firsts = [group.first for group in groups]
        borders = pa.array([*firsts, groups[-1].last], pa.int32())
        columns = {
            "shard": np.full(len(groups), self.shard),
            "offset": [offset for offset, _ in places],
            "length": [length for _, length in places],
            "checksum": np.zeros(len(groups), np.uint64),  # until the shard is closed
            "num_samples": [group.last - group.first for group in groups],
            **{name: np.add.reduceat(block.counts[name], firsts) for name in COUNT_COLUMNS},
            "sample_ids": pa.ListArray.from_arrays(
                borders, pa.array(block.sample_ids, pa.string())
            ),
        }
        self.tables.append(pa.table(columns).cast(INDEX_SCHEMA))

    def finish(self, name: str, shard: Path) -> None:
        """Fill in the checksums of the groups, and of the shard with its `name`, out of the
        finished file.
        """
        with pa.memory_map(str(shard)) as source:
            content = memoryview(source.read_buffer())
        place, whole, done = INDEX_SCHEMA.get_field_index("checksum"), FileChecksum(), 0
        for number, table in enumerate(self.tables):
            checksums = []
            for offset, length in zip(
                *(table.column(key).to_pylist() for key in ("offset", "length")), strict=True
            ):
                whole.add(content[done : offset + length])  # once through the memory for both
                checksums.append(group_checksum(content[offset : offset + length]))
                done = offset + length
            column = pa.array(checksums, pa.uint64())
            self.tables[number] = table.set_column(place, INDEX_SCHEMA.field(place), column)
        whole.add(content[done:])
        self.described = {"name": name, "size": len(content), "xxh3_128": whole.hex}

    def save(self, path: Path) -> None:
        """Write the rows, whole or not at all."""
        metadata = {"rejected": json.dumps(self.rejected), "shard": json.dumps(self.described)}
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *self.tables]).combine_chunks()
        table = table.replace_schema_metadata(metadata)
        temporary = path.with_suffix(".tmp")
        with pa.ipc.new_file(temporary, table.schema) as writer:
            writer.write_table(table)
        temporary.replace(path)


def read_lost(path: Path) -> list[tuple[int, str, str]]:
    """The samples that were rejected while a shard was written: (row of counts, reason, detail)."""
    return [(row, reason, detail) for row, reason, detail in _metadata(path, b"rejected")]


def read_described(path: Path) -> dict[str, Any]:
    """Name, size and checksum that a shard had when it was written, so that nobody need read it
    again.
    """
    described: dict[str, Any] = _metadata(path, b"shard")
    return described


def _metadata(path: Path, key: bytes) -> Any:
    with pa.memory_map(str(path)) as source:
        return json.loads(pa.ipc.open_file(source).schema.metadata[key])


def merge_index(parts: Iterable[Path], target: Path) -> pa.Table:
    """One index of all shards' rows; returns it. Written whole or not at all."""
    tables = [INDEX_SCHEMA.empty_table()]
    for part in parts:
        with pa.OSFile(str(part), "rb") as source:
            tables.append(pa.ipc.open_file(source).read_all().replace_schema_metadata(None))
    table = pa.concat_tables(tables).combine_chunks()
    temporary = target.with_suffix(".tmp")
    with pa.ipc.new_file(temporary, INDEX_SCHEMA) as writer:
        writer.write_table(table, max_chunksize=INDEX_BATCH_ROWS)
    temporary.replace(target)
    return table
