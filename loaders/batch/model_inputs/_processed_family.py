"""Models whose images went through their own processor (`MicroBatch.processed`).

What the model takes is what the processor gave. That packed samples stay apart is known of models
around a language model that is causal everywhere and counts positions from 0. For some others
`encode=` and `measure="own"` give arrays that are those of the model's own rule: Qwen-VL, GLM-V,
Gemma 3 and PaliGemma.
"""

from dataclasses import replace
from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import (
    BlankImage,
    ModelFamily,
    config_of_text,
    crop_sides,
)

_CAUSAL = (
    *("aria_text", "cohere", "cohere2", "gemma", "gemma2", "granite", "llama", "mistral"),
    *("ministral3", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
"""Language models of transformers that tell packed samples apart by `position_ids`."""


_NATIVE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm4v_moe", "glm46v"),
)
_OF_ONE_SIZE = ("gemma3", "paligemma")
"""Models whose processors give `pixel_values` as `MicroBatch` has them, the first with grids."""


def as_own_rule(batch: MicroBatch, config: Any) -> MicroBatch:
    """`batch` with the arrays of `encode=` in the fields that the model's rule fills.

    ConfigError for arrays next to those of images.
    """
    kind = getattr(config, "model_type", None)
    is_native = kind in _NATIVE
    is_known = is_native or kind in _OF_ONE_SIZE
    is_of_build = batch.blank_tokens or len(batch.image_sizes)
    if batch.processed is None or is_of_build or not is_known:
        return batch
    if wrong := sorted(batch.processed.keys() - {"pixel_values", "image_grid_thw"}):
        raise ConfigError(
            f"{wrong[0]} of encode=: model_inputs takes images alone for {kind}; leave it out, or "
            "give to_inputs="
        )
    vision = config.vision_config
    side = 0 if is_native else crop_sides(config)[0]
    row = (3 * vision.temporal_patch_size * vision.patch_size**2,) if is_native else (3, side, side)
    pixels = batch.processed.get("pixel_values", batch.pixel_values.new_empty(0, *row))
    grids = batch.processed.get("image_grid_thw", batch.image_sizes.new_empty(0, 3))
    sizes = batch.image_sizes.new_ones(len(grids if is_native else pixels), 2)
    batch = replace(batch, processed=None, pixel_values=pixels, image_sizes=sizes)
    return replace(batch, image_grid_thw=grids) if is_native else batch


def processed_family(batch: MicroBatch, config: Any) -> ModelFamily:
    """The family of a micro-batch; ConfigError where samples might see each other."""
    text = config_of_text(config)
    kind = getattr(text, "model_type", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if kind not in _CAUSAL or "mrope_section" in rope:
        raise ConfigError(
            f"{config.model_type} around {kind}: model_inputs does not know how it keeps packed"
            " samples apart; call it with MicroBatch.processed, and positions and masks of its own"
        )
    blank = BlankImage(rows=0, tokens=batch.blank_tokens, size=(1, 1))
    return ModelFamily(
        blank=lambda _: blank, images=lambda micro_batch, _: dict(micro_batch.processed or {})
    )
