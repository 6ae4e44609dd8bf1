"""Native resolution: videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from isobatch.models.image_rules.base import MarkupPart, PicturePlan, ResizeTo, Size
from isobatch.models.image_rules.native import nearest_size, scaled_up
from isobatch.models.video_rules.base import (
    Indices,
    SampledRule,
    VideoFacts,
    VideoPlan,
    VideoRejected,
    labelled,
    spread,
    too_short,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeVideoRule(SampledRule):
    """Qwen2-VL: so many frames per second, each resized by its own area; one run of tokens.

    Equal to the processor with `do_sample_frames=True` and `fps=frames_per_second`.
    """

    vit_patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float
    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_video_tokens: int | None = None
    """Limit of the whole video's area (`cap_pixels_per_frame` of transformers); None: no limit."""

    def plan(self, facts: VideoFacts) -> VideoPlan:
        """A grid of frames, rows and columns; the last frame is repeated to fill it."""
        indices = self.chosen(facts)
        size = self.resized(facts, len(indices))
        side, length = self.vit_patch_size, self.temporal_patch_size
        columns, rows, frames = size[0] // side, size[1] // side, -(-len(indices) // length)
        tokens = columns * rows // self.merge_size**2
        sampled_rate = facts.rate if facts.is_list else len(indices) / facts.num_frames * facts.rate
        return VideoPlan(
            num_patches=frames,
            num_vit_tokens=frames * rows * columns,
            num_image_tokens=frames * tokens,
            pictures=(PicturePlan((ResizeTo(*size),)),),
            columns=columns,
            rows=rows,
            parts=self.parts(facts, indices, tokens),
            frame_indices=indices,
            seconds_per_grid=length / sampled_rate,
        )

    def sample(self, facts: VideoFacts) -> Indices:
        """A whole number of temporal patches, evenly from the first frame on."""
        length = self.temporal_patch_size
        total = facts.num_frames
        max_frames = min(self.max_frames, total) // length * length
        wanted = total / facts.rate * self.frames_per_second
        count = math.floor(min(max(wanted, self.min_frames), max_frames) / length) * length
        if not count:
            raise too_short(facts, length)
        return spread(0, total, count)

    def resized(self, facts: VideoFacts, num_frames: int) -> Size:
        """Pixels of a resized frame."""
        self.check_aspect(facts, (facts.width, facts.height))
        max_pixels = self.max_pixels
        unit = self.unit
        if self.max_video_tokens is not None:
            share = int(self.max_video_tokens * unit * unit * 0.9) * self.temporal_patch_size
            max_pixels = max(min(max_pixels, share // num_frames), int(self.min_pixels * 1.05))
        return nearest_size((facts.width, facts.height), unit, (self.min_pixels, max_pixels))

    def parts(self, facts: VideoFacts, indices: Indices, tokens: int) -> tuple[MarkupPart, ...]:
        """None: all tokens are in one run."""
        return ()

    @property
    def unit(self) -> int:
        """Side of what becomes one LLM token, in pixels."""
        return self.vit_patch_size * self.merge_size

    def check_aspect(self, facts: VideoFacts, size: Size) -> None:
        """VideoRejected above the model's limit."""
        aspect = max(size) / min(size)
        if aspect > self.max_aspect_ratio:
            raise VideoRejected(
                "aspect_ratio",
                f"video of {facts.width} x {facts.height} pixels: aspect ratio {aspect:.1f} is"
                f" above the model's limit of {self.max_aspect_ratio:g}; crop it or remove it",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampsRule(NativeVideoRule):
    """Qwen3-VL: frames resized by the area of all; each temporal patch has its time in the text."""

    part_names: ClassVar[tuple[str, ...]] = ("frame",)

    def sample(self, facts: VideoFacts) -> Indices:
        """Evenly from the first to the last frame; an odd number is possible."""
        total = facts.num_frames
        count = int(total / facts.rate * self.frames_per_second)
        count = min(max(count, self.min_frames), self.max_frames, total)
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())

    def resized(self, facts: VideoFacts, num_frames: int) -> Size:
        """Pixels of a resized frame; the limits are of the area times frames."""
        length = self.temporal_patch_size
        unit = self.unit
        if num_frames < length:
            raise too_short(facts, length)
        size = scaled_up((facts.width, facts.height), unit)
        self.check_aspect(facts, size)
        max_pixels = self.max_pixels
        if self.max_video_tokens is not None:
            frame_pixels = min(self.max_video_tokens * unit * unit, max_pixels // num_frames)
            max_pixels = max(frame_pixels, int(self.min_pixels * 1.05)) * num_frames
        whole = round(num_frames / length) * length
        return nearest_size(size, unit, (self.min_pixels, max_pixels), frames=(num_frames, whole))

    def parts(self, facts: VideoFacts, indices: Indices, tokens: int) -> tuple[MarkupPart, ...]:
        """A `frame` per temporal patch; its label is the mean of its first and last second."""
        length = self.temporal_patch_size
        padded = [*indices, *[indices[-1]] * (-len(indices) % length)]
        seconds = [index / facts.rate for index in padded]
        times = zip(seconds[::length], seconds[length - 1 :: length], strict=True)
        labels = [f"{(first + last) / 2:.1f}" for first, last in times]
        return labelled("frame", tokens, labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVideoRule(TimestampsRule):
    """GLM-4.1V: frames of whole fractions of a second; the text has the second after each."""

    max_seconds: float = 300.0
    """A longer video has no more frames than this much."""

    def sample(self, facts: VideoFacts) -> Indices:
        """Frames at each 1 / `frames_per_second`, made even by the last one."""
        last = facts.num_frames - 1
        duration = facts.duration
        wanted = self.frames_per_second
        if duration <= self.max_seconds:
            count = max(math.floor(duration * wanted), 1)
            places = [math.ceil(number * facts.rate / wanted) for number in range(count)]
        elif (count := int(self.max_seconds * wanted)) >= facts.num_frames:
            places = list(range(facts.num_frames))
        else:
            seconds = np.linspace(0, duration, count)
            places = [math.ceil(second * facts.rate) for second in seconds.tolist()]
        indices = list(dict.fromkeys(min(last, place) for place in places))
        return tuple(indices + indices[-1:] * (len(indices) % 2))

    def parts(self, facts: VideoFacts, indices: Indices, tokens: int) -> tuple[MarkupPart, ...]:
        """A `frame` per temporal patch; its label is the second of its first frame, cut off."""
        return labelled("frame", tokens, [str(int(index / facts.rate)) for index in indices[::2]])
