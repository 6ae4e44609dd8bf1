"""Parquet files and `save_to_disk` folders, in chunks that any process can read.

A file is a row of blocks (row groups, record batches). Small blocks are joined to a chunk, large
ones are cut by rows, so that a chunk has about `num_records` records and at most about CHUNK_BYTES.
Reading the middle of a block means decoding what precedes it; a block that would have to be decoded
more than MAX_REREADS times is read once, in the leading process. Only columns of known schemas are
read. Parquet is read by pyarrow; Arrow files are memory-mapped by `datasets`, without a copy, and
those in an object store are streamed by the leading process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isobatch.common.errors import first_line
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.packer.sources.base import (
    CHUNK_BYTES,
    FilePiece,
    Located,
    OnBytes,
    Source,
    cut,
    examples,
    known_columns,
    named_record,
    opened,
)
from isobatch.packer.sources.datasets_source import import_datasets
from isobatch.shards.folders import Folder, is_uri, join, open_folder

MAX_REREADS = 8
EXAMPLE_BLOCKS = 4
"""Blocks that are looked at for a value of a column that nothing reads."""
READ_BYTES, WHOLE_BYTES = 1 << 20, 64 << 20
"""Size of the reads of column chunks, so that a large row group is never in memory as a whole; and
of files below which it may be.
"""
BATCH_ROWS = 8
"""Rows decoded at once: few, because a dictionary can give each the same 50 MB, 2 KB on disk."""
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream; without them, pyarrow takes a truncated stream for a whole one."""

Block = tuple[int, int]
"""Rows, and decoded bytes."""
NewChunk = Callable[..., "TableChunk"]
"""Makes a chunk of a file from (blocks, first row, rows to skip, rows)."""


class _ParquetTable:
    """An open Parquet file; its blocks are row groups."""

    def __init__(self, file: pq.ParquetFile) -> None:
        self._file = file
        self.columns: list[str] = file.schema_arrow.names

    def blocks(self, columns: Sequence[str]) -> list[Block]:
        # of all columns: pyarrow ends the process where a damaged footer's single column is asked
        metadata = self._file.metadata
        groups = list(map(metadata.row_group, range(metadata.num_row_groups)))
        if any(group.num_rows < 0 for group in groups):
            raise pa.ArrowInvalid("a row group has fewer than 0 rows")
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def batches(self, blocks: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return self._file.iter_batches(  # type: ignore[no-any-return]
            BATCH_ROWS, row_groups=list(blocks), columns=list(columns), use_threads=False
        )


class _ArrowTable:
    """A mapped Arrow stream; its blocks are record batches."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self.columns: list[str] = table.column_names

    def blocks(self, columns: Sequence[str]) -> list[Block]:
        # `nbytes` follows offsets, which nobody has checked yet
        return [(len(batch), batch.get_total_buffer_size()) for batch in self._batches]

    def batches(self, blocks: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return (_checked(self._batches[block].select(list(columns))) for block in blocks)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of an Arrow file; ArrowInvalid if its offsets lead out of its buffers.

    Nothing else looks: a damaged offset would end the process. Bad UTF-8 costs its row later.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        for column in batch.columns:
            column.view(_as_bytes(column.type)).validate(full=True)
    return batch


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """A type with bytes in place of its texts."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return kind


@contextmanager
def _open_table(folder: Folder, name: str) -> Iterator[_ParquetTable | _ArrowTable]:
    """A table file; DataError that names it if it is damaged, also inside the `with`."""
    with opened(folder, name) as file:
        if name.endswith(".parquet"):
            # a buffer grows to what a page claims, up to 2 GiB, however small the file is
            size = READ_BYTES if file.seek(0, 2) > WHOLE_BYTES else 0
            yield _ParquetTable(pq.ParquetFile(file, buffer_size=size, pre_buffer=False))
            return
        file.seek(max(file.seek(0, 2) - len(END_MARK), 0))
        if file.read() != END_MARK:
            raise pa.ArrowInvalid("it ends without the end mark of an Arrow stream")
        datasets = import_datasets(f"{name}, written by `datasets`,")
        path = join(folder.uri, name)
        with pa.memory_map(path) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                batch.validate()  # a length below 0 would end the process in `from_file`
        try:
            table = datasets.Dataset.from_file(path).data.table
        except ValueError as error:  # its metadata describe other columns than it has
            raise pa.ArrowInvalid(first_line(error)) from None
        yield _ArrowTable(table)


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Some rows of a table file."""

    folder: str
    name: str
    columns: tuple[str, ...]
    blocks: tuple[int, ...]
    first_row: int
    """Row of the file at which `blocks` begin."""
    skip: int
    """Rows of `blocks` to skip."""
    count: int

    def records(self) -> Iterator[RawRecord]:
        """The rows as records. DataError if the file is damaged."""
        return islice(self._all(), self.count)

    def _all(self) -> Iterator[RawRecord]:
        row, first = self.first_row, self.first_row + self.skip
        with _open_table(open_folder(self.folder, follow_links=True), self.name) as table:
            for batch in table.batches(self.blocks, self.columns):
                start = min(max(first - row, 0), len(batch))
                yield from _records(self.name, row + start, batch.slice(start))
                row += len(batch)


class TableSource(Source):
    """Records of Parquet files, or of the Arrow streams of a `datasets.save_to_disk` folder."""

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """Ranges of rows; only footers and headers are read here, except for very large blocks."""
        for piece in self.pieces():
            if self._is_streamed:
                yield from cut(self._streamed(piece.name), num_records)
                on_bytes(piece.size)
                continue
            with _open_table(self.folder, piece.name) as table:
                where = join(self.located.folder, piece.name)
                columns = known_columns(table.columns, where, self.located)
                blocks = table.blocks(columns)[piece.start : piece.stop]
            new = partial(TableChunk, self.located.folder, piece.name, columns)
            num_rows = max(sum(rows for rows, _ in blocks), 1)
            reported = 0
            for chunk in _chunks(new, blocks, num_records, piece):
                yield chunk
                if isinstance(chunk, TableChunk):
                    end = chunk.first_row + chunk.skip + chunk.count - piece.first
                    on_bytes(piece.size * end // num_rows - reported)
                    reported = piece.size * end // num_rows
            on_bytes(piece.size - reported)

    def cut(self, num_bytes: int) -> list[FilePiece] | None:
        """Files, and large ones by row groups or record batches."""
        pieces: list[FilePiece] = []
        for file in self.pieces():
            number = max(1, round(file.size / max(1, num_bytes)))
            blocks: list[Block] = []
            if number > 1 and not self._is_streamed:
                with _open_table(self.folder, file.name) as table:
                    blocks = table.blocks(table.columns)
            rows = np.cumsum([0, *(rows for rows, _ in blocks)])
            # blocks whose middle is in one of the equal parts of all rows
            part = (rows[:-1] + rows[1:]) * number // max(2 * int(rows[-1]), 1)
            starts = np.flatnonzero(np.diff(part, prepend=-1)).tolist() or [0]
            bytes_before = [file.size * int(row) // max(int(rows[-1]), 1) for row in rows]
            for start, stop in zip(starts, [*starts[1:], None], strict=True):
                end = file.size if stop is None else bytes_before[stop]
                size = end - bytes_before[start]
                pieces.append(FilePiece(file.name, start, stop, int(rows[start]), size))
        return pieces

    def bytes_per_record(self) -> float:
        """By the rows of the first file."""
        if self._is_streamed:
            return super().bytes_per_record()
        info = self.files()[0]
        with _open_table(self.folder, info.name) as table:
            return info.size / max(1, sum(rows for rows, _ in table.blocks(())))

    @property
    def _is_streamed(self) -> bool:
        """Whether files are read from their beginning only."""
        return self.located.layout == "arrow" and is_uri(self.located.folder)

    def columns(self) -> set[str]:
        """Columns of the first file, also those that no record is read from."""
        name = self.located.names[0]
        if self._is_streamed:
            with opened(self.folder, name) as file:
                return set(pa.ipc.open_stream(file).schema.names)
        with _open_table(self.folder, name) as table:
            return set(table.columns)

    def unread_columns(self) -> dict[str, str]:
        """Columns of the first file read here that no record is read from, by its first blocks."""
        if not (names := self.read_names()):
            return {}
        name = names[0]
        where = join(self.located.folder, name)
        if self._is_streamed:
            with opened(self.folder, name) as file:
                reader = pa.ipc.open_stream(file)
                unread = _without(reader.schema.names, where, self.located)
                first = next(iter(reader), None) if unread else None
                return {} if first is None else examples(_rows_of(first.select(unread)))
        with _open_table(self.folder, name) as table:
            unread = _without(table.columns, where, self.located)
            values: dict[str, str] = {}
            for block in range(min(len(table.blocks(())), EXAMPLE_BLOCKS)):
                missing = [column for column in unread if column not in values]
                batches = table.batches([block], missing) if missing else ()
                for batch in islice(batches, 1):  # none where the block has no row
                    values |= examples(_rows_of(batch))
            return {column: values[column] for column in unread if column in values}

    def _streamed(self, name: str) -> Iterator[RawRecord]:
        """The rows of an Arrow stream, from its beginning."""
        row = 0
        with opened(self.folder, name) as file:
            reader = pa.ipc.open_stream(file)
            where = join(self.located.folder, name)
            columns = known_columns(reader.schema.names, where, self.located)
            for batch in reader:
                yield from _records(name, row, _checked(batch.select(list(columns))))
                row += len(batch)


def _without(columns: Sequence[str], where: str, located: Located) -> list[str]:
    """The columns that no record is read from."""
    known = known_columns(columns, where, located)
    return [column for column in columns if column not in known]


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The first rows; none if a text is not UTF-8."""
    try:
        rows: list[dict[str, Any]] = batch.slice(0, BATCH_ROWS).to_pylist()
    except UnicodeDecodeError:
        return []
    return rows


# --- blocks -> chunks ---


def _chunks(
    new: NewChunk, blocks: Sequence[Block], num_records: int, piece: FilePiece
) -> Iterator[Chunk]:
    """The chunks of a piece of a file; `blocks` are those of the piece."""
    joined: list[int] = []
    joined_rows = joined_bytes = 0
    row = piece.first
    for number, (rows, num_bytes) in enumerate(blocks, piece.start):
        is_large = rows > num_records or num_bytes > CHUNK_BYTES
        is_full = joined_rows + rows > num_records or joined_bytes + num_bytes > CHUNK_BYTES
        if joined and (is_large or is_full):
            yield new(tuple(joined), row - joined_rows, 0, joined_rows)
            joined, joined_rows, joined_bytes = [], 0, 0
        if is_large:
            at_once = _rows_at_once(rows, num_bytes, num_records)
            if rows > at_once * MAX_REREADS:
                yield from cut(new((number,), row, 0, rows).records(), at_once)
            else:
                for skip in range(0, rows, at_once):
                    yield new((number,), row, skip, min(at_once, rows - skip))
        else:
            joined.append(number)
            joined_rows, joined_bytes = joined_rows + rows, joined_bytes + num_bytes
        row += rows
    if joined_rows:
        yield new(tuple(joined), row - joined_rows, 0, joined_rows)


def _rows_at_once(rows: int, num_bytes: int, num_records: int) -> int:
    """Rows of a large block that go into one chunk.

    >>> _rows_at_once(5000, 1000, 1024), _rows_at_once(100, 3 * CHUNK_BYTES, 1024)
    (1024, 33)
    """
    return max(1, min(num_records, rows * CHUNK_BYTES // max(num_bytes, 1)))


# --- rows -> records ---


def _records(name: str, first_row: int, batch: pa.RecordBatch) -> Iterator[RawRecord]:
    """Rows as records."""
    for row, value in enumerate(_values(batch), first_row):
        if isinstance(value, UnicodeDecodeError):
            broken = f"{name}, row {row}: {value.reason} at byte {value.start} of a text"
            yield RawRecord(row, {"__key__": f"{name}:{row}"}, broken)
        else:
            yield named_record(row, value, name)


def _values(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Rows as plain values; a row with a text that is not UTF-8 as the error that says so."""
    for start in range(0, len(batch), BATCH_ROWS):
        rows = batch.slice(start, BATCH_ROWS)
        try:
            yield from rows.to_pylist()
        except UnicodeDecodeError:
            for row in range(len(rows)):
                try:
                    yield rows.slice(row, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield error
