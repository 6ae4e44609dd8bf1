"""A small InternVL of transformers, and attention that keeps samples apart without masks.

All methods train this model with this attention: `scaled_dot_product_attention` of each sample's
own tokens, which is what flash attention with variable lengths does, for rows of several samples
(packed) and for rows with padding at their ends alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, InternVLConfig, InternVLForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface

from online_runs.records import SIDE, TILE_TOKENS
from support.models.saved_folders import IMAGENET, Family, save_family

VISION = {
    "image_size": [SIDE, SIDE],
    "patch_size": [14, 14],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "use_mask_token": False,
}
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
}
ATTENTION = "by_sample"


def save_model(folder: Path) -> None:
    """Config, processor and tokenizer, without weights."""
    family = Family(
        config={
            "text_config": TEXT,
            "vision_config": VISION,
            "image_seq_length": TILE_TOKENS,
            "downsample_ratio": 0.5,
            "tie_word_embeddings": False,
        },
        processor="InternVLProcessor",
        images="GotOcr2ImageProcessor",
        image_settings={"size": {"height": SIDE, "width": SIDE}, **IMAGENET},
        settings={"image_seq_length": TILE_TOKENS},
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        markup="<IMG_CONTEXT>",
    )
    processor = save_family("internvl", family, folder)
    config = InternVLConfig.from_pretrained(folder)
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_id = processor.image_token_id
    config.save_pretrained(folder)


def open_model(folder: Path) -> InternVLForConditionalGeneration:
    """The model with random weights, the same on all ranks."""
    AttentionInterface.register(ATTENTION, by_sample)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
    torch.manual_seed(0)
    config = InternVLConfig.from_pretrained(folder)
    chosen = {"text_config": ATTENTION, "vision_config": "sdpa", "": "sdpa"}
    return InternVLForConditionalGeneration._from_config(config, attn_implementation=chosen)


def by_sample(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of each span of each row; `options["spans"]` are their lengths.

    query, key, value (rows, heads, tokens, size) -> (rows, tokens, heads, size).
    """
    out = torch.zeros_like(query.transpose(1, 2))
    made = []
    for row, lengths in enumerate(options["spans"]):
        start = 0
        for length in lengths:
            own = [part[row : row + 1, :, start : start + length] for part in (query, key, value)]
            found = scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
            made.append(found[0].transpose(0, 1))
            start += length
        if start < query.shape[2]:
            made.append(out[row, start:])
    return torch.cat(made).view_as(out), None
