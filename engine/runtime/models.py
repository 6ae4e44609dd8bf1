"""Vision-language models of transformers as pipelines take them: `from_transformers`.

For LLaVA, InternVL and Qwen2-VL of transformers 5. The layers hold the model's own modules: no weight is copied, and
`engine.runtime.weights` brings them in and out under transformers' names. Micro-batches are packed without padding
(`loaders.MicroBatch`, or whatever has its fields). Imports nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from balance.errors import ConfigError
from engine.runtime.carries import Batch, LayeredModel, Spec
from engine.runtime.cut_layers import CutLayer
from engine.runtime.language_layers import Positions, language_layers
from engine.runtime.qwen2_vl_layers import qwen2_vl_vision, rotary_positions
from engine.runtime.vision_layers import internvl_vision, llava_vision


def from_transformers(model: Any) -> LayeredModel:
    """A model's layers: patch embedding, vision layers, projector, token embedding, decoder layers, norm and head.

    `model`: a LlavaForConditionalGeneration, InternVLForConditionalGeneration or Qwen2VLForConditionalGeneration.
    Attention is as the model is set: flash attention gets the samples' borders, anything else is computed sample by
    sample. ConfigError for other models.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = _FAMILIES.get(str(kind))
    if family is None or not hasattr(model, "lm_head"):
        raise ConfigError(
            f"{type(model).__name__} (model type {kind!r}): give a ForConditionalGeneration of {', '.join(_FAMILIES)}"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "the model recomputes by itself; call gradient_checkpointing_disable(), the plan says what is"
        )
    if not all(hasattr(layer, "self_attn") for layer in model.model.language_model.layers):
        raise ConfigError(f"text model {model.config.text_config.model_type!r}: its layers have no self_attn to pack")
    layers = [*family.vision(model), *language_layers(model, family.positions(model))]
    # not the layers themselves, which a rank may let go of
    gives = [layer.gives for layer in layers]

    def specs(cut: int, batch: Batch) -> Mapping[str, Spec]:
        return gives[cut - 1](batch)

    return LayeredModel(layers=layers, specs=specs)


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between models."""

    vision: Callable[[Any], list[CutLayer]]
    positions: Callable[[Any], Positions]


def _plain_positions(model: Any) -> Positions:
    return lambda batch: batch.position_ids[None]


def _grid_positions(model: Any) -> Positions:
    image_token_id, merge = int(model.config.image_token_id), int(model.config.vision_config.spatial_merge_size)

    def positions(batch: Batch) -> Tensor:
        rows = rotary_positions(batch.input_ids, batch.cu_seqlens, batch.image_grid_thw, image_token_id, merge)
        return rows[:, None]

    return positions


_FAMILIES = {
    "llava": _Family(llava_vision, _plain_positions),
    "internvl": _Family(internvl_vision, _plain_positions),
    "qwen2_vl": _Family(qwen2_vl_vision, _grid_positions),
}
