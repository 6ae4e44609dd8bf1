"""The model of `gpu_training.py load`: Qwen3-VL of transformers, weights drawn."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from gpu.device import Bench
from isobatch.models.presets import ModelPreset

POSITIONS = 2304
"""Learned positions of the encoder, 48 by 48."""
DEEPSTACK = (5, 11, 17)
"""Encoder layers whose features the LLM's first layers get too."""
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
MROPE = [24, 20, 20]
"""Pairs of a head's numbers that time, row and column rotate; of 64."""


def make_vlm(preset: ModelPreset, image_token_id: int, bench: Bench) -> Any:
    """On the bench's device in its dtype; a tiny one has few layers of few numbers."""
    vit, llm = preset.dimensions
    vision = {
        "depth": vit.num_layers,
        "hidden_size": vit.hidden_size,
        "num_heads": vit.num_heads,
        "intermediate_size": vit.ffn_size,
        "out_hidden_size": llm.hidden_size,
        "patch_size": 16,
        "num_position_embeddings": POSITIONS,
        "deepstack_visual_indexes": list(DEEPSTACK),
    }
    text = {
        "num_hidden_layers": llm.num_layers,
        "hidden_size": llm.hidden_size,
        "num_attention_heads": llm.num_heads,
        "num_key_value_heads": llm.num_kv_heads,
        "head_dim": llm.head_size,
        "intermediate_size": llm.ffn_size,
        "vocab_size": llm.vocab_size,
        "rope_parameters": ROPE | {"mrope_section": MROPE},
        "tie_word_embeddings": True,
    }
    if bench.tiny:
        vision |= {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
        vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]}
        text |= {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
        text |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
        text |= {"vocab_size": 4096, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image_token_id,
        video_token_id=image_token_id + 1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = Qwen3VLForConditionalGeneration(config)
    return model.to(bench.dtype)
