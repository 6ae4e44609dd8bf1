"""Vision encoders that see patches of one size, as layers of a pipeline: those of LLaVA and
InternVL.

For `engine.runtime.models.transformers_models`. The layers hold the model's own modules. A
micro-batch without images passes through without a computation: what travels is then empty, and
nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from balance.errors import ConfigError
from engine.runtime.models.layer_specs import FEATURES, CutLayer, Gives, gives_patches, gives_rows
from engine.runtime.stage_io import Batch, StageTensors


class PatchEmbedding(CutLayer):
    """Pixels to the vision encoder's tokens."""

    def __init__(
        self,
        embeddings: nn.Module,
        norm: nn.Module | None,
        gives: Gives,
        *,
        row_shape: tuple[int, ...],
    ) -> None:
        """`row_shape`: of a row of `pixel_values`."""
        super().__init__(gives)
        self.embeddings, self._row_shape = embeddings, row_shape
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`pixel_values` -> `features`: of patches (patches, ViT tokens, width), of native ones
        (ViT tokens, width).
        """
        pixels: Tensor = batch.pixel_values
        if not pixels.is_floating_point():
            raise ConfigError(
                "pixel_values are raw (torch.uint8); normalise them first, with loaders.normalize"
            )
        if not len(batch.patches_per_image):
            return {FEATURES: self.no_features(batch, pixels)}
        if not len(pixels):
            raise ConfigError(
                "images without pixel_values: the first stage's loader needs decode_images=True"
            )
        if pixels.shape[1:] != self._row_shape:
            raise ConfigError(
                f"pixel_values have rows of shape {tuple(pixels.shape[1:])}, the model takes {self._row_shape}: build "
                "with a model preset of this model"
            )
        return {FEATURES: self.norm(self.embeddings(pixels.to(dtype_of(self.embeddings))))}


class VisionLayer(CutLayer):
    """A layer of the vision encoder; each patch is a sequence of its own."""

    def __init__(self, layer: nn.Module, arguments: tuple[None, ...], gives: Gives) -> None:
        """`arguments`: what the layer takes besides its input."""
        super().__init__(gives)
        self.layer, self._arguments = layer, arguments

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`features` (patches, ViT tokens, width) -> the same."""
        features = carry[FEATURES]
        if not len(features):
            return {FEATURES: features}
        after = self.layer(features, *self._arguments)
        # some versions of transformers give a tuple
        return {FEATURES: after[0] if isinstance(after, tuple) else after}


class Projector(CutLayer):
    """The vision encoder's tokens to features in the language model's width."""

    def __init__(
        self,
        projector: nn.Module,
        norm: nn.Module | None,
        gives: Gives,
        *,
        drop_first: bool,
        merge: int,
    ) -> None:
        """`drop_first`: without the class token; `merge`: a square of so many tokens a side becomes
        one.
        """
        super().__init__(gives)
        self.projector, self._drop_first, self._merge = projector, drop_first, merge
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`features` (patches, ViT tokens, width) -> (image tokens, LLM width)."""
        features = carry[FEATURES]
        if not len(features):
            return {FEATURES: self.no_features(batch, features)}
        features = self.norm(features)
        if self._drop_first:
            features = features[:, 1:]
        return {FEATURES: self.projector(merge_squares(features, self._merge)).flatten(0, 1)}


def llava_vision(model: Any) -> list[CutLayer]:
    """Vision half of a LlavaForConditionalGeneration with a CLIP or SigLIP encoder.

    Layers behind the one that the model looks at are left out: they are computed for nothing and
    get no gradient.
    """
    config = model.config
    kind = config.vision_config.model_type
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise ConfigError(
            f"LLaVA with a vision encoder {kind!r}: give one with clip_vision_model, siglip_vision_model"
        )
    # the first versions 5 of transformers have the encoder one deeper
    tower = getattr(model.model.vision_tower, "vision_model", model.model.vision_tower)
    squares = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    tokens = squares + (kind == "clip_vision_model")  # SigLIP has no class token
    drop_first = config.vision_feature_select_strategy == "default"
    between = gives_patches(tokens, config.vision_config.hidden_size, dtype_of(tower.embeddings))
    used = _used_layers(config.vision_feature_layer, len(tower.encoder.layers))
    projector = Projector(
        model.model.multi_modal_projector,
        None,
        _gives_features(model, tokens - drop_first),
        drop_first=drop_first,
        merge=1,
    )
    layers = [VisionLayer(layer, (None,), between) for layer in tower.encoder.layers[:used]]
    side = config.vision_config.image_size
    row_shape = config.vision_config.num_channels, side, side
    norm = getattr(tower, "pre_layrnorm", None)
    return [
        PatchEmbedding(tower.embeddings, norm, between, row_shape=row_shape),
        *layers,
        projector,
    ]


def internvl_vision(model: Any) -> list[CutLayer]:
    """Vision half of an InternVLForConditionalGeneration."""
    config, tower = model.config, model.model.vision_tower
    (height, width), square = (
        _pair(config.vision_config.image_size),
        _pair(config.vision_config.patch_size),
    )
    squares = (height // square[0]) * (width // square[1])
    merge = round(1 / config.downsample_ratio)
    drop_first = config.vision_feature_select_strategy == "default"
    between = gives_patches(
        squares + 1, config.vision_config.hidden_size, dtype_of(tower.embeddings)
    )
    used = _used_layers(config.vision_feature_layer, len(tower.encoder.layer))
    projector = Projector(
        model.model.multi_modal_projector,
        # the norm is that of the encoder's output, not of what a layer gives
        tower.layernorm if config.vision_feature_layer == -1 else None,
        _gives_features(model, (squares + 1 - drop_first) // merge**2),
        drop_first=drop_first,
        merge=merge,
    )
    layers = [VisionLayer(layer, (), between) for layer in tower.encoder.layer[:used]]
    row_shape = config.vision_config.num_channels, height, width
    return [
        PatchEmbedding(tower.embeddings, None, between, row_shape=row_shape),
        *layers,
        projector,
    ]


def merge_squares(features: Tensor, side: int) -> Tensor:
    """Squares of `side` x `side` tokens become one: (patches, n^2, width) -> (patches, n^2 /
    side^2, width * side^2).

    >>> merge_squares(torch.arange(16).reshape(1, 16, 1), 2)[0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    """
    if side == 1:
        return features
    patches, tokens, width = features.shape
    blocks = round(tokens**0.5) // side
    split = features.reshape(patches, blocks, side, blocks, side, width)
    return split.transpose(2, 3).reshape(patches, blocks * blocks, side * side * width)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Of a module's weights."""
    return next(module.parameters()).dtype


def _gives_features(model: Any, per_patch: int) -> Gives:
    """What the projector gives."""
    projector = model.model.multi_modal_projector
    return gives_rows(
        lambda patches: patches * per_patch,
        model.config.text_config.hidden_size,
        dtype_of(projector),
    )


def _used_layers(chosen: Any, count: int) -> int:
    """How many layers run for the hidden state that `vision_feature_layer` names; 0 is the
    embedding's.
    """
    if not isinstance(chosen, int):
        raise ConfigError(
            f"vision_feature_layer = {chosen}: only one layer's features can be taken; give one number"
        )
    if not -count - 1 <= chosen <= count:
        raise ConfigError(f"vision_feature_layer = {chosen}, but the encoder has {count} layers")
    return chosen % (count + 1)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
