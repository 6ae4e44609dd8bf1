"""Vision-language models of transformers as layer stacks: `from_transformers`.

For LLaVA, InternVL and Qwen2-VL of transformers 5, which is not imported. The layers hold the
model's own modules: no weight is copied, and `engine.runtime.models.weights` gathers them by name.
Micro-batches are packed without padding (`loaders.MicroBatch`, or any object with its fields).
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from balance.errors import ConfigError, first_line
from engine.runtime.models.language_layers import Positions, language_layers
from engine.runtime.models.qwen2_vl_layers import qwen2_vl_vision, rotary_positions
from engine.runtime.models.vision_layers import internvl_vision, llava_vision
from engine.runtime.stage_io import Batch, LayerStack, TensorSpec

TEXT_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text")
"""Model types of language models that consist of embedding, decoder layers, norm and head only.
Others scale between these, add a loss or mask otherwise: they would be computed wrongly, silently.
"""
_VISION = {"llava": llava_vision, "internvl": internvl_vision, "qwen2_vl": qwen2_vl_vision}
"""Vision half of a model, by model type."""


def from_transformers(model: Any) -> LayerStack:
    """A model's layers: patch embedding, vision layers, projector, embedding, decoder layers, head.

    `model`: a LlavaForConditionalGeneration, InternVLForConditionalGeneration or
    Qwen2VLForConditionalGeneration. Attention stays as the model is set: flash attention gets the
    samples' borders, anything else is computed per sample. ConfigError for other models, and if
    something other than the pipeline moves or recomputes its layers.
    """
    _check_family(model)
    _check_state(model)
    try:
        vision = _VISION[model.config.model_type](model)
        layers = [*vision, *language_layers(model, _positions(model))]
    except AttributeError as error:
        version = getattr(sys.modules.get("transformers"), "__version__", "(not imported)")
        raise ConfigError(
            f"{type(model).__name__} of transformers {version}: {first_line(error)}; only the"
            " modules of transformers 5 are supported: install that"
        ) from error
    # not the layers themselves, which a rank may release
    output_specs = [layer.output_specs for layer in layers]

    def specs(cut: int, batch: Batch) -> Mapping[str, TensorSpec]:
        return output_specs[cut - 1](batch)

    return LayerStack(layers=layers, specs=specs)


def _check_family(model: Any) -> None:
    """ConfigError if a model is of no family that is supported."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _VISION or not hasattr(model, "lm_head"):
        raise ConfigError(
            f"{type(model).__name__} (model type {kind!r}): give a ForConditionalGeneration of"
            f" {', '.join(_VISION)}"
        )
    text = model.config.text_config.model_type
    if text not in TEXT_MODELS:
        raise ConfigError(
            f"{type(model).__name__} with a text model {text!r}: give one of"
            f" {', '.join(TEXT_MODELS)}"
        )


def _check_state(model: Any) -> None:
    """ConfigError if a model is set up so that a pipeline cannot train it."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "the model recomputes by itself, not by plan; call gradient_checkpointing_disable()"
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
                f"{name} is trained in float16, where gradients underflow; load the model with"
                " dtype=torch.float32 and give PipelineOptions(mode=TrainingMode()), or"
                " freeze it"
            )


def _positions(model: Any) -> Positions:
    """Positions as the rotary embedding of a model's family takes them."""
    config = model.config
    if config.model_type != "qwen2_vl":
        return lambda batch: batch.position_ids[None]
    token, merge = int(config.image_token_id), int(config.vision_config.spatial_merge_size)
    return lambda batch: rotary_positions(
        batch.input_ids, batch.cu_seqlens, batch.image_grid_thw, token, merge
    )[:, None]
