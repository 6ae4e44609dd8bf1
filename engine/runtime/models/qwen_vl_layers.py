"""Vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL as pipeline layers.

The layers hold the model's own modules. Each rank computes places of ViT tokens from the
micro-batch's image grids (`engine.runtime.models.image_grids`).

- Qwen2.5-VL attends within windows in most layers. From the patch embedding to the merger its ViT
  tokens are in the windows' order, as in transformers, and across cuts.
- Qwen3-VL adds outputs of early vision layers to the first decoder layers (deepstack). These
  cross cuts next to `features`, and as LLM features next to `hidden`, each until it is used.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from isobatch.engine.runtime.models.image_grids import (
    frame_borders,
    interpolated_places,
    patch_positions,
    window_order,
)
from isobatch.engine.runtime.models.layer_specs import (
    FEATURES,
    OutputSpecs,
    SpecLayer,
    add_specs,
    deep_name,
    deep_tensors,
    row_specs,
)
from isobatch.engine.runtime.models.vision_layers import PatchEmbedding, dtype_of
from isobatch.engine.runtime.stage_io import Batch, StageTensors, host_of, to_device

_COS, _SIN, _BORDERS = "vision_cos", "vision_sin", "vision_borders"
_WINDOWS = "vision_windows"
_SHARED = (_COS, _SIN, _BORDERS, _WINDOWS)


@dataclass(frozen=True, slots=True)
class GridRule:
    """How ViT tokens of an image are ordered."""

    merge: int
    """Side of the square of tokens that become one LLM token; they are adjacent."""
    window: int | None
    """Side of windows in LLM tokens, if any layer has some: the windows are adjacent."""


class NativePatchEmbedding(PatchEmbedding):
    """Rows of pixels -> ViT tokens, with learnt places and in the order of windows."""

    def __init__(
        self, visual: Any, rule: GridRule, output_specs: OutputSpecs, *, row_shape: tuple[int, ...]
    ) -> None:
        super().__init__(visual.patch_embed, nn.Identity(), output_specs, row_shape=row_shape)
        self.places = getattr(visual, "pos_embed", None)
        self._rule = rule

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`pixel_values` -> `features` (ViT tokens, width)."""
        features = super().forward(inputs, batch)[FEATURES]
        grids, device = host_of(batch).image_grid_thw, features.device
        if not len(features):
            return {FEATURES: features}
        if self.places is not None:
            side = round(self.places.num_embeddings**0.5)
            index, weights = interpolated_places(grids, self._rule.merge, side)
            index, weights = to_device(index, device), to_device(weights, device)
            learnt = (self.places(index) * weights[:, :, None]).sum(1)
            features = features + learnt.to(features.dtype)
        if self._rule.window is not None:
            order, _ = window_order(grids, self._rule.merge, self._rule.window)
            features = features[to_device(order, device)]
        return {FEATURES: features}


class NativeVisionLayer(SpecLayer):
    """A layer of the vision encoder; attention within each image, or within its windows."""

    def __init__(
        self,
        block: Any,
        rotary: nn.Module,
        rule: GridRule,
        output_specs: OutputSpecs,
        *,
        in_windows: bool = False,
        deep: str | None = None,
    ) -> None:
        """`deep`: another name of the output, if decoder layers need it."""
        super().__init__(output_specs)
        self.block, self.rotary, self._rule = block, rotary, rule
        self._in_windows, self._deep = in_windows, deep

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> the same."""
        features = inputs[FEATURES]
        passed = deep_tensors(inputs)
        if len(features):
            shared = {name: inputs[name] for name in _SHARED if name in inputs}
            shared = shared or self._shared(batch)
            borders = shared[_WINDOWS if self._in_windows else _BORDERS]
            rotary = shared[_COS], shared[_SIN]
            longest = {}
            # anything but flash attention reads the borders
            if "flash" in str(self.block.attn.config._attn_implementation):
                if "max_seqlen" in signature(type(self.block.attn).forward).parameters:
                    longest = {"max_seqlen": int(borders.diff().max())}
                borders = to_device(borders, features.device)
            features = self.block(
                features, cu_seqlens=borders, position_embeddings=rotary, **longest
            )
            passed |= shared
        if self._deep is not None:
            passed[self._deep] = features
        return {FEATURES: features, **passed}

    def _shared(self, batch: Batch) -> StageTensors:
        """Rotary embeddings and image borders, which the stage's next layers need too."""
        frequencies: Any = self.rotary.inv_freq
        grids, rule = host_of(batch).image_grid_thw, self._rule
        positions = patch_positions(grids, rule.merge)
        shared = {_BORDERS: frame_borders(grids)}
        if rule.window is not None:
            order, shared[_WINDOWS] = window_order(grids, rule.merge, rule.window)
            positions = positions[order]
        positions = to_device(positions, frequencies.device)
        half = (positions[..., None].float() * frequencies.float()).flatten(1)
        angles = torch.cat([half, half], dim=1)
        return {_COS: angles.cos(), _SIN: angles.sin(), **shared}


class Merger(SpecLayer):
    """ViT tokens -> features in the language model's width, merge x merge tokens into one."""

    def __init__(self, visual: Any, rule: GridRule, output_specs: OutputSpecs) -> None:
        super().__init__(output_specs)
        self.merger, self._rule = visual.merger, rule
        self.deep_mergers = getattr(visual, "deepstack_merger_list", None)

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (ViT tokens, width) -> (image tokens, LLM width); the same of deep ones."""
        features = inputs[FEATURES]
        if not len(features):
            names = self.output_specs(host_of(batch))
            return dict.fromkeys(names, self.no_features(batch, features))
        merged = self.merger(features)
        rule = self._rule
        if rule.window is not None:
            order, _ = window_order(host_of(batch).image_grid_thw, rule.merge, rule.window)
            # numbers of the merged tokens, in the order of windows
            places = (order[:: rule.merge**2] // rule.merge**2).argsort()
            merged = merged[to_device(places, merged.device)]
        deep = {
            deep_name(level): merger(inputs[deep_name(level)])
            for level, merger in enumerate(self.deep_mergers or ())
        }
        return {FEATURES: merged, **deep}


def qwen_vl_vision(model: Any) -> list[SpecLayer]:
    """Vision half of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL ForConditionalGeneration."""
    visual, config = model.model.visual, model.config.vision_config
    side = getattr(config, "window_size", None)
    window = None if side is None else side // config.spatial_merge_size // config.patch_size
    rule = GridRule(config.spatial_merge_size, window)
    dtype = dtype_of(visual)
    # Qwen2-VL calls the encoder's width embed_dim, and the language model's hidden_size
    width = getattr(config, "embed_dim", config.hidden_size)
    levels = list(getattr(config, "deepstack_visual_indexes", ()))
    whole = range(len(visual.blocks)) if rule.window is None else config.fullatt_block_indexes
    rows = row_specs(lambda rows: rows, width, dtype)
    layers: list[SpecLayer] = []
    for number, block in enumerate(visual.blocks):
        # outputs of this layer and those before it that decoder layers need
        num_levels = sum(level <= number for level in levels)
        layers.append(
            NativeVisionLayer(
                block,
                visual.rotary_pos_emb,
                rule,
                add_specs(rows, range(num_levels), rows),
                in_windows=number not in whole,
                deep=deep_name(levels.index(number)) if number in levels else None,
            )
        )
    output = model.config.text_config.hidden_size
    merged = row_specs(lambda rows: rows // rule.merge**2, output, dtype)
    row_shape = (config.in_channels * config.temporal_patch_size * config.patch_size**2,)
    embedding = NativePatchEmbedding(visual, rule, rows, row_shape=row_shape)
    return [embedding, *layers, Merger(visual, rule, add_specs(merged, range(len(levels)), merged))]
