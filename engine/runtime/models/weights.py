"""Weights of all ranks' layers gathered under transformers' names.

For models of `engine.runtime.models.transformers_models.from_transformers`, whose layers hold the
model's own modules: a module's path in the model is its name. Weights in no layer (vision layers
whose output is unused) never change and are not gathered. Each weight is sent once, and rank 0
needs memory for its own layers and one shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def gather_shards(
    model: nn.Module,
    local: Mapping[str, Tensor],
    unused: Callable[[str], Tensor],
    *,
    only: str = "",
    max_bytes: int = SHARD_BYTES,
) -> Iterator[dict[str, Tensor]]:
    """The model's parameters by name, tied ones once, on the CPU of rank 0, in several shards.

    All ranks of the world take all shards, with their own layers' tensors (`state_dict_of`); others
    than rank 0 get empty ones. `unused`: value of a parameter in no layer. `only`: what is in the
    names of those that are wanted. `max_bytes`: of float32 numbers, but for a single larger
    parameter. PeerLost if a rank is lost.
    """
    rank = dist.get_rank()
    described = gather_objects(
        {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}
    )
    # the first rank that has a weight sends it: replicas are equal
    owners: dict[str, int] = {}
    for owner, names in enumerate(described):
        owners = dict.fromkeys(names, owner) | owners
    device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, weight in model.named_parameters():
        if only not in name:
            continue
        if num_bytes and num_bytes + 4 * weight.numel() > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        num_bytes += 4 * weight.numel()
        owner = owners.get(name, 0)
        with world_errors():
            if rank == owner > 0:
                dist.send(local[name].detach().contiguous(), 0)
            elif rank == 0 < owner:
                shape, dtype = described[owner][name]
                buffer = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(buffer, owner)
                shard[name] = buffer.cpu()
            elif rank == 0:
                shard[name] = local[name].detach().cpu() if name in local else unused(name)
    yield shard
