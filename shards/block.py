"""What shards are written from: a run of samples, columnar, the same for every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFiles:
    """The images or the audio files of some samples, one sample's after the other's."""

    offsets: IntArray
    """Borders of the samples among the files, shape (num_samples + 1,)."""
    paths: list[str]
    content: NDArray[np.uint8]
    """The original bytes of all files, one behind the other; not used when the format refers to the
    files.
    """
    content_offsets: IntArray
    """Borders of the files in `content`, shape (num_files + 1,)."""
    numbers: dict[str, IntArray]
    """What the shards keep of each file beside its bytes: `width` and `height`, or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlock:
    """Samples ready to be written: tokens with images and audio expanded, and the original bytes of
    their files.
    """

    sample_ids: list[str]
    counts: dict[str, IntArray]
    """Column of `balance.types.Counts` -> value of each sample."""
    token_offsets: IntArray
    """Borders of the samples in `input_ids` and `labels`, shape (num_samples + 1,)."""
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    images: PackedFiles
    audios: PackedFiles


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Samples of a block that are one group: from `first` up to `last`."""

    number: int
    first: int
    last: int


class ShardWriter(Protocol):
    """Writes the groups of one shard, in order."""

    def add(self, block: PackedBlock, groups: list[GroupPlace]) -> list[tuple[int, int]]:
        """Append groups; -> (offset, length) of the bytes of each in the shard."""

    def close(self) -> None:
        """Finish the file."""
