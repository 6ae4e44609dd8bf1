"""Weights of all ranks' layers gathered under transformers' names.

For models of `engine.runtime.models.transformers_models.from_transformers`, whose layers hold the
model's own modules: a module's path in the model is its name. Weights in no layer (vision layers
whose output is unused) never change and are not gathered. Each weight is sent once, and rank 0
needs memory for its own layers and one shard.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.engine.runtime.communication.collectives import gather_objects, world_errors

Prefixes = tuple[Mapping[str, str], ...]
"""Names of each layer's children -> their paths in the model."""
SHARD_BYTES = 2 << 30
"""Weights of other ranks that rank 0 holds at a time."""


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> Prefixes:
    """Paths in the model of its layers' children; `layers` are all of them, `LayerStack.layers`.

    Parameters of the layer itself are children here too. Children that are not the model's, which
    have no weights, are left out.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    paths |= {id(weight): name for name, weight in model.named_parameters()}

    def children(layer: nn.Module) -> Iterator[tuple[str, Any]]:
        yield from layer.named_children()
        yield from layer.named_parameters(recurse=False)

    return tuple(
        {
            name_in_layer: paths[id(child)]
            for name_in_layer, child in children(layer)
            if id(child) in paths
        }
        for layer in layers
    )


def state_dict_of(layers: Mapping[int, nn.Module], prefixes: Prefixes) -> dict[str, Tensor]:
    """Weights of layers, by index in the model, under transformers' names. No copies."""
    state: dict[str, Tensor] = {}
    for index, layer in layers.items():
        for name, tensor in layer.state_dict().items():
            child, dot, rest = name.partition(".")
            state[f"{prefixes[index][child]}{dot}{rest}"] = tensor
    return state


def split_weights(model: nn.Module, max_bytes: int = SHARD_BYTES) -> list[list[str]]:
    """Names of a model's parameters, tied ones once, in shards of at most so many float32 bytes.

    A larger parameter is a shard by itself.
    """
    shards: list[list[str]] = []
    free_bytes = 0
    for name, weight in model.named_parameters():
        num_bytes = 4 * weight.numel()
        if num_bytes > free_bytes:
            shards.append([])
            free_bytes = max_bytes
        shards[-1].append(name)
        free_bytes -= num_bytes
    return shards


def gather_shards(
    layers: Mapping[int, nn.Module], prefixes: Prefixes, shards: Iterable[Iterable[str]]
) -> Iterator[dict[str, Tensor]]:
    """Weights of all ranks' layers on the CPU of rank 0, shard by shard; others get empty ones.

    All ranks of the world call it with their own layers. PeerLost if one is lost.
    """
    local = state_dict_of(layers, prefixes)
    rank = dist.get_rank()
    described = gather_objects(
        {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}
    )
    # the first rank that has a weight sends it
    owners: dict[str, int] = {}
    for owner, names in enumerate(described):
        owners = dict.fromkeys(names, owner) | owners
    device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
    for shard in shards:
        received: dict[str, Tensor] = {}
        with world_errors():
            for name in shard:
                owner = owners.get(name, -1)
                if owner < 0 or rank not in (0, owner):
                    continue
                if rank > 0:
                    dist.send(local[name].detach().contiguous(), 0)
                elif owner > 0:
                    shape, dtype = described[owner][name]
                    received[name] = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(received[name], owner)
                    received[name] = received[name].cpu()
                else:
                    received[name] = local[name].detach().cpu()
        yield received
