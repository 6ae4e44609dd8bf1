"""Arrow shards, written and read: IPC files with a record batch per group.

So a group is one contiguous range: a slice of a memory map locally, one ranged GET remotely, and no
copy until an image is decoded. With refs, paths replace the bytes of images and audio files.
"""

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
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
        arrays = []
        for name, kind in self._extras.items():
            values = block.extras[name]
            if kind == "json":
                values = [None if each is None else _to_json(each) for each in values]
            arrays.append(pa.array(values, _EXTRAS[kind]))
        return pa.StructArray.from_arrays(arrays, fields=list(self._schema.field(EXTRAS).type))

    def close(self) -> None:
        """Write the footer and close the file."""
        with closed_on_error(self._file):
            self._writer.close()
            self._file.close()


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _binaries(files: PackedFiles) -> pa.BinaryArray:
    """The content as an array of binaries, which it is already: no copy."""
    offsets = pa.array(files.content_offsets, pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(files.content)]
    return pa.Array.from_buffers(pa.binary(), len(files.paths), buffers)


def _int_lists(offsets: IntArray, values: IntArray | Int32Array) -> pa.ListArray:
    borders, numbers = (pa.array(array, pa.int32()) for array in (offsets, values))
    return pa.ListArray.from_arrays(borders, numbers, type=_INTS)


# --- reading ---


def read_schema(head: bytes | pa.Buffer) -> pa.Schema:
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
        """ValueError if the columns are not of a shard's types."""
        numbers = ("input_ids", "labels", "image_widths", "image_heights")
        wrong = ", ".join(name for name in numbers if schema.field(name).type != _INTS)
        if wrong or schema.field("sample_id").type != pa.string():
            raise ValueError(f"columns of other types than a shard's: {wrong or 'sample_id'}")
        self.schema, self.extras = schema, extras
        self.columns = {name: number for number, name in enumerate(schema.names)}
        self.has_audio = "audio_lengths" in self.columns
        # the batch's validity, then the buffers of each column and of what is in it
        places = accumulate((_num_buffers(field.type) for field in schema), initial=1)
        self.buffers = dict(zip(schema.names, places, strict=False))


def _num_buffers(kind: pa.DataType) -> int:
    """Buffers of a column: validity, offsets, values, and those of what is in it."""
    if pa.types.is_list(kind):
        return 2 + _num_buffers(kind.value_type)
    if pa.types.is_struct(kind):
        return 1 + sum(_num_buffers(field.type) for field in kind)
    return 3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2


class _Batch:
    """A record batch by its buffers, fetched all at once: three times as fast as one by one."""

    def __init__(self, content: pa.Buffer, layout: ArrowLayout) -> None:
        self._batch, self._layout = pa.ipc.read_record_batch(content, layout.schema), layout
        # damaged offsets would otherwise be followed outside of the buffer
        self._batch.validate(full=True)
        self._buffers = self._batch.to_struct_array().buffers()
        self._rows = self._batch.num_rows
        # buffers are parts of `content`: taking them out of one array is four times as fast as
        # asking each for its own
        self._start = content.address
        self._words = np.frombuffer(content, np.int32, content.size // 4)

    def column(self, name: str) -> pa.Array:
        return self._batch.column(self._layout.columns[name])

    def borders(self, name: str) -> tuple[Int32Array, int]:
        """Borders of a list column's rows, from 0 on, and the place of the first value."""
        place = self._layout.buffers[name]
        if self._buffers[place] is not None:
            raise ValueError("a list is missing")
        borders = self._int32(place + 1, 0, self._rows + 1)
        first = borders.item(0)
        return borders - first if first else borders, first

    def ints(self, name: str) -> tuple[Int32Array, Int32Array]:
        """Borders of a list column's rows, from 0 on, and the values of all; views."""
        borders, first = self.borders(name)
        count = borders.item(-1)
        if not count:
            return borders, NO_NUMBERS
        return borders, self._int32(self._layout.buffers[name] + 3, first, count)

    def views(self, name: str, first: int, count: int) -> list[memoryview]:
        """Some values of a column of lists of bytes, as views: faster than each one's buffer."""
        place = self._layout.buffers[name]
        borders = self._int32(place + 3, first, count + 1).tolist()
        # none if all are empty; pyarrow's have signed bytes
        data = memoryview(self._buffers[place + 4] or b"").cast("B")
        return [data[start:end] for start, end in pairwise(borders)]

    def _int32(self, place: int, first: int, count: int) -> Int32Array:
        """Some values of a buffer that is known to hold them."""
        buffer = self._buffers[place]
        word, rest = divmod(buffer.address - self._start + 4 * first, 4)
        if rest or word < 0 or word + count > len(self._words):
            # a copy, which Arrow made because of its alignment
            return np.frombuffer(buffer, np.int32, count, 4 * first)
        return self._words[word : word + count]


def decode_arrow(
    content: pa.Buffer, layout: ArrowLayout, where: str, media: MediaReader | None
) -> StoredGroup:
    """The samples of a record batch (an encapsulated IPC message); `media` reads the files of refs.

    Images, audio and tokens are views into `content`. DECODE_ERRORS if it is damaged.
    """
    batch = _Batch(content, layout)
    sample_ids = tuple(batch.column("sample_id").to_pylist())
    cu_seqlens, input_ids = batch.ints("input_ids")
    source = media, sample_ids, where
    images, names, image_samples, (widths, heights) = _files(batch, "image", *source)
    image_sizes = np.empty((len(heights), 2), np.int32)
    image_sizes[:, 0], image_sizes[:, 1] = heights, widths
    audio: dict[str, Any] = {}
    if layout.has_audio and len(batch.ints("audio_lengths")[1]):
        audios, _, audio_samples, (lengths,) = _files(batch, "audio", *source)
        audio = {"audios": audios, "audio_samples": audio_samples, "audio_lengths": lengths}
    return StoredGroup(
        where=where,
        sample_ids=sample_ids,
        input_ids=input_ids,
        labels=batch.ints("labels")[1],
        cu_seqlens=cu_seqlens,
        images=images,
        image_sizes=image_sizes,
        image_samples=image_samples,
        image_names=names,
        extras=_extras(batch, layout.extras) if layout.extras else NO_EXTRAS,
        **audio,
    )


def _extras(batch: _Batch, types: ExtraTypes) -> dict[str, list[Any]]:
    column, extras = batch.column(EXTRAS), {}
    for place, (name, kind) in enumerate(types.items()):
        values = column.field(place).to_pylist()
        if kind == "json":
            values = [None if each is None else json.loads(each) for each in values]
        extras[name] = values
    return extras


_NUMBERS = {"image": ("image_widths", "image_heights"), "audio": ("audio_lengths",)}
"""Columns of numbers that are stored with the files of a kind."""


def _files(
    batch: _Batch, kind: str, media: MediaReader | None, sample_ids: tuple[str, ...], where: str
) -> tuple[Contents, Sequence[str], Int32Array, list[Int32Array]]:
    """Images or audio files of a batch, their paths (refs), samples and numbers."""
    name = f"{kind}s" if media is None else f"{kind}_paths"
    found = [batch.ints(number) for number in _NUMBERS[kind]]
    numbers = [values for _, values in found]
    borders, first = batch.borders(name)
    bounds = borders.tobytes()
    if any(other.tobytes() != bounds for other, _ in found):
        raise ValueError(f"{kind} files and their numbers do not belong together")
    owners = _owners(borders)
    if not len(owners):
        return (), (), owners, numbers
    if media is None:
        return batch.views(name, first, len(owners)), (), owners, numbers
    paths = batch.column(name).values.slice(first, len(owners)).to_pylist()
    contents = media.read(paths, [sample_ids[place] for place in owners], where)
    return contents, paths, owners, numbers


def _owners(borders: Int32Array) -> Int32Array:
    """The row of each value of a list column.

    >>> _owners(np.int32([0, 2, 2, 3])).tolist()
    [0, 0, 2]
    """
    if len(borders) <= len(_ROWS) and borders.tobytes() == _ROWS[: len(borders)].tobytes():
        return _ROWS[: len(borders) - 1]  # one each, as mostly
    # a list: a group has few samples, for which NumPy takes longer
    rows = [row for row, (a, b) in enumerate(pairwise(borders.tolist())) for _ in range(b - a)]
    return np.array(rows, np.int32)


_ROWS: Int32Array = np.arange(1024, dtype=np.int32)
_ROWS.flags.writeable = False  # it is shared
