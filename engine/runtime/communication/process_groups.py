"""Which ranks talk to each other: the process groups of a pipeline and its replicas. Made once, by
all ranks alike.

`torch.distributed.new_group` must be called by every process for every group, in one order: so all
of this is made from the list of all replicas' pipelines, which every rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.runtime.errors import peers
from engine.runtime.stage_io import LayerStack

Pair = tuple[int, int]
"""(sender, receiver), as ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Parameters that several ranks of a pipeline have copies of."""

    weights: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Whom one rank talks to."""

    ranks: tuple[int, ...]
    """This replica's pipeline, as ranks of the world, first stage first."""
    rank: int
    """This process's place among them."""
    links: Mapping[Pair, dist.ProcessGroup]
    """A communicator per direction between neighbours, around the ring, and from ranks that encode
    to the first.
    """
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """All replicas' ranks with the same stages; None if there is one replica."""
    replica: int
    """This process's place among the replicas."""
    ties: tuple[Tie, ...]


def make_groups(
    pipelines: Sequence[Sequence[int]],
    model: LayerStack,
    borders: Sequence[int],
    *,
    encoder_ranks: Sequence[int] = (),
    timeout_s: float = 300.0,
) -> ProcessGroups:
    """Groups of this process; `pipelines` are those of all replicas, in one order on every rank.

    `encoder_ranks`: ranks of a pipeline that encode ahead. What takes longer than `timeout_s`
    fails.
    """
    me, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
    own = next(tuple(pipeline) for pipeline in pipelines if me in pipeline)
    shared = tied_parameters(model, borders, len(own))
    links: dict[Pair, dist.ProcessGroup] = {}
    ties = []
    for pipeline in map(tuple, pipelines):
        for sender, receiver in directions(len(own), encoder_ranks):
            group = dist.new_group([pipeline[sender], pipeline[receiver]], timeout=timeout)
            if pipeline == own:
                links[sender, receiver] = group
        for places, weights in shared:
            group = dist.new_group([pipeline[place] for place in places], timeout=timeout)
            if pipeline == own and own.index(me) in places:
                ties.append(Tie(weights=weights, group=group))
        group = dist.new_group(list(pipeline), timeout=timeout)
        if pipeline == own:
            whole = group
    beside = [
        dist.new_group([pipeline[place] for pipeline in pipelines], timeout=timeout)
        for place in range(len(own))
    ]
    return ProcessGroups(
        ranks=own,
        rank=own.index(me),
        links=links,
        pipeline=whole,
        replicas=beside[own.index(me)] if len(pipelines) > 1 else None,
        replica=[tuple(pipeline) for pipeline in pipelines].index(own),
        ties=tuple(ties),
    )


def open_links(groups: ProcessGroups, device: torch.device) -> None:
    """Send something along every link, one after the other, in the order that all ranks share; then
    in every group.

    NCCL opens a communicator when it is first used, and both sides wait until it is open: in the
    midst of a step, where ranks use their links in different orders, they would wait for each other
    for ever. It also needs memory of the GPU then, of which torch may have taken all later.
    """
    for (sender, receiver), group in sorted(groups.links.items(), key=lambda link: link[0]):
        if groups.rank in (sender, receiver):
            token = torch.zeros(1, device=device)
            other = groups.ranks[receiver if groups.rank == sender else sender]
            with peers([other], other):
                if groups.rank == sender:
                    dist.send(token, other, group=group)
                else:
                    dist.recv(token, other, group=group)
    for whole in (*(tie.group for tie in groups.ties), groups.pipeline, groups.replicas):
        if whole is not None:
            with peers(dist.get_process_group_ranks(whole)):
                dist.all_reduce(torch.zeros(1, device=device), group=whole)


def directions(num_ranks: int, encoder_ranks: Sequence[int] = ()) -> list[Pair]:
    """Every direction in which something can go: to neighbours, around the ring, and features to
    the first rank.

    >>> directions(3)
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> set(directions(5, [1, 2])) - set(directions(5))
    {(2, 0)}
    """
    found = {(rank, (rank + step) % num_ranks) for rank in range(num_ranks) for step in (1, -1)}
    found |= {(rank, 0) for rank in encoder_ranks}
    return sorted(pair for pair in found if pair[0] != pair[1])


def tied_parameters(
    model: LayerStack, borders: Sequence[int], num_ranks: int
) -> list[tuple[tuple[int, ...], tuple[nn.Parameter, ...]]]:
    """Parameters that layers of several ranks share, by the ranks that have them."""
    owners: dict[int, set[int]] = {}
    weights: dict[int, nn.Parameter] = {}
    for stage, (start, end) in enumerate(pairwise(borders)):
        for weight in (
            weight for layer in model.layers[start:end] for weight in layer.parameters()
        ):
            owners.setdefault(id(weight), set()).add(stage % num_ranks)
            weights[id(weight)] = weight
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for key, own in owners.items():
        if len(own) > 1:
            shared.setdefault(tuple(sorted(own)), []).append(weights[key])
    return [(ranks, tuple(tied)) for ranks, tied in sorted(shared.items())]


BUCKET_BYTES = 256 << 20
"""Of gradients that are summed in one message: larger ones gain nothing, and all at once would need
as much again.
"""


def sum_over(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum gradients over a group, few messages for many small ones; the same list on all its
    ranks.
    """
    if group is None:
        return
    for bucket in buckets(gradients, bucket_bytes):
        flat = (
            bucket[0]
            if len(bucket) == 1
            else torch.cat([gradient.reshape(-1) for gradient in bucket])
        )
        flat = flat.contiguous()
        with peers(dist.get_process_group_ranks(group)):
            dist.all_reduce(flat, group=group)
        for gradient, part in zip(
            bucket, torch.split(flat.view(-1), [own.numel() for own in bucket]), strict=True
        ):
            if flat is not gradient:
                gradient.copy_(part.view_as(gradient))


def buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Tensors of one dtype together, in their order, as many as do not exceed a size; larger ones
    alone.

    >>> [[len(own) for own in bucket] for bucket in buckets([torch.zeros(n) for n in (2, 3, 9, 1)], 24)]
    [[2, 3], [9], [1]]
    """
    found: list[list[Tensor]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        room = 0
        for tensor in (own for own in tensors if own.dtype == dtype):
            if tensor.nbytes > room:
                found.append([])
                room = max(most_bytes, tensor.nbytes)
            found[-1].append(tensor)
            room -= tensor.nbytes
    return found
