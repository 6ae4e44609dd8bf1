"""A model preset with the sizes of a transformers model: `preset_from_model`.

So costs, profiles and plans are of the model that trains. `layers_of` such a preset lists the
model's layers one by one: what planning calls each of them, and which part it belongs to.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from balance.presets import FixedRule, LlmShape, ModelPreset, TilesRule, VitShape
from engine.runtime.models.qwen2_vl_layers import NativeVisionLayer
from engine.runtime.models.vision_layers import VisionLayer, as_pair
from engine.runtime.stage_io import LayerStack


def preset_from_model(model: Any, stack: LayerStack, preset: ModelPreset) -> ModelPreset:
    """`preset`, the build's, with the sizes of a model whose layers are `stack`.

    Only vision layers whose output is used count: LLaVA-1.5 has 23, not 24. Name and description
    become the model's.
    """
    config, vision = model.config, preset.vision
    num_layers = sum(isinstance(layer, VisionLayer | NativeVisionLayer) for layer in stack.layers)
    vit = replace(_VITS[config.model_type](config), num_layers=num_layers)
    if isinstance(vision, FixedRule | TilesRule):
        vision = replace(vision, vit_tokens_per_patch=_patch_tokens(config.vision_config))
    return replace(
        preset,
        name=config.model_type,
        description=f"{type(model).__name__}, its own sizes",
        vision=vision,
        vit=vit,
        llm=_llm_shape(config.text_config),
        audio_encoder=None,
    )


def _llm_shape(text: Any) -> LlmShape:
    """Sizes of one of `TEXT_MODELS`, all of which have gated feed-forward parts."""
    return LlmShape(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        ffn_size=text.intermediate_size,
        gated=True,
        vocab_size=text.vocab_size,
    )


def _llava_vit(config: Any) -> VitShape:
    vision, width = config.vision_config, config.text_config.hidden_size
    patch_values = vision.num_channels * vision.patch_size**2
    return _vit_shape(vision, patch_values, (vision.hidden_size, width, width))


def _internvl_vit(config: Any) -> VitShape:
    vision, width = config.vision_config, config.text_config.hidden_size
    height, across = as_pair(vision.patch_size)
    merged = vision.hidden_size * round(1 / config.downsample_ratio) ** 2
    shape = _vit_shape(vision, vision.num_channels * height * across, (merged, width, width))
    return replace(shape, query_key_norm=bool(vision.use_qk_norm), layer_scale=True)


def _qwen2_vl_vit(config: Any) -> VitShape:
    vision, width = config.vision_config, config.text_config.hidden_size
    merged = vision.embed_dim * vision.spatial_merge_size**2
    return VitShape(
        num_layers=vision.depth,
        hidden_size=vision.embed_dim,
        num_heads=vision.num_heads,
        num_kv_heads=vision.num_heads,
        head_size=vision.embed_dim // vision.num_heads,
        ffn_size=int(vision.embed_dim * vision.mlp_ratio),
        gated=False,
        projector=(merged, merged, width),
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )


_VITS: dict[str, Callable[[Any], VitShape]] = {
    "llava": _llava_vit,
    "internvl": _internvl_vit,
    "qwen2_vl": _qwen2_vl_vit,
}


def _vit_shape(vision: Any, patch_values: int, projector: tuple[int, ...]) -> VitShape:
    """Sizes of an encoder whose config names them as CLIP's does."""
    return VitShape(
        num_layers=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        num_kv_heads=vision.num_attention_heads,
        head_size=vision.hidden_size // vision.num_attention_heads,
        ffn_size=vision.intermediate_size,
        gated=False,
        projector=projector,
        patch_values=patch_values,
    )


def _patch_tokens(vision: Any) -> int:
    """Vision-encoder tokens of one patch, the class token included; SigLIP has none."""
    (height, across), patch = as_pair(vision.image_size), as_pair(vision.patch_size)
    has_class_token = vision.model_type != "siglip_vision_model"
    return (height // patch[0]) * (across // patch[1]) + int(has_class_token)
