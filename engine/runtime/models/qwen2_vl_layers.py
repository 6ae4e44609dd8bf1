"""Qwen2-VL's vision encoder and positions as pipeline layers.

The layers hold the model's own modules. Each rank computes grid positions of ViT tokens and rotary
positions of LLM tokens from the micro-batch's image grids (arXiv 2409.12191, section 2.1).
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.runtime.models.layer_specs import FEATURES, OutputSpecs, SpecLayer, row_specs
from engine.runtime.models.vision_layers import PatchEmbedding, dtype_of
from engine.runtime.stage_io import Batch, StageTensors

_COS, _SIN, _BORDERS = "vision_cos", "vision_sin", "vision_borders"


class NativeVisionLayer(SpecLayer):
    """A layer of the vision encoder; attention within each image."""

    def __init__(
        self, block: nn.Module, rotary: nn.Module, merge: int, output_specs: OutputSpecs
    ) -> None:
        super().__init__(output_specs)
        self.block, self.rotary, self._merge = block, rotary, merge

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> the same."""
        features = inputs[FEATURES]
        if not len(features):
            return {FEATURES: features}
        shared = {name: inputs[name] for name in (_COS, _SIN, _BORDERS) if name in inputs}
        shared = shared or self._shared(batch)
        rotary = shared[_COS], shared[_SIN]
        output = self.block(features, cu_seqlens=shared[_BORDERS], position_embeddings=rotary)
        return {FEATURES: output, **shared}

    def _shared(self, batch: Batch) -> StageTensors:
        """Rotary embeddings and image borders, which the stage's next layers need too."""
        frequencies: Any = self.rotary.inv_freq
        positions = patch_positions(batch.image_grid_thw, self._merge)
        half = (positions[..., None].float() * frequencies.float()).flatten(1)
        angles = torch.cat([half, half], dim=1)
        borders = frame_borders(batch.image_grid_thw)
        return {_COS: angles.cos(), _SIN: angles.sin(), _BORDERS: borders}


class Merger(SpecLayer):
    """ViT tokens -> features in the language model's width, merge x merge tokens into one."""

    def __init__(self, merger: nn.Module, output_specs: OutputSpecs) -> None:
        super().__init__(output_specs)
        self.merger = merger

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> (image tokens, LLM width)."""
        features = inputs[FEATURES]
        if not len(features):
            return {FEATURES: self.no_features(batch, features)}
        return {FEATURES: self.merger(features)}


def qwen2_vl_vision(model: Any) -> list[SpecLayer]:
    """Vision half of a Qwen2VLForConditionalGeneration."""
    visual, config = model.model.visual, model.config.vision_config
    merge, dtype = config.spatial_merge_size, dtype_of(visual)
    between = row_specs(lambda rows: rows, config.embed_dim, dtype)
    merged = row_specs(lambda rows: rows // merge**2, model.config.text_config.hidden_size, dtype)
    layers = [
        NativeVisionLayer(block, visual.rotary_pos_emb, merge, between) for block in visual.blocks
    ]
    row_shape = (config.in_channels * config.temporal_patch_size * config.patch_size**2,)
    embedding = PatchEmbedding(visual.patch_embed, nn.Identity(), between, row_shape=row_shape)
    return [embedding, *layers, Merger(visual.merger, merged)]


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """Row and column of each ViT token in its image: int64, (ViT tokens, 2); `grids` (images, 3).

    Tokens that are merged into one LLM token are adjacent.

    >>> patch_positions(torch.tensor([[1, 2, 4]]), 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    image, index = _members(grids.prod(1))
    rows, columns = grids[image, 1], grids[image, 2]
    # index of the merged token in its frame, and of the ViT token within it
    block, inner = (index % (rows * columns)) // merge**2, index % merge**2
    across = columns // merge
    row = block // across * merge + inner // merge
    column = block % across * merge + inner % merge
    return torch.stack([row, column], dim=1)


def frame_borders(grids: Tensor) -> Tensor:
    """Borders between the ViT tokens of all images' frames: int32, (frames + 1,).

    >>> frame_borders(torch.tensor([[1, 2, 4], [2, 2, 2]])).tolist()
    [0, 8, 12, 16]
    """
    lengths = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def rotary_positions(
    input_ids: Tensor, cu_seqlens: Tensor, grids: Tensor | None, image_token_id: int, merge: int
) -> Tensor:
    """Qwen2-VL's positions (frame, row, column), int64 (3, tokens), from 0 in each sample.

    Text counts on in all three. An image token's position is that of the image's first token plus
    its own frame, row and column; text after it continues past the image's larger side.

    >>> ids, grids = torch.tensor([7, 5, 5, 5, 5, 8, 9, 9]), torch.tensor([[1, 4, 4]])
    >>> rotary_positions(ids, torch.tensor([0, 6, 8]), grids, 5, 2).tolist()
    [[0, 1, 1, 1, 1, 3, 0, 1], [0, 1, 1, 2, 2, 3, 0, 1], [0, 1, 2, 1, 2, 3, 0, 1]]
    """
    # increment to the next token's position, and the token's place within its image
    steps = torch.ones_like(input_ids)
    within = input_ids.new_zeros(3, len(input_ids))
    if grids is not None and len(grids):
        frames, rows, columns = (grids // grids.new_tensor([1, merge, merge])).unbind(1)
        image, index = _members(frames * rows * columns)
        is_image = input_ids == image_token_id
        rows, columns = rows[image], columns[image]
        is_last = index == frames[image] * rows * columns - 1
        steps[is_image] = torch.where(is_last, torch.maximum(rows, columns), 0)
        within[:, is_image] = torch.stack(
            [index // (rows * columns), index // columns % rows, index % columns]
        )
    begins = steps.cumsum(0) - steps
    sample, _ = _members(cu_seqlens.long().diff())
    return begins - begins[cu_seqlens.long()[sample]] + within


def _members(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Group and index within it, for every member of groups with these counts."""
    group = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    begins = counts.cumsum(0) - counts
    return group, torch.arange(len(group), device=counts.device) - begins[group]
