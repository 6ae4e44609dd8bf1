"""Records of table files, Parquet or Arrow: cut into pieces that the counting processes read
themselves.

A file is a row of blocks (row groups, record batches). Small blocks are joined to a chunk, large
ones are cut by rows, so that a chunk holds about `num_records` records and at most some
CHUNK_BYTES. Reading the middle of a block means decoding what is in front of it; a block that would
have to be decoded more than MAX_REREADS times is read once, here. Only the columns that
`packer.records.schemas` knows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from balance.errors import DataError
from packer.records.record import RawRecord
from packer.records.schemas import CONTENT_KEYS, RECORD_KEYS
from packer.sources._arrow_stream import open_arrow_stream
from packer.sources._parquet import open_parquet
from packer.sources.base import Chunk, cut
from packer.sources.files import file_infos, name_and_size
from shards.folders import FileInfo, Folder, join, open_folder

CHUNK_BYTES = 64 << 20
"""Decoded bytes of a chunk at most, about; its images are copied into the staging folder at
once.
"""
MAX_REREADS = 8


class TableFile(Protocol):
    """An open table."""

    columns: list[str]

    def blocks(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, decoded bytes of `columns`) of each block."""

    def batches(self, blocks: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of some blocks, a few at a time."""


_OPEN: dict[str, Callable[[Folder, str], AbstractContextManager[TableFile]]] = {
    "parquet": open_parquet,
    "arrow": open_arrow_stream,
}


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Some rows of a table file."""

    layout: str
    folder: str
    name: str
    columns: tuple[str, ...]
    blocks: tuple[int, ...]
    first_row: int
    """Row of the file at which `blocks` begin."""
    skip: int
    """Rows of `blocks` to pass over."""
    count: int

    def records(self) -> Iterator[RawRecord]:
        """The rows as records. DataError if the file is damaged."""
        return islice(self._all(), self.count)

    def _all(self) -> Iterator[RawRecord]:
        root = open_folder(self.folder, follow_links=True)
        row, first = self.first_row, self.first_row + self.skip
        with _OPEN[self.layout](root, self.name) as table:
            for batch in table.batches(self.blocks, self.columns):
                start = min(max(first - row, 0), len(batch))
                for number, value in enumerate(_values(batch.slice(start)), row + start):
                    yield _record(self.name, number, value)
                row += len(batch)


class TableSource:
    """Records of Parquet files, or of the Arrow streams of a `datasets.save_to_disk` folder."""

    def __init__(
        self, layout: str, name: str, folder: str, names: Sequence[str], data_root: str
    ) -> None:
        """`layout` is `parquet` or `arrow`."""
        self.name = name
        self.data_root = data_root
        self._layout = layout
        self._folder = folder
        self._root: Folder = open_folder(folder, follow_links=True)
        self._names = names

    def files(self) -> list[FileInfo]:
        """The table files."""
        return file_infos(self._root, self._names)

    def chunks(self, num_records: int, on_bytes: Callable[[int], None]) -> Iterator[Chunk]:
        """Ranges of rows; only footers and headers are read here, unless a block is very large."""
        for info in self.files():
            with _OPEN[self._layout](self._root, info.name) as table:
                columns = _columns_of(table, join(self._folder, info.name))
                blocks = table.blocks(columns)
            new = partial(TableChunk, self._layout, self._folder, info.name, columns)
            num_rows = max(sum(rows for rows, _ in blocks), 1)
            told = 0
            for chunk in _chunks(new, blocks, num_records):
                yield chunk
                done = _end_row(chunk)
                if done is not None:
                    on_bytes(info.size * done // num_rows - told)
                    told = info.size * done // num_rows
            on_bytes(info.size - told)

    def describe(self) -> list[dict[str, Any]]:
        """Name and size of each file."""
        return name_and_size(self.files())


def _columns_of(table: TableFile, where: str) -> tuple[str, ...]:
    if not CONTENT_KEYS & set(table.columns):
        known = ", ".join(sorted(CONTENT_KEYS))
        raise DataError(
            f"{where}: has the columns {', '.join(table.columns)[:200]}; expected one of {known}"
        )
    return tuple(name for name in table.columns if name in RECORD_KEYS)


def _chunks(
    new: Callable[..., TableChunk], blocks: Sequence[tuple[int, int]], num_records: int
) -> Iterator[Chunk]:
    """The chunks of a file; `new` makes one of (blocks, first row, rows to pass over, rows)."""
    joined: list[int] = []
    row = joined_rows = joined_bytes = 0
    for number, (rows, num_bytes) in enumerate(blocks):
        is_large = rows > num_records or num_bytes > CHUNK_BYTES
        if joined and (
            is_large or joined_rows + rows > num_records or joined_bytes + num_bytes > CHUNK_BYTES
        ):
            yield new(tuple(joined), row - joined_rows, 0, joined_rows)
            joined, joined_rows, joined_bytes = [], 0, 0
        if is_large:
            yield from _cut_block(
                new, number, row, rows, _rows_at_once(rows, num_bytes, num_records)
            )
        else:
            joined, joined_rows, joined_bytes = (
                [*joined, number],
                joined_rows + rows,
                joined_bytes + num_bytes,
            )
        row += rows
    if joined_rows:
        yield new(tuple(joined), row - joined_rows, 0, joined_rows)


def _cut_block(
    new: Callable[..., TableChunk], number: int, row: int, rows: int, at_once: int
) -> Iterator[Chunk]:
    if rows > at_once * MAX_REREADS:
        yield from cut(new((number,), row, 0, rows).records(), at_once)
        return
    for skip in range(0, rows, at_once):
        yield new((number,), row, skip, min(at_once, rows - skip))


def _rows_at_once(rows: int, num_bytes: int, num_records: int) -> int:
    """Rows of a large block that go into one chunk.

    >>> _rows_at_once(5000, 1000, 1024), _rows_at_once(100, 3 * CHUNK_BYTES, 1024)
    (1024, 33)
    """
    return max(1, min(num_records, rows * CHUNK_BYTES // max(num_bytes, 1)))


def _end_row(chunk: Chunk) -> int | None:
    """The row behind a chunk's last; None for records that were read here."""
    return chunk.first_row + chunk.skip + chunk.count if isinstance(chunk, TableChunk) else None


def _values(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Rows as plain values; a row with a text that is no UTF-8 as the error that says so."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(len(batch)):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


def _record(name: str, row: int, value: dict[str, Any] | UnicodeDecodeError) -> RawRecord:
    key = {"__key__": f"{name}:{row}"}
    if isinstance(value, UnicodeDecodeError):
        return RawRecord(
            row, key, f"{name}, row {row}: {value.reason} at byte {value.start} of a text"
        )
    if value.get("id") is None and value.get("__key__") is None:
        value |= key
    return RawRecord(row, value)
