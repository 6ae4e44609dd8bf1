"""Qwen2-VL's vision encoder as layers of a pipeline, and its positions: images at native
resolution.

For `engine.runtime.models.transformers_models`. The layers hold the model's own modules. Places of
ViT tokens and positions of LLM tokens follow from the images' grids alone, so each rank computes
them out of the micro-batch (arXiv 2409.12191, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.runtime.models.layer_specs import FEATURES, CutLayer, Gives, gives_rows
from engine.runtime.models.vision_layers import PatchEmbedding, dtype_of
from engine.runtime.stage_io import Batch, StageTensors

_COS, _SIN, _BORDERS = "vision_cos", "vision_sin", "vision_borders"


class NativeVisionLayer(CutLayer):
    """A layer of the vision encoder; attention inside each image."""

    def __init__(self, block: nn.Module, rotary: nn.Module, merge: int, gives: Gives) -> None:
        super().__init__(gives)
        self.block, self.rotary, self._merge = block, rotary, merge

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> the same."""
        features = carry[FEATURES]
        if not len(features):
            return {FEATURES: features}
        shared = {
            name: carry[name] for name in (_COS, _SIN, _BORDERS) if name in carry
        } or self._shared(batch)
        rotary = shared[_COS], shared[_SIN]
        return {
            FEATURES: self.block(features, cu_seqlens=shared[_BORDERS], position_embeddings=rotary),
            **shared,
        }

    def _shared(self, batch: Batch) -> StageTensors:
        """Rotary embeddings and image borders; the next layers of the stage need them too."""
        frequencies: Any = self.rotary.inv_freq
        places = square_places(batch.image_grid_thw, self._merge)
        half = (places[..., None].float() * frequencies.float()).flatten(1)
        angles = torch.cat([half, half], dim=1)
        return {
            _COS: angles.cos(),
            _SIN: angles.sin(),
            _BORDERS: frame_borders(batch.image_grid_thw),
        }


class Merger(CutLayer):
    """ViT tokens to features in the language model's width, a square of them into one."""

    def __init__(self, merger: nn.Module, gives: Gives) -> None:
        super().__init__(gives)
        self.merger = merger

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> (image tokens, LLM width)."""
        features = carry[FEATURES]
        return {
            FEATURES: self.merger(features) if len(features) else self.no_features(batch, features)
        }


def qwen2_vl_vision(model: Any) -> list[CutLayer]:
    """Vision half of a Qwen2VLForConditionalGeneration."""
    visual, vision, dtype = (
        model.model.visual,
        model.config.vision_config,
        dtype_of(model.model.visual),
    )
    merge = vision.spatial_merge_size
    between = gives_rows(lambda rows: rows, vision.embed_dim, dtype)
    merged = gives_rows(lambda rows: rows // merge**2, model.config.text_config.hidden_size, dtype)
    layers = [
        NativeVisionLayer(block, visual.rotary_pos_emb, merge, between) for block in visual.blocks
    ]
    row_shape = (vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,)
    embedding = PatchEmbedding(visual.patch_embed, None, between, row_shape=row_shape)
    return [embedding, *layers, Merger(visual.merger, merged)]


def square_places(grids: Tensor, merge: int) -> Tensor:
    """Row and column of each ViT token in its image: int64, (ViT tokens, 2); `grids` (images, 3).

    The tokens of a square that becomes one LLM token stand together.

    >>> square_places(torch.tensor([[1, 2, 4]]), 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    image, place = _members(grids.prod(1))
    rows, columns = grids[image, 1], grids[image, 2]
    # place of the merged square in its frame, and inside it
    block, inner = (place % (rows * columns)) // merge**2, place % merge**2
    across = columns // merge
    row = block // across * merge + inner // merge
    column = block % across * merge + inner % merge
    return torch.stack([row, column], dim=1)


def frame_borders(grids: Tensor) -> Tensor:
    """Where the ViT tokens of each frame of each image begin and end: int32, (frames + 1,).

    >>> frame_borders(torch.tensor([[1, 2, 4], [2, 2, 2]])).tolist()
    [0, 8, 12, 16]
    """
    lengths = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def rotary_positions(
    input_ids: Tensor, cu_seqlens: Tensor, grids: Tensor | None, image_token_id: int, merge: int
) -> Tensor:
    """The three rows of Qwen2-VL's positions (frame, row, column), int64 (3, tokens), from 0 in
    each sample.

    Text counts on in all rows. Of an image, a token's positions are that of the image's beginning
    plus its own frame, row and column; what follows goes on behind the larger of the image's sides.
    No loop over images.

    >>> ids = torch.tensor([7, 5, 5, 5, 5, 8, 9, 9])
    >>> rotary_positions(ids, torch.tensor([0, 6, 8]), torch.tensor([[1, 4, 4]]), image_token_id=5, merge=2).tolist()
    [[0, 1, 1, 1, 1, 3, 0, 1], [0, 1, 1, 2, 2, 3, 0, 1], [0, 1, 2, 1, 2, 3, 0, 1]]
    """
    # how much further the next token is, and where in its image a token is
    steps = torch.ones_like(input_ids)
    within = input_ids.new_zeros(3, len(input_ids))
    if grids is not None and len(grids):
        frames, rows, columns = (grids // grids.new_tensor([1, merge, merge])).unbind(1)
        image, place = _members(frames * rows * columns)
        is_image = input_ids == image_token_id
        rows, columns = rows[image], columns[image]
        is_last = place == frames[image] * rows * columns - 1
        steps[is_image] = torch.where(is_last, torch.maximum(rows, columns), 0)
        within[:, is_image] = torch.stack(
            [place // (rows * columns), place // columns % rows, place % columns]
        )
    begins = steps.cumsum(0) - steps
    sample, _ = _members(cu_seqlens.long().diff())
    return begins - begins[cu_seqlens.long()[sample]] + within


def _members(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For the members of groups of so many: which group, and which place in it."""
    group = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    begins = counts.cumsum(0) - counts
    return group, torch.arange(len(group), device=counts.device) - begins[group]
