"""A group's bytes -> its samples: one record batch of an Arrow shard, or the members of a tar.

Nothing is copied but what a tar forces: images, audio and tokens are views into the bytes that were
given. Pure, but for the files that a refs build points to, which a `MediaReader` reads.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Contents = Sequence[bytes | memoryview]

_LIST_COLUMNS = ("input_ids", "labels", "image_widths", "image_heights")


_NO_NUMBERS: Int32Array = np.zeros(0, np.int32)
_NO_NUMBERS.flags.writeable = False  # it is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """The samples of a group as they are stored: tokens packed, images and audio not yet
    decoded.
    """

    where: str
    """The shard and the group, for messages."""
    sample_ids: tuple[str, ...]
    input_ids: Int32Array
    """(tokens,), one sample behind the other, as `labels`."""
    labels: Int32Array
    cu_seqlens: Int32Array
    """(num_samples + 1,)."""
    images: Contents
    """Encoded files, in the order of their places in `input_ids`."""
    image_sizes: Int32Array
    """(num_images, 2): height and width as counted."""
    image_samples: Int32Array
    """(num_images,): the place in the group of each image's sample."""
    audios: Contents = ()
    """Encoded files, in the order of their places in `input_ids`."""
    audio_lengths: Int32Array = field(default_factory=lambda: _NO_NUMBERS)
    """(num_audios,): length of each clip as counted, in samples at the model's rate."""
    audio_samples: Int32Array = field(default_factory=lambda: _NO_NUMBERS)
    """(num_audios,): the place in the group of each clip's sample."""


class MediaReader(Protocol):
    """Where a refs build's images and audio files lie."""

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Contents of the files `names`, which belong to the samples `owners` of the group `where`.

        DataError with the sample and the file if one cannot be read.
        """

    def cancel(self) -> None:
        """Stop what is under way, without waiting for it."""

    def close(self) -> None:
        """Stop what is under way and let go of connections."""


class ArrowLayout:
    """Where in a record batch the columns of a build's shards lie; ValueError if they are not of a
    shard's types.
    """

    def __init__(self, schema: pa.Schema) -> None:
        wrong = [name for name in _LIST_COLUMNS if schema.field(name).type != pa.list_(pa.int32())]
        if wrong or schema.field("sample_id").type != pa.string():
            raise ValueError(
                f"columns of other types than a shard's: {', '.join(wrong) or 'sample_id'}"
            )
        self.schema = schema
        self.columns = {name: number for number, name in enumerate(schema.names)}
        self.has_audio = "audio_lengths" in self.columns
        # the batch's validity, then the buffers of each column and of what is in it
        places = [1]
        for field_ in schema:
            places.append(places[-1] + _num_buffers(field_.type))
        self.buffers = dict(zip(schema.names, places, strict=False))


def _num_buffers(kind: pa.DataType) -> int:
    """Buffers of a column: validity, offsets, values, and those of the values of a list."""
    if pa.types.is_list(kind):
        return 2 + _num_buffers(kind.value_type)
    return 3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2


class _Batch:
    """A record batch by its buffers, all asked for at once: column by column that takes three times
    as long.
    """

    def __init__(self, content: pa.Buffer, layout: ArrowLayout) -> None:
        self._batch, self._layout = pa.ipc.read_record_batch(content, layout.schema), layout
        self._batch.validate(
            full=True
        )  # damaged offsets would otherwise be followed outside of the buffer
        self._buffers = self._batch.to_struct_array().buffers()
        self._rows = self._batch.num_rows
        # buffers are parts of `content`: to take them out of one array is four times as fast as to
        # ask each for its own
        self._start, self._words = (
            content.address,
            np.frombuffer(content, np.int32, content.size // 4),
        )

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
        return borders, self._int32(
            self._layout.buffers[name] + 3, first, count
        ) if count else _NO_NUMBERS

    def views(self, name: str, first: int, count: int) -> list[memoryview]:
        """Some values of a column of lists of bytes, as views; a third of the time of asking each
        for its buffer.
        """
        place = self._layout.buffers[name]
        borders = self._int32(place + 3, first, count + 1).tolist()
        # none if all are empty; pyarrow's have signed bytes
        data = memoryview(self._buffers[place + 4] or b"").cast("B")
        return [data[start:end] for start, end in pairwise(borders)]

    def _int32(self, place: int, first: int, count: int) -> Int32Array:
        """Some values of a buffer that is known to hold them."""
        buffer = self._buffers[place]
        word, rest = divmod(buffer.address - self._start + 4 * first, 4)
        if (
            rest or word < 0 or word + count > len(self._words)
        ):  # a copy, which Arrow made because of its alignment
            return np.frombuffer(buffer, np.int32, count, 4 * first)
        return self._words[word : word + count]


def decode_arrow(
    content: pa.Buffer, layout: ArrowLayout, where: str, media: MediaReader | None
) -> StoredGroup:
    """The samples of a record batch (an encapsulated IPC message); with `media`, files are read
    from there.

    Raises pa.ArrowException, KeyError or ValueError if the bytes are damaged.
    """
    batch = _Batch(content, layout)
    sample_ids = tuple(batch.column("sample_id").to_pylist())
    cu_seqlens, input_ids = batch.ints("input_ids")
    images, image_samples, (widths, heights) = _files(batch, "image", sample_ids, where, media)
    image_sizes = np.empty((len(heights), 2), np.int32)
    image_sizes[:, 0], image_sizes[:, 1] = heights, widths
    audio: dict[str, Any] = {}
    if layout.has_audio and len(batch.ints("audio_lengths")[1]):
        audios, audio_samples, (lengths,) = _files(batch, "audio", sample_ids, where, media)
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
        **audio,
    )


_NUMBERS = {"image": ("image_widths", "image_heights"), "audio": ("audio_lengths",)}
"""What is stored of each file of a kind."""


def _files(
    batch: _Batch, kind: str, sample_ids: tuple[str, ...], where: str, media: MediaReader | None
) -> tuple[Contents, Int32Array, list[Int32Array]]:
    """The image or audio files of a batch, the place of each one's sample, and their numbers."""
    name = f"{kind}s" if media is None else f"{kind}_paths"
    found = [batch.ints(number) for number in _NUMBERS[kind]]
    numbers = [values for _, values in found]
    borders, first = batch.borders(name)
    bounds = borders.tobytes()
    if any(other.tobytes() != bounds for other, _ in found):
        raise ValueError(f"{kind} files and their numbers do not belong together")
    owners = _owners(borders)
    if not len(owners):
        return (), owners, numbers
    if media is None:
        return batch.views(name, first, len(owners)), owners, numbers
    paths = batch.column(name).values.slice(first, len(owners)).to_pylist()
    return media.read(paths, [sample_ids[place] for place in owners], where), owners, numbers


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


def decode_tar(content: pa.Buffer, where: str) -> StoredGroup:
    """The samples in a byte range of whole tar members.

    Raises tarfile.TarError, KeyError, TypeError, ValueError or OverflowError if the bytes are
    damaged.
    """
    members = _members(content)
    keys = [name.removesuffix(".json") for name in members if name.endswith(".json")]
    infos: list[dict[str, Any]] = [json.loads(members[f"{key}.json"]) for key in keys]
    input_ids = [_array(members[f"{key}.input_ids.npy"]) for key in keys]
    sizes = [
        size
        for info in infos
        for size in zip(info["image_heights"], info["image_widths"], strict=True)
    ]
    audio_lengths = [length for info in infos for length in info.get("audio_lengths", ())]
    images, image_samples = _named_files(members, keys, [info["images"] for info in infos])
    audios, audio_samples = _named_files(members, keys, [info.get("audios", ()) for info in infos])
    if len(audios) != len(audio_lengths):
        raise ValueError("audio files and their numbers do not belong together")
    return StoredGroup(
        where=where,
        sample_ids=tuple(info["sample_id"] for info in infos),
        input_ids=np.concatenate(input_ids),
        labels=np.concatenate([_array(members[f"{key}.labels.npy"]) for key in keys]),
        cu_seqlens=np.concatenate([[0], np.cumsum([len(ids) for ids in input_ids])]).astype(
            np.int32
        ),
        images=images,
        image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        image_samples=image_samples,
        audios=audios,
        audio_lengths=np.array(audio_lengths, dtype=np.int32),
        audio_samples=audio_samples,
    )


def _members(content: pa.Buffer) -> dict[str, bytes]:
    """Name -> content of the members, in order."""
    members = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                raise ValueError(f"member {member.name} is not a file")
            members[member.name] = file.read()
    return members


def _named_files(
    members: dict[str, bytes], keys: list[str], names: Sequence[Sequence[str]]
) -> tuple[list[bytes], Int32Array]:
    """The members that each sample names, and the place of each one's sample."""
    files = [members[f"{key}.{name}"] for key, own in zip(keys, names, strict=True) for name in own]
    return files, np.repeat(np.arange(len(keys), dtype=np.int32), [len(own) for own in names])


def _array(content: bytes) -> Int32Array:
    """A one-dimensional int32 .npy file; np.load takes 23 us for what takes 1 us here."""
    start = 10 + int.from_bytes(
        content[8:10], "little"
    )  # magic, version, length of the header, header
    if not content.startswith(b"\x93NUMPY\x01\x00") or b"'descr': '<i4'" not in content[10:start]:
        raise ValueError("tokens are not an .npy file of int32")
    return np.frombuffer(content, dtype="<i4", offset=start)
