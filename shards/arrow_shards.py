"""Arrow shards: IPC file format, uncompressed, one record batch per group.

Uncompressed and one message per group, so that a group is one contiguous range: a slice of a memory
map locally, one ranged GET remotely, and no copy until an image is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.types import IntArray
from shards.block import GroupPlace, PackedBlock, PackedFiles

BUFFER_BYTES = 1 << 20

_INTS = pa.list_(pa.int32())
_BYTES = pa.list_(pa.binary())
_PATHS = pa.list_(pa.string())


def shard_schema(*, refs: bool) -> pa.Schema:
    """Columns of a shard; with `refs`, paths stand in place of the bytes of images and audio
    files.
    """
    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("input_ids", _INTS),
            ("labels", _INTS),
            ("image_paths", _PATHS) if refs else ("images", _BYTES),
            ("image_widths", _INTS),
            ("image_heights", _INTS),
            ("audio_paths", _PATHS) if refs else ("audios", _BYTES),
            ("audio_lengths", _INTS),
        ]
    )


class ArrowShardWriter:
    """Writes one Arrow shard."""

    def __init__(self, path: Path, *, refs: bool) -> None:
        self._refs = refs
        self._schema = shard_schema(refs=refs)
        # a group's message is some forty small pieces
        self._file = pa.output_stream(str(path), compression=None, buffer_size=BUFFER_BYTES)
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, block: PackedBlock, groups: list[GroupPlace]) -> list[tuple[int, int]]:
        """Append each group as one record batch; a range is exactly its encapsulated IPC
        message.
        """
        batch = self._batch(block)
        with self._closed_on_error():
            # slices of the whole block: the writer cuts all columns to them
            return [
                self._write(batch.slice(group.first, group.last - group.first)) for group in groups
            ]

    def _write(self, part: pa.RecordBatch) -> tuple[int, int]:
        self._writer.write_batch(part)
        # measured from the end: in front of the first message the writer puts the schema as well
        length = pa.ipc.get_record_batch_size(part)
        return self._file.tell() - length, length

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """On a full disk, let go of the file at once: dropped with bytes in its buffer, it prints
        an error itself.
        """
        try:
            yield
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise

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
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _files(self, files: PackedFiles) -> pa.ListArray:
        values = pa.array(files.paths, pa.string()) if self._refs else _binaries(files)
        return pa.ListArray.from_arrays(pa.array(files.offsets, pa.int32()), values)

    def close(self) -> None:
        """Write the footer and close the file."""
        with self._closed_on_error():
            self._writer.close()
            self._file.close()


def _binaries(files: PackedFiles) -> pa.BinaryArray:
    """The content as an array of binaries, which it is already: no copy."""
    offsets = pa.array(files.content_offsets, pa.int32()).buffers()[1]
    return pa.Array.from_buffers(
        pa.binary(), len(files.paths), [None, offsets, pa.py_buffer(files.content)]
    )


def _int_lists(offsets: IntArray, values: IntArray | NDArray[np.int32]) -> pa.ListArray:
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values, pa.int32()), type=_INTS
    )
