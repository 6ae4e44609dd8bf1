"""Weights of all ranks' layers gathered under transformers' names.

For models of `engine.runtime.models.transformers_models.from_transformers`, whose layers hold the
model's own modules: a module's path in the model is its name. Weights in no layer (vision layers
whose output is unused) never change and are taken from the model itself. Each weight is sent once:
rank 0 needs memory for one copy of the model, the others for none.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Prefixes = tuple[Mapping[str, str], ...]
"""Names of each layer's children -> their paths in the model."""


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> Prefixes:
    """Paths in the model of its layers' children; `layers` are all of them, `LayerStack.layers`.

    Children that are not the model's, which have no weights, are left out.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    return tuple(
        {own: paths[id(child)] for own, child in layer.named_children() if id(child) in paths}
        for layer in layers
    )


def state_dict_of(layers: Mapping[int, nn.Module], prefixes: Prefixes) -> dict[str, Tensor]:
    """Weights of layers, by index in the model, under transformers' names. No copies."""
    state: dict[str, Tensor] = {}
    for index, layer in layers.items():
        for own, tensor in layer.state_dict().items():
            child, _, rest = own.partition(".")
            state[f"{prefixes[index][child]}.{rest}"] = tensor
    return state


def gather_state_dict(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    prefixes: Prefixes,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor] | None:
    """The whole `model.state_dict()` on the CPU of the group's first rank; None on the others.

    All ranks of the group, by default of the world, call it with their own layers.
    """
    own = state_dict_of(layers, prefixes)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    described: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(
        described, {name: (each.shape, each.dtype) for name, each in own.items()}, group=group
    )
    device = next((tensor.device for tensor in own.values()), torch.device("cpu"))
    received: dict[str, Tensor] = {}
    for name, owner in _owners(described).items():
        if owner > 0 and rank == owner:
            dist.send(own[name].detach().contiguous(), group=group, group_dst=0)
        elif owner > 0 and rank == 0:
            shape, dtype = described[owner][name]
            buffer = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(buffer, group=group, group_src=owner)
            received[name] = buffer.cpu()
    if rank > 0:
        return None
    # what is neither received nor in a layer here is in no layer, and never changed
    return {
        name: received[name]
        if name in received
        else torch.empty_like(tensor, device="cpu").copy_(own.get(name, tensor))
        for name, tensor in model.state_dict().items()
    }


def _owners(described: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """Sender of each weight: the first rank that has it.

    >>> _owners([{"a": 1, "b": 1}, {"b": 1, "c": 1}])
    {'a': 0, 'b': 0, 'c': 1}
    """
    owners: dict[str, int] = {}
    for rank, names in enumerate(described):
        for name in names:
            owners.setdefault(name, rank)
    return owners
