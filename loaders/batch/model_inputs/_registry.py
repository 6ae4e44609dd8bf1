"""Families of models by `config.model_type`: `family_of`."""

from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs._gemma_families import GEMMA_FAMILIES
from isobatch.loaders.batch.model_inputs._native_families import NATIVE_FAMILIES
from isobatch.loaders.batch.model_inputs._patch_families import PATCH_FAMILIES
from isobatch.loaders.batch.model_inputs._processed_family import processed_family
from isobatch.loaders.batch.model_inputs.family import ModelFamily

FAMILIES: dict[Any, ModelFamily] = {**PATCH_FAMILIES, **NATIVE_FAMILIES, **GEMMA_FAMILIES}
"""`model_type` -> what is particular about its inputs."""


def family_of(config: Any, batch: MicroBatch) -> ModelFamily:
    """The family of a model with transformers' `config`; ConfigError for another model."""
    return family_of_type(config) if batch.processed is None else processed_family(batch, config)


def family_of_type(config: Any) -> ModelFamily:
    """The family by the config alone, of micro-batches that no processor made."""
    name = getattr(config, "model_type", None)
    vision = getattr(getattr(config, "vision_config", None), "model_type", None)
    if (name, vision) == ("llava", "pixtral"):  # the first Pixtral is a LLaVA
        name = "pixtral"
    family = FAMILIES.get(name)
    if family is None:
        name = name or type(config).__name__
        raise ConfigError(f"model type {name!r}: give a config of {', '.join(FAMILIES)}")
    return family
