"""transformers' InternVL, as small as the preset `tiny`, for the examples that train on a CPU."""

from __future__ import annotations

import torch
from tiny_vlm import PATCH_SIDE, TOKENS_PER_PATCH, VIT_PATCH_SIDE
from transformers import InternVLConfig, InternVLForConditionalGeneration

from isobatch import StreamingLoader


def make_internvl(loader: StreamingLoader, *, seed: int = 0) -> InternVLForConditionalGeneration:
    """A model with random weights for a build of the preset `tiny`; else call `from_pretrained`."""
    if getattr(loader.model.vision, "image_size", None) != PATCH_SIDE:
        raise SystemExit(f"the build is for {loader.model.name}; build it with --model tiny")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = InternVLConfig(
        vision_config={
            "image_size": [PATCH_SIDE, PATCH_SIDE],
            "patch_size": [VIT_PATCH_SIDE, VIT_PATCH_SIDE],
            "hidden_size": 32,
            "intermediate_size": 128,
            # droppable parts would make a step depend on more than its samples
            "hidden_dropout_prob": 0.0,
            "use_mask_token": False,
            **sizes,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": loader.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_key_value_heads": 4,
            "pad_token_id": None,
            **sizes,
        },
        image_token_id=loader.image_token_id,
        image_seq_length=TOKENS_PER_PATCH,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)  # the same weights on all ranks
    return InternVLForConditionalGeneration(config)
