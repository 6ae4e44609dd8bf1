"""Models of transformers, read for a build and written.

Without a config, a tiny model is made with the build's image patches, image token and vocabulary.
So any build with a preset of these models trains (`llava_1_5`, `internvl_1_5*`, `qwen2_vl`).
transformers is an optional dependency that takes seconds to import: it is imported on demand.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.engine.runtime.models.vision_layers import as_pair
from isobatch.engine.train.step_source import StepSource

TINY_KINDS = ("llava", "internvl", "qwen2_vl")
"""Models that can be made without a config."""
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    # for generation only; the defaults are tokens of the real models' vocabularies
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
"""Division of a head's 8 frequencies between frame, row and column."""


def read_model(name: str, path: Path | None, source: StepSource) -> Any:
    """The model on the CPU: tiny, of a `config.json` or of a folder with weights. ConfigError."""
    if path is None and name not in TINY_KINDS:
        raise ConfigError(
            f"--model {name} needs --config: a config.json of transformers or a folder with weights"
        )
    transformers = _import_transformers(name)
    errors = (OSError, ValueError, RuntimeError, _safetensors_error())
    missing: list[str] = []
    try:
        if path is None:
            model = transformers.AutoModelForImageTextToText.from_config(make_config(name, source))
        elif path.is_dir():
            model, missing = _read_weights(transformers, path)
        else:
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            model = transformers.AutoModelForImageTextToText.from_config(config)
    except errors as error:
        raise ConfigError(f"{path or name}: {first_line(error)}") from error
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} weights that its config.json asks for (or their shapes"
            f" differ), as {missing[0]}: give a folder with all, or config.json for random ones"
        )
    _check_fits(model, name, path, source)
    return model.train()


def write_model(model: Any, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model with other weights, as `save_pretrained` does. DataError if it fails."""
    try:
        model.save_pretrained(folder, state_dict=state)
    except (OSError, _safetensors_error()) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{folder}: {reason}") from None


def make_config(name: str, source: StepSource) -> Any:
    """Config of a tiny model for the tokens and images of a build, which must fit the model."""
    transformers = _import_transformers(name)
    rule: Any = source.model.vision
    text, video = TEXT | {"vocab_size": source.vocab_size}, source.video_token_id
    if name == "qwen2_vl":
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
            image_token_id=source.image_token_id,
            # of a build without videos, a token that no text has
            video_token_id=source.vocab_size if video is None else video,
            tie_word_embeddings=True,
        )
    # ViT patches along a tile's side, without the class token
    side = math.isqrt(rule.vit_tokens_per_patch - 1)
    size, patch = rule.image_size, rule.image_size // side
    if name == "llava":
        sizes = {"model_type": "clip_vision_model", "image_size": size, "patch_size": patch}
        return transformers.LlavaConfig(
            vision_config=VISION | sizes,
            text_config=text | {"model_type": "llama"},
            image_token_id=source.image_token_id,
        )
    return transformers.InternVLConfig(
        vision_config=VISION | {"image_size": [size] * 2, "patch_size": [patch] * 2},
        text_config=text | {"model_type": "qwen2"},
        image_token_id=source.image_token_id,
        downsample_ratio=math.sqrt(rule.llm_tokens_per_patch) / side,
    )


def _import_transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"--model {name} needs transformers ({error}): pip install transformers accelerate"
        ) from error


def _safetensors_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("safetensors").SafetensorError
    return error


def _read_weights(transformers: Any, folder: Path) -> tuple[Any, list[str]]:
    """(model, weights that are missing or have another shape). ConfigError if they are a pickle."""
    pickles = sorted(folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        advice = "load them where you trust them, and save_pretrained writes safetensors"
        raise ConfigError(
            f"{folder}: {pickles[0].name} is a pickle, which could run code; {advice}"
        )
    # transformers prints a table of what does not fit: our error says it in one line
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model, info = transformers.AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,  # without it, transformers would ask on a terminal
            use_safetensors=True,  # the other kind of file is a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    return model, sorted([*info["missing_keys"], *mismatched])


def _check_fits(model: Any, name: str, path: Path | None, source: StepSource) -> None:
    """ConfigError unless a model takes the images and tokens of a build."""
    config, num_tokens = model.config, model.get_input_embeddings().num_embeddings
    if config.model_type != name:
        raise ConfigError(f"{path} is a model of type {config.model_type}, not {name}")
    if config.image_token_id != source.image_token_id or num_tokens < source.vocab_size:
        raise ConfigError(
            f"{path} has {num_tokens} tokens, image token {config.image_token_id}; the build has"
            f" {source.vocab_size} and {source.image_token_id}: use the model's own tokenizer"
        )
    video = getattr(config, "video_token_id", None)
    if None not in (video, source.video_token_id) and video != source.video_token_id:
        raise ConfigError(
            f"{path} has the video token {video}; the build has {source.video_token_id}: use"
            " the model's own tokenizer"
        )
    takes = _IMAGES[name](config)
    cut = {key: getattr(source.model.vision, key) for key in takes}
    if takes != cut:
        needed, built = (
            ", ".join(f"{key} {value}" for key, value in sizes.items()) for sizes in (takes, cut)
        )
        raise ConfigError(
            f"{path} takes images of {needed}; the build, for {source.model.name}, has {built}:"
            " build with a preset of this model"
        )


def _llava_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    # the class token, which SigLIP lacks, counts unless it is dropped
    extra = (vision.model_type == "clip_vision_model") - (
        config.vision_feature_select_strategy == "default"
    )
    tokens = (vision.image_size // vision.patch_size) ** 2 + extra
    return {"image_size": vision.image_size, "llm_tokens_per_patch": tokens}


def _internvl_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    (height, width), patch = as_pair(vision.image_size), as_pair(vision.patch_size)
    tokens = (height // patch[0]) * (width // patch[1]) * config.downsample_ratio**2
    size = height if height == width else (height, width)
    return {"image_size": size, "llm_tokens_per_patch": round(tokens)}


def _qwen_vl_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "vit_patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }


def _anyres_images(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    limit = getattr(config, "vision_aspect_ratio", None)
    return {
        "image_size": vision.image_size,
        "vit_patch_size": vision.patch_size,
        "grid_pinpoints": tuple((height, width) for height, width in config.image_grid_pinpoints),
        "anyres_max": None if limit is None else int(limit.removeprefix("anyres_max_")),
    }


def _gemma3_images(config: Any) -> dict[str, Any]:
    return {
        "image_size": config.vision_config.image_size,
        "llm_tokens_per_patch": config.mm_tokens_per_image,
        "crop": False,
    }


_IMAGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llava": _llava_images,
    "internvl": _internvl_images,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _qwen_vl_images),
    **dict.fromkeys(("llava_next", "llava_onevision"), _anyres_images),
    "gemma3": _gemma3_images,
}
"""Fields that a build's vision rule must have, from a model's config."""
