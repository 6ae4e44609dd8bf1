"""Models whose images went through their own processor (`MicroBatch.processed`).

What the model takes is what the processor gave. That packed samples stay apart is known of models
around a language model that is causal everywhere and counts positions from 0.
"""

from typing import Any

from balance.errors import ConfigError
from loaders.batch.micro_batch import MicroBatch
from loaders.batch.model_inputs.family import BlankImage, ModelFamily, config_of_text

_CAUSAL = (
    *("aria_text", "cohere", "cohere2", "gemma", "gemma2", "granite", "llama", "mistral"),
    *("ministral3", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
"""Language models of transformers that tell packed samples apart by `position_ids`."""


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
    return ModelFamily(blank=lambda _: blank, images=lambda each, _: dict(each.processed or {}))
