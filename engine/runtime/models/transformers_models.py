"""Vision-language models of transformers as pipelines take them: `from_transformers`.

For LLaVA, InternVL and Qwen2-VL of transformers 5. The layers hold the model's own modules: no
weight is copied, and `engine.runtime.models.weights` brings them in and out under transformers'
names. Micro-batches are packed without padding (`loaders.MicroBatch`, or whatever has its fields).
Imports nothing of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from balance.errors import ConfigError, first_line
from engine.runtime.models.language_layers import Positions, language_layers
from engine.runtime.models.layer_specs import CutLayer
from engine.runtime.models.qwen2_vl_layers import qwen2_vl_vision, rotary_positions
from engine.runtime.models.vision_layers import internvl_vision, llava_vision
from engine.runtime.stage_io import Batch, LayerStack, TensorSpec

TEXT_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text")
"""Model types of language models that are nothing but embedding, decoder layers, norm and head.
Others scale what goes in between, add a loss of their own or mask otherwise, and would be computed
wrongly without a word.
"""


def from_transformers(model: Any) -> LayerStack:
    """A model's layers: patch embedding, vision layers, projector, token embedding, decoder layers,
    norm and head.

    `model`: a LlavaForConditionalGeneration, InternVLForConditionalGeneration or
    Qwen2VLForConditionalGeneration. Attention is as the model is set: flash attention gets the
    samples' borders, anything else is computed sample by sample. ConfigError for other models, and
    for those that something else than the pipeline moves or recomputes.
    """
    family = _family(model)
    _check_state(model)
    try:
        layers = [*family.vision(model), *language_layers(model, family.positions(model))]
    except AttributeError as error:
        raise ConfigError(
            f"{type(model).__name__} of transformers {_transformers_version()}: {first_line(error)}; only the modules "
            "of transformers 5 are known here: install that"
        ) from error
    # not the layers themselves, which a rank may let go of
    gives = [layer.gives for layer in layers]

    def specs(cut: int, batch: Batch) -> Mapping[str, TensorSpec]:
        return gives[cut - 1](batch)

    return LayerStack(layers=layers, specs=specs)


def _family(model: Any) -> _Family:
    """How a model is cut. ConfigError if it is none that is known."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = _FAMILIES.get(str(kind))
    if family is None or not hasattr(model, "lm_head"):
        raise ConfigError(
            f"{type(model).__name__} (model type {kind!r}): give a ForConditionalGeneration of {', '.join(_FAMILIES)}"
        )
    text = model.config.text_config.model_type
    if text not in TEXT_MODELS:
        raise ConfigError(
            f"{type(model).__name__} with a text model {text!r}: give one of {', '.join(TEXT_MODELS)}"
        )
    return family


def _check_state(model: Any) -> None:
    """ConfigError if a model was set up so that a pipeline cannot train it."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "the model recomputes by itself; call gradient_checkpointing_disable(), the plan says what is"
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ConfigError(
            "the model was loaded with device_map, which moves its layers: load it without"
        )
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            raise ConfigError(
                f"{name} is quantized ({weight.dtype}); load the model with dtype=torch.float32"
            )
        if weight.requires_grad and weight.dtype == torch.float16:
            raise ConfigError(
                f"{name} is trained in float16, whose gradients vanish for want of range; load the model with "
                "dtype=torch.float32 and give PipelineOptions(autocast=torch.bfloat16), or freeze it"
            )


def _transformers_version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "(not imported)"))


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between models."""

    vision: Callable[[Any], list[CutLayer]]
    positions: Callable[[Any], Positions]


def _plain_positions(model: Any) -> Positions:
    return lambda batch: batch.position_ids[None]


def _grid_positions(model: Any) -> Positions:
    image_token_id, merge = (
        int(model.config.image_token_id),
        int(model.config.vision_config.spatial_merge_size),
    )

    def positions(batch: Batch) -> Tensor:
        rows = rotary_positions(
            batch.input_ids, batch.cu_seqlens, batch.image_grid_thw, image_token_id, merge
        )
        return rows[:, None]

    return positions


_FAMILIES = {
    "llava": _Family(llava_vision, _plain_positions),
    "internvl": _Family(internvl_vision, _plain_positions),
    "qwen2_vl": _Family(qwen2_vl_vision, _grid_positions),
}
