"""Weights of all ranks' layers gathered under transformers' names.

For models of `engine.runtime.models.transformers_models.from_transformers`, whose layers hold the
model's own modules: a module's path in the model is its name. Weights in no layer (vision layers
whose output is unused) never change and are taken from the model itself. Each weight is sent once:
rank 0 needs memory for one copy of the model, the others for none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.engine.runtime.communication.collectives import gather_objects, world_errors

Prefixes = tuple[Mapping[str, str], ...]
"""Names of each layer's children -> their paths in the model."""


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


def gather_state_dict(
    model: nn.Module, layers: Mapping[int, nn.Module], prefixes: Prefixes
) -> dict[str, Tensor] | None:
    """The whole `model.state_dict()` on the CPU of rank 0; None on the others.

    All ranks of the world call it with their own layers. PeerLost if one is lost.
    """
    gathered = gather_tensors(state_dict_of(layers, prefixes))
    if gathered is None:
        return None
    # what is in no layer never changed
    return {
        name: gathered[name] if name in gathered else tensor.cpu()
        for name, tensor in model.state_dict().items()
    }


def gather_tensors(local: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The named tensors of all ranks on the CPU of rank 0, copied; None on the others.

    Equal names are equal tensors, of which the first rank that has one sends it. PeerLost.
    """
    rank = dist.get_rank()
    described = gather_objects(
        {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}
    )
    owners: dict[str, int] = {}
    for owner, names in enumerate(described):
        owners = dict.fromkeys(names, owner) | owners
    device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
    gathered: dict[str, Tensor] = {}
    with world_errors():
        for name, owner in owners.items():
            if owner > 0 and rank == owner:
                dist.send(local[name].detach().contiguous(), 0)
            elif rank == 0:
                shape, dtype = described[owner][name]
                whole = torch.empty(shape, dtype=dtype, device=device)
                if owner:
                    dist.recv(whole, owner)
                else:
                    whole.copy_(local[name].detach())
                gathered[name] = whole.cpu()
    return gathered if rank == 0 else None
