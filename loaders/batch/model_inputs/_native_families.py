"""Models with images of any size: Qwen-VL, GLM-V, Pixtral and MiniCPM-V.

`MicroBatch.pixel_values` have a row per ViT token, the grids are in `image_grid_thw`:

- Qwen-VL, GLM-V: (ViT tokens, 3 * 2 * side * side), channel, frame, row, column; the tokens that
  become one LLM token are next to each other. Videos have several frames of such tokens.
- Pixtral, Mistral 3: (ViT tokens, 3 * side * side), channel, row, column; tokens row by row.
- MiniCPM-V 4.6: the same, with a grid for the whole image and one for each of its slices.
"""

from dataclasses import replace
from functools import partial
from typing import Any

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
from isobatch.tensors.rotary_positions import video_positions


def mrope_positions(batch: MicroBatch, config: Any, *, are_stamped: bool = False) -> Tensor:
    """Text positions, from which samples are told apart, and M-RoPE's three: (4, 1, tokens).

    A video is one run of tokens; with times in the text (`are_stamped`), each of its frames is.
    """
    is_vision = vision_tokens(batch, config)
    positions = video_positions(is_vision, batch, config.vision_config, are_stamped=are_stamped)
    return torch.cat([batch.position_ids[None], positions])[:, None]


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
_STAMPED = replace(_MERGED, positions=partial(mrope_positions, are_stamped=True))
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
