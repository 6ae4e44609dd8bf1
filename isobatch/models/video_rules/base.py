"""What video rules share: facts of a header, the plan, the choice of frames.

A rule is a frozen dataclass that reads from TOML, as the rules of images are. A video in a record
is one of two things, and `VideoFacts` describes either:

- a file with a video stream: width and height upright, so after its rotation metadata; the number
  of frames; and the average rate (`average_rate` of PyAV), as transformers' loading reads them;
- a list of images: frames that somebody sampled, without a rate. All of them are used. They are
  stored as one file (`media.frame_archive`).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from isobatch.common.config import check_positive
from isobatch.common.errors import MediaRejected
from isobatch.models.image_rules.base import ImagePlan, MarkupPart, Resample

ASSUMED_RATE = 24.0
"""Frames per second of a list of images, for its timestamps: transformers assumes it too."""

Indices = tuple[int, ...]
"""Numbers of frames in a file, from 0, in order; one may be there more than once."""

_LANES, _BLOCK = 8, 16
"""float32 in a vector register, and in the two that torch fills at a time."""


class VideoRejected(MediaRejected):
    """The model's processor would refuse a video of this size or length."""


class VideoFacts(NamedTuple):
    """What the header of a video says."""

    width: int
    height: int
    """Pixels of an upright frame."""
    num_frames: int
    frames_per_second: float = 0.0
    """Average; 0 for a list of images, of which every one is used."""

    @property
    def is_list(self) -> bool:
        """Whether the frames are a list of images."""
        return self.frames_per_second == 0

    @property
    def rate(self) -> float:
        """Frames per second, for timestamps."""
        return self.frames_per_second or ASSUMED_RATE

    @property
    def duration(self) -> float:
        """Seconds: frames by rate, whatever else the header says."""
        return self.num_frames / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlan(ImagePlan):
    """What one video becomes: as an image's plan, of which `pictures` are cut from every frame.

    `num_patches` are what the encoder looks at by itself: crops, at native resolution frames of the
    grid. `columns` and `rows` are the grid of one frame.
    """

    frame_indices: Indices
    """Frames of the file that are used; a grid of more repeats the last one."""
    seconds_per_grid: float
    """Seconds from one frame of the grid to the next: M-RoPE of Qwen2.5-VL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRule:
    """What every video rule has; mean and std are those of the model's images."""

    resample: Resample = "bicubic"

    part_names: ClassVar[tuple[str, ...]] = ()
    """Names of `VideoPlan.parts`, which the model's markup has texts for."""

    def __post_init__(self) -> None:
        check_positive(self, max_integer=2**31 - 1)

    def plan(self, facts: VideoFacts) -> VideoPlan:
        """The plan of a video with pixels and frames. VideoRejected if the model refuses it."""
        raise NotImplementedError

    def chosen(self, facts: VideoFacts) -> Indices:
        """The frames that are used: all of a list, else those that `sample` chooses."""
        return tuple(range(facts.num_frames)) if facts.is_list else self.sample(facts)

    def sample(self, facts: VideoFacts) -> Indices:
        """The frames of a file that are used. VideoRejected if there are too few."""
        raise NotImplementedError


def too_short(facts: VideoFacts, min_frames: int) -> VideoRejected:
    """The error for a video with too few frames."""
    frames = f"{facts.num_frames} frame" + "s" * (facts.num_frames != 1)
    return VideoRejected(
        "short_video",
        f"video of {frames}: the model needs {min_frames}; remove it, or use an image",
    )


def labelled(name: str, tokens: int, labels: list[str]) -> tuple[MarkupPart, ...]:
    """A part of one name for each label."""
    return tuple(MarkupPart(name, tokens, label=label) for label in labels)


def spread(first: float, total: int, count: int) -> Indices:
    """`torch.arange(first, total, total / count).int()`, without frames that there are not.

    torch computes in float64 and rounds to float32: a whole block from the rounded first entry of
    each register, what is left over entry by entry. One rounding more or less decides whether a
    frame's number is cut off to the one before it.
    """
    step = total / count
    # may be one more than count, by rounding
    places = np.arange(math.ceil((total - first) / step))
    within = np.where(places < len(places) // _BLOCK * _BLOCK, places % _LANES, 0)
    bases = (first + step * (places - within)).astype(np.float32).astype(np.float64)
    numbers = (bases + step * within).astype(np.float32).astype(np.int64)
    return tuple(numbers[numbers < total].tolist())
