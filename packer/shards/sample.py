"""What a shard holds of a sample, the same for every format, and what a format's writer must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """A sample ready to be written: tokens with images and audio expanded, and the original bytes of its files."""

    sample_id: str
    counts: dict[str, int]
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    image_paths: list[str]
    images: list[bytes]
    """Empty when the format refers to the files instead of holding them."""
    image_widths: list[int]
    image_heights: list[int]
    audio_paths: list[str]
    audios: list[bytes]
    """As `images`."""
    audio_lengths: list[int]
    """Samples of each audio file after resampling to the model's rate."""


class ShardWriter(Protocol):
    """Writes the groups of one shard, in order."""

    def add(self, group: int, samples: Sequence[PackedSample]) -> tuple[int, int]:
        """Append a group; -> (offset, length) of its bytes in the shard."""

    def close(self) -> None:
        """Finish the file."""
