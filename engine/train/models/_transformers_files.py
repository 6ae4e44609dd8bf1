"""Models of transformers, read for a build and written.

Without a config, a tiny model is made with the build's image patches, image token and vocabulary.
So any build with a preset of these models trains (`llava_1_5`, `internvl_1_5*`, `qwen2_vl`).
transformers is an optional dependency that takes seconds to import: it is imported on demand.
"""

import importlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.engine.runtime.models.vision_layers import as_pair
from isobatch.engine.train.models.model_weights import (
    INDEX,
    WEIGHTS,
    LazyWeights,
    reading,
    weights_of,
)
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
EARLIER = (
    f"{WEIGHTS}*",
    "model-?????-of-?????.safetensors",
    "adapter_config.json",
    "adapter_model.*",
)
"""Files of an earlier export; transformers would load adapters on their base, not the model."""
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
"""Division of a head's 8 frequencies between frame, row and column."""


def read_model(name: str, path: Path | None, source: StepSource) -> tuple[Any, LazyWeights]:
    """The model on the meta device, and its weights: tiny, of a `config.json`, or a folder's.

    Random ones follow from torch's seed. ConfigError.
    """
    if path is None and name not in TINY_KINDS:
        raise ConfigError(
            f"--model {name} needs --config: a config.json of transformers or a folder with weights"
        )
    if path is not None and not path.exists():
        raise ConfigError(f"--config {path}: no such file or folder")
    transformers, accelerate = _import(name, "transformers"), _import(name, "accelerate")
    folder = path if path is not None and path.is_dir() else None
    with reading(path or name):
        if path is None:
            config = make_config(name, source)
        else:
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        with accelerate.init_empty_weights():  # buffers, which no file has, keep their values
            model = transformers.AutoModelForImageTextToText.from_config(
                config, dtype=torch.float32
            )
        model.tie_weights()
        if folder is not None and (folder / "generation_config.json").exists():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    weights = LazyWeights(model, folder, torch.initial_seed())
    _check_fits(model, name, path, source)
    return model.train(), weights


def write_model(model: Any, folder: Path, shards: Iterable[dict[str, torch.Tensor]]) -> None:
    """Write a model as `save_pretrained` does, each shard of its weights when it comes.

    DataError, after the last shard, if it fails: then the folder's files are as they were.
    """
    waiting = iter(shards)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as unfinished:
            parts = []
            for number, shard in enumerate(waiting):
                parts.append(Path(unfinished) / str(number))
                model.save_pretrained(parts[-1], state_dict=shard)
                shard.clear()  # its memory is for the next one
            _put_together(parts, folder)
    except (OSError, importlib.import_module("safetensors").SafetensorError) as error:
        deque(waiting, maxlen=0)  # other ranks send them
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{folder}: {reason}") from None


def _put_together(parts: Sequence[Path], folder: Path) -> None:
    """Make one model of folders that have some weights each, over an earlier one."""
    names = [
        f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number in range(len(parts))
    ]
    names = names if len(parts) > 1 else [WEIGHTS]
    for pattern in EARLIER:
        for earlier in folder.glob(pattern):
            earlier.unlink()
    weight_map: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        weight_map |= dict.fromkeys((weight.key for weight in weights_of(part / WEIGHTS)), name)
        for file in part.iterdir():
            file.replace(folder / (name if file.name == WEIGHTS else file.name))
    if len(parts) > 1:
        size = sum((folder / name).stat().st_size for name in names)
        table = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def make_config(name: str, source: StepSource) -> Any:
    """Config of a tiny model for the tokens and images of a build, which must fit the model."""
    transformers = _import(name, "transformers")
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


def _import(name: str, library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"--model {name} needs {library} ({error}): pip install transformers accelerate"
        ) from error


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
