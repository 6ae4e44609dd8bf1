"""Frames as pictures of one size: InternVL, LLaVA-OneVision and SmolVLM2."""

from dataclasses import dataclass
from datetime import timedelta
from math import ceil, sqrt
from typing import ClassVar

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.models.image_rules.base import MarkupPart, PicturePlan, ResizeTo
from isobatch.models.image_rules.splits import longest_side
from isobatch.models.video_rules.base import (
    Indices,
    SampledRule,
    VideoFacts,
    VideoPlan,
    labelled,
    spread,
)

MOST_WORDS = 999
"""Largest number that has words here."""

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesRule(SampledRule):
    """InternVL: so many frames from the middles of equal parts, each squashed to one tile.

    Equal to the processor with `do_sample_frames=True` and `num_frames=min(num_frames, frames)`:
    it refuses a video of fewer frames, which here has all of them.
    """

    image_size: int
    vit_tokens_per_frame: int
    llm_tokens_per_frame: int
    num_frames: int

    part_names: ClassVar[tuple[str, ...]] = ("frame", "between")

    def plan(self, facts: VideoFacts) -> VideoPlan:
        """The same counts for every frame."""
        indices = self.chosen(facts)
        count = len(indices)
        return VideoPlan(
            num_patches=count,
            num_vit_tokens=count * self.vit_tokens_per_frame,
            num_image_tokens=self.tokens(count),
            pictures=(self.picture(facts),),
            columns=1,
            rows=1,
            parts=self.parts(facts, indices),
            frame_indices=indices,
            seconds_per_grid=facts.num_frames / facts.rate / count,
        )

    def sample(self, facts: VideoFacts) -> Indices:
        """Frames from the middles of `num_frames` equal parts."""
        count = min(self.num_frames, facts.num_frames)
        return spread(facts.num_frames / count / 2, facts.num_frames, count)

    def tokens(self, num_frames: int) -> int:
        """LLM tokens of so many frames."""
        return num_frames * self.llm_tokens_per_frame

    def picture(self, facts: VideoFacts) -> PicturePlan:
        """How a frame is cut."""
        return PicturePlan((ResizeTo(self.image_size, self.image_size),))

    def parts(self, facts: VideoFacts, indices: Indices) -> tuple[MarkupPart, ...]:
        """A `frame` for each, its label the number from 1, and `between` two of them."""
        labels = [str(number) for number in range(1, len(indices) + 1)]
        parts = labelled("frame", self.llm_tokens_per_frame, labels)
        return tuple(piece for part in parts for piece in (MarkupPart("between"), part))[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRule(FramesRule):
    """LLaVA-OneVision: frames from the first on, 2 x 2 features made one; one run of tokens.

    `llm_tokens_per_frame` are those before that; a newline follows the last frame. transformers
    takes only videos of equally many frames in one batch, so a short one repeats some of its own.
    """

    part_names: ClassVar[tuple[str, ...]] = ()

    def sample(self, facts: VideoFacts) -> Indices:
        """The first of each of `num_frames` equal parts."""
        count = self.num_frames
        return tuple(number * facts.num_frames // count for number in range(count))

    def tokens(self, num_frames: int) -> int:
        """Pooled features, and the newline."""
        return num_frames * ceil(int(sqrt(self.llm_tokens_per_frame)) / 2) ** 2 + 1

    def parts(self, facts: VideoFacts, indices: Indices) -> tuple[MarkupPart, ...]:
        """None: all tokens are in one run."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRule(FramesRule):
    """SmolVLM2: so many frames per second, `num_frames` at most; the text has their times."""

    longest_side: int
    """Pixels that a frame's longer side is resized to, before it is squashed to `image_size`."""
    frames_per_second: float = 1.0
    skipped_seconds: float = 1.0
    """Seconds that are skipped at either end of a long video."""

    part_names: ClassVar[tuple[str, ...]] = ("count", "duration", "frame", "end")

    def __post_init__(self) -> None:
        super(ClockRule, self).__post_init__()
        if self.num_frames > MOST_WORDS:
            raise ConfigError(f"num_frames = {self.num_frames}: at most {MOST_WORDS}")

    def sample(self, facts: VideoFacts) -> Indices:
        """Evenly from the first to the last frame, or to those a second from the ends."""
        wanted = self.frames_per_second
        skip = self.skipped_seconds
        total = facts.num_frames
        count = max(min(round(wanted * facts.duration), self.num_frames), 1)
        first, last = 0, total - 1
        if facts.duration - 2 * skip > self.num_frames * wanted:
            first, last = int(skip * facts.rate), min(int(total - skip * facts.rate), total - 1)
        if first >= last:
            first, last = 0, total - 1
        return tuple(np.unique(np.linspace(first, last, count, dtype=int)).tolist())

    def picture(self, facts: VideoFacts) -> PicturePlan:
        """Resized twice, as the reference does."""
        longest = longest_side(facts.width, facts.height, self.longest_side)
        return PicturePlan((ResizeTo(*longest), ResizeTo(self.image_size, self.image_size)))

    def parts(self, facts: VideoFacts, indices: Indices) -> tuple[MarkupPart, ...]:
        """`count` and `duration`, which introduce the video, a `frame` for each, `end`."""
        seconds = [index / facts.rate for index in indices]
        duration = seconds[-1] if facts.is_list else facts.duration
        labels = [f"{int(second // 60):02d}:{int(second % 60):02d}" for second in seconds]
        return (
            MarkupPart("count", label=number_words(len(indices))),
            MarkupPart("duration", label=str(timedelta(seconds=int(duration)))),
            *labelled("frame", self.llm_tokens_per_frame, labels),
            MarkupPart("end"),
        )


def number_words(number: int) -> str:
    """A number of 0 to 999 in words; a larger one in digits."""
    if number > MOST_WORDS:
        return str(number)
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    words = f"{_SMALL[hundreds]} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _below_hundred(number: int) -> str:
    if number < len(_SMALL):
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
