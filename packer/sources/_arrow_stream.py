"""Arrow IPC streams, as `datasets.save_to_disk` writes them, as tables of record batches.

A stream has no index, so its message headers are walked; the bodies between them are not read. A
header is a FlatBuffer (Arrow's Message.fbs), of which three fields are needed: its kind, its rows,
and the length of its body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from packer.sources.files import damaged, opened
from shards.folders import Folder

CONTINUATION = 0xFFFFFFFF
"""Stands in front of every message."""
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
"""Kinds of messages (Message.fbs, MessageHeader)."""
_KIND, _HEADER, _BODY_LENGTH = 1, 2, 3
"""Fields of a message, by their place in Message.fbs; in a record batch, field 0 is its rows."""


@dataclass(frozen=True, slots=True)
class _Message:
    offset: int
    kind: int
    num_rows: int
    body_bytes: int


class ArrowStream:
    """An open Arrow IPC stream."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._batches = [message for message in _messages(file) if message.kind == _RECORD_BATCH]
        file.seek(0)
        self._schema = pa.ipc.open_stream(file).schema
        self.columns: list[str] = self._schema.names

    def blocks(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, bytes of all columns) of each record batch."""
        return [(message.num_rows, message.body_bytes) for message in self._batches]

    def batches(self, blocks: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Record batches, with some of their columns."""
        for block in blocks:
            self._file.seek(self._batches[block].offset)
            message = pa.ipc.read_message(self._file)
            yield pa.ipc.read_record_batch(message, self._schema).select(list(columns))


@contextmanager
def open_arrow_stream(root: Folder, name: str) -> Iterator[ArrowStream]:
    """An Arrow stream; DataError that names it if it is damaged, also when that comes out inside
    the `with`.
    """
    with opened(root, name) as file:
        try:
            yield ArrowStream(file)
        except (pa.ArrowException, EOFError, struct.error, _BadStreamError) as error:
            raise damaged(root, name, error) from None


class _BadStreamError(ValueError):
    """Bytes that are no Arrow stream."""


def _messages(file: IO[bytes]) -> Iterator[_Message]:
    """The messages of a stream, up to its end mark."""
    end = file.seek(0, 2)
    offset = 0
    while True:
        file.seek(offset)
        head = file.read(8)
        if len(head) < 8:
            raise _BadStreamError("it ends without its end mark")
        mark, length = struct.unpack("<II", head)
        if mark != CONTINUATION:
            raise _BadStreamError("it is not an Arrow IPC stream")
        if length == 0:
            return
        message = _parse(file.read(length), offset)
        if message.kind == _DICTIONARY:
            raise _BadStreamError("it has dictionary columns; save the dataset as Parquet")
        yield message
        offset += 8 + length + message.body_bytes
        if offset > end:
            raise _BadStreamError("its last record batch is cut")


def _parse(metadata: bytes, offset: int) -> _Message:
    table = struct.unpack_from("<I", metadata)[0]
    kind = _number("<B", metadata, table, _KIND)
    body_bytes = _number("<q", metadata, table, _BODY_LENGTH)
    place = _field(metadata, table, _HEADER)
    header = place + struct.unpack_from("<I", metadata, place)[0]
    num_rows = _number("<q", metadata, header, 0) if kind == _RECORD_BATCH else 0
    if min(body_bytes, num_rows) < 0:
        raise _BadStreamError("a message has a negative length")
    return _Message(offset, kind, num_rows, body_bytes)


def _number(form: str, metadata: bytes, table: int, field: int) -> int:
    """A number of a FlatBuffer table; 0, the default of all of ours, if it is left out."""
    place = _field(metadata, table, field)
    return int(struct.unpack_from(form, metadata, place)[0]) if place else 0


def _field(metadata: bytes, table: int, field: int) -> int:
    """Where a field of a FlatBuffer table stands; 0 if it is left out."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    size = struct.unpack_from("<H", metadata, vtable)[0]
    if 4 + 2 * field >= size:
        return 0
    place = struct.unpack_from("<H", metadata, vtable + 4 + 2 * field)[0]
    return table + place if place else 0
