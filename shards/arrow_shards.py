"""Arrow shards, written and read: IPC files with a record batch per group.

So a group is one contiguous range: a slice of a memory map locally, one ranged GET remotely, and no
copy until an image is decoded. With refs, paths replace the bytes of images and audio files.
"""

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from balance.errors import first_line
from balance.types import IntArray
from shards.stored_group import (
    EXTRAS,
    NO_EXTRAS,
    NO_NUMBERS,
    ByteRange,
    Contents,
    ExtraType,
    ExtraTypes,
    GroupBytes,
    Int32Array,
    MediaReader,
    PackedBlock,
    PackedFiles,
    StoredGroup,
    closed_on_error,
)

BUFFER_BYTES = 1 << 20
"""Write buffer: a group's message is some forty small pieces."""
MAGIC_BYTES = 8
"""Magic and padding before the schema of an IPC file."""

_INTS = pa.list_(pa.int32())
_BYTES = pa.list_(pa.binary())
_PATHS = pa.list_(pa.string())
_EXTRAS: dict[ExtraType, pa.DataType] = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "list<int64>": pa.list_(pa.int64()),
    "list<double>": pa.list_(pa.float64()),
    "json": pa.string(),
}


def shard_schema(*, refs: bool, extras: ExtraTypes = NO_EXTRAS) -> pa.Schema:
    """Columns of a shard."""
    columns: list[Any] = [
        ("sample_id", pa.string()),
        ("input_ids", _INTS),
        ("labels", _INTS),
        ("image_paths", _PATHS) if refs else ("images", _BYTES),
        ("image_widths", _INTS),
        ("image_heights", _INTS),
        ("audio_paths", _PATHS) if refs else ("audios", _BYTES),
        ("audio_lengths", _INTS),
    ]
    if extras:
        fields = [(name, _EXTRAS[kind]) for name, kind in extras.items()]
        columns.append((EXTRAS, pa.struct(fields)))
    return pa.schema(columns)


# --- writing ---


class ArrowShardWriter:
    """Writes one Arrow shard."""

    def __init__(self, path: Path, *, refs: bool, extras: ExtraTypes = NO_EXTRAS) -> None:
        self._refs, self._extras = refs, extras
        self._schema = shard_schema(refs=refs, extras=extras)
        self._file = pa.output_stream(str(path), compression=None, buffer_size=BUFFER_BYTES)
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, block: PackedBlock) -> list[ByteRange]:
        """Append each group as one record batch; a range is its encapsulated IPC message."""
        batch = self._batch(block)
        with closed_on_error(self._file):
            # slices of the whole block: the writer cuts all columns to them
            return [
                self._write(batch.slice(first, last - first))
                for first, last in pairwise(block.group_offsets.tolist())
            ]

    def _write(self, part: pa.RecordBatch) -> ByteRange:
        self._writer.write_batch(part)
        # measured from the end: before the first message the writer puts the schema as well
        length = pa.ipc.get_record_batch_size(part)
        return self._file.tell() - length, length

    def _batch(self, block: PackedBlock) -> pa.RecordBatch:
        images, audios = block.images, block.audios
        columns = [
            pa.array(block.sample_ids, pa.string()),
            _int_lists(block.token_offsets, block.input_ids),
            _int_lists(block.token_offsets, block.labels),
            self._files(images),
            _int_lists(images.offsets, images.numbers["width"]),
            _int_lists(images.offsets, images.numbers["height"]),
            self._files(audios),
            _int_lists(audios.offsets, audios.numbers["length"]),
        ]
        if self._extras:
            columns.append(self._extra_columns(block))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _files(self, files: PackedFiles) -> pa.ListArray:
        values = pa.array(files.paths, pa.string()) if self._refs else _binaries(files)
        return pa.ListArray.from_arrays(pa.array(files.offsets, pa.int32()), values)

    def _extra_columns(self, block: PackedBlock) -> pa.StructArray:
        arrays, to_json = [], partial(json.dumps, ensure_ascii=False)
        for name, kind in self._extras.items():
            values = block.extras[name]
            if kind == "json":
                values = [None if each is None else to_json(each) for each in values]
            arrays.append(pa.array(values, _EXTRAS[kind]))
        return pa.StructArray.from_arrays(arrays, fields=list(self._schema.field(EXTRAS).type))

    def close(self) -> None:
        """Write the footer and close the file."""
        with closed_on_error(self._file):
            self._writer.close()
            self._file.close()


def _binaries(files: PackedFiles) -> pa.BinaryArray:
    """The content as an array of binaries, which it is already: no copy."""
    offsets = pa.array(files.content_offsets, pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(files.content)]
    return pa.Array.from_buffers(pa.binary(), len(files.paths), buffers)


def _int_lists(offsets: IntArray, values: IntArray | Int32Array) -> pa.ListArray:
    borders, numbers = (pa.array(array, pa.int32()) for array in (offsets, values))
    return pa.ListArray.from_arrays(borders, numbers, type=_INTS)


# --- reading ---


def read_schema(head: bytes | GroupBytes) -> pa.Schema:
    """Columns of a shard that begins with `head`: all before its first group.

    Raises pa.ArrowException, OSError or ValueError if it is no Arrow file, or no shard.
    """
    schema = pa.ipc.read_schema(pa.BufferReader(head[MAGIC_BYTES:]))
    known = [*shard_schema(refs=False), *shard_schema(refs=True)]
    if strangers := [field.name for field in schema if field not in known]:
        raise ValueError(f"columns that no shard has: {strangers[0]!r}")
    return schema


def schema_problem(head: bytes | pa.Buffer) -> str:
    """Why `head` is not the beginning of a shard; empty if it is."""
    try:
        read_schema(head)
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"no Arrow file ({first_line(error)})"
    return ""


class ArrowLayout:
    """Where the columns of a build's shards are in a record batch; the same for all its groups."""

    def __init__(self, schema: pa.Schema, extras: ExtraTypes = NO_EXTRAS) -> None:
        self.schema, self.extras = schema, extras
        # all but the extras, which are last
        columns = {field.name: field.type for field in schema if field.name != EXTRAS}
        places = [*accumulate(map(_num_buffers, columns.values()), initial=0)]
        self.offsets = {name: place + 1 for name, place in zip(columns, places, strict=False)}
        """Column -> its buffer of offsets; validity is before it, what is in it after it."""
        # vectors of columns and what is in their lists, and of buffers: a size, then pairs of int64
        num_arrays = sum(1 + pa.types.is_list(kind) for kind in columns.values())
        self.arrays, self.buffers = (Struct(f"<i{2 * n}q") for n in (num_arrays, places[-1]))


def _num_buffers(kind: pa.DataType) -> int:
    """Buffers of a column: validity, offsets, values, and those of what is in it."""
    if pa.types.is_list(kind):
        return 2 + _num_buffers(kind.value_type)
    return 3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2


@lru_cache(maxsize=1024)
def _int32s(count: int) -> Struct:
    return Struct(f"<{count}i")


class _Message:
    """A record batch by its buffers, which are found without pyarrow: in a third of the time.

    Whatever its bytes are, no others are read. DECODE_ERRORS if they are damaged.
    """

    def __init__(self, content: GroupBytes, layout: ArrowLayout) -> None:
        self._bytes = memoryview(content).cast("B")
        mark, size = _PREFIX.unpack_from(self._bytes)
        if mark != -1:
            raise ValueError("no message begins here")
        self._body = _PREFIX.size + size
        metadata = self._bytes[_PREFIX.size : self._body]
        arrays, buffers = _find_vectors(metadata)
        # a length and a number of missing values each
        lengths = _read_pairs(metadata, arrays, layout.arrays)
        if any(lengths[2::2]):
            raise ValueError("a value is missing")
        # an offset in the body and a length each
        self._buffers = _read_pairs(metadata, buffers, layout.buffers)
        # column -> borders of its rows among its values
        self.borders: dict[str, tuple[int, ...]] = {}
        self._offsets, numbers, last = layout.offsets, _int32s(lengths[1] + 1), None
        for name, place in layout.offsets.items():
            borders = numbers.unpack_from(self._bytes, self._start(place, numbers.size))
            if borders != last:
                _check_ascent(borders, name)
            last = self.borders[name] = borders

    def ints(self, name: str) -> Int32Array:
        """The values of a list column; a view."""
        (first, *_, last) = self.borders[name]
        if first == last:
            return NO_NUMBERS
        start = self._start(self._offsets[name] + 2, 4 * last)
        return np.frombuffer(self._bytes, np.int32, last - first, start + 4 * first)

    def texts(self, name: str) -> list[str]:
        """The values of a column of texts."""
        borders = self.borders[name]
        data = self._content(self._offsets[name] + 1, borders)
        if (text := str(data, "utf-8")).isascii():
            return [text[begin:end] for begin, end in pairwise(borders)]
        return [str(data[begin:end], "utf-8") for begin, end in pairwise(borders)]

    def files(self, name: str) -> list[memoryview]:
        """The values of a column of lists of bytes or texts; views."""
        place, rows = self._offsets[name] + 2, self.borders[name]
        start = self._start(place, 4 * (rows[-1] + 1)) + 4 * rows[0]
        borders = _int32s(rows[-1] - rows[0] + 1).unpack_from(self._bytes, start)
        _check_ascent(borders, name)
        data = self._content(place + 1, borders)
        return [data[begin:end] for begin, end in pairwise(borders)]

    def _content(self, place: int, borders: tuple[int, ...]) -> memoryview:
        """The bytes of a buffer, up to the last of the borders in it."""
        start = self._start(place, borders[-1])
        return self._bytes[start : start + borders[-1]]

    def _start(self, place: int, num_bytes: int) -> int:
        """Where a buffer of at least so many bytes begins."""
        offset, size = self._buffers[2 * place + 1], self._buffers[2 * place + 2]
        start: int = self._body + offset
        if offset < 0 or num_bytes > size or start + num_bytes > len(self._bytes):
            raise ValueError("a value ends after its buffer")
        return start


def _check_ascent(borders: tuple[int, ...], name: str) -> None:
    if borders[0] < 0 or tuple(sorted(borders)) != borders:
        raise ValueError(f"the borders of {name} do not ascend")


_PREFIX = Struct("<2i")
"""What is before a message's metadata: -1 and their length."""
_HEADER_TYPE, _HEADER, _RECORD_BATCH = 1, 2, 3
"""Fields of the table Message in Arrow's Message.fbs, and the type of a record batch."""
_NODES, _BUFFERS, _COMPRESSION = 1, 2, 3
"""Fields of the table RecordBatch."""


def _find_vectors(metadata: memoryview) -> tuple[int, int]:
    """Where the vectors of arrays (`nodes`) and of buffers are in a record batch's metadata.

    A table of a flatbuffer begins with the distance back to its vtable: the sizes of both, then the
    place in the table of each field, which may be a distance to another table or a vector.
    """
    words, halves = metadata.cast("i"), metadata.cast("H")
    message = words[0]
    fields = ((message - words[message >> 2]) >> 1) + 2
    if metadata[message + halves[fields + _HEADER_TYPE]] != _RECORD_BATCH:
        raise ValueError("not the message of a record batch")
    batch = message + halves[fields + _HEADER]
    batch += words[batch >> 2]
    fields = ((batch - words[batch >> 2]) >> 1) + 2
    # last fields that are not there are left out
    if halves[fields - 2] > 4 + 2 * _COMPRESSION and halves[fields + _COMPRESSION]:
        raise ValueError("compressed, as no shard is")
    arrays, buffers = batch + halves[fields + _NODES], batch + halves[fields + _BUFFERS]
    return arrays + words[arrays >> 2], buffers + words[buffers >> 2]


def _read_pairs(metadata: memoryview, place: int, pairs: Struct) -> tuple[int, ...]:
    """The size of a vector and the numbers of its first pairs, one after the other."""
    found = pairs.unpack_from(metadata, place) if place <= len(metadata) - pairs.size else (0,)
    if place < 0 or found[0] < pairs.size >> 4:
        raise ValueError("the message has other columns than the shard")
    return found


def decode_arrow(
    content: GroupBytes, layout: ArrowLayout, where: str, media: MediaReader | None
) -> StoredGroup:
    """The samples of a record batch (an encapsulated IPC message); `media` reads the files of refs.

    Images, audio and tokens are views into `content`. DECODE_ERRORS if it is damaged.
    """
    batch = _Message(content, layout)
    borders, sample_ids = batch.borders, tuple(batch.texts("sample_id"))
    tokens = borders["input_ids"]
    if borders["labels"] != tokens:
        raise ValueError("tokens and labels do not belong together")
    source = media, sample_ids, where
    images, names, image_samples, (widths, heights) = _files(batch, "image", *source)
    image_sizes = np.empty((len(heights), 2), np.int32)
    image_sizes[:, 0], image_sizes[:, 1] = heights, widths
    audio: dict[str, Any] = {}
    if borders.get("audio_lengths", (0,))[-1]:
        audios, _, audio_samples, (lengths,) = _files(batch, "audio", *source)
        audio = {"audios": audios, "audio_samples": audio_samples, "audio_lengths": lengths}
    cu_seqlens = np.array(tokens, np.int32)
    return StoredGroup(
        where=where,
        sample_ids=sample_ids,
        input_ids=batch.ints("input_ids"),
        labels=batch.ints("labels"),
        cu_seqlens=cu_seqlens - tokens[0] if tokens[0] else cu_seqlens,
        images=images,
        image_sizes=image_sizes,
        image_samples=image_samples,
        image_names=names,
        extras=_extras(content, layout) if layout.extras else NO_EXTRAS,
        **audio,
    )


def _extras(content: GroupBytes, layout: ArrowLayout) -> dict[str, list[Any]]:
    column = pa.ipc.read_record_batch(content, layout.schema).column(EXTRAS)
    # damaged offsets would otherwise be followed outside of the buffer
    column.validate(full=True)
    extras = {}
    for place, (name, kind) in enumerate(layout.extras.items()):
        values = column.field(place).to_pylist()
        if kind == "json":
            values = [None if each is None else json.loads(each) for each in values]
        extras[name] = values
    return extras


_NUMBERS = {"image": ("image_widths", "image_heights"), "audio": ("audio_lengths",)}
"""Columns of numbers that are stored with the files of a kind."""


def _files(
    batch: _Message, kind: str, media: MediaReader | None, sample_ids: tuple[str, ...], where: str
) -> tuple[Contents, Sequence[str], Int32Array, list[Int32Array]]:
    """Images or audio files of a batch, their paths (refs), samples and numbers."""
    name = f"{kind}s" if media is None else f"{kind}_paths"
    borders, numbers = batch.borders[name], []
    for number in _NUMBERS[kind]:
        if batch.borders[number] != borders:
            raise ValueError(f"{kind} files and their numbers do not belong together")
        numbers.append(batch.ints(number))
    owners = _owners(borders)
    if not len(owners):
        return (), (), owners, numbers
    if media is None:
        return batch.files(name), (), owners, numbers
    paths = [str(path, "utf-8") for path in batch.files(name)]
    contents = media.read(paths, [sample_ids[place] for place in owners], where)
    return contents, paths, owners, numbers


def _owners(borders: tuple[int, ...]) -> Int32Array:
    """The row of each value of a list column.

    >>> _owners((0, 2, 2, 3)).tolist()
    [0, 0, 2]
    """
    if borders == _COUNTED[: len(borders)]:
        return _ROWS[: len(borders) - 1]  # one each, as mostly
    # a list: for few samples NumPy takes longer
    rows = [row for row, (a, b) in enumerate(pairwise(borders)) for _ in range(b - a)]
    return np.array(rows, np.int32)


_COUNTED = tuple(range(1024))
_ROWS: Int32Array = np.arange(len(_COUNTED), dtype=np.int32)
_ROWS.flags.writeable = False  # it is shared
