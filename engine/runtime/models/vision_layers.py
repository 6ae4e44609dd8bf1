"""Vision encoders of LLaVA, InternVL and Gemma 3 as pipeline layers.

The layers hold the model's own modules. Without images they compute nothing: tensors are empty.
"""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.models.layer_specs import (
    FEATURES,
    OutputSpecs,
    SpecLayer,
    patch_specs,
    row_specs,
)
from isobatch.engine.runtime.stage_io import Batch, StageTensors, TensorSpec, host_of


class PatchEmbedding(SpecLayer):
    """Pixels -> the vision encoder's tokens."""

    def __init__(
        self,
        embeddings: nn.Module,
        norm: nn.Module,
        output_specs: OutputSpecs,
        *,
        row_shape: tuple[int, ...],
    ) -> None:
        """`row_shape`: shape of a row of `pixel_values`."""
        super().__init__(output_specs)
        self.embeddings, self.norm, self._row_shape = embeddings, norm, row_shape

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`pixel_values` -> `features` (patches, ViT tokens, width) or (ViT tokens, width)."""
        pixels: Tensor = batch.pixel_values
        if not pixels.is_floating_point():
            raise ConfigError(
                "pixel_values are raw (torch.uint8); normalise them first, with loaders.normalize"
            )
        if not len(batch.patches_per_image):
            return {FEATURES: self.no_features(batch, pixels)}
        if not len(pixels):
            raise ConfigError(
                "images without pixel_values: the first stage's loader needs images='patches'"
            )
        if pixels.shape[1:] != self._row_shape:
            raise ConfigError(
                f"pixel_values have rows of shape {tuple(pixels.shape[1:])}, the model takes"
                f" {self._row_shape}: build with a model preset of this model"
            )
        return {FEATURES: self.norm(self.embeddings(pixels.to(dtype_of(self.embeddings))))}


class VisionLayer(SpecLayer):
    """A layer of the vision encoder; each patch is a sequence of its own."""

    def __init__(
        self, layer: nn.Module, arguments: tuple[None, ...], output_specs: OutputSpecs
    ) -> None:
        """`arguments`: positional arguments of the layer after its input."""
        super().__init__(output_specs)
        self.layer, self._arguments = layer, arguments

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (patches, ViT tokens, width) -> the same."""
        features = inputs[FEATURES]
        if not len(features):
            return {FEATURES: features}
        output = self.layer(features, *self._arguments)
        # some versions of transformers return a tuple
        return {FEATURES: output[0] if isinstance(output, tuple) else output}


class Projector(SpecLayer):
    """The vision encoder's tokens -> features in the language model's width."""

    def __init__(
        self,
        projector: nn.Module,
        norm: nn.Module,
        output_specs: OutputSpecs,
        *,
        drop_first: bool,
        merge: int,
    ) -> None:
        """`drop_first`: leave out the class token; `merge` x `merge` tokens become one."""
        super().__init__(output_specs)
        self.projector, self.norm = projector, norm
        self._drop_first, self._merge = drop_first, merge

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (patches, ViT tokens, width) -> (image tokens, LLM width)."""
        features = inputs[FEATURES]
        if not len(features):
            return {FEATURES: self.no_features(batch, features)}
        features = self.norm(features)
        if self._drop_first:
            features = features[:, 1:]
        return {FEATURES: self.projector(merge_tokens(features, self._merge)).flatten(0, 1)}


class AnyresProjector(Projector):
    """Projector of models that join an image's tiles: padding removed, a newline after each row."""

    def __init__(self, model: Any, projector: Projector, output_specs: OutputSpecs) -> None:
        super().__init__(
            projector.projector,
            projector.norm,
            output_specs,
            drop_first=projector._drop_first,
            merge=1,
        )
        self.image_newline = model.image_newline
        # transformers' own function, without the model: a rank may release that
        self._join = partial(type(model).pack_image_features, SimpleNamespace(config=model.config))
        self._options = {
            name: getattr(model.config, name)
            for name in ("vision_feature_select_strategy", "vision_aspect_ratio")
            if name in signature(type(model).pack_image_features).parameters
        }

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (patches, ViT tokens, width) -> (image tokens, LLM width)."""
        if getattr(batch, "video_seconds", None) is not None:
            raise ConfigError(
                "there are videos, whose features this model pools; as layers it takes images only"
            )
        features = super().forward(inputs, batch)[FEATURES]
        if not len(features):
            return {FEATURES: features}
        host = host_of(batch)
        patches = host.patches_per_image.tolist()
        images = torch.split(features.reshape(sum(patches), -1, features.shape[1]), patches)
        joined, _ = self._join(
            images, host.image_sizes.cpu(), image_newline=self.image_newline, **self._options
        )
        return {FEATURES: torch.cat(joined)}


def llava_vision(model: Any) -> list[SpecLayer]:
    """Vision half of a LlavaForConditionalGeneration with a CLIP or SigLIP encoder."""
    kind = model.config.vision_config.model_type
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise ConfigError(
            f"LLaVA with a vision encoder {kind!r}: give clip_vision_model or siglip_vision_model"
        )
    # the first versions 5 of transformers have the encoder one level deeper
    tower = getattr(model.model.vision_tower, "vision_model", model.model.vision_tower)
    norms = getattr(tower, "pre_layrnorm", nn.Identity()), nn.Identity()
    return _vision_half(model, tower, tower.encoder.layers, (None,), norms)


def anyres_vision(model: Any) -> list[SpecLayer]:
    """Vision half of a LLaVA-NeXT or LLaVA-OneVision ForConditionalGeneration."""
    *layers, projector = llava_vision(model)
    assert isinstance(projector, Projector)  # for types
    token = int(model.config.image_token_id)
    text = model.config.text_config
    dtype = dtype_of(projector)

    def specs(batch: Batch) -> Mapping[str, TensorSpec]:
        rows = int((batch.input_ids == token).sum())
        return {FEATURES: TensorSpec(shape=(rows, text.hidden_size), dtype=dtype)}

    return [*layers, AnyresProjector(model.model, projector, specs)]


def gemma3_vision(model: Any) -> list[SpecLayer]:
    """Vision half of a Gemma3ForConditionalGeneration."""
    tower = getattr(model.model.vision_tower, "vision_model", model.model.vision_tower)
    norms = nn.Identity(), tower.post_layernorm
    return _vision_half(model, tower, tower.encoder.layers, (None,), norms)


def internvl_vision(model: Any) -> list[SpecLayer]:
    """Vision half of an InternVLForConditionalGeneration."""
    tower = model.model.vision_tower
    # the norm belongs to the encoder's output, not to an inner layer's
    is_output = model.config.vision_feature_layer == -1
    norms = nn.Identity(), tower.layernorm if is_output else nn.Identity()
    return _vision_half(model, tower, tower.encoder.layer, (), norms)


def _vision_half(
    model: Any,
    tower: Any,
    encoder: nn.ModuleList,
    arguments: tuple[None, ...],
    norms: tuple[nn.Module, nn.Module],
) -> list[SpecLayer]:
    """Embedding, encoder layers up to the one that the model reads, and projector.

    `arguments` as in `VisionLayer`; `norms`: after the embedding, and before the projector.
    """
    config, vision = model.config, model.config.vision_config
    projector = model.model.multi_modal_projector
    tokens = patch_tokens(vision)
    merge = merge_side(config)
    # Gemma 3 has neither of these: its projector averages all tokens of the last layer
    drop_first = getattr(config, "vision_feature_select_strategy", "full") == "default"
    last = getattr(config, "vision_feature_layer", -1)
    per_patch = getattr(config, "mm_tokens_per_image", (tokens - drop_first) // merge**2)
    between = patch_specs(tokens, vision.hidden_size, dtype_of(tower.embeddings))
    features = row_specs(
        lambda patches: patches * per_patch, config.text_config.hidden_size, dtype_of(projector)
    )
    used = encoder[: _used_layers(last, len(encoder))]
    row_shape = vision.num_channels, *as_pair(vision.image_size)
    return [
        PatchEmbedding(tower.embeddings, norms[0], between, row_shape=row_shape),
        *(VisionLayer(layer, arguments, between) for layer in used),
        Projector(projector, norms[1], features, drop_first=drop_first, merge=merge),
    ]


def merge_tokens(features: Tensor, side: int) -> Tensor:
    """Merge `side` x `side` tokens: (patches, n^2, width) -> (patches, n^2/side^2, width*side^2).

    >>> merge_tokens(torch.arange(16).reshape(1, 16, 1), 2)[0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    """
    if side == 1:
        return features
    patches, tokens, width = features.shape
    blocks = round(tokens**0.5) // side
    split = features.reshape(patches, blocks, side, blocks, side, width)
    return split.transpose(2, 3).reshape(patches, blocks * blocks, side * side * width)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of a module's weights."""
    return next(module.parameters()).dtype


def as_pair(value: Any) -> tuple[int, int]:
    """(height, width) of a size in a config, where one number means both."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def patch_tokens(vision: Any) -> int:
    """Vision-encoder tokens of one patch, the class token included; SigLIP has none."""
    (height, width), patch = as_pair(vision.image_size), as_pair(vision.patch_size)
    has_class_token = vision.model_type != "siglip_vision_model"
    return (height // patch[0]) * (width // patch[1]) + int(has_class_token)


def merge_side(config: Any) -> int:
    """Side of the block of tokens that become one; LLaVA merges none."""
    return round(1 / getattr(config, "downsample_ratio", 1))


def _used_layers(chosen: Any, count: int) -> int:
    """Layers before the hidden state that `vision_feature_layer` names; 0 is the embedding's."""
    if not isinstance(chosen, int):
        raise ConfigError(
            f"vision_feature_layer = {chosen}: only one layer's features can be taken; give one"
            " number"
        )
    if not -count - 1 <= chosen <= count:
        raise ConfigError(f"vision_feature_layer = {chosen}, but the encoder has {count} layers")
    return chosen % (count + 1)
