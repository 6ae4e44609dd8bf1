"""What a shard holds: `PackedBlock` to be written, `StoredGroup` as read.

The same for every format; `shards.arrow_shards` and `shards.tar_shards` write and read them.
"""

import json
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.common.types import FloatArray, IntArray


class MissingFile(bytes):
    """Stand-in for a file of a refs build that is not there: no bytes, and why there are none."""

    reason: str

    def __new__(cls, reason: str) -> Self:
        """Make one without bytes."""
        missing = super().__new__(cls)
        missing.reason = reason
        return missing


Int32Array = NDArray[np.int32]
Contents = Sequence[bytes | memoryview]
"""Encoded files."""
GroupBytes = pa.Buffer | memoryview
"""Bytes of a group as they are stored."""
ByteRange = tuple[int, int]
"""Offset and length of a group in its shard."""

ExtraType = Literal["bool", "int64", "double", "string", "list<int64>", "list<double>", "json"]
"""Type of a column of the raw data that a build carries along: any JSON value is a `json`."""
ExtraTypes = Mapping[str, ExtraType]
"""Column -> type, as the manifest has it."""
NO_EXTRAS: ExtraTypes = {}
EXTRAS = "extras"
"""Name of these columns in manifests, shards and micro-batches."""

FRAMES = "frames:"
"""Prefix of the path of a video that is a list of images, in a refs build: their paths as JSON."""


def frame_paths(path: str) -> list[str]:
    """The images of a video that is a list of them; none for a file.

    >>> frame_paths('frames:["a/0.png", "a/1.png"]'), frame_paths("a.mp4")
    (['a/0.png', 'a/1.png'], [])
    """
    paths: list[str] = json.loads(path.removeprefix(FRAMES)) if path.startswith(FRAMES) else []
    return paths


NO_NUMBERS: Int32Array = np.zeros(0, np.int32)
NO_NUMBERS.flags.writeable = False  # it is shared
NO_RATES: FloatArray = np.zeros(0)
NO_RATES.flags.writeable = False


# --- writing ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFiles:
    """Images and videos, or audio files, of some samples, one sample's after the other's."""

    offsets: IntArray
    """Borders of the samples among the files, shape (num_samples + 1,)."""
    paths: list[str]
    content: NDArray[np.uint8]
    """Original bytes of all files, one after the other; unused when shards refer to the files."""
    content_offsets: IntArray
    """Borders of the files in `content`, shape (num_files + 1,)."""
    numbers: Mapping[str, IntArray | FloatArray]
    """Numbers stored with each file: `width`, `height`, `num_frames` and `rate`, or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlock:
    """Whole groups ready to be written: expanded tokens, and the original bytes of their files."""

    groups: list[int]
    """Number of each group in the build."""
    group_offsets: IntArray
    """Borders of the groups among the samples, shape (num_groups + 1,), strictly ascending."""
    sample_ids: list[str]
    counts: dict[str, IntArray]
    """Column of `common.types.Counts` -> value of each sample."""
    token_offsets: IntArray
    """Borders of the samples in `input_ids` and `labels`, shape (num_samples + 1,)."""
    input_ids: Int32Array
    labels: Int32Array
    images: PackedFiles
    audios: PackedFiles
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the raw data -> value of each sample."""


class ShardWriter(Protocol):
    """Writes the groups of one shard, in order."""

    def add(self, block: PackedBlock) -> list[ByteRange]:
        """Append the groups of a block; -> the range of each in the shard."""

    def close(self) -> None:
        """Finish the file."""


@contextmanager
def closed_on_error(*files: Any) -> Iterator[None]:
    """Close files on a full disk: dropped with bytes in their buffers, they print errors."""
    try:
        yield
    except OSError:
        for file in files:
            with suppress(OSError):
                file.close()
        raise


# --- reading ---

DECODE_ERRORS = (
    *(pa.ArrowException, tarfile.TarError, OSError, EOFError),
    *(LookupError, TypeError, ValueError, OverflowError, struct.error),
)
"""What decoding a group raises if its bytes are damaged."""


@dataclass(slots=True, kw_only=True)
class StoredGroup:
    """The samples of a group as they are stored: tokens packed, images and audio still encoded."""

    where: str
    """The shard and the group, for messages."""
    sample_ids: tuple[str, ...]
    input_ids: Int32Array
    """(tokens,), one sample after the other, as `labels`."""
    labels: Int32Array
    cu_seqlens: Int32Array
    """(num_samples + 1,)."""
    images: Contents
    """Encoded images and videos, in the order of their places in `input_ids`."""
    image_sizes: Int32Array
    """(num_images, 2): height and width as counted, upright."""
    image_samples: Int32Array
    """(num_images,): place in the group of each image's sample."""
    image_frames: Int32Array = field(default_factory=lambda: NO_NUMBERS)
    """(num_images,): frames that a video has; 0 for an image. Zeros if none are given."""
    image_rates: FloatArray = field(default_factory=lambda: NO_RATES)
    """(num_images,): frames per second of a video; 0 for an image, and for a list of frames."""
    image_names: Sequence[str] = ()
    """Paths (refs) or tar members (webdataset) of the images; empty for Arrow shards."""
    audios: Contents = ()
    """Encoded files, in the order of their places in `input_ids`."""
    audio_lengths: Int32Array = field(default_factory=lambda: NO_NUMBERS)
    """(num_audios,): length of each clip as counted, in samples at the model's rate."""
    audio_samples: Int32Array = field(default_factory=lambda: NO_NUMBERS)
    """(num_audios,): place in the group of each clip's sample."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the raw data -> value of each sample, None where it has none."""
    arrays: Sequence[Mapping[str, Any]] | None = None
    """Media of each sample that a user's function gave as arrays, by name; None: only files."""

    def __post_init__(self) -> None:
        if len(self.image_frames) != (num_images := len(self.image_sizes)):
            self.image_frames = np.zeros(num_images, np.int32)
            self.image_rates = np.zeros(num_images)


EMPTY_GROUP = StoredGroup(
    where="the padding of the epoch's last step",
    sample_ids=(),
    input_ids=NO_NUMBERS,
    labels=NO_NUMBERS,
    cu_seqlens=np.zeros(1, dtype=np.int32),
    images=(),
    image_sizes=NO_NUMBERS.reshape(0, 2),
    image_samples=NO_NUMBERS,
)


class MediaReader(Protocol):
    """Reads the image and audio files that a refs build points to."""

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> Contents:
        """Contents of the files `names` of `owners`. DataError with the sample if one fails."""
