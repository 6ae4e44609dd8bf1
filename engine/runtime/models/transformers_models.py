"""Vision-language models of transformers as layer stacks: `from_transformers`.

For LLaVA, its successors, InternVL, Qwen-VL and Gemma 3 of transformers 5, which is not imported.
The layers hold the model's own modules: no weight is copied, and `engine.runtime.models.weights`
gathers them by name. Micro-batches are packed without padding (`loaders.MicroBatch`, or any object
with its fields).
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from isobatch.common.errors import ConfigError, first_line
from isobatch.engine.runtime.models.language_layers import LanguageRules, language_layers
from isobatch.engine.runtime.models.layer_specs import SpecLayer
from isobatch.engine.runtime.models.qwen_vl_layers import qwen_vl_vision
from isobatch.engine.runtime.models.vision_layers import (
    anyres_vision,
    gemma3_vision,
    internvl_vision,
    llava_vision,
)
from isobatch.engine.runtime.stage_io import Batch, LayerStack, TensorSpec
from isobatch.tensors.rotary_positions import video_positions

TEXT_MODELS = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "gemma3_text"),
)
"""Model types of language models that consist of embedding, decoder layers, norm and head only.
Others scale between these, add a loss or mask otherwise: they would be computed wrongly, silently.
"""
_NATIVE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_VISION = {
    "llava": llava_vision,
    "llava_next": anyres_vision,
    "llava_onevision": anyres_vision,
    "internvl": internvl_vision,
    **dict.fromkeys(_NATIVE, qwen_vl_vision),
    "gemma3": gemma3_vision,
}
"""Vision half of a model, by model type."""


def from_transformers(model: Any) -> LayerStack:
    """A model's layers: patch embedding, vision layers, projector, embedding, decoder layers, head.

    `model`: the ForConditionalGeneration of LLaVA, LLaVA-NeXT, LLaVA-OneVision, InternVL, Qwen2-VL,
    Qwen2.5-VL, Qwen3-VL or Gemma 3. Attention stays as the model is set: flash attention gets the
    samples' borders, anything else is computed per sample. ConfigError for other models, and if
    something other than the pipeline moves or recomputes its layers.
    """
    _check_family(model)
    _check_state(model)
    try:
        vision = _VISION[model.config.model_type](model)
        layers = [*vision, *language_layers(model, _language_rules(model, vision[-1]))]
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


def _language_rules(model: Any, projector: SpecLayer) -> LanguageRules:
    """What is particular about the language model of a family."""
    config, kind = model.config, model.config.model_type
    token = int(config.image_token_id)
    text, vision = config.text_config, config.vision_config
    if text.model_type == "gemma3_text" and text.use_bidirectional_attention:
        raise ConfigError(
            "gemma3_text with use_bidirectional_attention: no token predicts the next"
        )
    if kind not in _NATIVE:
        return LanguageRules(
            positions=lambda _, batch: batch.position_ids,
            image_token_id=token,
            two_way_images=kind == "gemma3",
            rotary_by_type=text.model_type == "gemma3_text",
        )
    return LanguageRules(
        positions=partial(video_positions, vision=vision, are_stamped=kind == "qwen3_vl"),
        image_token_id=token,
        video_token_id=int(config.video_token_id),
        deep_specs=projector.output_specs,
        num_deep=len(getattr(vision, "deepstack_visual_indexes", ())),
    )
