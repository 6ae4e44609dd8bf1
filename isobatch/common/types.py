"""Columns and containers of all packages: counts of samples, groups, caps.

Arrays only, one entry per sample or per group, so that a billion samples stay a few columns.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

CHUNK = 1 << 18
"""Groups that are summed or moved at a time."""

LABEL_IGNORE = -100
"""Label of a token without loss: the default `ignore_index` of torch's cross entropy."""


def padded_lengths(lengths: NDArray[np.integer[Any]], multiple: int) -> IntArray:
    """Each length, rounded up to a multiple; int64, same shape.

    >>> padded_lengths(np.array([0, 1, 8, 9]), 8).tolist()
    [0, 8, 8, 16]
    """
    return -(-lengths.astype(np.int64) // multiple) * multiple


def require_multiple(pad_each_to: int, max_tokens: int | None, name: str) -> None:
    """ConfigError for a multiple that no sample could have under the cap of that name."""
    if pad_each_to < 1:
        raise ConfigError(f"pad_each_to is {pad_each_to}; it must be at least 1")
    if max_tokens is not None and pad_each_to > max_tokens:
        raise ConfigError(
            f"pad_each_to is {pad_each_to}, more than {name} {max_tokens}, so that no sample fits; "
            "give a smaller multiple or a larger cap"
        )


def index_dtype(count: int) -> type[np.signedinteger[Any]]:
    """The narrower of int32 and int64 that holds `count` and all numbers below it."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What each sample has of everything that costs; int64 arrays of shape (num_samples,)."""

    num_image_patches: IntArray
    num_vit_tokens: IntArray
    num_image_tokens: IntArray
    num_text_tokens: IntArray
    num_audio_tokens: IntArray
    num_loss_tokens: IntArray

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of different lengths: {lengths}; give one entry per sample")

    def __len__(self) -> int:
        return len(self.num_image_patches)

    @property
    def seq_len(self) -> IntArray:
        """LLM sequence length of each sample: image, text and audio tokens together."""
        return self.num_image_tokens + self.num_text_tokens + self.num_audio_tokens

    def padded(self, pad_each_to: int) -> "Counts":
        """The counts with padding to a multiple as text: what samples cost in the LLM then."""
        if pad_each_to == 1:
            return self
        padding = padded_lengths(self.seq_len, pad_each_to) - self.seq_len
        return replace(self, num_text_tokens=self.num_text_tokens + padding)

    def take(self, indices: IntArray) -> "Counts":
        """The counts of the samples at `indices`, in that order."""
        return Counts(**{field.name: getattr(self, field.name)[indices] for field in fields(self)})


COUNT_COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Counts))

VISION_UNITS = ("image_patches", "vit_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps of a group and the targets of ISF's filter (OmniBal 4.1 and 5.2).

    The vision cap counts image patches, or ViT tokens for native-resolution models (`vision_unit`).
    """

    max_seq_len: int
    """Q_t: LLM tokens of a group at most."""
    max_vision: int
    """Q_v: `vision_unit`s of a group at most."""
    min_seq_len: int
    """Q'_t: a group with at least so many LLM tokens passes the filter."""
    min_vision: int
    """Q'_v: a group with at least so many `vision_unit`s passes the filter."""
    vision_unit: str = "image_patches"
    """Unit of the vision cap: `image_patches` or `vit_tokens`."""
    pad_each_to: int = 1
    """Multiple of tokens that each sample counts as, since the trainer pads it; 1: no padding."""

    def __post_init__(self) -> None:
        if self.pad_each_to < 1:
            raise ValueError(f"pad_each_to is {self.pad_each_to}; it must be at least 1")
        if self.vision_unit not in VISION_UNITS:
            units = ", ".join(VISION_UNITS)
            raise ValueError(f"vision_unit is {self.vision_unit!r}; use one of {units}")
        if self.max_seq_len < 1 or self.max_vision < 0:
            caps = f"{self.max_seq_len} tokens and {self.max_vision} {self.unit}"
            raise ValueError(f"caps must be positive, not {caps}")

    @property
    def unit(self) -> str:
        """The vision unit in words."""
        return self.vision_unit.replace("_", " ").replace("vit", "ViT")

    def vision_load(self, counts: Counts) -> IntArray:
        """The column of `counts` that `max_vision` caps."""
        in_tokens = self.vision_unit == "vit_tokens"
        return counts.num_vit_tokens if in_tokens else counts.num_image_patches

    def llm_load(self, counts: Counts) -> IntArray:
        """LLM tokens of each sample as `max_seq_len` counts them: with padding."""
        return padded_lengths(counts.seq_len, self.pad_each_to)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, `pad_each_to` only if there is padding."""
        values = asdict(self)
        if self.pad_each_to == 1:
            del values["pad_each_to"]
        return values


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of samples as one flat list: group g holds `samples[offsets[g]:offsets[g + 1]]`."""

    samples: IntArray
    """Sample indices, shape (num_grouped,); int32 from the groupers where that is enough."""
    offsets: IntArray
    """Shape (num_groups + 1,), first 0, last num_grouped."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, group: int) -> IntArray:
        return self.samples[self.offsets[group] : self.offsets[group + 1]]

    @property
    def sizes(self) -> IntArray:
        """Number of samples of each group."""
        return np.diff(self.offsets)

    def sum(self, column: NDArray[np.integer[Any]]) -> IntArray:
        """Sum of a per-sample column over each group, int64, shape (num_groups,).

        >>> groups = Groups(np.array([2, 0, 1]), np.array([0, 2, 3]))
        >>> groups.sum(np.array([10, 20, 30])).tolist()
        [40, 20]
        """
        sums = np.empty(len(self), np.int64)
        for first in range(0, len(self), CHUNK):  # so that nothing as long as the samples is made
            ends = self.offsets[first : first + CHUNK + 1]
            running = np.cumsum(column[self.samples[ends[0] : ends[-1]]], dtype=np.int64)
            running = np.concatenate([[0], running])[ends - ends[0]]
            sums[first : first + CHUNK] = np.diff(running)
        return sums

    @classmethod
    def joined(cls, parts: "Sequence[Groups]") -> "Groups":
        """The groups of all parts, one part after the other."""
        sizes = np.concatenate([np.empty(0, np.int64), *(part.sizes for part in parts)])
        samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
        return cls(samples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    def take(self, groups: IntArray) -> "Groups":
        """The groups at `groups`, in that order.

        >>> Groups(np.array([2, 0, 1]), np.array([0, 2, 3])).take(np.array([1, 0])).samples.tolist()
        [1, 2, 0]
        """
        offsets = np.zeros(len(groups) + 1, np.int64)
        np.cumsum(self.sizes[groups], out=offsets[1:])
        samples = np.empty(offsets[-1], self.samples.dtype)
        for first in range(0, len(groups), CHUNK):  # chunks bound the index arrays
            ends = offsets[first : first + CHUNK + 1]
            starts = self.offsets[groups[first : first + CHUNK]]
            # source place of each sample: its target place, plus how far its group moves
            moved = np.repeat(starts - ends[:-1], np.diff(ends))
            samples[ends[0] : ends[-1]] = self.samples[np.arange(ends[0], ends[-1]) + moved]
        return Groups(samples, offsets)
