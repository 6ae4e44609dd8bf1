"""Arrow shards, written and read: IPC files with a record batch per group.

So a group is one contiguous range: a slice of a memory map locally, one ranged GET remotely, and no
copy until an image is decoded. With refs, paths replace the bytes of images and audio files.
"""

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from isobatch.common.errors import DataError, first_line
from isobatch.common.types import IntArray
from isobatch.media.frame_archive import pack_frames
from isobatch.shards.stored_group import (
    EXTRAS,
    NO_EXTRAS,
    ByteRange,
    Contents,
    ExtraType,
    ExtraTypes,
    GroupBytes,
    Int32Array,
    MediaReader,
    MissingFile,
    PackedBlock,
    PackedFiles,
    StoredGroup,
    closed_on_error,
    frame_paths,
)

BUFFER_BYTES = 1 << 20
"""Write buffer: a group's message is some forty small pieces."""
MAGIC_BYTES = 8
"""Magic and padding before the schema of an IPC file."""

MOST_FILE_BYTES = (1 << 31) - 1
"""Bytes of a group's images and videos at most, and of its audio: offsets are int32."""

_INTS = pa.list_(pa.int32())
_BYTES = pa.list_(pa.binary())
_PATHS = pa.list_(pa.string())
_RATES = pa.list_(pa.float64())
_EXTRAS: dict[ExtraType, pa.DataType] = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "list<int64>": pa.list_(pa.int64()),
    "list<double>": pa.list_(pa.float64()),
    "json": pa.string(),
}


def shard_schema(*, refs: bool, videos: bool = False, extras: ExtraTypes = NO_EXTRAS) -> pa.Schema:
    """Columns of a shard; `videos`: some of the build's images are videos."""
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
    if videos:
        columns += [("image_frames", _INTS), ("image_rates", _RATES)]
    if extras:
        fields = [(name, _EXTRAS[kind]) for name, kind in extras.items()]
        columns.append((EXTRAS, pa.struct(fields)))
    return pa.schema(columns)


_COLUMNS: dict[str, pa.DataType] = {
    field.name: field.type
    for refs in (False, True)
    for field in shard_schema(refs=refs, videos=True)
}
"""Columns that a shard may have, but for the extras."""


# --- writing ---


class ArrowShardWriter:
    """Writes one Arrow shard."""

    def __init__(
        self, path: Path, *, refs: bool, videos: bool = False, extras: ExtraTypes = NO_EXTRAS
    ) -> None:
        self._refs, self._videos, self._extras = refs, videos, extras
        self._schema = shard_schema(refs=refs, videos=videos, extras=extras)
        self._file = pa.output_stream(str(path), compression=None, buffer_size=BUFFER_BYTES)
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, block: PackedBlock) -> list[ByteRange]:
        """Append each group as one record batch; a range is its encapsulated IPC message."""
        batch = self._batch(block)
        borders = pairwise(block.group_offsets.tolist())
        # slices of the whole block: the writer cuts all columns to them
        return [self.add_rows(batch.slice(first, last - first)) for first, last in borders]

    def add_rows(self, rows: pa.RecordBatch) -> ByteRange:
        """Append samples as a group: of a block, or of `stored_rows`."""
        with closed_on_error(self._file):
            self._writer.write_batch(rows)
            # measured from the end: before the first message the writer puts the schema as well
            length = pa.ipc.get_record_batch_size(rows)
            return self._file.tell() - length, length

    def _batch(self, block: PackedBlock) -> pa.RecordBatch:
        images, audios = block.images, block.audios
        columns = [
            pa.array(block.sample_ids, pa.string()),
            _lists(block.token_offsets, block.input_ids),
            _lists(block.token_offsets, block.labels),
            self._files(images),
            _lists(images.offsets, images.numbers["width"]),
            _lists(images.offsets, images.numbers["height"]),
            self._files(audios),
            _lists(audios.offsets, audios.numbers["length"]),
        ]
        if self._videos:
            columns.append(_lists(images.offsets, images.numbers["num_frames"]))
            columns.append(_lists(images.offsets, images.numbers["rate"], _RATES))
        if self._extras:
            arrays = []
            for name, kind in self._extras.items():
                values = block.extras[name]
                if kind == "json":
                    to_json = partial(json.dumps, ensure_ascii=False)
                    values = [None if value is None else to_json(value) for value in values]
                arrays.append(pa.array(values, _EXTRAS[kind]))
            fields = list(self._schema.field(EXTRAS).type)
            columns.append(pa.StructArray.from_arrays(arrays, fields=fields))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _files(self, files: PackedFiles) -> pa.ListArray:
        values = pa.array(files.paths, pa.string()) if self._refs else _binaries(files)
        return pa.ListArray.from_arrays(pa.array(files.offsets, pa.int32()), values)

    def close(self) -> None:
        """Write the footer and close the file."""
        with closed_on_error(self._file):
            self._writer.close()
            self._file.close()


def _binaries(files: PackedFiles) -> pa.BinaryArray:
    """The content as an array of binaries, which it is already: no copy. DataError above 2 GiB."""
    if (num_bytes := int(files.content_offsets[-1])) > MOST_FILE_BYTES:
        advice = "use --format webdataset or refs, or a smaller --max-seq-len or --max-vision"
        raise DataError(f"a group of an Arrow shard holds 2 GiB, not {num_bytes:,} bytes: {advice}")
    offsets = pa.array(files.content_offsets, pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(files.content)]
    return pa.Array.from_buffers(pa.binary(), len(files.paths), buffers)


def _lists(offsets: IntArray, values: NDArray[Any], kind: pa.DataType = _INTS) -> pa.ListArray:
    borders, numbers = pa.array(offsets, pa.int32()), pa.array(values, kind.value_type)
    return pa.ListArray.from_arrays(borders, numbers, type=kind)


# --- reading ---


def read_schema(head: bytes | GroupBytes) -> pa.Schema:
    """Columns of a shard that begins with `head`: all before its first group.

    Raises pa.ArrowException, OSError or ValueError if it is no Arrow file, or no shard.
    """
    schema = pa.ipc.read_schema(pa.BufferReader(head[MAGIC_BYTES:]))
    if strangers := [field.name for field in schema if _COLUMNS.get(field.name) != field.type]:
        raise ValueError(f"columns that no shard has: {strangers[0]!r}")
    return schema


def schema_problem(head: bytes | pa.Buffer) -> str:
    """Why `head` is not the beginning of a shard; empty if it is."""
    try:
        read_schema(head)
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"no Arrow file ({first_line(error)})"
    return ""


def stored_rows(content: GroupBytes, schema: pa.Schema) -> pa.RecordBatch:
    """The samples of a group as they are stored, a row each. DECODE_ERRORS if damaged."""
    batch = pa.ipc.read_record_batch(content, schema)
    batch.validate(full=True)
    return batch


class _Layout(NamedTuple):
    """Where columns lie among the buffers of a record batch."""

    offsets: dict[str, int]
    """List column -> its buffer of offsets; that of its values' presence and its values follow."""
    presence: tuple[int, ...]
    """Buffers that are there only where a value may be missing."""


@lru_cache
def _layout(names: tuple[str, ...]) -> _Layout:
    """Of a shard with these columns; each buffer of a column is behind those of the one before."""
    offsets, presence, place = {}, [], 1  # the first is that of the rows' own presence
    for name in names:
        if name == EXTRAS:  # the last; its values may be missing
            break
        presence.append(place)
        if pa.types.is_list(_COLUMNS[name]):
            offsets[name] = place + 1
            place += 2
            presence.append(place)
        place += 2 if _COLUMNS[name] in (_INTS, _RATES) else 3
    return _Layout(offsets, tuple(presence))


class GroupColumns:
    """Columns of a group's record batch, as views into its bytes. DECODE_ERRORS if damaged."""

    def __init__(self, content: GroupBytes, schema: pa.Schema) -> None:
        # validated: damaged offsets would otherwise be followed outside of the buffers
        self._batch = stored_rows(content, schema)
        self._offsets, presence = _layout(tuple(schema.names))
        # of all columns at once, in a third of the time that an array of each would take
        self._buffers: list[pa.Buffer | None] = self._batch.to_struct_array().buffers()
        if any(self._buffers[place] is not None for place in presence):
            raise ValueError("a value is missing")
        read = Struct(f"<{len(self._batch) + 1}i").unpack_from
        self.borders: dict[str, tuple[int, ...]] = {
            name: read(self._buffers[place]) for name, place in self._offsets.items()
        }
        """List column -> borders of its rows among its values."""

    def column(self, name: str) -> pa.Array:
        """A column, with an entry per sample."""
        return self._batch.column(name)

    def numbers(self, name: str) -> NDArray[Any]:
        """The values of a list column of numbers."""
        first, *_, last = self.borders[name]
        kind = np.float64 if _COLUMNS[name] == _RATES else np.int32
        return _numbers(self._buffers[self._offsets[name] + 2], kind, first, last)

    def files(self, name: str) -> list[memoryview]:
        """The values of a column of lists of bytes or texts."""
        first, *_, last = self.borders[name]
        place = self._offsets[name] + 2
        data = self._buffers[place + 1]
        if first == last or data is None:
            return [memoryview(b"")] * (last - first)
        places = _numbers(self._buffers[place], np.int32, first, last + 1).tolist()
        content = memoryview(data)
        return [content[begin:end] for begin, end in pairwise(places)]


def _numbers(buffer: pa.Buffer | None, kind: type, first: int, last: int) -> NDArray[Any]:
    """A view of the numbers [first, last); `to_numpy` of Arrow's would import pandas."""
    if buffer is None or first == last:
        return np.zeros(0, kind)
    return np.frombuffer(buffer, kind, last - first, first * np.dtype(kind).itemsize)


def decode_arrow(
    content: GroupBytes,
    schema: pa.Schema,
    where: str,
    media: MediaReader | None,
    extras: ExtraTypes = NO_EXTRAS,
) -> StoredGroup:
    """The samples of a record batch (an encapsulated IPC message); `media` reads the files of refs.

    Images, audio and tokens are views into `content`. DECODE_ERRORS if it is damaged.
    """
    batch = GroupColumns(content, schema)
    borders = batch.borders
    sample_ids = tuple(batch.column("sample_id").to_pylist())
    tokens = borders["input_ids"]
    if borders["labels"] != tokens:
        raise ValueError("tokens and labels do not belong together")
    source = media, sample_ids, where
    images, names, image_samples, (widths, heights, *video) = _files(batch, "image", *source)
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
        input_ids=batch.numbers("input_ids"),
        labels=batch.numbers("labels"),
        cu_seqlens=cu_seqlens - tokens[0] if tokens[0] else cu_seqlens,
        images=images,
        image_sizes=image_sizes,
        image_samples=image_samples,
        image_names=names,
        extras=_extras(batch.column(EXTRAS), extras) if extras else NO_EXTRAS,
        **audio,
        **dict(zip(_VIDEO_NUMBERS, video, strict=False)),
    )


def _extras(column: pa.StructArray, types: ExtraTypes) -> dict[str, list[Any]]:
    extras = {}
    for place, (name, kind) in enumerate(types.items()):
        values = column.field(place).to_pylist()
        if kind == "json":
            values = [None if value is None else json.loads(value) for value in values]
        extras[name] = values
    return extras


_VIDEO_NUMBERS = "image_frames", "image_rates"
_NUMBERS: dict[str, tuple[str, ...]] = {
    "image": ("image_widths", "image_heights", *_VIDEO_NUMBERS),
    "audio": ("audio_lengths",),
}
"""Columns of numbers that are stored with the files of a kind; a build may be without videos'."""


def _files(
    batch: GroupColumns,
    kind: str,
    media: MediaReader | None,
    sample_ids: tuple[str, ...],
    where: str,
) -> tuple[Contents, Sequence[str], Int32Array, list[Any]]:
    """Images or audio files of a batch, their paths (refs), samples and numbers."""
    name = f"{kind}s" if media is None else f"{kind}_paths"
    borders = batch.borders[name]
    numbers = []
    for number in filter(batch.borders.__contains__, _NUMBERS[kind]):
        if batch.borders[number] != borders:
            raise ValueError(f"{kind} files and their numbers do not belong together")
        numbers.append(batch.numbers(number))
    owners = _owners(borders)
    if not len(owners):
        return (), (), owners, numbers
    if media is None:
        return batch.files(name), (), owners, numbers
    paths = [str(path, "utf-8") for path in batch.files(name)]
    contents = _read_refs(media, paths, [sample_ids[place] for place in owners], where)
    return contents, paths, owners, numbers


def _read_refs(
    media: MediaReader, paths: Sequence[str], owners: Sequence[str], where: str
) -> Contents:
    """The files at paths; of a list of images, their archive."""
    lists = [frame_paths(path) for path in paths]
    if not any(lists):
        return media.read(paths, owners, where)
    names = [frames or [path] for path, frames in zip(paths, lists, strict=True)]
    whose = [owner for owner, frame_names in zip(owners, names, strict=True) for _ in frame_names]
    read_files = iter(media.read([*chain(*names)], whose, where))
    contents = []
    for frames, frame_names in zip(lists, names, strict=True):
        files = [*islice(read_files, len(frame_names))]
        missing = [file for file in files if isinstance(file, MissingFile)]
        contents.append(pack_frames(files) if frames and not missing else (missing or files)[0])
    return contents


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
