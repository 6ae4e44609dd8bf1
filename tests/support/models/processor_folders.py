"""Folders of families without a rule of their own, which go through their processor.

Real sizes for packing, as in `saved_folders`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from support.models.saved_folders import CLIP_PROCESSOR, HALF, Family, clip, save_family, text

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}

PROCESSOR_FAMILIES: dict[str, Family] = {
    "aya_vision": Family(
        config={},
        processor="AyaVisionProcessor",
        images="GotOcr2ImageProcessor",
        image_settings={
            "size": {"height": 364, "width": 364},
            "image_mean": HALF,
            "image_std": HALF,
            "max_patches": 12,
        },
        settings={"patch_size": 14, "img_size": 364, "downsample_factor": 2},
        tokens={
            "a": "<image>",
            "b": "<|START_OF_IMG|>",
            "c": "<|END_OF_IMG|>",
            "d": "<|IMG_PATCH|>",
            "e": "TILE",
            "f": "TILE_GLOBAL",
        },
    ),
    "aria": Family(
        config={},
        processor="AriaProcessor",
        images="AriaImageProcessor",
        image_settings={},
        tokens={"image_token": "<|img|>"},
        markup="<fim_prefix><|img|><fim_suffix>",
    ),
    "granite4_vision": Family(
        config={},
        processor="Granite4VisionProcessor",
        images="LlavaNextImageProcessor",
        image_settings={
            "size": {"shortest_edge": 384},
            "crop_size": {"height": 384, "width": 384},
            "image_grid_pinpoints": [[384, 384 * n] for n in (1, 2, 3)] + [[768, 384], [768, 768]],
        },
        settings={
            "patch_size": 16,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "4/8",
        },
        tokens={"image_token": "<image>"},
    ),
    "granite_docling": Family(
        config={},
        processor="GraniteDoclingProcessor",
        images="GraniteDoclingImageProcessor",
        image_settings={},
        tokens={"image_token": "<image>", "a": "<fake_token_around_image>", "b": "<global-img>"},
    ),
    "lighton_ocr": Family(
        config={},
        processor="LightOnOcrProcessor",
        images="PixtralImageProcessor",
        image_settings={"size": {"longest_edge": 1540}},
        tokens={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        markup="<|image_pad|>",
    ),
    "qianfan_ocr": Family(
        config={},
        processor="QianfanOCRProcessor",
        images="GotOcr2ImageProcessor",
        image_settings={"size": {"height": 448, "width": 448}, "crop_to_patches": True},
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        markup="<image>",
    ),
    "hunyuan_vl": Family(
        config={},
        processor="HunYuanVLProcessor",
        images="HunYuanVLImageProcessor",
        image_settings={},
        tokens={
            "image_token": "<img>",
            "image_start_token": "<start>",
            "image_end_token": "<end>",
            "pad_token": "<pad>",
        },
        markup="<start><img><end>",
    ),
    "llava_next_video": Family(
        config={"text_config": LLAMA, "vision_config": clip()},
        processor="LlavaNextVideoProcessor",
        images="LlavaNextImageProcessor",
        image_settings={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        settings=CLIP_PROCESSOR,
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "exaone4_5": Family(
        config={},
        processor="Exaone4_5_Processor",
        images="Qwen2VLImageProcessor",
        image_settings={},
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        markup="<vision><|image_pad|></vision>",
    ),
    "video_llama_3": Family(
        config={},
        processor="VideoLlama3Processor",
        images="VideoLlama3ImageProcessor",
        image_settings={},
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "lfm3_vl": Family(
        config={},
        processor="Lfm3VlProcessor",
        images="Qwen2VLImageProcessor",
        image_settings={},
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "florence2": Family(
        config={},
        processor="Florence2Processor",
        images="CLIPImageProcessor",
        image_settings={},
        tokens={"image_token": "<image>"},
    ),
    "gemma3n": Family(
        config={},
        processor="Gemma3nProcessor",
        images="SiglipImageProcessor",
        image_settings={},
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        markup="<image_soft_token>",
    ),
    "cosmos3_edge": Family(
        config={},
        processor="Cosmos3EdgeProcessor",
        images="Cosmos3EdgeImageProcessor",
        image_settings={},
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        markup="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "cohere_compass": Family(
        config={},
        processor="CohereCompassProcessor",
        images="CohereCompassImageProcessor",
        image_settings={},
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        markup="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "glm5_next": Family(
        config={},
        processor="Glm5NextProcessor",
        images="Glm5NextImageProcessor",
        image_settings={},
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        markup="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "hyperclovax_vision_v2": Family(
        config={},
        processor="HyperCLOVAXVisionV2Processor",
        images="Qwen2VLImageProcessor",
        image_settings={},
        tokens={"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
        markup="<|IMAGE_PAD|>",
    ),
    "dots3_note": Family(
        config={},
        processor="Dots3NoteProcessor",
        images="Qwen2VLImageProcessor",
        image_settings={},
        tokens={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
        markup="<|img|><|imgpad|><|endofimg|>",
    ),
}


TINY_SIDE, TINY_PATCH = 28, 7
_TINY_TEXT = {
    **text(32, 48, 2, 4, 2, head_dim=8, max_position_embeddings=2048),
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_TINY_VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": TINY_SIDE, "patch_size": TINY_PATCH},
}
TINY: dict[str, Family] = {
    "aya_vision": replace(
        PROCESSOR_FAMILIES["aya_vision"],
        config={
            "vision_config": {"model_type": "siglip_vision_model", **_TINY_VISION},
            "text_config": {"model_type": "cohere2", **_TINY_TEXT, "sliding_window": 64},
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
        },
        image_settings={"size": {"height": TINY_SIDE, "width": TINY_SIDE}, "max_patches": 3},
        settings={"patch_size": TINY_PATCH, "img_size": TINY_SIDE, "downsample_factor": 2},
    ),
    "lighton_ocr": replace(
        PROCESSOR_FAMILIES["lighton_ocr"],
        config={
            "vision_config": {"model_type": "pixtral", **_TINY_VISION, "head_dim": 8},
            "text_config": {"model_type": "qwen3", **_TINY_TEXT},
            "spatial_merge_size": 2,
        },
        image_settings={"size": {"longest_edge": 56}},
        settings={"patch_size": TINY_PATCH, "spatial_merge_size": 2},
    ),
    "llava_next_video": replace(
        PROCESSOR_FAMILIES["llava_next_video"],
        config={
            "vision_config": {"model_type": "clip_vision_model", **_TINY_VISION},
            "text_config": {"model_type": "llama", **_TINY_TEXT},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        image_settings={
            "size": {"shortest_edge": TINY_SIDE},
            "crop_size": {"height": TINY_SIDE, "width": TINY_SIDE},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        settings={**CLIP_PROCESSOR, "patch_size": TINY_PATCH},
    ),
}
"""Small sizes, for models with random weights."""


def save_processor_folder(name: str, folder: Path, family: Family | None = None) -> Any:
    """Save a family's config and processor, whose image tokens agree; returns the processor."""
    family = family or PROCESSOR_FAMILIES[name]
    processor = save_family(name, family, folder)
    saved = transformers.AutoConfig.for_model(name, **family.config)
    saved.get_text_config().vocab_size = len(processor.tokenizer)
    for key in ("image_token_id", "image_token_index"):
        if hasattr(saved, key):
            setattr(saved, key, processor.image_token_id)
    saved.save_pretrained(folder)
    return processor
