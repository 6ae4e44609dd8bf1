"""Models with images of any size: Qwen-VL, GLM-V, Pixtral and MiniCPM-V.

`MicroBatch.pixel_values` have a row per ViT token, the grids are in `image_grid_thw`:

- Qwen-VL, GLM-V: (ViT tokens, 3 * 2 * side * side), channel, frame, row, column; the tokens that
  become one LLM token are next to each other.
- Pixtral, Mistral 3: (ViT tokens, 3 * side * side), channel, row, column; tokens row by row.
- MiniCPM-V 4.6: the same, with a grid for the whole image and one for each of its slices.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loaders.batch.micro_batch import MicroBatch
from loaders.batch.model_inputs.family import (
    Arguments,
    BlankImage,
    ModelFamily,
    image_grids,
    pixel_arguments,
)


def mrope_positions(batch: MicroBatch, config: Any) -> Tensor:
    """Text positions, from which samples are told apart, and M-RoPE's three: (4, 1, tokens)."""
    return torch.cat([batch.position_ids[None], _mrope(batch, config)])[:, None]


def _mrope(batch: MicroBatch, config: Any) -> Tensor:
    """Qwen2-VL's rotary positions (frame, row, column), (3, tokens), from 0 in each sample.

    Text counts up in all three rows. An image starts where the text before it ended, plus row and
    column of the merged patch; the text after it, after its larger side (arXiv 2409.12191, 2.1).
    """
    merge = config.vision_config.spatial_merge_size
    thw = batch.image_grid_thw
    # (images, 2): rows and columns of LLM tokens
    grids = iter([] if thw is None else (thw[:, 1:] // merge).tolist())
    image_places = (batch.input_ids == config.image_token_id).nonzero().flatten().tolist()
    parts = [torch.zeros(3, 0, dtype=torch.long)]
    taken = 0  # image tokens so far
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        place, position = start, 0
        while place < end:
            text_end = min(end, image_places[taken]) if taken < len(image_places) else end
            parts.append(torch.arange(position, position + text_end - place).expand(3, -1))
            position, place = position + text_end - place, text_end
            if place < end:
                rows, columns = next(grids)
                parts.append(position + _grid_places(rows, columns))
                position, place, taken = (
                    position + max(rows, columns),
                    place + rows * columns,
                    taken + rows * columns,
                )
    return torch.cat(parts, dim=1).to(batch.position_ids.device)


def _grid_places(rows: int, columns: int) -> Tensor:
    """Frame 0, row and column of each merged patch, row by row: (3, rows * columns)."""
    places = torch.zeros(3, rows, columns, dtype=torch.long)
    places[1] = torch.arange(rows)[:, None]
    places[2] = torch.arange(columns)
    return places.flatten(1)


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
    side, grids = int(config.vision_config.patch_size), image_grids(batch)
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
    side, rows = int(config.vision_config.patch_size), len(batch.pixel_values)
    strip = batch.pixel_values.reshape(rows, 3, side, side).permute(1, 2, 0, 3)
    sizes = image_grids(batch)[:, 1:].int()
    return {"pixel_values": strip.reshape(1, 3, side, rows * side), "target_sizes": sizes}


_MERGED = ModelFamily(
    blank=_blank_merged,
    images=pixel_arguments("image_grid_thw"),
    positions=mrope_positions,
    is_native=True,
)
_PIXTRAL = ModelFamily(blank=_blank_pixtral, images=_pixtral_images, is_native=True)
NATIVE_FAMILIES = {
    "qwen2_vl": _MERGED,
    "qwen2_5_vl": _MERGED,
    "qwen3_vl": _MERGED,
    "qwen3_vl_moe": _MERGED,
    "qwen3_5": _MERGED,
    "qwen3_5_moe": _MERGED,
    "qwen2_5_omni_thinker": _MERGED,
    "qwen3_omni_moe_thinker": _MERGED,
    "glm4v": _MERGED,
    "glm4v_moe": _MERGED,
    "glm46v": _MERGED,
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "minicpmv4_6": ModelFamily(blank=_blank_slices, images=_sliced_images, is_native=True),
}
