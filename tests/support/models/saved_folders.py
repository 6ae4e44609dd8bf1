"""Folders as transformers' `save_pretrained` writes them, of each family's sizes.

A case is a config, the settings of its image processor as the family's repository has them, and the
processor. The tokenizer is the small one of tests/data with the family's tokens; weights are not
needed. The video processor, which needs torchvision, is replaced by its settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm as smolvlm
from transformers.utils import PushToHubMixin

from support import ROOT

TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "byte_level"
HALF = [0.5, 0.5, 0.5]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CLIP_PROCESSOR = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'audio' %}AUDIO"
    "{% else %}IMAGE{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes strings and parts; IMAGE and AUDIO are what the family's own template writes."""


@dataclass(frozen=True)
class Family:
    """How a family's folder is made."""

    config: dict[str, Any]
    """Of `AutoConfig.for_model`."""
    processor: str
    """Class in transformers."""
    images: str
    """Class of the image processor, without its backend."""
    image_settings: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the processor itself."""
    tokens: dict[str, str] = field(default_factory=dict)
    """What the tokenizer names."""
    markup: str = "<image>"
    """An image in the text, before its token is repeated."""
    audio_markup: str = ""
    """A clip in the text."""
    audio_settings: dict[str, Any] | None = None
    """Of Whisper's feature extractor."""


def text(hidden: int, ffn: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, (hidden, ffn, layers, heads), strict=True))
    return {**sizes, "num_key_value_heads": kv, **more}


def clip(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    shape = {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
    return {"model_type": "clip_vision_model", **sizes, **shape, **more}


QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN_MARKUP = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN3_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
QWEN3_PIXELS = {
    **{"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16},
    **{"image_mean": HALF, "image_std": HALF},
}
VICUNA = {"model_type": "llama", "max_position_embeddings": 4096}

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        config={
            "text_config": text(3584, 18944, 28, 28, 4, vocab_size=152064),
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584},
        },
        processor="Qwen2VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings={"min_pixels": 3136, "max_pixels": 12845056},
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "qwen2_5_vl": Family(
        config={
            "text_config": text(
                2048, 11008, 36, 16, 2, vocab_size=151936, max_position_embeddings=128000
            ),
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
        },
        processor="Qwen2_5_VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings={"min_pixels": 3136, "max_pixels": 12845056},
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "qwen3_vl": Family(
        config={
            "text_config": text(4096, 12288, 36, 32, 8, max_position_embeddings=262144),
            "vision_config": {**QWEN3_VISION, "out_hidden_size": 4096},
        },
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings=QWEN3_PIXELS,
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "qwen3_vl_moe": Family(
        config={
            "text_config": {
                **text(2048, 6144, 48, 32, 4, head_dim=128, max_position_embeddings=262144),
                **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
            },
            "vision_config": {**QWEN3_VISION, "out_hidden_size": 2048},
        },
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings=QWEN3_PIXELS,
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "qwen3_5": Family(
        config={
            "text_config": {"max_position_embeddings": 262144},
            "vision_config": {**QWEN3_VISION, "out_hidden_size": 4096},
        },
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings=QWEN3_PIXELS,
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "qwen3_5_moe": Family(
        config={
            "text_config": {"max_position_embeddings": 262144},
            "vision_config": {**QWEN3_VISION, "out_hidden_size": 2048},
        },
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessor",
        image_settings=QWEN3_PIXELS,
        tokens=QWEN,
        markup=QWEN_MARKUP,
    ),
    "internvl": Family(
        config={
            "text_config": {"model_type": "qwen2", **text(3584, 18944, 28, 28, 4)},
            "vision_config": {},
        },
        processor="InternVLProcessor",
        images="GotOcr2ImageProcessor",
        image_settings={"size": {"height": 448, "width": 448}, **IMAGENET},
        settings={"image_seq_length": 256},
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        markup="<IMG_CONTEXT>",
    ),
    "llava": Family(
        config={"text_config": VICUNA, "vision_config": clip()},
        processor="LlavaProcessor",
        images="CLIPImageProcessor",
        image_settings={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        settings=CLIP_PROCESSOR,
        tokens={"image_token": "<image>"},
    ),
    "llava_next": Family(
        config={"text_config": VICUNA, "vision_config": clip()},
        processor="LlavaNextProcessor",
        images="LlavaNextImageProcessor",
        image_settings={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        settings=CLIP_PROCESSOR,
        tokens={"image_token": "<image>"},
    ),
}


GLM = {
    **{"image_token": "<|image|>", "video_token": "<|video|>"},
    **{"start_token": "<|begin_of_image|>", "end_token": "<|end_of_image|>"},
}
FAMILIES |= {
    "glm4v": Family(
        config={
            "text_config": {"max_position_embeddings": 65536},
            "vision_config": {},
        },
        processor="Glm4vProcessor",
        images="Glm4vImageProcessor",
        image_settings={},
        tokens=GLM,
        markup="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "glm46v": Family(
        config={
            "text_config": {"model_type": "glm4v_moe_text", "head_dim": 128},
            "vision_config": {"model_type": "glm4v_moe_vision"},
        },
        processor="Glm46VProcessor",
        images="Glm46VImageProcessor",
        image_settings={},
        tokens=GLM,
        markup="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "glm4v_moe": Family(
        config={"text_config": {"head_dim": 128}, "vision_config": {}},
        processor="Glm4vProcessor",
        images="Glm4vImageProcessor",
        image_settings={},
        tokens=GLM,
        markup="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "llava_onevision": Family(
        config={
            "text_config": {
                "model_type": "qwen2",
                **text(3584, 18944, 28, 28, 4, vocab_size=152000),
            },
        },
        processor="LlavaOnevisionProcessor",
        images="LlavaOnevisionImageProcessor",
        image_settings={"image_mean": HALF, "image_std": HALF},
        settings={
            "num_image_tokens": 729,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
}


SIGLIP = {
    **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304},
    **{"num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14},
    "vision_use_head": False,
}
FAKE = "<fake_token_around_image>"
TILED = {"<image>", FAKE, "<global-img>", "<end_of_utterance>"}
TILED |= {f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)}
FAMILIES |= {
    "gemma3": Family(
        config={
            "text_config": text(
                2560, 10240, 34, 8, 4, head_dim=256, sliding_window=1024, vocab_size=262208
            ),
            "vision_config": {**SIGLIP, "image_size": 896},
        },
        processor="Gemma3Processor",
        images="Gemma3ImageProcessor",
        image_settings={"size": {"height": 896, "width": 896}, "do_convert_rgb": None},
        settings={"image_seq_length": 256},
        tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        markup="<start_of_image>",
    ),
    "paligemma": Family(
        config={
            "text_config": {
                "model_type": "gemma2",
                **text(2304, 9216, 26, 8, 4, head_dim=256, vocab_size=257216),
            },
            "vision_config": {**SIGLIP, "image_size": 224},
            "projection_dim": 2304,
        },
        processor="PaliGemmaProcessor",
        images="SiglipImageProcessor",
        image_settings={"image_seq_length": 256, "do_convert_rgb": None},
        tokens={"image_token": "<image>"},
    ),
    "gemma4": Family(
        config={"text_config": {}, "vision_config": {}},
        processor="Gemma4Processor",
        images="Gemma4ImageProcessor",
        image_settings={},
        tokens={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        markup="<|image|>",
    ),
    "idefics3": Family(
        config={
            "text_config": {
                "model_type": "llama",
                **text(4096, 14336, 32, 32, 8, max_position_embeddings=131072, vocab_size=128259),
            },
            "vision_config": {
                **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
                **{"num_attention_heads": 16, "patch_size": 14, "image_size": 364},
            },
        },
        processor="Idefics3Processor",
        images="Idefics3ImageProcessor",
        image_settings={},
        tokens={f"token_{i}": token for i, token in enumerate(sorted(TILED))},
    ),
    "smolvlm": Family(
        config={
            "text_config": {
                "model_type": "llama",
                **text(960, 2560, 32, 15, 5, max_position_embeddings=8192, vocab_size=49280),
            },
            "vision_config": {
                **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
                **{"num_attention_heads": 12, "patch_size": 16, "image_size": 512},
            },
            "scale_factor": 4,
        },
        processor="SmolVLMProcessor",
        images="SmolVLMImageProcessor",
        image_settings={
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        settings={"image_seq_len": 64},
        tokens={f"token_{i}": token for i, token in enumerate(sorted(TILED))},
    ),
    "mistral3": Family(
        config={},
        processor="PixtralProcessor",
        images="PixtralImageProcessor",
        image_settings={"size": {"longest_edge": 1540}},
        settings={"patch_size": 14, "spatial_merge_size": 2},
        tokens={"a": "[IMG]", "b": "[IMG_BREAK]", "c": "[IMG_END]"},
        markup="[IMG]",
    ),
}


QWEN2_5_VISION = {"hidden_size": 1280, "out_hidden_size": 3584}
FAMILIES |= {
    "minicpmv4_6": Family(
        config={"text_config": {}, "vision_config": {}},
        processor="MiniCPMV4_6Processor",
        images="MiniCPMV4_6ImageProcessor",
        image_settings={},
        tokens={
            **{"image_token": "<unk_image>", "video_token": "<unk_video>"},
            **{"image_start_token": "<image>", "image_end_token": "</image>"},
            **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
            **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
        },
        markup="<unk_image>",
    ),
    "qwen2_5_omni": Family(
        config={"thinker_config": {"vision_config": QWEN2_5_VISION}},
        processor="Qwen2_5OmniProcessor",
        images="Qwen2VLImageProcessor",
        image_settings={"min_pixels": 3136, "max_pixels": 12845056},
        tokens={
            **{"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>"},
            **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
            **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        },
        markup="<|vision_bos|><|IMAGE|><|vision_eos|>",
        audio_markup="<|audio_bos|><|AUDIO|><|audio_eos|>",
        audio_settings={"feature_size": 128, "chunk_length": 300},
    ),
    "qwen3_omni_moe": Family(
        config={
            "thinker_config": {
                "text_config": {"head_dim": 128, "vocab_size": 152064},
                "vision_config": {"out_hidden_size": 2048},
            }
        },
        processor="Qwen3OmniMoeProcessor",
        images="Qwen2VLImageProcessor",
        image_settings=QWEN3_PIXELS,
        tokens={
            **QWEN,
            **{"audio_token": "<|audio_pad|>", "vision_bos_token": "<|vision_start|>"},
            **{"vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>"},
            "audio_eos_token": "<|audio_end|>",
        },
        markup=QWEN_MARKUP,
        audio_markup="<|audio_start|><|audio_pad|><|audio_end|>",
        audio_settings={"feature_size": 128},
    ),
}


class _OtherSettings(PushToHubMixin):
    """The processor of videos or audio, as far as it is saved."""

    _auto_class = None

    def __getattr__(self, name: str) -> None:
        """What a processor asks of it when it begins, which images do not need."""
        if name.startswith("_"):
            raise AttributeError(name)

    def to_dict(self) -> dict[str, Any]:
        return {"video_processor_type": "VideoProcessor", "size": {"longest_edge": 1}}


class _WithoutVideo:
    """No video processor (it needs torchvision, even for the check of its type)."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


def make_processor(name: str) -> Any:
    """The processor of a family."""
    return processor_of(FAMILIES[name])


def processor_of(family: Family) -> Any:
    """A processor as its family's repository has it."""
    kind = _processor_class(family.processor)
    # words for numbers of frames, of videos only
    smolvlm.num2words = smolvlm.num2words or str
    own = type(family.processor, (_WithoutVideo, kind), {})
    parts = {
        "image_processor": _image_class(family.images)(**family.image_settings),
        "tokenizer": make_tokenizer(family),
    }
    for part in ("video_processor", "feature_extractor"):
        if part in kind.get_attributes():
            parts[part] = _OtherSettings()
    if family.audio_settings is not None:
        extractor = transformers.WhisperFeatureExtractor(**family.audio_settings)
        parts["feature_extractor"] = extractor
    template = TEMPLATE.replace("IMAGE", family.markup).replace("AUDIO", family.audio_markup)
    return own(**parts, **family.settings, chat_template=template)


def _processor_class(name: str) -> Any:
    if name != "PixtralProcessor":
        return getattr(transformers, name)
    # it asks for one function of a file that needs torchvision, and another file has it too
    folder = "transformers.models.pixtral"
    plain = import_module(f"{folder}.image_processing_pil_pixtral")
    with mock.patch.dict(sys.modules, {f"{folder}.image_processing_pixtral": plain}):
        return import_module(f"{folder}.processing_pixtral").PixtralProcessor


def make_tokenizer(family: Family) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        TOKENIZER, extra_special_tokens=family.tokens
    )
    tokenizer.chat_template = None  # a processor's own is saved
    return tokenizer


def _image_class(name: str) -> Callable[..., Any]:
    # Pillow's; in transformers 5.0 it has the plain name
    kind: Callable[..., Any] = getattr(transformers, f"{name}Pil", None) or getattr(
        transformers, name
    )
    return kind


def make_config(name: str) -> Any:
    return transformers.AutoConfig.for_model(name, **FAMILIES[name].config)


def save_folder(name: str, folder: Path, *, old: bool = False) -> Any:
    """Save a family's config and processor; returns the processor.

    `old`: as transformers 4 did, with the image processor in `preprocessor_config.json`.
    """
    processor = save_family(name, FAMILIES[name], folder)
    if old:
        path = folder / "processor_config.json"
        values = json.loads(path.read_text())
        images = values.pop("image_processor")
        values.pop("video_processor", None)
        path.write_text(json.dumps(values))
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return processor


def save_family(name: str, family: Family, folder: Path) -> Any:
    """Save the config and the processor of a family; returns the processor."""
    processor = processor_of(family)
    transformers.AutoConfig.for_model(name, **family.config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor
