"""Packed partitions -> tables and index of a build, one in memory at a time."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from isobatch.packer.partitions.partition import ROWS_NAME, PackedPartition
from isobatch.packer.partitions.results import TABLES, Results
from isobatch.shards.index import merge_index
from isobatch.shards.tables import (
    COUNTS_NAME,
    COUNTS_SCHEMA,
    GROUPS_NAME,
    GROUPS_SCHEMA,
    REJECTED_NAME,
    REJECTED_SCHEMA,
    read_table,
)

_SCHEMAS = {
    COUNTS_NAME: COUNTS_SCHEMA,
    GROUPS_NAME: GROUPS_SCHEMA,
    REJECTED_NAME: REJECTED_SCHEMA,
}


@dataclass(slots=True)
class _Before:
    """What earlier partitions have."""

    records: int = 0
    rows: int = 0
    """Of the counts table."""


def join_partitions(results: Results, packed: Sequence[PackedPartition], out: Path) -> None:
    """Write the tables, the index and the sample ids of all partitions, in order, to `out`.

    Positions and rows are numbered through. Each file is whole or not there.
    """
    before = _Before()
    temporaries = {name: (out / name).with_suffix(".tmp") for name in TABLES}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                pq.ParquetWriter(temporaries[name], schema, compression="zstd")
            )
            for name, schema in _SCHEMAS.items()
        }
        for number, of in enumerate(packed):
            with results.opened(number, TABLES) as folder:
                tables = {name: read_table(folder / name) for name in TABLES}
            for name, table in _numbered(tables, before).items():
                # a row group per partition: the report reads whole ones
                writers[name].write_table(table, row_group_size=max(1, len(table)))
            before.records += of.num_read
            before.rows += len(tables[COUNTS_NAME])
    for name, temporary in temporaries.items():
        temporary.replace(out / name)

    def rows() -> Iterator[Path]:
        for number in range(len(packed)):
            with results.opened(number, [ROWS_NAME]) as folder:
                yield folder / ROWS_NAME

    merge_index(rows(), [of.index for of in packed], [len(of.shards) for of in packed], out)


def _numbered(tables: dict[str, pa.Table], before: _Before) -> dict[str, pa.Table]:
    """The tables of a partition, with the numbers that they have in the build."""
    numbered = {
        name: _added(tables[name], "position", before.records).cast(_SCHEMAS[name])
        for name in (COUNTS_NAME, REJECTED_NAME)
    }
    groups = tables[GROUPS_NAME]
    lists = groups.column("samples").combine_chunks()
    rows = pc.add(lists.flatten(), before.rows)
    samples = pa.ListArray.from_arrays(lists.offsets, rows) if len(lists) else lists
    place = groups.schema.get_field_index("samples")
    groups = groups.set_column(place, "samples", samples).cast(GROUPS_SCHEMA)
    return numbered | {GROUPS_NAME: groups}


def _added(table: pa.Table, name: str, number: int) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pc.add(table.column(name), number))
