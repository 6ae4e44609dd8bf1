"""LoRA by peft on a pipeline's layers: adapters made, written, or merged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.engine.runtime.communication.collectives import gather_objects
from isobatch.engine.runtime.layer_rng import LayerRng, preserve_rng
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.stage_io import set_values
from isobatch.engine.train.models.open_model import PipelineModel
from isobatch.engine.train.options import ALL_LINEAR, LoraOptions

CPU = torch.device("cpu")
ADAPTER = ".lora_"
"""Part of the names of adapters' weights."""
SAMPLED = 4_096
"""Numbers of a weight that are hashed: another base model differs in nearly all of them."""


def add_adapters(
    layers: Mapping[int, nn.Module], parts: Sequence[str], options: LoraOptions, seed: int
) -> None:
    """Give layers of `options.lora_parts` adapters, and freeze everything else. ConfigError.

    `layers`: by index in the model; `parts`: the part of each layer of the model. An adapter starts
    with the same numbers on whichever rank its layer is; on the meta device it has none.
    """
    peft = _import_peft()
    target = list(options.lora_targets)
    wanted = ALL_LINEAR if ALL_LINEAR in target else target
    for layer in layers.values():
        layer.requires_grad_(False)
    failure = "the model has no layer of these parts"
    num_adapted = 0
    for index, layer in layers.items():
        # peft leaves out the layer of logits too
        if parts[index] not in options.lora_parts or index == len(parts) - 1:
            continue
        try:
            with preserve_rng(CPU):  # `_start` draws the numbers
                peft.inject_adapter_in_model(_peft_config(options, wanted), layer)
        except ValueError as error:  # a layer without such a linear layer
            # peft's words for "all-linear" name other options of its own
            failure = "these parts have no linear layer"
            if wanted != ALL_LINEAR:
                failure = first_line(error)
            continue
        num_adapted += 1
        _start(layer, index, seed)
    if not num_adapted:
        raise ConfigError(
            f"--lora-parts {' '.join(options.lora_parts)}, --lora-targets {' '.join(target)}:"
            f" {failure}"
        )


def with_adapters(model: PipelineModel, options: LoraOptions, seed: int) -> PipelineModel:
    """The model with adapters, which get their numbers with the weights of their layers."""
    stack = model.stack
    parts = [layer.part for layer in model.listed]
    add_adapters(dict(enumerate(stack.layers)), parts, options, seed)
    if stack.load is None:
        return model

    def load(index: int) -> None:
        assert stack.load is not None
        is_first = any(weight.is_meta for weight in stack.layers[index].parameters())
        stack.load(index)
        if is_first:
            _start(stack.layers[index], index, seed)

    return replace(model, stack=replace(stack, load=load))


def _start(layer: nn.Module, index: int, seed: int) -> None:
    """Give adapters their first numbers, unless their layer has no weights yet."""
    kind = _import_peft().tuners.tuners_utils.BaseTunerLayer
    adapted = [module for module in layer.modules() if isinstance(module, kind)]
    if any(module.get_base_layer().weight.is_meta for module in adapted):
        return
    with preserve_rng(CPU):
        LayerRng(seed=seed, step=0).seed_layer(index, 0, CPU)
        for module in adapted:
            for name, weight in module.named_parameters():
                if weight.is_meta and ADAPTER in f".{name}":
                    set_values(weight, torch.empty(weight.shape))
            module.reset_lora_parameters("default", init_lora_weights=True)


def export_adapters(
    model: PipelineModel, pipeline: Pipeline, folder: Path, options: LoraOptions, base: Path | None
) -> bool:
    """Write a folder that `PeftModel.from_pretrained` loads over the base. DataError.

    All ranks call it; -> whether this one wrote.
    """
    adapters = {
        name.replace(".default", ""): tensor
        for shard in model.shards(pipeline, only=ADAPTER)
        for name, tensor in shard.items()
    }
    if dist.get_rank() > 0:
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


def basis_of(layers: Mapping[int, nn.Module], options: LoraOptions) -> dict[str, Any]:
    """What saved adapters depend on: options that no weight shows, and the base model.

    `layers`: those of this rank, by index in the model. All ranks call it. The base model is a hash
    of a sample of each frozen weight: it does not depend on partition or precision.
    """
    digests = {index: _frozen_digest(layer) for index, layer in layers.items()}
    by_index: dict[int, str] = {}
    for part in gather_objects(digests):
        by_index |= part
    text = " ".join(by_index[index] for index in sorted(by_index))
    return {
        "--lora-alpha": options.lora_alpha,
        "--lora-parts": sorted(options.lora_parts),
        "--lora-targets": sorted(options.lora_targets),
        "a base model whose hash is": blake2b(text.encode(), digest_size=8).hexdigest(),
    }


def _frozen_digest(layer: nn.Module) -> str:
    """A hash of up to `SAMPLED` numbers of each frozen weight, as bfloat16."""
    digest = blake2b(digest_size=16)
    for weight in layer.parameters():
        if not weight.requires_grad:
            numbers = weight.detach().reshape(-1)
            sample = numbers[:: max(1, -(-len(numbers) // SAMPLED))]
            digest.update(f"{tuple(weight.shape)}".encode())
            digest.update(sample.to(CPU, torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def merge_adapters(layers: Sequence[nn.Module]) -> None:
    """Add adapters to the weights of their linear layers, and take them out."""
    kind = _import_peft().tuners.tuners_utils.BaseTunerLayer
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, kind):
                if not module.get_base_layer().weight.is_meta:
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
