"""Weights of a pipeline's layers under transformers' names: in and out as ordinary state dicts.

For models of `engine.runtime.models.transformers_models.from_transformers`, whose layers hold the
model's own modules: where a module stands in the model is its name. What is in no layer (vision
layers that nothing looks at) never changes, and is taken from the model itself. Gathering sends
each weight once: rank 0 gets one copy of the model, the others need no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from balance.errors import ConfigError

Prefixes = tuple[Mapping[str, str], ...]
"""Of each layer: its children's names -> where they stand in the model."""


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> Prefixes:
    """Where the children of a model's layers stand in it; `layers` are all of them,
    `LayeredModel.layers`.

    Children that are not the model's, which have no weights, are left out.
    """
    places = {id(module): name for name, module in model.named_modules()}
    return tuple(
        {own: places[id(child)] for own, child in layer.named_children() if id(child) in places}
        for layer in layers
    )


def state_dict_of(layers: Mapping[int, nn.Module], prefixes: Prefixes) -> dict[str, Tensor]:
    """Weights of some layers, by their place in the model (`Pipeline.layers`), under transformers'
    names. No copies.
    """
    state: dict[str, Tensor] = {}
    for place, layer in layers.items():
        for own, tensor in layer.state_dict().items():
            child, _, rest = own.partition(".")
            state[f"{prefixes[place][child]}.{rest}"] = tensor
    return state


def load_state_dict(
    layers: Mapping[int, nn.Module], prefixes: Prefixes, state: Mapping[str, Tensor]
) -> None:
    """Copy a model's state dict into some of its layers; reads only what they need, so `state` may
    be lazy.

    ConfigError if a weight is not there or has another shape; then nothing was copied.
    """
    own = state_dict_of(layers, prefixes)
    missing = [name for name in own if name not in state]
    if missing:
        raise ConfigError(
            f"the state dict has no {missing[0]!r} (missing: {len(missing)}); give one of this model"
        )
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise ConfigError(
                f"{name} has shape {tuple(state[name].shape)} there, {tuple(tensor.shape)} in the model"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def gather_state_dict(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    prefixes: Prefixes,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor] | None:
    """The whole model's state dict on the CPU of the group's first rank, as `model.state_dict()`;
    None on the others.

    To be called by all ranks of the group, all ranks of the world if None, each with its own
    layers.
    """
    own = state_dict_of(layers, prefixes)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    described: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(
        described, {name: (each.shape, each.dtype) for name, each in own.items()}, group=group
    )
    received: dict[str, Tensor] = {}
    for name, owner in _owners(described).items():
        if owner > 0 and rank == owner:
            dist.send(own[name].detach().contiguous(), group=group, group_dst=0)
        elif owner > 0 and rank == 0:
            shape, dtype = described[owner][name]
            buffer = torch.empty(shape, dtype=dtype, device=_device(own))
            dist.recv(buffer, group=group, group_src=owner)
            received[name] = buffer.cpu()
    if rank > 0:
        return None
    # what neither came nor is here is in no layer, and as it was
    return {
        name: received[name]
        if name in received
        else torch.empty_like(tensor, device="cpu").copy_(own.get(name, tensor))
        for name, tensor in model.state_dict().items()
    }


def _owners(described: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """Who sends each weight: the first rank that has it.

    >>> _owners([{"a": 1, "b": 1}, {"b": 1, "c": 1}])
    {'a': 0, 'b': 0, 'c': 1}
    """
    owners: dict[str, int] = {}
    for rank, names in enumerate(described):
        for name in names:
            owners.setdefault(name, rank)
    return owners


def _device(state: Mapping[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in state.values()), torch.device("cpu"))
