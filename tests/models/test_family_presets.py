"""Presets of today's families: the sizes of the published models, as a folder would give them."""

from __future__ import annotations

from typing import Any

import pytest

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.find_model import model_from_files
from isobatch.models.image_rules import NativeRule, TilesRule
from isobatch.models.presets import ModelPreset, load_model
from support.cases import for_each

BILLIONS = {
    **{"qwen2_5_vl_3b": 3.75, "qwen2_5_vl": 8.29, "qwen2_5_vl_32b": 33.5, "qwen2_5_vl_72b": 73.4},
    **{"qwen3_vl_2b": 2.13, "qwen3_vl_4b": 4.44, "qwen3_vl": 8.77, "qwen3_vl_32b": 33.4},
    **{"qwen3_vl_30b_a3b": 31.1, "qwen3_vl_235b_a22b": 235.7},
    **{"internvl2_5_1b": 0.94, "internvl2_5_2b": 2.21, "internvl2_5_4b": 3.71},
    **{"internvl2_5": 8.08, "internvl2_5_26b": 25.5, "internvl2_5_38b": 38.4},
    **{"internvl2_5_78b": 78.4, "internvl3_1b": 0.94, "internvl3_2b": 2.09, "internvl3": 7.94},
    **{"internvl3_14b": 15.1, "internvl3_38b": 38.4, "internvl3_78b": 78.4},
    **{"internvl3_5_1b": 1.06, "internvl3_5_2b": 2.35, "internvl3_5_4b": 4.73},
    **{"internvl3_5": 8.53, "internvl3_5_14b": 15.1, "internvl3_5_38b": 38.4},
    **{"internvl3_5_30b_a3b": 30.8, "internvl3_5_241b_a28b": 240.7},
    **{"llava_onevision_0_5b": 0.89, "llava_onevision": 8.03, "llava_onevision_72b": 73.2},
    **{"gemma3": 4.3, "gemma3_12b": 12.2, "gemma3_27b": 27.4, "glm4v": 10.3},
    **{"paligemma2": 3.03, "paligemma2_10b": 9.66, "paligemma2_28b": 27.7},
    **{"smolvlm2_256m": 0.256, "smolvlm2": 0.507, "idefics3": 8.46},
    **{"mistral3": 24.0, "pixtral": 12.7},
}
"""Parameters of the published weights, from the pages of the models."""
TIED = (
    "qwen2_5_vl_3b",
    "qwen3_vl_2b",
    "qwen3_vl_4b",
    "llava_onevision_0_5b",
    "gemma3",
    "paligemma2",
)
"""The output head is the token table."""


@for_each(("name", "billions"), list(BILLIONS.items()))
def test_a_preset_has_as_many_parameters_as_the_published_model(name: str, billions: float) -> None:
    vit, llm = load_model(name).dimensions
    tables = (1 if name.startswith(TIED) else 2) * llm.vocab_size * llm.hidden_size
    encoder = vit.num_layers * vit.layer_weights + vit.patch_values * vit.hidden_size
    total = llm.num_layers * llm.held_weights + encoder + vit.projector_weights + tables
    assert total / 1e9 == pytest.approx(billions, rel=0.006)


@for_each("name", ["qwen2_5_omni", "qwen3_omni_30b_a3b"])
def test_omni_presets_are_the_folder_of_the_published_files(name: str) -> None:
    """Settings of preprocessor_config.json as published, and transformers' configs."""
    is_third, preset = name.startswith("qwen3"), load_model(name)
    llm = preset.dimensions[1]
    thinker: dict[str, Any] = {
        "text_config": {
            **text_config(preset, "qwen3_omni_moe_text" if is_third else "qwen2_5_omni_text"),
        },
        "audio_config": {"output_dim": llm.hidden_size},
        "vision_config": {"out_hidden_size": llm.hidden_size},
    }
    if not is_third:
        thinker["vision_config"]["hidden_size"] = 1280
    audio = {"feature_size": 128, "chunk_length": 300, "sampling_rate": 16_000}
    images = {"patch_size": preset.vision.vit_patch_size, "min_pixels": 3136}
    images |= {"max_pixels": 12845056}
    files = ModelFiles(
        where=name,
        config={
            "model_type": "qwen3_omni_moe" if is_third else "qwen2_5_omni",
            "thinker_config": thinker,
        },
        image_processor={
            **{**images, **audio, "feature_extractor_type": "WhisperFeatureExtractor"},
            **{"image_processor_type": "Qwen2VLImageProcessor"},
            **{"image_mean": preset.vision.mean, "image_std": preset.vision.std},
        },
        tokenizer={
            "image_token": preset.image_markup.token,
            "vision_bos_token": preset.image_markup.prefix,
            "vision_eos_token": preset.image_markup.suffix,
            "audio_token": preset.audio_markup and preset.audio_markup.token,
            "audio_bos_token": preset.audio_markup and preset.audio_markup.prefix,
            "audio_eos_token": preset.audio_markup and preset.audio_markup.suffix,
        },
    )
    found = model_from_files(files)
    for part in ("audio", "audio_markup", "audio_encoder", "image_markup", "vision", "vit", "llm"):
        assert getattr(found, part) == getattr(preset, part), part


def text_config(model: ModelPreset, kind: str) -> dict[str, Any]:
    """The language model of a preset in transformers' words."""
    llm = model.dimensions[1]
    values = {
        "model_type": kind,
        "hidden_size": llm.hidden_size,
        "intermediate_size": llm.ffn_size,
        "num_hidden_layers": llm.num_layers,
        "num_attention_heads": llm.num_heads,
        "num_key_value_heads": llm.num_kv_heads,
        "head_dim": llm.head_size,
        "vocab_size": llm.vocab_size,
        "max_position_embeddings": model.context_len,
    }
    if llm.all_experts_size is not None:
        shared = 1 if kind == "qwen3_5_moe_text" else 0
        width = {2048: 512 if shared else 768, 4096: 1536}[llm.hidden_size]
        values["moe_intermediate_size"] = width
        values["num_experts_per_tok"] = llm.ffn_size // width - shared
        values["num_experts"] = llm.all_experts_size // width - shared
    return values


def qwen_files(model: ModelPreset, family: str) -> ModelFiles:
    vit, rule = model.dimensions[0], model.vision
    assert isinstance(rule, NativeRule)
    vision = {
        "depth": vit.num_layers,
        "hidden_size": vit.hidden_size,
        "intermediate_size": vit.ffn_size,
        "num_heads": vit.num_heads,
        "patch_size": rule.vit_patch_size,
        "out_hidden_size": vit.projector[-1],
    }
    config = {
        "model_type": family,
        "text_config": text_config(model, f"{family}_text"),
        "vision_config": vision,
    }
    images = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
        "patch_size": rule.vit_patch_size,
        "image_mean": list(rule.mean),
        "image_std": list(rule.std),
    }
    return ModelFiles(where=model.name, config=config, image_processor=images)


def internvl_files(model: ModelPreset) -> ModelFiles:
    vit, llm = model.dimensions
    rule = model.vision
    assert isinstance(rule, TilesRule)
    kind = "qwen3" if llm.head_norms else "llama"
    if llm.all_experts_size is not None:
        kind = "qwen3_moe"
    vision = {
        "hidden_size": vit.hidden_size,
        "num_hidden_layers": vit.num_layers,
        "num_attention_heads": vit.num_heads,
        "intermediate_size": vit.ffn_size,
        "use_qk_norm": vit.query_key_norm,
    }
    config = {
        "model_type": "internvl",
        "text_config": text_config(model, kind),
        "vision_config": vision,
    }
    images = {
        "size": {"height": rule.image_size, "width": rule.image_size},
        "image_mean": list(rule.mean),
        "image_std": list(rule.std),
    }
    return ModelFiles(where=model.name, config=config, image_processor=images)


def other_files(model: ModelPreset, family: str) -> ModelFiles:
    """A family whose folder of the tests has the rest: only the dimensions are the preset's."""
    vit = model.dimensions[0]
    kind, encoder, more = OTHERS[family]
    glm = family == "glm4v"
    names = ("depth", "num_heads") if glm else ("num_hidden_layers", "num_attention_heads")
    vision = {
        **({"model_type": encoder} if encoder else {}),
        "hidden_size": vit.hidden_size,
        "intermediate_size": 13696 if glm else vit.ffn_size,
        "patch_size": 16
        if model.name == "pixtral"
        else getattr(model.vision, "vit_patch_size", 14),
        **dict(zip(names, (vit.num_layers, vit.num_heads), strict=True)),
        **more.get("vision", {}),
    }
    text = {**text_config(model, kind), **more.get("text", {})}
    config = {"model_type": family, "text_config": text, "vision_config": vision}
    rule = model.vision
    return ModelFiles(
        where=model.name,
        config=config | more.get("config", {}),
        image_processor={
            "image_mean": list(rule.mean),
            "image_std": list(rule.std),
            **more.get("images", {}),
        },
        processor=more.get("processor", {}),
    )


HIDDEN_SHOWS = {"do_convert_rgb": None}
"""As the files of Gemma 3 and PaliGemma have it."""
SMOL = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava_onevision": ("qwen2", "siglip_vision_model", {}),
    "gemma3": (
        "gemma3_text",
        "siglip_vision_model",
        {
            "text": {"sliding_window": 1024},
            "images": {"size": {"height": 896, "width": 896}, **HIDDEN_SHOWS},
        },
    ),
    "paligemma": (
        "gemma2",
        "siglip_vision_model",
        {"images": {"image_seq_length": 256, **HIDDEN_SHOWS}},
    ),
    "idefics3": ("llama", "idefics3_vision", {}),
    "smolvlm": (
        "llama",
        "smolvlm_vision",
        {
            **{"vision": {"patch_size": 16}, "config": {"scale_factor": 4}, "images": SMOL},
            "processor": {"image_seq_len": 64},
        },
    ),
    "mistral3": (
        "mistral",
        "pixtral",
        {
            "images": {"size": {"longest_edge": 1540}},
            "processor": {"patch_size": 14, "spatial_merge_size": 2},
            "text": {"sliding_window": None},
        },
    ),
    "llava": ("mistral", "pixtral", {}),
    "glm4v": ("glm4v_text", "", {}),
}
"""Family -> type of its language model and encoder, and what is not of the preset's dimensions."""
FAMILY_OF = {"paligemma2": "paligemma", "smolvlm2": "smolvlm", "pixtral": "llava"}


def files_of(model: ModelPreset) -> ModelFiles:
    if model.name.startswith("internvl"):
        return internvl_files(model)
    own = [name for name in (*OTHERS, *FAMILY_OF) if model.name.startswith(name)]
    if own:
        return other_files(model, FAMILY_OF.get(own[0], own[0]))
    family = next(f for f in ("qwen2_5_vl", "qwen3_vl", "qwen3_5") if model.name.startswith(f))
    has_experts = model.dimensions[1].all_experts_size is not None
    return qwen_files(model, f"{family}_moe" if has_experts else family)


@for_each("name", [*BILLIONS, "qwen3_5", "qwen3_5_35b_a3b"])
def test_a_preset_is_what_a_folder_of_those_sizes_gives(name: str) -> None:
    model = load_model(name)
    read = model_from_files(files_of(model))
    for part in ("vision", "vit", "llm", "image_markup", "context_len"):
        assert getattr(read, part) == getattr(model, part), part
