"""Record batches of Arrow shards, by the places of their buffers in the bytes.

Found without pyarrow, in a third of the time. For `shards.arrow_shards`. Pure.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.shards.stored_group import EXTRAS, NO_EXTRAS, NO_NUMBERS, ExtraTypes, GroupBytes


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


class RecordBatchMessage:
    """A record batch by its buffers.

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

    def numbers(self, name: str, none: NDArray[Any] = NO_NUMBERS) -> NDArray[Any]:
        """The values of a list column, of the type of `none`; a view."""
        (first, *_, last) = self.borders[name]
        if first == last:
            return none
        size = none.itemsize
        start = self._start(self._offsets[name] + 2, size * last)
        return np.frombuffer(self._bytes, none.dtype, last - first, start + size * first)

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
