"""Process groups of a pipeline and its replicas, and the gradient sums over them.

`torch.distributed.new_group` must be called by every process for every group, in one order, and
waits for all. So all groups are made from the list of all replicas' pipelines, which every rank
has, and their number grows with stages and with replicas, not with their product.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.errors import peer_errors
from isobatch.engine.runtime.stage_io import LayerStack

Pair = tuple[int, int]
"""(sender, receiver), as ranks of a pipeline."""
GroupKey = tuple[str, tuple[int, ...], int]
"""(kind, ranks of a pipeline, replica)."""
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
    links: Mapping[tuple[int, ...], dist.ProcessGroup]
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
    groups: dict[GroupKey, dist.ProcessGroup] = {}
    for key, members in group_ranks(pipelines, encoder_ranks, [tie for tie, _ in shared]):
        group = dist.new_group(members, timeout=timeout)
        if me in members:
            groups[key] = group
    rank = local_ranks.index(me)
    replica = [tuple(pipeline) for pipeline in pipelines].index(local_ranks)
    ties = [
        TiedWeights(weights=weights, group=groups["tie", ranks, replica])
        for ranks, weights in shared
        if rank in ranks
    ]
    return ProcessGroups(
        ranks=local_ranks,
        rank=rank,
        links={pair: group for (kind, pair, _), group in groups.items() if kind == "link"},
        pipeline=groups["pipeline", (), replica],
        replicas=groups.get(("replicas", (rank,), 0)),
        replica=replica,
        ties=tuple(ties),
    )


def group_ranks(
    pipelines: Sequence[Sequence[int]],
    encoder_ranks: Sequence[int],
    ties: Sequence[tuple[int, ...]],
) -> Iterator[tuple[GroupKey, list[int]]]:
    """All groups of a run in one order; `ties`: ranks of a pipeline that share parameters.

    A link's group has both ends in all replicas, which send within theirs only. NCCL opens a
    communicator per pair of ranks and direction, as it does for groups of two.

    >>> [ranks for (kind, *_), ranks in group_ranks([[0, 1], [2, 3]], [], []) if kind == "link"]
    [[0, 2, 1, 3], [1, 3, 0, 2]]
    """
    across = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    for sender, receiver in directions(len(across), encoder_ranks):
        yield ("link", (sender, receiver), 0), across[sender] + across[receiver]
    for replica, pipeline in enumerate(pipelines):
        for ranks in ties:
            yield ("tie", ranks, replica), [pipeline[rank] for rank in ranks]
        yield ("pipeline", (), replica), list(pipeline)
    if len(pipelines) > 1:
        for rank, ranks_across in enumerate(across):
            yield ("replicas", (rank,), 0), ranks_across


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
