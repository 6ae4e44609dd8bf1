"""What each raw layout does: names its files and cuts them into chunks.

`chunks` runs once, in the process that leads a build, in the same order every time; `records` runs
wherever the chunk is counted. Layouts whose records only a parser finds (JSON, CSV) send the
records in the chunk; others a file name and a range. The helpers below are what layouts share.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.common.visible_text import shown
from isobatch.counting.records.fields import NO_MEANING, Unread, example_of, is_empty
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.counting.records.schemas import CONTENT_KEYS, RECORD_KEYS
from isobatch.counting.records.user_map import ALL_COLUMNS
from isobatch.shards.folders import Folder, is_uri, join, open_folder
from isobatch.shards.local_folder import FileInfo

FIRST_RECORDS = 1000
"""Records that are looked at for the columns of a dataset."""
FIRST_ROWS = 20
"""Rows that are looked at for values of columns that nothing reads."""
CHUNK_BYTES = 64 << 20
"""Decoded bytes of a chunk at most, about; its images go into the staging folder at once."""
OnBytes = Callable[[int], None]
"""Is told of bytes read, for progress."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Successive records of a file, which can be read without those before them."""

    name: str
    start: int = 0
    """Where they begin: a byte, or a block of a table."""
    stop: int | None = None
    """Where the next piece begins; None: they go on to the end of the file."""
    first: int = 0
    """Number that the first of them has in the file."""
    size: int = 0
    """Bytes of the file that they take, about."""

    @property
    def is_file(self) -> bool:
        """Whether it is the whole file."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True, slots=True)
class Located:
    """Files of one layout."""

    layout: str
    """`annotations`, `parquet`, `arrow`, `tar`, or a builder of `datasets`, with its `options`."""
    folder: str
    names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    keep: tuple[str, ...] = ()
    """Columns to read in addition to those of the known schemas."""
    columns: Any = None
    """`Columns`, where the dataset has names of its own."""
    name: str = ""
    """Name of the dataset, where its description gives one."""
    unread: tuple[Unread, ...] = ()
    """Keys of that description which say something that nothing here does."""
    pieces: tuple[FilePiece, ...] | None = None
    """What is read of the files, in order; None: everything."""

    def identity(self) -> dict[str, str]:
        """What decides the records of the same files; empty for most."""
        decides = ("fields", "sampling", "subset", "aux")
        values = {key: repr(value) for key, value in self.options if key in decides}
        return values | ({} if self.columns is None else {"columns": repr(self.columns)})

    def seeded(self, seed: int) -> "Located":
        """The same files; records that are drawn are drawn by this seed."""
        options = (
            (key, value.seeded(seed) if key == "sampling" else value) for key, value in self.options
        )
        return replace(self, options=tuple(options))


class Source:
    """One raw dataset in one layout."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """Paths of images and audio files are relative to `data_root`, a folder or URI."""
        self.located = located
        self.name = name
        self.data_root = data_root
        self.folder = open_folder(located.folder, follow_links=True)
        self.changes: list[Callable[[Chunk], Chunk]] = []
        """What becomes of chunks where their records are counted, in this order."""

    def files(self) -> list[FileInfo]:
        """The files with the records, in order: they identify the data."""
        infos = []
        for name in self.located.names:
            with _named(self.folder, name):
                infos.append(self.folder.info(name))
        return infos

    def read_names(self) -> list[str]:
        """Names of the files that are read, in order; no file is looked at for it."""
        if self.located.pieces is None:
            return list(self.located.names)
        return list(dict.fromkeys(piece.name for piece in self.located.pieces))

    def pieces(self) -> Iterable[FilePiece]:
        """What is read of the files, in order."""
        if self.located.pieces is not None:
            return self.located.pieces
        return [FilePiece(info.name, size=info.size) for info in self.files()]

    def cut(self, num_bytes: int) -> list[FilePiece] | None:
        """The files of `pieces` in pieces of about `num_bytes`, or more where no reader can begin.

        None for records that only a reader of all of them finds.
        """
        return None

    def aligned(self, piece: FilePiece) -> FilePiece:
        """A piece of `cut`, from where its first record begins to where the next piece's does."""
        return piece

    def bytes_per_record(self) -> float:
        """Bytes of the files that a record takes, about: by the first records."""
        lengths = [len(repr(record.value)) for record in self._first_records()]
        return max(1.0, sum(lengths) / max(1, len(lengths)))

    def describe(self) -> list[dict[str, Any]]:
        """The files for the manifest; no SHA-256, for that would read a whole dataset."""
        return [{"name": info.name, "size": info.size} for info in self.files()]

    def columns(self) -> set[str]:
        """Columns that the first records have, for messages."""
        values = (record.value for record in self._first_records())
        return {key for value in values if isinstance(value, Mapping) for key in value}

    def _first_records(self) -> Iterator[RawRecord]:
        chunks = self.raw_chunks(FIRST_RECORDS, lambda _: None)
        return islice((record for chunk in chunks for record in chunk.records()), FIRST_RECORDS)

    def unread_columns(self) -> dict[str, str]:
        """Columns that records come without, because nothing reads them, each with one value.

        A look at the first rows; a column without a value there is not named.
        """
        return {}

    def chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """The records in chunks of about `num_records`, with the changes."""
        chunks = self.raw_chunks(num_records, on_bytes)
        for change in self.changes:
            chunks = map(change, chunks)
        return chunks

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """The same without them."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Records that were read already, in lists, because sending objects takes twice as long."""

    positions: list[int]
    values: list[Any]
    broken: dict[int, tuple[str, str]]
    """Place in the lists of a record that is not valid -> why, and its reason."""

    def records(self) -> Iterator[RawRecord]:
        """The records."""
        for place, (position, value) in enumerate(zip(self.positions, self.values, strict=True)):
            yield RawRecord(position, value, *self.broken.get(place, ()))


def cut(
    records: Iterator[RawRecord],
    num_records: int,
    size_of: Callable[[RawRecord], int] | None = None,
) -> Iterator[RecordChunk]:
    """Records in chunks of `num_records`, the last one shorter.

    `size_of`: bytes of a record's content, of which a chunk has about CHUNK_BYTES at most.
    """
    while batch := list(_until_full(records, num_records, size_of)):
        yield RecordChunk(
            [record.position for record in batch],
            [record.value for record in batch],
            {i: (record.broken, record.reason) for i, record in enumerate(batch) if record.broken},
        )


def _until_full(
    records: Iterator[RawRecord], num_records: int, size_of: Callable[[RawRecord], int] | None
) -> Iterator[RawRecord]:
    """The records of the next chunk."""
    if size_of is None:
        yield from islice(records, num_records)
        return
    num_bytes = 0
    for record in islice(records, num_records):
        yield record
        num_bytes += size_of(record)
        if num_bytes >= CHUNK_BYTES:
            return


def named_record(row: int, value: dict[str, Any], name: str) -> RawRecord:
    """A row as a record; one without an id is named by its file and row."""
    is_named = value.get("id") is not None or value.get("__key__") is not None
    return RawRecord(row, value if is_named else value | {"__key__": f"{name}:{row}"})


# --- files, with errors that name them ---


@contextmanager
def opened(folder: Folder, name: str) -> Iterator[IO[bytes]]:
    """A file for reading; what goes wrong inside the `with` is a DataError that names the file."""
    with _named(folder, name), folder.open(name) as file:
        yield file


def even_pieces(file: FilePiece, num_bytes: int) -> list[FilePiece]:
    """A file in pieces of equal size, about `num_bytes`; whole if it is not much larger.

    >>> even_pieces(FilePiece("a.jsonl", size=10), 4)[-1]
    FilePiece(name='a.jsonl', start=5, stop=None, first=5, size=5)
    """
    number = max(1, round(file.size / max(1, num_bytes)))
    starts = [file.size * place // number for place in range(number)]
    return pieces_between(file, [(start, start) for start in starts])


def pieces_between(file: FilePiece, borders: list[tuple[int, int]]) -> list[FilePiece]:
    """A file in pieces that begin at (byte, number of the first record)."""
    ends = [*(start for start, _ in borders[1:]), file.size]
    return [
        FilePiece(file.name, start, end if end < file.size else None, first, end - start)
        for (start, first), end in zip(borders, ends, strict=True)
    ]


def has_file(folder: Folder, name: str) -> bool:
    """Whether a file is there and can be read."""
    try:
        return folder.info(name).size >= 0
    except OSError:
        return False


@contextmanager
def _named(folder: Folder, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"{join(folder.uri, name)}: cannot be read: {reason}") from None
    except (pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise DataError(f"{join(folder.uri, name)}: damaged or cut short: {reason}") from None


def known_columns(columns: Iterable[str], where: str, located: Located) -> tuple[str, ...]:
    """The columns that records are read from, and those to keep; all for ALL_COLUMNS.

    DataError if none of them has content.
    """
    names = list(columns)
    if ALL_COLUMNS in located.keep:
        return tuple(names)
    renames = located.columns
    known_names = names if renames is None else [renames.ours(name) for name in names]
    if not CONTENT_KEYS.intersection(known_names):
        known = ", ".join(sorted(CONTENT_KEYS))
        has = ", ".join(names)[:200]
        raise DataError(f"{where}: has the columns {has}; expected one of {known}")
    wanted = RECORD_KEYS.union(located.keep, () if renames is None else renames.theirs)
    return tuple(name for name in names if name in wanted)


def require_known(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """ConfigError for a key of another tool's file that nothing here reads."""
    if strange := [str(key) for key in values if key not in known]:
        raise ConfigError(
            f"{where}: unknown key {shown(strange[0])}; known: {', '.join(sorted(known))}"
        )


def examples(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The first value of each column that has one and a meaning, as a short text."""
    texts: dict[str, str] = {}
    for row in rows:
        for column, value in row.items():
            if column not in texts and column not in NO_MEANING and not is_empty(value):
                texts[column] = example_of(value)
    return texts


def prefix_under(folder: str, data_root: str, what: str) -> str:
    """The path from the data root to a folder in it, empty or with a slash at the end.

    ConfigError if the folder is elsewhere; `what` are files whose images would be unreachable then.
    """
    if not is_uri(folder) and not is_uri(data_root):
        folder, data_root = str(Path(folder).resolve()), str(Path(data_root).resolve())
    folder, data_root = folder.rstrip("/") + "/", data_root.rstrip("/") + "/"
    if not folder.startswith(data_root):
        raise ConfigError(
            f"{folder}: {what} hold their own images: they must be under the data root {data_root}"
        )
    return folder[len(data_root) :]
