"""Rows of pixels of a video, from all of its frames, by transformers' own steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from isobatch.models.image_rules import VisionRule
from isobatch.models.video_rules import NativeVideoRule, VideoRule
from support.clips import Clip
from support.oracles.video_processors import taken


def by_torch(frames: torch.Tensor, size: tuple[int, int], resample: str) -> torch.Tensor:
    """What torchvision calls for uint8 tensors."""
    interpolate = torch.nn.functional.interpolate
    return interpolate(frames, size[::-1], mode=resample, antialias=True)


def by_pillow(frames: torch.Tensor, size: tuple[int, int], resample: str) -> torch.Tensor:
    images = (Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames)
    arrays = [np.array(image.resize(size, Image.Resampling[resample.upper()])) for image in images]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def expected_rows(
    vision: VisionRule, rule: VideoRule | None, clip: Clip, plan: Any, resize: Any = by_torch
) -> torch.Tensor:
    """Rows by a resize, torchvision's normalisation, and transformers' `patchify`."""
    every = clip.decoded()
    assert rule is not None
    frames = torch.from_numpy(np.stack([every[index] for index in plan.frame_indices]))
    frames = frames.permute(0, 3, 1, 2)
    for step in plan.pictures[0].steps:
        frames = resize(frames, (step.width, step.height), rule.resample)
    colours = vision.mean, vision.std
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in colours)
    values = (frames.float() - mean) / std
    if not isinstance(rule, NativeVideoRule):
        return values
    patchify = taken("qwen2_vl", "patchify")
    sizes = rule.vit_patch_size, rule.merge_size, rule.temporal_patch_size
    rows: torch.Tensor = patchify(None, values[None], *sizes)[0][0]
    return rows
