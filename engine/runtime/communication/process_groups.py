"""Process groups of a pipeline and its replicas, and the gradient sums over them.

`torch.distributed.new_group` must be called by every process for every group, in one order, and
waits for all. So all groups are made from the list of all replicas' pipelines, which every rank
has, and their number grows with the stages and with the replicas, not with both: 8 stages of 64
replicas have 88, and 64 more if embeddings are tied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.errors import peer_errors
from isobatch.engine.runtime.stage_io import LayerStack

T = TypeVar("T")
Pair = tuple[int, int]
"""(sender, receiver), as ranks of a pipeline."""
BUCKET_BYTES = 256 << 20
"""Gradients summed in one message: larger messages gain nothing, and their copy takes memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeights:
    """Parameters that several ranks of a pipeline have copies of."""

    weights: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Groups that one rank belongs to."""

    ranks: tuple[int, ...]
    """This replica's pipeline as ranks of the world, first stage first."""
    rank: int
    """Position of this process among them."""
    links: Mapping[Pair, dist.ProcessGroup]
    """Groups of this rank's links, by direction: to ring neighbours, from encoders to rank 0."""
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """Ranks of all replicas with the same stages; None if there is one replica."""
    replica: int
    """Position of this process among the replicas."""
    ties: tuple[TiedWeights, ...]

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Send to a rank of the pipeline over their link, and wait; PeerLost if it is lost."""
        with peer_errors(self.ranks, self.ranks[receiver]):
            dist.send(tensor, self.ranks[receiver], group=self.links[self.rank, receiver])

    def receive(self, tensor: Tensor, sender: int) -> None:
        """Fill a tensor with what `send` sends; PeerLost if that rank is lost."""
        with peer_errors(self.ranks, self.ranks[sender]):
            dist.recv(tensor, self.ranks[sender], group=self.links[sender, self.rank])


def make_groups(
    pipelines: Sequence[Sequence[int]],
    model: LayerStack,
    borders: Sequence[int],
    encoder_ranks: Sequence[int],
    timeout_s: float,
) -> ProcessGroups:
    """Groups of this process; `pipelines` are those of all replicas, in one order on every rank.

    `encoder_ranks`: ranks of a pipeline that encode ahead. Operations fail after `timeout_s`.
    """
    me = dist.get_rank()
    timeout = timedelta(seconds=timeout_s)
    local_ranks = next(tuple(pipeline) for pipeline in pipelines if me in pipeline)
    shared = _tied_parameters(model, borders, len(local_ranks))
    layout = layout_groups(pipelines, encoder_ranks, [ranks for ranks, _ in shared])

    def of_this_rank(lists: Sequence[tuple[T, Sequence[int]]]) -> list[tuple[T, dist.ProcessGroup]]:
        groups = [(key, dist.new_group(list(ranks), timeout=timeout)) for key, ranks in lists]
        return [pair for pair, (_, ranks) in zip(groups, lists, strict=True) if me in ranks]

    links, ties = of_this_rank(layout.links), of_this_rank(layout.ties)
    ((replica, whole),) = of_this_rank(layout.pipelines)
    across = [group for _, group in of_this_rank(layout.replicas)]
    return ProcessGroups(
        ranks=local_ranks,
        rank=local_ranks.index(me),
        links=dict(links),
        pipeline=whole,
        replicas=across[0] if across else None,
        replica=replica,
        ties=tuple(TiedWeights(weights=shared[tie][1], group=group) for tie, group in ties),
    )


class GroupLayout(NamedTuple):
    """Ranks of the world in each group, with what each is for, in the order of making them."""

    links: list[tuple[Pair, list[int]]]
    """Both ends of a link in all replicas, which send only within theirs: so there are as many
    groups as links of one pipeline, and as for a group of two, NCCL opens a communicator per pair
    and direction."""
    ties: list[tuple[int, list[int]]]
    """By number of the tie, in each replica."""
    pipelines: list[tuple[int, Sequence[int]]]
    """By number of the replica."""
    replicas: list[tuple[int, list[int]]]
    """By rank in a pipeline; none without other replicas."""


def layout_groups(
    pipelines: Sequence[Sequence[int]],
    encoder_ranks: Sequence[int],
    ties: Sequence[Sequence[int]],
) -> GroupLayout:
    """All groups of a run; `ties`: ranks of a pipeline that have copies of the same parameters.

    >>> layout = layout_groups([[0, 1], [2, 3]], [], [[0, 1]])
    >>> layout.links
    [((0, 1), [0, 2, 1, 3]), ((1, 0), [1, 3, 0, 2])]
    >>> layout.ties, layout.replicas
    ([(0, [0, 1]), (0, [2, 3])], [(0, [0, 2]), (1, [1, 3])])
    """
    across = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    pairs = directions(len(across), encoder_ranks)
    return GroupLayout(
        links=[((sender, to), across[sender] + across[to]) for sender, to in pairs],
        ties=[
            (number, [pipeline[rank] for rank in ranks])
            for pipeline in pipelines
            for number, ranks in enumerate(ties)
        ],
        pipelines=list(enumerate(pipelines)),
        replicas=list(enumerate(across)) if len(pipelines) > 1 else [],
    )


def open_links(groups: ProcessGroups, device: torch.device) -> None:
    """Open every link, then every group, in the order that all ranks share.

    NCCL opens a communicator at its first use, and both sides wait. Within a step, with different
    orders, they would wait forever. It also needs GPU memory, which torch may have taken by then.
    """
    token = torch.zeros(1, device=device)
    for sender, receiver in sorted(groups.links):
        if groups.rank == sender:
            groups.send(token, receiver)
        elif groups.rank == receiver:
            groups.receive(token, sender)
    for whole in (*(tie.group for tie in groups.ties), groups.pipeline, groups.replicas):
        if whole is not None:
            all_reduce(token, whole)


def directions(num_ranks: int, encoder_ranks: Sequence[int] = ()) -> list[Pair]:
    """Directions of messages: between neighbours of the ring, and from encoders to the first rank.

    >>> directions(3)
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> set(directions(5, [1, 2])) - set(directions(5))
    {(2, 0)}
    """
    pairs = {(rank, (rank + step) % num_ranks) for rank in range(num_ranks) for step in (1, -1)}
    pairs |= {(rank, 0) for rank in encoder_ranks}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def _tied_parameters(
    model: LayerStack, borders: Sequence[int], num_ranks: int
) -> list[tuple[tuple[int, ...], tuple[nn.Parameter, ...]]]:
    """Parameters that layers of several ranks share, by the ranks that have them."""
    owners: dict[nn.Parameter, set[int]] = {}
    for stage, (start, end) in enumerate(pairwise(borders)):
        for layer in model.layers[start:end]:
            for weight in layer.parameters():
                owners.setdefault(weight, set()).add(stage % num_ranks)
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for weight, ranks in owners.items():
        if len(ranks) > 1:
            shared.setdefault(tuple(sorted(ranks)), []).append(weight)
    return [(ranks, tuple(tied)) for ranks, tied in sorted(shared.items())]


def sum_gradients(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All-reduce gradients over a group in place, small ones in buckets; None: nothing to do.

    The same list on all ranks of the group.
    """
    if group is None:
        return
    for bucket in _buckets(gradients, bucket_bytes):
        flat = bucket[0]
        if len(bucket) > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = flat.contiguous()
        all_reduce(flat, group)
        sums = torch.split(flat.view(-1), [gradient.numel() for gradient in bucket])
        for gradient, summed in zip(bucket, sums, strict=True):
            if flat is not gradient:
                gradient.copy_(summed.view_as(gradient))


def _buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype, at most `most_bytes` per bucket; larger ones alone.

    >>> sizes = _buckets([torch.zeros(n) for n in (2, 3, 9, 1)], 24)
    >>> [[len(tensor) for tensor in bucket] for bucket in sizes]
    [[2, 3], [9], [1]]
    """
    buckets: list[list[Tensor]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        free_bytes = 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if tensor.nbytes > free_bytes:
                buckets.append([])
                free_bytes = max(most_bytes, tensor.nbytes)
            buckets[-1].append(tensor)
            free_bytes -= tensor.nbytes
    return buckets
