"""What a raw layout must do: say which files it has, and cut them into chunks that any process can
read.

`chunks` runs once, in the process that leads a build, in the same order every time; `records` runs
wherever the chunk is counted. Layouts whose borders only a parser finds (JSON) carry their records
in the chunk; others carry a file name and a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from packer.records.record import RawRecord
from shards.folders import FileInfo


class Chunk(Protocol):
    """Some records of a source; plain values, so that it travels to other processes and
    machines.
    """

    def records(self) -> Iterator[RawRecord]:
        """The records, in order. DataError if the file under them cannot be read."""


class Source(Protocol):
    """One raw dataset in one layout."""

    name: str
    data_root: str
    """Folder or URI that the paths of images and audio files are relative to."""

    def files(self) -> list[FileInfo]:
        """The files that hold the records, in order: what identifies the data."""

    def chunks(self, num_records: int, on_bytes: Callable[[int], None]) -> Iterator[Chunk]:
        """The records in chunks of about `num_records`; `on_bytes` hears of what is read or passed
        over.
        """

    def describe(self) -> list[dict[str, Any]]:
        """The files as the manifest names them: name, size, and a SHA-256 where the content is
        small enough.
        """


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Records that were read already; plain values in lists, because sending objects takes twice as
    long.
    """

    positions: list[int]
    values: list[Any]
    broken: dict[int, tuple[str, str]]
    """Place in the lists of a record that is not valid -> why, and its reason."""

    def records(self) -> Iterator[RawRecord]:
        """The records."""
        for place, (position, value) in enumerate(zip(self.positions, self.values, strict=True)):
            yield RawRecord(position, value, *self.broken.get(place, ()))


def cut(records: Iterator[RawRecord], num_records: int) -> Iterator[RecordChunk]:
    """Records in chunks of `num_records`, the last one shorter."""
    while batch := list(islice(records, num_records)):
        yield RecordChunk(
            [record.position for record in batch],
            [record.value for record in batch],
            {
                place: (record.broken, record.reason)
                for place, record in enumerate(batch)
                if record.broken
            },
        )
