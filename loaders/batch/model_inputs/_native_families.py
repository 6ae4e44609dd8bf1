"""Models with images of any size: Qwen-VL, GLM-V, Pixtral and MiniCPM-V.

`MicroBatch.pixel_values` have a row per ViT token, the grids are in `image_grid_thw`:

- Qwen-VL, GLM-V: (ViT tokens, 3 * 2 * side * side), channel, frame, row, column; the tokens that
  become one LLM token are next to each other. Videos have several frames of such tokens.
- Pixtral, Mistral 3: (ViT tokens, 3 * side * side), channel, row, column; tokens row by row.
- MiniCPM-V 4.6: the same, with a grid for the whole image and one for each of its slices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import (
    Arguments,
    BlankImage,
    ModelFamily,
    image_grids,
    vision_tokens,
)


class Run(NamedTuple):
    """Image tokens that stand next to each other."""

    frames: int
    rows: int
    columns: int
    """Columns, like rows, of merged patches: tokens."""
    interval: float = 1.0
    """Positions from one frame to the next."""


def mrope_positions(batch: MicroBatch, config: Any) -> Tensor:
    """Text positions, from which samples are told apart, and M-RoPE's three: (4, 1, tokens).

    A video is one run of tokens.
    """
    return _positions(batch, config, _runs(batch, config))


def _stamped_positions(batch: MicroBatch, config: Any) -> Tensor:
    """Positions of models with times in the text: each frame of a video is a run by itself."""
    runs = (Run(1, *run[1:3]) for run in _runs(batch, config) for _ in range(run.frames))
    return _positions(batch, config, runs)


def _runs(batch: MicroBatch, config: Any) -> list[Run]:
    merge = config.vision_config.spatial_merge_size
    # Qwen2.5-VL's positions of frames are times; the next frame is the next one with the others
    scale = getattr(config.vision_config, "tokens_per_second", None)
    grids = [] if batch.image_grid_thw is None else batch.image_grid_thw.tolist()
    seconds = [0.0] * len(grids) if batch.video_seconds is None else batch.video_seconds.tolist()
    return [
        Run(frames, rows // merge, columns // merge, scale * second if scale and second else 1.0)
        for (frames, rows, columns), second in zip(grids, seconds, strict=True)
    ]


def _positions(batch: MicroBatch, config: Any, runs: Iterable[Run]) -> Tensor:
    return torch.cat([batch.position_ids[None], _mrope(batch, config, iter(runs))])[:, None]


def _mrope(batch: MicroBatch, config: Any, runs: Iterator[Run]) -> Tensor:
    """Qwen2-VL's rotary positions (frame, row, column), (3, tokens), from 0 in each sample.

    Text counts up in all three rows. An image starts where the text before it ended, plus frame,
    row and column of the merged patch; the text after it, after the larger side of a frame (arXiv
    2409.12191, 2.1).
    """
    image_places = vision_tokens(batch, config).nonzero().flatten().tolist()
    parts = [torch.zeros(3, 0, dtype=torch.long)]
    taken = 0  # image tokens so far
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        place, position = start, 0
        while place < end:
            text_end = min(end, image_places[taken]) if taken < len(image_places) else end
            parts.append(torch.arange(position, position + text_end - place).expand(3, -1))
            position, place = position + text_end - place, text_end
            if place < end:
                run = next(runs)
                parts.append(position + _grid_places(run))
                position += max(run.rows, run.columns)
                place, taken = place + parts[-1].shape[1], taken + parts[-1].shape[1]
    return torch.cat(parts, dim=1).to(batch.position_ids.device)


def _grid_places(run: Run) -> Tensor:
    """Frame, row and column of each merged patch, frame by frame: (3, tokens)."""
    places = torch.zeros(3, *run[:3], dtype=torch.long)
    # in float32, and cut off, as the reference does
    times = torch.arange(run.frames) * torch.tensor(run.interval, dtype=torch.float32)
    places[0] = times.long()[:, None, None]
    places[1] = torch.arange(run.rows)[:, None]
    places[2] = torch.arange(run.columns)
    return places.flatten(1)


def _with_one_kind(batch: MicroBatch, config: Any) -> MicroBatch:
    """Where there are images and videos, videos get the token of images, and count as such.

    The model's encoder, which is the same for both, then runs once: with FSDP it must run equally
    often on every rank, whatever its micro-batch has.
    """
    seconds = batch.video_seconds
    if seconds is None or bool((seconds > 0).all()) or not bool((seconds > 0).any()):
        return batch
    is_video = batch.input_ids == getattr(config, "video_token_id", config.image_token_id)
    return replace(batch, input_ids=batch.input_ids.masked_fill(is_video, config.image_token_id))


def _merged_images(batch: MicroBatch, config: Any) -> Arguments:
    """Images and videos apart, each with its grids; together where all have the images' token."""
    grids = image_grids(batch)
    seconds = batch.video_seconds
    if seconds is None or not bool((batch.input_ids == config.video_token_id).any()):
        return {"pixel_values": batch.pixel_values, "image_grid_thw": grids}
    parts = torch.split(batch.pixel_values, grids.prod(dim=1).tolist())
    arguments: Arguments = {}
    for names, chosen in (
        (("pixel_values", "image_grid_thw"), seconds == 0),
        (("pixel_values_videos", "video_grid_thw"), seconds > 0),
    ):
        numbers = chosen.nonzero().flatten().tolist()
        if numbers:
            rows = torch.cat([parts[number] for number in numbers])
            arguments |= dict(zip(names, (rows, grids[chosen]), strict=True))
    return arguments


def _glm_images(batch: MicroBatch, config: Any) -> Arguments:
    """Frames of videos as images, which share their token: the model cannot tell them apart."""
    grids = image_grids(batch)
    frames = grids.repeat_interleave(grids[:, 0], dim=0)
    frames[:, 0] = 1
    return {"pixel_values": batch.pixel_values, "image_grid_thw": frames}


def _blank_merged(config: Any) -> BlankImage:
    merge = config.vision_config.spatial_merge_size
    side = merge * config.vision_config.patch_size
    return BlankImage(merge**2, 1, (side, side), (1, merge, merge))


def _blank_pixtral(config: Any) -> BlankImage:
    merge = getattr(config, "spatial_merge_size", 1)
    side = merge * config.vision_config.patch_size
    # two tokens: transformers drops a dimension of Mistral 3's features if they are one
    return BlankImage(2 * merge**2, 2, (side, 2 * side), (1, merge, 2 * merge))


def _pixtral_images(batch: MicroBatch, config: Any) -> Arguments:
    """Images in the upper left of canvases of one size, (images, 3, height, width), and sizes."""
    side = int(config.vision_config.patch_size)
    grids = image_grids(batch)
    sizes = grids[:, 1:] * side
    height, width = sizes.max(dim=0).values.tolist()
    canvases = batch.pixel_values.new_zeros(len(grids), 3, height, width)
    images = torch.split(batch.pixel_values, grids.prod(dim=1).tolist())
    for canvas, image, (_, rows, columns) in zip(canvases, images, grids.tolist(), strict=True):
        grid = image.reshape(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
        canvas[:, : rows * side, : columns * side] = grid.reshape(3, rows * side, columns * side)
    return {"pixel_values": canvases, "image_sizes": sizes}


def _blank_slices(config: Any) -> BlankImage:
    merge = 2 if config.downsample_mode == "4x" else 4
    pixels = merge * config.vision_config.patch_size
    return BlankImage(merge**2, 1, (pixels, pixels), (1, merge, merge))


def _sliced_images(batch: MicroBatch, config: Any) -> Arguments:
    """ViT patches next to each other, (1, 3, side, ViT tokens * side), and pictures' sizes."""
    side = int(config.vision_config.patch_size)
    rows = len(batch.pixel_values)
    strip = batch.pixel_values.reshape(rows, 3, side, side).permute(1, 2, 0, 3)
    sizes = image_grids(batch)[:, 1:].int()
    return {"pixel_values": strip.reshape(1, 3, side, rows * side), "target_sizes": sizes}


_MERGED = ModelFamily(
    blank=_blank_merged,
    images=_merged_images,
    one_kind=_with_one_kind,
    positions=mrope_positions,
    is_native=True,
)
_STAMPED = replace(_MERGED, positions=_stamped_positions)
_GLM = replace(_STAMPED, images=_glm_images)
_PIXTRAL = ModelFamily(blank=_blank_pixtral, images=_pixtral_images, is_native=True)
NATIVE_FAMILIES = {
    "qwen2_vl": _MERGED,
    "qwen2_5_vl": _MERGED,
    "qwen3_vl": _STAMPED,
    "qwen3_vl_moe": _STAMPED,
    "qwen3_5": _STAMPED,
    "qwen3_5_moe": _STAMPED,
    # pairs of tokens of two frames; one token of eight frames
    "qwen2_5_omni_thinker": replace(_MERGED, blank_clip=4),
    "qwen3_omni_moe_thinker": replace(_MERGED, blank_clip=8),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "minicpmv4_6": ModelFamily(blank=_blank_slices, images=_sliced_images, is_native=True),
}
