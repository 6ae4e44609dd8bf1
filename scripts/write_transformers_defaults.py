"""Write configs/transformers_defaults.toml from the installed transformers.

    python scripts/write_transformers_defaults.py

What transformers assumes where the files of a model say nothing. The readers of folders
(isobatch/models/folder) need it, and packing needs no transformers. A test compares both.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from transformers import AutoConfig, image_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TARGET = Path(__file__).resolve().parent.parent / "configs" / "transformers_defaults.toml"

AUDIO = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Families whose audio a reader looks at."""
MODELS = (
    *(
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4v",
        "glm46v",
    ),
    *("glm4v_moe", "llava", "llava_next", "llava_onevision", "internvl", "gemma3", "paligemma"),
    *("idefics3", "smolvlm", "mistral3", "gemma4", "minicpmv4_6"),
    *AUDIO,
)
"""Families, with the types of their parts."""
TEXTS = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2")
VISIONS = ("clip_vision_model", "siglip_vision_model", "pixtral", "gemma4_vision")

_READ = """
d_model downsample_hidden_size encoder_attention_heads encoder_ffn_dim encoder_layers n_window
n_window_infer num_mel_bins output_dim
attention_k_eq_v enable_moe_block hidden_size_per_layer_input num_kv_shared_layers
pooling_kernel_size top_k_experts use_double_wide_mlp
depth embed_dim first_k_dense_replace fullatt_block_indexes deepstack_visual_indexes head_dim
downsample_ratio hidden_act hidden_size image_seq_length image_size in_channels intermediate_size
linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
max_position_embeddings mlp_ratio mm_tokens_per_image model_type moe_intermediate_size
n_routed_experts n_shared_experts num_attention_heads num_channels num_experts
num_experts_per_tok num_local_experts num_heads num_hidden_layers num_key_value_heads
out_hidden_size patch_size scale_factor shared_expert_intermediate_size sliding_window
spatial_merge_size temporal_patch_size use_qk_norm vision_aspect_ratio vision_feature_layer
vision_feature_select_strategy vocab_size window_size
"""
KEYS = frozenset(_READ.split())
"""Keys of `config.json` that a reader looks at."""

IMAGE_PROCESSORS = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Glm4vImageProcessor": "glm4v",
    "Glm46VImageProcessor": "glm46v",
    "CLIPImageProcessor": "clip",
    "LlavaImageProcessor": "llava",
    "LlavaNextImageProcessor": "llava_next",
    "LlavaOnevisionImageProcessor": "llava_onevision",
    "GotOcr2ImageProcessor": "got_ocr2",
    "Gemma3ImageProcessor": "gemma3",
    "SiglipImageProcessor": "siglip",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
    "PixtralImageProcessor": "pixtral",
    "Gemma4ImageProcessor": "gemma4",
    "MiniCPMV4_6ImageProcessor": "minicpmv4_6",
}
"""Class -> its module in transformers."""


VIDEO_PROCESSORS = {
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "Glm4vVideoProcessor": "glm4v",
    "InternVLVideoProcessor": "internvl",
    "LlavaOnevisionVideoProcessor": "llava_onevision",
    "SmolVLMVideoProcessor": "smolvlm",
}
"""Class -> its module in transformers."""
_VIDEO_BASE = {"rescale_factor": 1 / 255}
_NOT_SETTINGS = ("valid_kwargs", "model_input_names")


def config_defaults() -> dict[str, Any]:
    """By model type: the values of a config that was given nothing."""
    found: dict[str, Any] = {}
    for name in MODELS:
        values = AutoConfig.for_model(name).to_dict()
        found[name] = _kept(values)
        for part in ("text_config", "vision_config", "audio_config"):
            if name not in AUDIO and part == "audio_config":
                continue
            if (own := _kept(values[part] or {})) == {}:
                continue
            kind = own["model_type"]
            found[kind] = _of_type(kind)
            # a whole part that is absent may have other values than its type
            other = {key: value for key, value in own.items() if found[kind].get(key) != value}
            found[name][part] = {**other, "model_type": kind}
    for name in (*TEXTS, *VISIONS):
        found[name] = _of_type(name)
    return found


def _of_type(name: str) -> dict[str, Any]:
    """Not what transformers derives from other keys, such as a head's size."""
    kind = CONFIG_MAPPING[name]
    derived = [
        key for key in ("head_dim", "num_key_value_heads") if getattr(kind, key, None) is None
    ]
    values = _kept(kind().to_dict())
    return {key: value for key, value in values.items() if key not in derived}


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in KEYS and value is not None}


def image_processor_defaults() -> dict[str, Any]:
    """By class: the settings of an image processor that was given nothing."""
    found = {}
    for name, module in IMAGE_PROCESSORS.items():
        path = f"transformers.models.{module}.image_processing_pil_{module}"
        kind = getattr(sys.modules.get(path) or __import__(path, fromlist=["x"]), f"{name}Pil")
        values = json.loads(kind().to_json_string())
        square = bool(getattr(kind, "default_to_square", True))
        del values["image_processor_type"]
        found[name] = {**values, "default_to_square": square}
        if hasattr(kind, "image_seq_length"):
            found[name]["image_seq_length"] = kind.image_seq_length
    return found


def video_processor_defaults() -> dict[str, Any]:
    """By class: its attributes, from the source, because it cannot be made without torchvision."""
    found = {}
    names = {**vars(image_utils), **dict.fromkeys(("VideosKwargs",))}
    for name, module in VIDEO_PROCESSORS.items():
        folder = Path(transformers.__file__).parent / "models" / module
        source = (folder / f"video_processing_{module}.py").read_text("utf-8")
        (kind,) = (
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == name
        )
        values = {
            node.targets[0].id: eval(compile(ast.Expression(node.value), module, "eval"), names)
            for node in kind.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id not in _NOT_SETTINGS
        }
        given = {key: value for key, value in values.items() if value is not None}
        found[name] = {**_VIDEO_BASE, **given, "resample": int(values["resample"])}
    return found


def feature_extractor_defaults() -> dict[str, Any]:
    """By class: the settings of a feature extractor of audio that was given nothing."""
    values = json.loads(transformers.WhisperFeatureExtractor().to_json_string())
    return {values.pop("feature_extractor_type"): values}


def toml_text() -> str:
    """The whole file."""
    lines = [
        "# Written by scripts/write_transformers_defaults.py: what transformers"
        f" {transformers.__version__} assumes where a model's files say nothing.",
    ]
    tables = {
        **{f"config.{name}": table for name, table in sorted(config_defaults().items())},
        **{f"feature_extractor.{k}": v for k, v in feature_extractor_defaults().items()},
        **{f"image_processor.{k}": v for k, v in sorted(image_processor_defaults().items())},
        **{f"video_processor.{k}": v for k, v in sorted(video_processor_defaults().items())},
    }
    for name, table in tables.items():
        _write(name, table, lines)
    return "\n".join(lines) + "\n"


def _write(name: str, table: dict[str, Any], lines: list[str]) -> None:
    parts = {key: value for key, value in table.items() if key.endswith("_config")}
    lines += ["", f"[{name}]"]
    lines += [f"{k} = {_toml(v)}" for k, v in sorted(table.items()) if k not in parts]
    for key, value in parts.items():
        _write(f"{name}.{key}", value, lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


if __name__ == "__main__":
    TARGET.write_text(toml_text(), "utf-8")
