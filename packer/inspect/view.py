"""What `packer inspect` shows of a group, as data: `packer.inspect._read_group` reads it, terminal,
page and JSON show it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from balance.types import Limits
from packer.inspect._thumbnails import Thumbnail
from packer.inspect.token_text import Piece

_IMAGE_KEYS = ("name", "width", "height", "num_patches", "num_tokens", "num_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView:
    """An image of a sample."""

    name: str
    """Path under the data root or in the tar; empty in Arrow shards, which hold no names."""
    width: int
    """As counted, upright."""
    height: int
    num_patches: int
    num_tokens: int
    """LLM tokens."""
    num_bytes: int | None
    """None if the file cannot be read."""
    problem: str
    """Why it cannot be read, cannot be decoded, or is not what was counted; else empty."""
    thumbnail: Thumbnail | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A sample of the group."""

    sample_id: str
    source: str
    counts: dict[str, int]
    """The six `num_*` columns and `seq_len`."""
    vision_load: int
    """What the vision cap counts."""
    pieces: tuple[Piece, ...]
    images: tuple[ImageView, ...]
    audio_seconds: tuple[float, ...]
    """Length of each clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group: its loads against the caps, and its samples in the order of the pack."""

    group: int
    """Row of the index, from 0."""
    num_groups: int
    why: str
    """Why this group is shown, in words; empty if it was asked for."""
    shard: str
    num_bytes: int
    limits: Limits
    counts: dict[str, int]
    """Sums over the samples."""
    vision_load: int
    samples: tuple[SampleView, ...]
    tokenizer: str
    """The tokenizer that the text comes from; empty: there is none, and pieces hold ids alone."""

    @property
    def fill(self) -> float:
        """Share of the room for LLM tokens that is used."""
        return self.counts["seq_len"] / self.limits.max_seq_len

    @property
    def vision_fill(self) -> float:
        """Share of the vision cap that is used; 0 without one."""
        return self.vision_load / self.limits.max_vision if self.limits.max_vision else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for `packer inspect --json`, without thumbnails."""
        return {
            "group": self.group,
            "num_groups": self.num_groups,
            "shard": self.shard,
            "num_bytes": self.num_bytes,
            "limits": asdict(self.limits),
            "fill": self.fill,
            "vision_fill": self.vision_fill,
            "counts": self.counts,
            "tokenizer": self.tokenizer,
            "samples": [_sample_json(sample) for sample in self.samples],
        }


def _sample_json(sample: SampleView) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "source": sample.source,
        "counts": sample.counts,
        "pieces": [piece.to_json() for piece in sample.pieces],
        "images": [
            {name: getattr(image, name) for name in _IMAGE_KEYS}
            | {"problem": image.problem or None}
            for image in sample.images
        ],
        "audio_seconds": list(sample.audio_seconds),
    }
