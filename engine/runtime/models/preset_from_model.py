"""A model preset with the sizes of a transformers model: `preset_from_model`.

So costs, profiles and plans are of the model that trains. `layers_of` such a preset lists the
model's layers one by one: what planning calls each of them, and which part it belongs to.
"""

from dataclasses import replace
from typing import Any

from balance.media.rules.fixed import FixedRule
from balance.media.rules.tiles import TilesRule
from balance.presets import LlmShape, ModelPreset, VitShape
from engine.runtime.models.qwen2_vl_layers import NativeVisionLayer
from engine.runtime.models.vision_layers import VisionLayer, as_pair, merge_side, patch_tokens
from engine.runtime.stage_io import LayerStack


def preset_from_model(model: Any, stack: LayerStack, preset: ModelPreset) -> ModelPreset:
    """`preset`, the build's, with the sizes of a model whose layers are `stack`.

    Only vision layers whose output is used count: LLaVA-1.5 has 23, not 24.
    """
    config, vision = model.config, preset.vision
    num_layers = sum(isinstance(layer, VisionLayer | NativeVisionLayer) for layer in stack.layers)
    make_vit = _qwen2_vl_vit if config.model_type == "qwen2_vl" else _patch_vit
    if isinstance(vision, FixedRule | TilesRule):
        vision = replace(vision, vit_tokens_per_patch=patch_tokens(config.vision_config))
    return replace(
        preset,
        name=config.model_type,
        description=f"{type(model).__name__}, its own sizes",
        vision=vision,
        vit=make_vit(config, num_layers),
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


def _patch_vit(config: Any, num_layers: int) -> VitShape:
    """Sizes of LLaVA's and InternVL's encoders, whose configs name them as CLIP's does."""
    vision, width = config.vision_config, config.text_config.hidden_size
    height, across = as_pair(vision.patch_size)
    return VitShape(
        num_layers=num_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        num_kv_heads=vision.num_attention_heads,
        head_size=vision.hidden_size // vision.num_attention_heads,
        ffn_size=vision.intermediate_size,
        gated=False,
        projector=(vision.hidden_size * merge_side(config) ** 2, width, width),
        patch_values=vision.num_channels * height * across,
        query_key_norm=bool(getattr(vision, "use_qk_norm", False)),
        layer_scale=config.model_type == "internvl",
    )


def _qwen2_vl_vit(config: Any, num_layers: int) -> VitShape:
    vision, width = config.vision_config, config.text_config.hidden_size
    merged = vision.embed_dim * vision.spatial_merge_size**2
    return VitShape(
        num_layers=num_layers,
        hidden_size=vision.embed_dim,
        num_heads=vision.num_heads,
        num_kv_heads=vision.num_heads,
        head_size=vision.embed_dim // vision.num_heads,
        ffn_size=int(vision.embed_dim * vision.mlp_ratio),
        gated=False,
        projector=(merged, merged, width),
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )
