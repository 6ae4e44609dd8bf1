"""MosaicML's streaming datasets (MDS): an index of shards, also compressed ones.

As mosaicml-streaming 0.13 writes them: `index.json` lists the shards with their columns, and a
shard begins with its number of samples and where each is. Shards of lines (JSON, XSV) have that in
a file of its own. Hashes of the index are checked once per shard. Only columns that are read are;
images, videos and sound stay where they are, as byte ranges, unless the shard is compressed. A
column of the encoding `pkl` would run whatever code it names, so nothing here reads one.
"""

import bz2
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

import numpy as np
import pyarrow as pa
from PIL import Image

from isobatch.common.errors import ConfigError, DataError, IsobatchError, first_line
from isobatch.common.types import IntArray
from isobatch.counting.headers.content_kind import HEAD_BYTES, kind_of_content
from isobatch.counting.records.media import FILE_KEYS, Media
from isobatch.counting.records.record import TOO_DEEP, Chunk, RawRecord, is_deep
from isobatch.packer.sources.base import (
    FIRST_ROWS,
    Located,
    OnBytes,
    Source,
    examples,
    has_file,
    known_columns,
    named_record,
    opened,
    prefix_under,
)
from isobatch.shards.folders import Folder, join, open_folder

INDEX_NAME = "index.json"
VERSION = 2
SPLITS = ("train", "val", "validation", "test", "eval", "dev")
"""Folders that are splits of the folder around them."""
CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""Compression of a shard -> its name in pyarrow."""
FORMATS = {"mds": "", "json": "", "xsv": None, "csv": ",", "tsv": "\t"}
"""Formats of shards -> what is between columns; None where the index says it."""
HASHES = hashlib.algorithms_guaranteed - {"shake_128", "shake_256"}
"""Hashes that are checked; those of xxhash are reported."""
MAX_REREADS = 8
"""Times that a compressed shard is unpacked at most, each time for some of its samples."""
_UINT = np.dtype("<u4")
_FILES = {"jpeg": "jpg", "png": "png", "bytes": "", "pil": "png"}
"""Encoding of one file -> suffix of its name."""
_LISTS = {"jpeg_array": "jpeg", "jpegarray": "jpeg"} | {
    f"list[{name}]": name for name in ("jpeg", "png", "pil")
}
_SCALARS: dict[str, Callable[[bytes], Any]] = {
    "str": lambda data: data.decode("utf-8", "surrogateescape"),
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: data.decode("ascii"),
}
_LINE_VALUES: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
_NUMBERS = frozenset(
    {f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)}
    | {"float16", "float32", "float64"}
)
_PIXEL_BITS = {"1": 1, "L": 8, "P": 8, "LA": 16, "I;16": 16, "RGB": 24, "RGBA": 32}
"""Modes of images that PNG stores -> bits of a pixel; rows are whole bytes."""
_MEDIA_KEYS = frozenset(key for keys in FILE_KEYS.values() for key in keys)


@dataclass(frozen=True, slots=True)
class MdsFile:
    """A file of a shard, as it is there: compressed or not."""

    name: str
    codec: str
    """Its compression, a key of CODECS; empty without one."""
    num_bytes: int
    raw_bytes: int
    """Size without compression."""
    hashes: tuple[tuple[str, str], ...]
    """Algorithm, hexadecimal digest."""


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard as the index has it."""

    data: MdsFile
    table: MdsFile | None
    """Where the samples of a shard of lines are; None of others, which begin with that."""
    num_samples: int
    columns: tuple[tuple[str, str, int], ...]
    """Name, encoding and fixed size (0 if it varies) of each column, in their order."""
    separator: str
    """Between the columns of a line; empty for JSON."""
    newline: str

    @property
    def name(self) -> str:
        """Path of the file with the samples."""
        return self.data.name

    @property
    def codec(self) -> str:
        """Compression of that file; empty without one."""
        return self.data.codec


def find_mds(
    folder: Folder, wanted: str | None, choose: Callable[[list[str]], str]
) -> Located | None:
    """The MDS dataset of a folder, or of the split in it that `choose` selects; None if none is.

    Errors as of `locate_mds`, and ConfigError for a split of what has none.
    """
    if _is_index(folder):
        if wanted is not None:
            raise ConfigError(f"{folder.uri}: {INDEX_NAME} has no splits, so no {wanted!r}")
        return locate_mds(folder)
    names = dict.fromkeys((*SPLITS, *([wanted] if wanted else [])))
    splits = [
        name for name in names if folder.has_folder(name) and _is_index(_inside(folder, name))
    ]
    return locate_mds(_inside(folder, choose(splits))) if splits else None


def _inside(folder: Folder, name: str) -> Folder:
    return open_folder(join(folder.uri, name), follow_links=True)


def _is_index(folder: Folder) -> bool:
    if not has_file(folder, INDEX_NAME):
        return False
    head = folder.read(INDEX_NAME, 0, 1 << 16).lstrip()
    return head.startswith(b"{") and b'"shards"' in head and b'"format"' in head


def locate_mds(folder: Folder) -> Located:
    """The shards of an index. ConfigError for a format that is not read; DataError for damage."""
    path = join(folder.uri, INDEX_NAME)
    try:
        values = json.loads(folder.read(INDEX_NAME))
        entries = list(values["shards"])
        shards = tuple(
            _shard(entry, folder, f"{path}, shard {number}") for number, entry in enumerate(entries)
        )
    except IsobatchError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from None
    except (
        OverflowError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        what = f"not as MDSWriter writes it ({first_line(error)})"
        raise DataError(f"{path}: {what}; copy or write it again") from None
    if not shards:
        raise DataError(f"{path}: lists no shards")
    names = tuple(shard.name for shard in shards)
    unknown = {name for shard in shards for name, _ in shard.data.hashes if name not in HASHES}
    unread = tuple((f"{name} of {INDEX_NAME}", "not checked") for name in sorted(unknown))
    return Located("mds", folder.uri, names, (("shards", shards),), unread=unread)


def _shard(entry: dict[str, Any], folder: Folder, where: str) -> MdsShard:
    if entry["format"] not in FORMATS or entry["version"] != VERSION:
        has = f"format {entry['format']!r}, version {entry['version']!r}"
        known = ", ".join(FORMATS)
        raise ConfigError(f"{where}: {has}; read are shards of {known}, version {VERSION}")
    codec = (entry["compression"] or "").partition(":")[0]
    if codec and codec not in CODECS:
        raise ConfigError(f"{where}: compression {codec!r}; read are {', '.join(CODECS)}")
    data = _file_of(entry, "data", codec, folder)
    if (num_samples := int(entry["samples"])) < 0:
        raise ValueError(f"{num_samples} samples in shard {data.name}")
    separator = FORMATS[entry["format"]]
    if entry["format"] == "json":
        pairs = list(entry["columns"].items())
    else:
        pairs = list(zip(entry["column_names"], entry["column_encodings"], strict=True))
    is_lines = entry["format"] != "mds"
    sizes = [0] * len(pairs) if is_lines else entry["column_sizes"]
    return MdsShard(
        data,
        _file_of(entry, "meta", codec, folder) if is_lines else None,
        num_samples,
        tuple(
            (str(name), str(encoding), int(size or 0))
            for (name, encoding), size in zip(pairs, sizes, strict=True)
        ),
        str(entry["separator"]) if separator is None else separator,
        str(entry["newline"]) if is_lines else "",
    )


def _file_of(entry: dict[str, Any], kind: str, codec: str, folder: Folder) -> MdsFile:
    raw, packed = entry[f"raw_{kind}"], entry[f"zip_{kind}"]
    # a folder that a loader has read has unpacked shards
    if codec and not (packed and has_file(folder, str(packed["basename"]))):
        codec = ""
    file = packed if codec else raw
    hashes = tuple((str(name), str(digest)) for name, digest in file["hashes"].items())
    return MdsFile(str(file["basename"]), codec, int(file["bytes"]), int(raw["bytes"]), hashes)


@dataclass(frozen=True, slots=True)
class MdsChunk:
    """Successive samples of a shard."""

    folder: str
    shard: MdsShard
    container: str
    """Name of the shard under the data root."""
    columns: tuple[str, ...]
    first: int
    last: int
    is_checked: bool
    """Whether hashes of the shard are; once per shard is enough."""

    def records(self) -> Iterator[RawRecord]:
        """The samples, in order; DataError for a shard that is damaged, one by one for a sample."""
        shard = self.shard
        folder = open_folder(self.folder, follow_links=True)
        with _opened_file(folder, shard.data, is_checked=self.is_checked) as file:
            if shard.table is None:
                borders = _borders(file, shard, self.container)
            else:
                with _opened_file(folder, shard.table, is_checked=self.is_checked) as table:
                    borders = _borders(table, shard, self.container)
            for row in range(self.first, self.last):
                try:
                    value = self._record(file, row, *borders[row : row + 2].tolist())
                except (ValueError, LookupError, OSError, RecursionError) as error:
                    problem = f"{self.container}, sample {row}: {first_line(error)}"
                    key = {"__key__": f"{shard.name}:{row}"}
                    yield RawRecord(row, key, problem, "broken_member")
                    continue
                yield named_record(row, value, shard.name)

    def _record(self, file: IO[bytes], row: int, begin: int, end: int) -> dict[str, Any]:
        """The columns that are read of a sample. ValueError if it is damaged."""
        file.seek(begin)
        if self.shard.table is not None:
            values = _line(file.read(end - begin), self.shard)
            if missing := [name for name in self.columns if name not in values]:
                raise ValueError(f"the line has no column {missing[0]!r}")
            return {name: values[name] for name in self.columns}
        columns = self.shard.columns
        varying = sum(not size for _, _, size in columns)
        sizes = iter(np.frombuffer(file.read(4 * varying), _UINT).tolist())
        start, record = begin + 4 * varying, {}
        for name, encoding, fixed in columns:
            size = fixed or next(sizes, -1)
            if size < 0 or start + size > end:
                raise ValueError(f"its columns are longer than the sample, which has {end - begin}")
            if name in self.columns:
                place = _Place(file, f"{self.shard.name}/{row}/{name}", start, size, self)
                key, value = _value(name, encoding, place)
                record[key] = value
            start += size
        if start != end:
            raise ValueError(f"its columns end {end - start} bytes before the sample does")
        return record


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value is in an open shard."""

    file: IO[bytes]
    name: str
    start: int
    size: int
    chunk: MdsChunk

    def read(self, size: int | None = None) -> bytes:
        self.file.seek(self.start)
        return self.file.read(self.size if size is None else min(size, self.size))

    def media(self, suffix: str) -> Media:
        """The file at this place; its content, if the shard is compressed."""
        name = f"{self.name}.{suffix}" if suffix else self.name
        if self.chunk.shard.codec:
            return Media(name, data=self.read())
        container = self.chunk.container
        return Media(name, container=container, offset=self.start, size=self.size)


def _value(name: str, encoding: str, place: _Place) -> tuple[str, Any]:
    """Key and value of a column. One that no record is read from has a dot before its name."""
    value: Any
    if encoding in _LISTS:
        value = _files(encoding, place)
    elif encoding == "bytes" and name not in _MEDIA_KEYS and not _is_media(place):
        value = place.read().decode("utf-8", "surrogateescape")
    elif encoding in _FILES:
        value = _file(encoding, place)
    elif encoding == "json":
        value = json.loads(place.read())
        if is_deep(value):
            raise ValueError(f"{name}: {TOO_DEEP}")
    elif encoding in _SCALARS:
        value = _SCALARS[encoding](place.read())
    elif encoding in _NUMBERS:
        value = np.frombuffer(place.read(), np.dtype(encoding).newbyteorder("<"))[0].item()
    else:
        return f".{name}", f"{encoding}, {place.size:,} bytes"
    return name, value


def _line(data: bytes, shard: MdsShard) -> dict[str, Any]:
    """The columns of a sample of a shard of lines. ValueError if it has others."""
    if not shard.separator:
        value = json.loads(data)
        if not isinstance(value, dict) or is_deep(value):
            raise ValueError("the line is not an object of texts and numbers")
        return value
    parts = data.decode().removesuffix(shard.newline).split(shard.separator)
    if len(parts) != len(shard.columns):
        raise ValueError(f"the line has {len(parts)} columns, not {len(shard.columns)}")
    pairs = zip(shard.columns, parts, strict=True)
    return {name: _LINE_VALUES[encoding](part) for (name, encoding, _), part in pairs}


def _is_media(place: _Place) -> bool:
    """Whether bytes are a file, by the first of them; else they may be a text."""
    return kind_of_content(place.read(HEAD_BYTES)) is not None


def _file(encoding: str, place: _Place) -> Media:
    if encoding != "pil":
        return place.media(_FILES[encoding])
    return Media(f"{place.name}.png", data=_png(place.read()))


def _files(encoding: str, place: _Place) -> list[Media]:
    """The images of a list: how many, their sizes, their contents."""
    inner = _LISTS[encoding]
    skip = 4 if encoding.startswith("list") else 0  # four bytes for later versions
    count = int(np.frombuffer(place.read(skip + 4)[skip:], _UINT)[0])
    start = skip + 4 + 4 * count
    sizes = np.frombuffer(place.read(start)[skip + 4 :], _UINT).tolist()
    if len(sizes) != count or start + sum(sizes) != place.size:
        raise ValueError(f"the list has not the {count} images that it says")
    files = []
    for number, size in enumerate(sizes):
        name = f"{place.name}/{number}"
        files.append(_file(inner, _Place(place.file, name, place.start + start, size, place.chunk)))
        start += size
    return files


def _png(data: bytes) -> bytes:
    """An image of raw pixels as PNG; ValueError for a mode that PNG has not, or a wrong size."""
    if len(data) < 12:
        raise ValueError(f"pil: {len(data)} bytes are too few for a size and a mode")
    width, height, length = np.frombuffer(data[:12], _UINT).tolist()
    mode = data[12 : 12 + length].decode("ascii")
    if mode not in _PIXEL_BITS:
        raise ValueError(f"pil: mode {mode[:20]!r}; read are {', '.join(_PIXEL_BITS)}")
    pixels = data[12 + length :]
    size = height * ((width * _PIXEL_BITS[mode] + 7) // 8)
    if not size or len(pixels) != size:  # before there is memory for as many as it says
        said = f"{size:,} bytes of {width:,} x {height:,} pixels"
        raise ValueError(f"pil: {len(pixels):,} bytes where it says {said}")
    image = Image.frombytes(mode, (width, height), pixels)
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()


# --- shards ---


@contextmanager
def _opened_file(folder: Folder, part: MdsFile, *, is_checked: bool) -> Iterator[IO[bytes]]:
    """A file of a shard, unpacked; `is_checked`: its hashes are.

    DataError if it has not the size or a hash that the index says.
    """
    where = join(folder.uri, part.name)
    with opened(folder, part.name) as file:
        if (size := file.seek(0, io.SEEK_END)) != part.num_bytes:
            said = f"{size:,} bytes, {INDEX_NAME} says {part.num_bytes:,}"
            raise DataError(f"{where}: {said}: it is cut short or another; copy it again")
        for name, digest in part.hashes if is_checked else ():
            if name in HASHES and _hash(file, name) != digest:
                said = f"its {name} is not that of {INDEX_NAME}"
                raise DataError(f"{where}: {said}: it is damaged or another; copy it again")
        file.seek(0)
        if not part.codec:
            yield file
            return
        try:
            unpacked = _unpacked(file.read(), part)
        except (ValueError, OSError, EOFError, zlib.error, pa.ArrowException) as error:
            what = f"{part.codec} cannot be unpacked ({first_line(error)})"
            raise DataError(f"{where}: {what}; copy it again") from None
        yield io.BytesIO(unpacked)


def _hash(file: IO[bytes], algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _unpacked(data: bytes, part: MdsFile) -> bytes:
    if part.codec == "bz2":
        content = bz2.decompress(data)
    elif part.codec == "gz":
        content = zlib.decompress(data, zlib.MAX_WBITS | 16)
    else:
        codec = CODECS[part.codec]
        content = pa.decompress(data, part.raw_bytes, codec=codec, asbytes=True)
    if len(content) != part.raw_bytes:
        raise ValueError(f"{len(content):,} bytes, not {part.raw_bytes:,}")
    return content


def _borders(file: IO[bytes], shard: MdsShard, where: str) -> IntArray:
    """Where each sample begins and the last one ends, (samples + 1,); DataError if they do not."""
    misfit = DataError(f"{where}: its table of samples does not fit {INDEX_NAME}; copy it again")
    size = 4 * (shard.num_samples + 2)
    table = file.read(size) if size <= (shard.table or shard.data).raw_bytes else b""
    if len(table) < size:
        raise misfit
    head = np.frombuffer(table, _UINT).astype(np.int64)
    borders = head[1:]
    is_known = head[0] == shard.num_samples and borders[-1] == shard.data.raw_bytes
    if not is_known or (np.diff(borders) < 0).any():
        raise misfit
    return borders


class MdsSource(Source):
    """Samples of MDS shards."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """ConfigError for shards outside the data root, unless their files come with records."""
        super().__init__(located, name, data_root)
        self._prefix = prefix_under(located.folder, data_root, "shards")
        self._shards: Sequence[MdsShard] = dict(located.options)["shards"]

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """Ranges of samples; nothing is read here but the index."""
        for shard in self._shards:
            step = num_records
            if shard.codec:
                step = max(step, -(-shard.num_samples // MAX_REREADS))
            for first in range(0, shard.num_samples, step):
                yield self._chunk(shard, first, min(first + step, shard.num_samples))
            on_bytes(shard.data.num_bytes)

    def bytes_per_record(self) -> float:
        """By the index."""
        num_samples = sum(shard.num_samples for shard in self._shards)
        return max(1.0, sum(shard.data.num_bytes for shard in self._shards) / max(1, num_samples))

    def columns(self) -> set[str]:
        """Columns of the first shard, also those that no record is read from."""
        return {name for name, _, _ in self._shards[0].columns}

    def unread_columns(self) -> dict[str, str]:
        """Columns of the first shard that no record is read from, by its first rows."""
        shard = self._shards[0]
        known = self._chunk(shard, 0, 0).columns
        unread = tuple(name for name, _, _ in shard.columns if name not in known)
        container = self._prefix + shard.name
        chunk = MdsChunk(self.located.folder, shard, container, unread, 0, 1, is_checked=False)
        rows = islice(chunk.records(), FIRST_ROWS) if unread and shard.num_samples else iter(())
        values = examples(row.value for row in rows)
        return {name: value for name, value in values.items() if name.removeprefix(".") in unread}

    def _chunk(self, shard: MdsShard, first: int, last: int) -> MdsChunk:
        where = join(self.located.folder, shard.name)
        columns = known_columns([name for name, _, _ in shard.columns], where, self.located)
        container = self._prefix + shard.name
        return MdsChunk(
            self.located.folder, shard, container, columns, first, last, is_checked=not first
        )
