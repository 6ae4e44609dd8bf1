"""What transformers' processors make of a video's header, for each video rule of a preset.

Its video processors need torchvision, so their functions are taken out of the files. The texts are
written by the processors' own methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import logging
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from isobatch.models.presets import MediaMarkup, load_model
from isobatch.models.video_rules.base import VideoFacts, VideoPlan
from support.oracles.family_processors import function_of

NAMES = {"math": math, "np": np, "torch": torch, "VideoMetadata": VideoMetadata}
NAMES |= {"logger": logging.get_logger("videos"), "MAX_IMAGE_SIZE": 4096}


@dataclass(frozen=True)
class Expected:
    """A video as transformers has it."""

    indices: list[int]
    text: str
    """What stands in place of the video token."""
    grid: tuple[int, int, int] | None = None
    seconds_per_grid: float | None = None
    resized: tuple[int, int] | None = None
    """(width, height)"""


def taken(file: str, name: str) -> Any:
    """A function of a video processor's file."""
    return function_of(f"{file}/video_processing_{file}.py", name, NAMES)


def _metadata(facts: VideoFacts) -> VideoMetadata:
    if facts.is_list:  # as `make_batched_metadata` of videos without metadata
        indices = list(range(facts.num_frames))
        return VideoMetadata(total_num_frames=facts.num_frames, frames_indices=indices)
    return VideoMetadata(
        total_num_frames=facts.num_frames,
        fps=facts.frames_per_second,
        duration=facts.num_frames / facts.frames_per_second,
    )


def _sampled(facts: VideoFacts, sample: Callable[[VideoMetadata], Any]) -> VideoMetadata:
    metadata = _metadata(facts)
    if not facts.is_list:
        indices = [int(each) for each in sample(metadata)]
        # of a frame more than there are, which decoding then refuses
        metadata.frames_indices = [each for each in indices if each < facts.num_frames]
    if not metadata.frames_indices:
        raise ValueError("no frames")
    return metadata


def _grid(rule: Any, num_frames: int, size: tuple[int, int]) -> tuple[int, int, int]:
    side = rule.vit_patch_size
    return -(-num_frames // rule.temporal_patch_size), size[1] // side, size[0] // side


def qwen2(rule: Any, facts: VideoFacts) -> Expected:
    """Qwen2-VL and Qwen2.5-VL, asked for `fps`."""
    options = {key: getattr(rule, key) for key in ("temporal_patch_size", "min_frames")}
    fake = SimpleNamespace(num_frames=None, fps=None)
    sample = taken("qwen2_vl", "sample_frames")
    metadata = _sampled(
        facts,
        lambda given: sample(
            fake, given, fps=rule.frames_per_second, max_frames=rule.max_frames, **options
        ),
    )
    count, unit = len(metadata.frames_indices), rule.vit_patch_size * rule.merge_size
    most = rule.max_pixels
    if rule.max_video_tokens is not None:
        share = int(rule.max_video_tokens * unit * unit * 0.9) * rule.temporal_patch_size // count
        most = max(min(most, share), int(rule.min_pixels * 1.05))
    height, width = taken("qwen2_vl", "smart_resize")(
        facts.height, facts.width, factor=unit, min_pixels=rule.min_pixels, max_pixels=most
    )
    grid = _grid(rule, count, (width, height))
    return Expected(
        metadata.frames_indices,
        "<|video_pad|>" * (math.prod(grid) // rule.merge_size**2),
        grid,
        rule.temporal_patch_size / metadata.sampled_fps,
        (width, height),
    )


def _volume(rule: Any, facts: VideoFacts, metadata: VideoMetadata, file: str) -> Any:
    count, unit = len(metadata.frames_indices), rule.vit_patch_size * rule.merge_size
    most = rule.max_pixels
    if rule.max_video_tokens is not None:
        cap = min(rule.max_video_tokens * unit * unit, most // count)
        most = max(cap, int(rule.min_pixels * 1.05)) * count
    height, width = taken(file, "smart_resize")(
        count,
        facts.height,
        facts.width,
        temporal_factor=rule.temporal_patch_size,
        factor=unit,
        min_pixels=rule.min_pixels,
        max_pixels=most,
    )
    grid = _grid(rule, count, (width, height))
    processor = SimpleNamespace(merge_size=rule.merge_size)
    processor.temporal_patch_size = rule.temporal_patch_size
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    return (width, height), grid, processor, inputs


def qwen3(rule: Any, facts: VideoFacts) -> Expected:
    """Qwen3-VL and Qwen3.5."""
    options = {key: getattr(rule, key) for key in ("min_frames", "max_frames")}
    fake = SimpleNamespace(fps=rule.frames_per_second, **options)
    metadata = _sampled(facts, lambda given: taken("qwen3_vl", "sample_frames")(fake, given))
    indices = list(metadata.frames_indices)
    size, grid, videos, inputs = _volume(rule, facts, metadata, "qwen3_vl")
    processor = object.__new__(Qwen3VLProcessor)
    processor.video_processor, processor.video_token = videos, "<|video_pad|>"
    processor.vision_start_token = "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    text = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    return Expected(indices, text, grid, None, size)


def glm(rule: Any, facts: VideoFacts) -> Expected:
    """GLM-4.1V."""
    fake = SimpleNamespace(fps=rule.frames_per_second, max_duration=rule.max_seconds)
    metadata = _sampled(facts, lambda given: taken("glm4v", "sample_frames")(fake, given))
    indices = list(metadata.frames_indices)
    size, grid, videos, inputs = _volume(rule, facts, metadata, "glm4v")
    processor = object.__new__(Glm4vProcessor)
    processor.video_processor, processor.image_token = videos, "<|image|>"
    text = Glm4vProcessor.replace_video_token(processor, inputs, 0)
    return Expected(indices, text, grid, None, size)


def internvl(rule: Any, facts: VideoFacts) -> Expected:
    """InternVL, asked for no more frames than there are."""
    fake = SimpleNamespace(num_frames=min(rule.num_frames, facts.num_frames), initial_shift=True)
    metadata = _sampled(facts, lambda given: taken("internvl", "sample_frames")(fake, given))
    processor = object.__new__(InternVLProcessor)
    processor.start_image_token, processor.end_image_token = "<img>", "</img>"
    processor.image_token = "<IMG_CONTEXT>"
    processor.image_seq_length = rule.llm_tokens_per_frame
    pixels = {"pixel_values_videos": [torch.empty(len(metadata.frames_indices))]}
    text = InternVLProcessor.replace_video_token(processor, pixels, 0)
    return Expected(metadata.frames_indices, text)


def onevision(rule: Any, facts: VideoFacts) -> Expected:
    """LLaVA-OneVision; of too few frames, which it refuses, some are given it repeatedly."""
    count, times = rule.num_frames, -(-rule.num_frames // facts.num_frames)
    longer = facts._replace(num_frames=facts.num_frames * times)
    metadata = _sampled(longer, lambda given: default_sample_indices_fn(given, num_frames=count))
    indices = metadata.frames_indices or []
    if not facts.is_list:
        indices = [index // times for index in indices]
    else:
        indices = indices[: facts.num_frames]
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.video_token = rule.llm_tokens_per_frame, "<video>"
    pixels = {"pixel_values_videos": [torch.empty(len(indices))]}
    text = LlavaOnevisionProcessor.replace_video_token(processor, pixels, 0)
    return Expected(indices, text)


def smolvlm(rule: Any, facts: VideoFacts) -> Expected:
    """SmolVLM2."""
    fake = SimpleNamespace(num_frames=rule.num_frames, fps=rule.frames_per_second)
    metadata = _sampled(facts, lambda given: taken("smolvlm", "sample_frames")(fake, given))
    processor = object.__new__(processing_smolvlm.SmolVLMProcessor)
    processor.fake_image_token = "<fake_token_around_image>"
    processor.image_token, processor.global_image_token = "<image>", "<global-img>"
    processor.image_seq_len = rule.llm_tokens_per_frame
    count = len(metadata.frames_indices)
    inputs = {"pixel_values": torch.empty(1, count), "video_metadata": [metadata]}
    text = processing_smolvlm.SmolVLMProcessor.replace_video_token(processor, inputs, 0)
    shape = SimpleNamespace(size=lambda: (count, 3, facts.height, facts.width))
    height, width = taken("smolvlm", "get_resize_output_image_size")(shape, rule.longest_side)
    return Expected(metadata.frames_indices, text, resized=(width, height))


ORACLES: dict[str, Callable[[Any, VideoFacts], Expected]] = {
    "qwen2_5_vl": qwen2,
    "qwen3_vl": qwen3,
    "glm4v": glm,
    "internvl3": internvl,
    "llava_onevision": onevision,
    "smolvlm2": smolvlm,
}
"""Preset -> what transformers makes of a video."""


def own_text(name: str, plan: VideoPlan) -> str:
    """What our plan puts in place of the video token, without prefix and suffix."""
    markup = load_model(name).video_markup
    assert isinstance(markup, MediaMarkup)
    written = markup.written(plan, 0)
    written = written[len(markup.prefix) : len(written) - len(markup.suffix)]
    pieces = written.split(markup.token)
    assert len(pieces) == len(plan.runs) + 1
    runs = [*plan.runs, 0]
    return "".join(piece + markup.token * run for piece, run in zip(pieces, runs, strict=True))
