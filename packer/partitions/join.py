"""Tables and index of a build, of those of its parts: partitions, or whole builds.

Rows are numbered through, and read some at a time, so memory does not grow with the parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from isobatch.packer.partitions.partition import ROWS_NAME, PackedPartition
from isobatch.packer.partitions.results import TABLES, Results
from isobatch.shards.index import (
    IDS_NAME,
    INDEX_NAME,
    IndexFigures,
    merge_index,
    open_index,
    read_rows,
)
from isobatch.shards.manifest import FolderFiles, Manifest, tables_on_disk
from isobatch.shards.tables import (
    COUNTS_NAME,
    COUNTS_SCHEMA,
    GROUPS_NAME,
    GROUPS_SCHEMA,
    REJECTED_NAME,
    REJECTED_SCHEMA,
    read_row_groups,
    read_table,
)

_SCHEMAS = {
    COUNTS_NAME: COUNTS_SCHEMA,
    REJECTED_NAME: REJECTED_SCHEMA,
    GROUPS_NAME: GROUPS_SCHEMA,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPart:
    """What a build is joined of."""

    open: Callable[[Sequence[str]], AbstractContextManager[Path]]
    """A folder of this machine with files of the part."""
    in_row_groups: bool
    """Whether its tables have a row group for each partition, so that they are read by these."""
    rows: Callable[[Path], Iterator[pa.Table]]
    """Rows of the index, out of a folder with the files that they are in."""
    row_files: tuple[str, ...]
    figures: IndexFigures
    num_shards: int
    num_records: int | None = None
    """Records that it has read; None: up to the last position."""
    back: int = 0
    """Parts before it at whose first record its positions begin."""


def packed_parts(
    results: Results, numbers: Sequence[int], packed: Sequence[PackedPartition]
) -> list[BuildPart]:
    """Packed partitions, with these numbers, as parts."""
    return [
        BuildPart(
            in_row_groups=False,
            open=lambda names, number=number: results.opened(number, names),  # type: ignore[misc]
            rows=lambda folder: read_rows(folder / ROWS_NAME),
            row_files=(ROWS_NAME,),
            figures=of.index,
            num_shards=len(of.shards),
            num_records=of.num_read,
            back=place if of.is_remainder else 0,
        )
        for place, (number, of) in enumerate(zip(numbers, packed, strict=True))
    ]


def build_as_part(manifest: Manifest) -> BuildPart:
    """A finished build as a part; reads its index once."""
    multiple, names = manifest.limits.pad_each_to, (INDEX_NAME, IDS_NAME)

    def rows(folder: Path) -> Iterator[pa.Table]:
        return open_index(manifest, FolderFiles(manifest, folder)).rows(multiple)

    with tables_on_disk(manifest, names) as folder:
        figures = open_index(manifest, FolderFiles(manifest, folder)).figures(multiple)
    return BuildPart(
        in_row_groups=True,
        open=lambda names: tables_on_disk(manifest, names),
        rows=rows,
        row_files=names,
        figures=figures,
        num_shards=len(manifest.shards),
    )


@dataclass(slots=True)
class _Before:
    """What earlier parts have."""

    records: list[int] = field(default_factory=lambda: [0])
    """Until each of them, and until the next one."""
    rows: int = 0
    """Of the counts table."""


def join_build(parts: Sequence[BuildPart], out: Path) -> None:
    """Write the tables, the index and the sample ids of all parts, in order, to `out`.

    Positions and rows are numbered through. Each file is whole or not there.
    """
    before = _Before()
    temporaries = {name: (out / name).with_suffix(".tmp") for name in _SCHEMAS}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                pq.ParquetWriter(temporaries[name], schema, compression="zstd")
            )
            for name, schema in _SCHEMAS.items()
        }
        for part in parts:
            with part.open(TABLES) as folder:
                _add_tables(part, folder, writers, before)
    for name, temporary in temporaries.items():
        temporary.replace(out / name)

    def rows() -> Iterator[Iterator[pa.Table]]:
        for part in parts:
            with part.open(part.row_files) as folder:
                yield part.rows(folder)

    merge_index(rows(), [of.figures for of in parts], [of.num_shards for of in parts], out)


def _add_tables(
    part: BuildPart, folder: Path, writers: dict[str, pq.ParquetWriter], before: _Before
) -> None:
    """Write a part's tables with the numbers that they have in the build.

    A partition's are a row group each: the report reads whole partitions.
    """

    def tables(name: str) -> Iterable[pa.Table]:
        path = folder / name
        return read_row_groups(path) if part.in_row_groups else [read_table(path)]

    def write(name: str, table: pa.Table) -> None:
        writers[name].write_table(table.cast(_SCHEMAS[name]), row_group_size=max(1, len(table)))

    last, num_rows = -1, 0
    first = before.records[-1 - part.back]
    for name in (COUNTS_NAME, REJECTED_NAME):
        for table in tables(name):
            if len(table):
                last = max(last, pc.max(table.column("position")).as_py())
            num_rows += len(table) if name == COUNTS_NAME else 0
            write(name, _added(table, "position", first))
    for groups in tables(GROUPS_NAME):
        lists = groups.column("samples").combine_chunks()
        rows = pc.add(lists.flatten(), before.rows)
        # the offsets of a part of a list begin anywhere
        borders = pc.subtract(lists.offsets, lists.offsets[0])
        samples = pa.ListArray.from_arrays(borders, rows) if len(lists) else lists
        place = groups.schema.get_field_index("samples")
        write(GROUPS_NAME, groups.set_column(place, "samples", samples))
    num_records = last + 1 if part.num_records is None else part.num_records
    before.records.append(before.records[-1] + num_records)
    before.rows += num_rows


def _added(table: pa.Table, name: str, number: int) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pc.add(table.column(name), number))
