"""What differs between families of models, `ModelFamily`, and what most share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch

Arguments = dict[str, Any]
"""Keyword arguments of a model."""


@dataclass(frozen=True, slots=True)
class BlankImage:
    """The smallest image of a model."""

    rows: int
    """Rows of `pixel_values`."""
    tokens: int
    """LLM tokens."""
    size: tuple[int, int]
    """Height and width in pixels."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of ViT patches, at native resolution."""


def pixel_arguments(*fields: str) -> Callable[[MicroBatch, Any], Arguments]:
    """`ModelFamily.images` of a model that takes these fields of `MicroBatch` as they are."""
    names = "pixel_values", *fields
    return lambda batch, config: {name: getattr(batch, name) for name in names}


pixels_alone = pixel_arguments()
"""`pixel_values` as they are, and nothing else."""


def as_it_is(batch: MicroBatch, config: Any) -> MicroBatch:
    """No change."""
    return batch


def text_positions(batch: MicroBatch, config: Any) -> Tensor:
    """Positions from 0 in each sample: (1, tokens)."""
    return batch.position_ids[None]


def causal(batch: MicroBatch, config: Any) -> Arguments:
    """No mask: with positions that begin again, transformers' models keep samples apart."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What differs between models; each rule takes the model's config."""

    blank: Callable[[Any], BlankImage]
    images: Callable[[MicroBatch, Any], Arguments] = pixels_alone
    """Arguments made of a micro-batch's images, of which there is at least one."""
    one_kind: Callable[[MicroBatch, Any], MicroBatch] = as_it_is
    """The micro-batch whose images and videos the model encodes in one pass, if it can."""
    positions: Callable[[MicroBatch, Any], Tensor] = text_positions
    """`position_ids`."""
    masks: Callable[[MicroBatch, Any], Arguments] = causal
    """Arguments that say which tokens see which."""
    blank_clip: int | None = None
    """Frames of the smallest clip of audio, one LLM token; None: the model takes no audio."""
    is_native: bool = False
    """Whether `pixel_values` have a row per ViT token, and images a grid (`image_grid_thw`)."""


def image_grids(batch: MicroBatch) -> Tensor:
    """`image_grid_thw` of a micro-batch at native resolution."""
    if batch.image_grid_thw is None:
        raise ConfigError("the micro-batch has no image_grid_thw; build with this model's preset")
    return batch.image_grid_thw


def vision_tokens(batch: MicroBatch, config: Any) -> Tensor:
    """Whether each token is one that features of images or videos fill, bool, (tokens,)."""
    tokens = [config.image_token_id]
    if batch.video_seconds is not None:
        tokens.append(getattr(config, "video_token_id", tokens[0]))
    return torch.isin(batch.input_ids, torch.tensor(tokens, device=batch.input_ids.device))


def config_of_text(config: Any) -> Any:
    """The config of a model's language model."""
    return getattr(config, "text_config", config)


def crop_sides(config: Any) -> tuple[int, int]:
    """Side of an image patch in pixels and in ViT patches."""
    vision = config.vision_config
    # some configs give sides as (height, width)
    pixels, vit_patch = (
        value if isinstance(value, int) else value[0]
        for value in (vision.image_size, vision.patch_size)
    )
    return pixels, pixels // vit_patch
