"""Tiny LLaVA, InternVL and Qwen2-VL of transformers for a build: `make_config`, what does not come from it kept small.

Patches, their tokens, the image token and the vocabulary are those of the build, so any build made with a preset of
these models trains: `llava_1_5`, `internvl_1_5*`, `qwen2_vl`, whatever the tokenizer.
"""

from __future__ import annotations

import math
from typing import Any

import transformers

from balance.errors import ConfigError
from balance.presets import FixedRule, NativeRule, TilesRule, VisionRule
from loaders import StreamingLoader

MODELS = ("llava", "internvl", "qwen2_vl")

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    # of generation alone; by default they are tokens of the real models' vocabularies
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 1}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
"""How a head's 8 frequencies are shared out between frame, row and column."""


def make_config(name: str, loader: StreamingLoader) -> Any:
    """A config of transformers for the images and tokens of a build. ConfigError if they are another model's."""
    rule, text = loader.model.vision, TEXT | {"vocab_size": loader.vocab_size}
    if name == "llava" and isinstance(rule, FixedRule):
        vision: dict[str, Any] = VISION | {"model_type": "clip_vision_model", "image_size": rule.image_size}
        vision |= {"patch_size": rule.image_size // _squares(rule)}
        return transformers.LlavaConfig(
            vision_config=vision, text_config=text | {"model_type": "llama"}, image_token_id=loader.image_token_id
        )
    if name == "internvl" and isinstance(rule, TilesRule):
        square = rule.image_size // _squares(rule)
        vision = VISION | {"image_size": [rule.image_size] * 2, "patch_size": [square] * 2}
        return transformers.InternVLConfig(
            vision_config=vision,
            text_config=text | {"model_type": "qwen2"},
            image_token_id=loader.image_token_id,
            downsample_ratio=math.sqrt(rule.llm_tokens_per_patch) / _squares(rule),
        )
    if name == "qwen2_vl" and isinstance(rule, NativeRule):
        return transformers.Qwen2VLConfig(
            vision_config={
                "depth": 3,
                "embed_dim": 16,
                "num_heads": 1,
                "hidden_size": text["hidden_size"],
                "patch_size": rule.vit_patch_size,
                "spatial_merge_size": rule.merge_size,
                "temporal_patch_size": rule.temporal_patch_size,
            },
            text_config=text | {"rope_parameters": MROPE, "tie_word_embeddings": True},
            image_token_id=loader.image_token_id,
            # no build has films
            video_token_id=loader.vocab_size,
            tie_word_embeddings=True,
        )
    raise ConfigError(f"--model {name}: the build's images are cut as {type(rule).__name__} says; build for this model")


def _squares(rule: VisionRule) -> int:
    """ViT squares along a patch's side; a class token comes on top of them."""
    return math.isqrt(rule.vit_tokens_per_patch - 1)
