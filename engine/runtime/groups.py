"""Which ranks talk to each other: the process groups of a pipeline and its replicas. Made once, by all ranks alike.

`torch.distributed.new_group` must be called by every process for every group, in one order: so all of this is made from
the list of all replicas' pipelines, which every rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.runtime.carries import LayeredModel

Pair = tuple[int, int]
"""(sender, receiver), as ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Parameters that several ranks of a pipeline have copies of."""

    weights: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Whom one rank talks to."""

    ranks: tuple[int, ...]
    """This replica's pipeline, as ranks of the world, first stage first."""
    rank: int
    """This process's place among them."""
    links: Mapping[Pair, dist.ProcessGroup]
    """A communicator per direction between neighbours, around the ring."""
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """All replicas' ranks with the same stages; None if there is one replica."""
    ties: tuple[Tie, ...]


def make_groups(pipelines: Sequence[Sequence[int]], model: LayeredModel, borders: Sequence[int]) -> Groups:
    """Groups of this process; `pipelines` are those of all replicas, in one order on every rank."""
    me = dist.get_rank()
    own = next(tuple(pipeline) for pipeline in pipelines if me in pipeline)
    shared = tied_parameters(model, borders, len(own))
    links: dict[Pair, dist.ProcessGroup] = {}
    ties = []
    for pipeline in map(tuple, pipelines):
        for sender, receiver in directions(len(own)):
            group = dist.new_group([pipeline[sender], pipeline[receiver]])
            if pipeline == own:
                links[sender, receiver] = group
        for places, weights in shared:
            group = dist.new_group([pipeline[place] for place in places])
            if pipeline == own and own.index(me) in places:
                ties.append(Tie(weights=weights, group=group))
        group = dist.new_group(list(pipeline))
        if pipeline == own:
            whole = group
    beside = [dist.new_group([pipeline[place] for pipeline in pipelines]) for place in range(len(own))]
    return Groups(
        ranks=own,
        rank=own.index(me),
        links=links,
        pipeline=whole,
        replicas=beside[own.index(me)] if len(pipelines) > 1 else None,
        ties=tuple(ties),
    )


def directions(num_ranks: int) -> list[Pair]:
    """Every direction in which something can go: to neighbours, around the ring.

    >>> directions(3)
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    found = {(rank, (rank + step) % num_ranks) for rank in range(num_ranks) for step in (1, -1)}
    return sorted(pair for pair in found if pair[0] != pair[1])


def tied_parameters(
    model: LayeredModel, borders: Sequence[int], num_ranks: int
) -> list[tuple[tuple[int, ...], tuple[nn.Parameter, ...]]]:
    """Parameters that layers of several ranks share, by the ranks that have them."""
    owners: dict[int, set[int]] = {}
    weights: dict[int, nn.Parameter] = {}
    for stage, (start, end) in enumerate(pairwise(borders)):
        for weight in (weight for layer in model.layers[start:end] for weight in layer.parameters()):
            owners.setdefault(id(weight), set()).add(stage % num_ranks)
            weights[id(weight)] = weight
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for key, own in owners.items():
        if len(own) > 1:
            shared.setdefault(tuple(sorted(own)), []).append(weights[key])
    return [(ranks, tuple(tied)) for ranks, tied in sorted(shared.items())]


def sum_over(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over a group, all in one message per dtype."""
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for own in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(own, torch.split(flat, [gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view_as(gradient))
