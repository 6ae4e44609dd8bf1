"""LLaVA, InternVL and Qwen2-VL of transformers for a build: `read_model`, `write_model`; tiny ones:
`make_config`.

Of a tiny one, patches, their tokens, the image token and the vocabulary are those of the build, so
any build made with a preset of these models trains: `llava_1_5`, `internvl_1_5*`, `qwen2_vl`,
whatever the tokenizer; the rest is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from balance.errors import ConfigError, DataError, first_line
from balance.presets import VisionRule
from loaders import StreamingLoader

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
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
"""How a head's 8 frequencies are shared out between frame, row and column."""


def read_model(name: str, given: Path | None, loader: StreamingLoader) -> Any:
    """The model, on the CPU: tiny, of a `config.json`, or of a folder with weights.

    ConfigError if it cannot be read, lacks weights, or is not of the build.
    """
    auto = transformers.AutoModelForImageTextToText
    lacking: list[str] = []
    try:
        if given is None:
            model = auto.from_config(make_config(name, loader))
        elif given.is_dir():
            options = {
                "local_files_only": True,
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,
            }
            with _quiet():
                model, found = auto.from_pretrained(given, dtype=torch.float32, **options)
            lacking = sorted(
                [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
            )
        else:
            model = auto.from_config(
                transformers.AutoConfig.from_pretrained(given, local_files_only=True)
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{given or name}: {first_line(error)}") from error
    if lacking:
        raise ConfigError(
            f"{given} lacks {len(lacking)} weights that its config.json asks for, or has them in another shape, as "
            f"{lacking[0]}: give a folder that has all, or the config.json for random ones"
        )
    _check_fits(model, name, given, loader)
    return model.train()


def _check_fits(model: Any, name: str, given: Path | None, loader: StreamingLoader) -> None:
    """ConfigError unless a model takes the images and tokens of a build."""
    config, num_tokens = model.config, model.get_input_embeddings().num_embeddings
    if config.model_type != name:
        raise ConfigError(f"{given} is a model of type {config.model_type}, not {name}")
    if config.image_token_id != loader.image_token_id or num_tokens < loader.vocab_size:
        raise ConfigError(
            f"{given} has {num_tokens} tokens, image token {config.image_token_id}; the build {loader.vocab_size}, "
            f"image token {loader.image_token_id}: build with the model's own tokenizer"
        )
    takes = _IMAGES[name](config)
    cut = {key: getattr(loader.model.vision, key) for key in takes}
    if takes != cut:
        own, other = (
            ", ".join(f"{key} {value}" for key, value in each.items()) for each in (takes, cut)
        )
        raise ConfigError(
            f"{given} takes images of {own}; the build, for {loader.model.name}, has {other}: build with a preset of "
            "this model"
        )


def write_model(model: Any, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model with other weights, as `save_pretrained` does. DataError if that cannot be."""
    try:
        model.save_pretrained(folder, state_dict=state)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder}: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a table of what does not fit on stderr, for that is told in a line."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def make_config(name: str, loader: StreamingLoader) -> Any:
    """The config of a tiny model for the tokens of a build and its images, which must be cut for
    it.
    """
    rule: Any = loader.model.vision
    text = TEXT | {"vocab_size": loader.vocab_size}
    if name == "llava":
        vision: dict[str, Any] = VISION | {
            "model_type": "clip_vision_model",
            "image_size": rule.image_size,
        }
        vision |= {"patch_size": rule.image_size // _squares(rule)}
        return transformers.LlavaConfig(
            vision_config=vision,
            text_config=text | {"model_type": "llama"},
            image_token_id=loader.image_token_id,
        )
    if name == "internvl":
        square = rule.image_size // _squares(rule)
        vision = VISION | {"image_size": [rule.image_size] * 2, "patch_size": [square] * 2}
        return transformers.InternVLConfig(
            vision_config=vision,
            text_config=text | {"model_type": "qwen2"},
            image_token_id=loader.image_token_id,
            downsample_ratio=math.sqrt(rule.llm_tokens_per_patch) / _squares(rule),
        )
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


def _squares(rule: VisionRule) -> int:
    """ViT squares along a patch's side; a class token comes on top of them."""
    return math.isqrt(rule.vit_tokens_per_patch - 1)


def _llava_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    # the class token, which SigLIP has none of, is one too many unless all are taken
    extra = (vision.model_type == "clip_vision_model") - (
        config.vision_feature_select_strategy == "default"
    )
    squares = (vision.image_size // vision.patch_size) ** 2
    return {"image_size": vision.image_size, "llm_tokens_per_patch": squares + extra}


def _internvl_images(config: Any) -> dict[str, Any]:
    (height, width), (rows, columns) = map(
        _pair, (config.vision_config.image_size, config.vision_config.patch_size)
    )
    tokens = (height // rows) * (width // columns) * config.downsample_ratio**2
    return {
        "image_size": height if height == width else (height, width),
        "llm_tokens_per_patch": round(tokens),
    }


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _qwen2_vl_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "vit_patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }


_IMAGES = {"llava": _llava_images, "internvl": _internvl_images, "qwen2_vl": _qwen2_vl_images}
"""What a build must say of images, as its vision rule names it, by a model's config."""
