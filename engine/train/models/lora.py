"""LoRA by peft on a pipeline's layers: adapters made, written, or merged."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.engine.runtime.layer_rng import LayerRng, preserve_rng
from isobatch.engine.runtime.models.weights import gather_tensors, names_of, state_dict_of
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.train.models.open_model import PipelineModel
from isobatch.engine.train.options.lora_options import ALL_LINEAR, LoraOptions

CPU = torch.device("cpu")
ADAPTER = ".lora_"
"""Part of the names of adapters' weights."""


def add_adapters(
    layers: Mapping[int, nn.Module], parts: Sequence[str], options: LoraOptions, seed: int
) -> None:
    """Give layers of `options.lora_parts` adapters, and freeze everything else. ConfigError.

    `layers`: by index in the model; `parts`: the part of each layer of the model. An adapter starts
    with the same numbers on whichever rank its layer is.
    """
    peft = _import_peft()
    target = list(options.lora_targets)
    wanted = ALL_LINEAR if ALL_LINEAR in target else target
    for layer in layers.values():
        layer.requires_grad_(False)
    failure = "no layer of these parts is on this rank"
    num_adapted = 0
    with preserve_rng(CPU):
        for index, layer in layers.items():
            # peft leaves out the layer of logits too
            if parts[index] not in options.lora_parts or index == len(parts) - 1:
                continue
            LayerRng(seed=seed, step=0).seed_layer(index, 0, CPU)
            try:
                peft.inject_adapter_in_model(_peft_config(options, wanted), layer)
                num_adapted += 1
            except ValueError as error:  # a layer without such a linear layer
                failure = first_line(error)
    if not num_adapted:
        raise ConfigError(
            f"--lora-parts {' '.join(options.lora_parts)}, --lora-targets {' '.join(target)}:"
            f" {failure}"
        )


def export_adapters(
    model: PipelineModel, pipeline: Pipeline, folder: Path, options: LoraOptions, base: Path | None
) -> bool:
    """Write a folder that `PeftModel.from_pretrained` loads over the base. DataError.

    All ranks call it; -> whether this one wrote.
    """
    pipeline.gather_weights()
    state = state_dict_of(pipeline.layers, names_of(model.whole, model.stack.layers))
    named = {name.replace(".default", ""): state[name] for name in state if ADAPTER in name}
    adapters = gather_tensors(named)
    if adapters is None:
        return False
    modules = sorted({name.partition(ADAPTER)[0] for name in adapters})
    config = _peft_config(options, modules)
    config.base_model_name_or_path = None if base is None else str(base)
    try:
        config.save_pretrained(folder)
        import_module("safetensors.torch").save_file(
            {f"base_model.model.{name}": tensor for name, tensor in adapters.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
    except (OSError, import_module("safetensors").SafetensorError) as error:
        raise DataError(f"{folder}: {getattr(error, 'strerror', None) or error}") from None
    return True


def merge_adapters(layers: Sequence[nn.Module]) -> None:
    """Add adapters to the weights of their linear layers, and take them out."""
    kind = _import_peft().tuners.tuners_utils.BaseTunerLayer
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, kind):
                module.merge()
                parent, _, child = name.rpartition(".")
                setattr(layer.get_submodule(parent), child, module.get_base_layer())


def _peft_config(options: LoraOptions, target: Any) -> Any:
    return _import_peft().LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=target,
    )


def _import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"--lora-rank needs peft ({first_line(error)}): pip install peft"
        ) from error
