"""A model preset with the sizes of a transformers model: `preset_from_model`.

So costs, profiles and plans are of the model that trains. `layers_of` such a preset lists the
model's layers one by one: what planning calls each of them, and which part it belongs to.
"""

from dataclasses import replace
from typing import Any

from isobatch.engine.runtime.models.qwen_vl_layers import NativeVisionLayer, window_tokens
from isobatch.engine.runtime.models.vision_layers import (
    VisionLayer,
    as_pair,
    merge_side,
    patch_tokens,
)
from isobatch.engine.runtime.stage_io import LayerStack
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.image_rules.tiles import TilesRule
from isobatch.models.presets import LlmShape, ModelPreset, VitShape


def preset_from_model(model: Any, stack: LayerStack, preset: ModelPreset) -> ModelPreset:
    """`preset`, the build's, with the sizes of a model whose layers are `stack`.

    Only vision layers whose output is used count: LLaVA-1.5 has 23, not 24.
    """
    config, vision = model.config, preset.vision
    num_layers = sum(isinstance(layer, VisionLayer | NativeVisionLayer) for layer in stack.layers)
    make_vit = _VITS.get(config.model_type, _patch_vit)
    if isinstance(vision, FixedRule | TilesRule | AnyresRule):
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
        sandwich_norms=text.model_type in ("gemma2", "gemma3_text"),
        head_norms=text.model_type.startswith(("qwen3", "gemma3_text")),
        **_windows(text),
    )


def _windows(text: Any) -> dict[str, Any]:
    """Layers that attend over whole samples, and the window of the others, if any have one."""
    kinds = getattr(text, "layer_types", None) or ()
    full = sum(kind == "full_attention" for kind in kinds)
    if full in (0, len(kinds)):
        return {}
    return {"num_full_layers": full, "window": text.sliding_window}


def _patch_vit(config: Any, num_layers: int) -> VitShape:
    """Sizes of encoders of LLaVA, its successors and InternVL, named as CLIP's is."""
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
        quick_gelu=getattr(vision, "hidden_act", "") == "quick_gelu",
    )


def _gemma3_vit(config: Any, num_layers: int) -> VitShape:
    """Sizes of Gemma 3's encoder, whose tokens are averaged before one matrix."""
    vision = config.vision_config
    return replace(
        _patch_vit(config, num_layers),
        projector=(vision.hidden_size, config.text_config.hidden_size),
        pooled=patch_tokens(vision) // config.mm_tokens_per_image,
    )


def _qwen_vl_vit(config: Any, num_layers: int) -> VitShape:
    vision, output = config.vision_config, config.text_config.hidden_size
    # Qwen2-VL calls the encoder's width embed_dim, and the language model's hidden_size
    is_first = config.model_type == "qwen2_vl"
    width = vision.embed_dim if is_first else vision.hidden_size
    merged = width * vision.spatial_merge_size**2
    window = window_tokens(vision)
    return VitShape(
        num_layers=num_layers,
        hidden_size=width,
        num_heads=vision.num_heads,
        num_kv_heads=vision.num_heads,
        head_size=width // vision.num_heads,
        ffn_size=int(width * vision.mlp_ratio) if is_first else vision.intermediate_size,
        gated=window is not None,
        num_full_layers=None if window is None else len(vision.fullatt_block_indexes),
        window=None if window is None else (window * vision.spatial_merge_size) ** 2,
        projector=(merged, merged, output),
        num_projectors=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        quick_gelu=vision.hidden_act == "quick_gelu",
        joint_attention=True,
    )


_VITS = {
    "gemma3": _gemma3_vit,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _qwen_vl_vit),
}
"""Sizes of encoders that are not named as CLIP's, by model type."""
