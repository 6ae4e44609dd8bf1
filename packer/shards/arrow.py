"""Arrow shards: IPC file format, uncompressed, one record batch per group.

Uncompressed and one message per group, so that a group is one contiguous range: a slice of a memory map locally, one
ranged GET remotely, and no copy until an image is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from packer.shards.sample import PackedSample

_INTS = pa.list_(pa.int32())
_BYTES = pa.list_(pa.binary())
_PATHS = pa.list_(pa.string())


def shard_schema(*, refs: bool) -> pa.Schema:
    """Columns of a shard; with `refs`, paths stand in place of the bytes of images and audio files."""
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
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, group: int, samples: Sequence[PackedSample]) -> tuple[int, int]:
        """Append a group as one record batch; the range is exactly its encapsulated IPC message."""
        files = _PATHS if self._refs else _BYTES
        columns = [
            pa.array([s.sample_id for s in samples], pa.string()),
            _int_lists([s.input_ids for s in samples]),
            _int_lists([s.labels for s in samples]),
            pa.array([s.image_paths if self._refs else s.images for s in samples], files),
            pa.array([s.image_widths for s in samples], _INTS),
            pa.array([s.image_heights for s in samples], _INTS),
            pa.array([s.audio_paths if self._refs else s.audios for s in samples], files),
            pa.array([s.audio_lengths for s in samples], _INTS),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._writer.write_batch(batch)
        # measured from the end: in front of the first message the writer puts the schema as well
        length = pa.ipc.get_record_batch_size(batch)
        return self._file.tell() - length, length

    def close(self) -> None:
        """Write the footer and close the file."""
        self._writer.close()
        self._file.close()


def _int_lists(lists: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(values) for values in lists])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(lists), type=_INTS)
