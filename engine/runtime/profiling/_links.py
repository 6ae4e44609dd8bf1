"""Message times between neighbouring ranks: latency and time per byte."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from balance.types import IntArray
from engine.runtime.communication.process_groups import Pair, ProcessGroups
from engine.runtime.errors import peer_errors

ROUNDS = 7
"""Messages per size; the first warms up, the median of the others counts."""
LEAST_BYTES = 1 << 20
"""Minimum size of a large message: enough for bytes to matter next to the latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Time of a message from one rank to the next."""

    latency_ns: float
    ns_per_byte: float

    def message_ns(self, num_bytes: IntArray) -> IntArray:
        """Times of messages, int64; an empty message takes no time.

        >>> LinkTimes(latency_ns=100.0, ns_per_byte=0.5).message_ns(np.array([0, 1_000])).tolist()
        [0, 600]
        """
        times = (self.latency_ns + num_bytes * self.ns_per_byte) * (num_bytes > 0)
        return np.asarray(np.rint(times), np.int64)


def link_times(groups: ProcessGroups, large_bytes: int, device: torch.device) -> LinkTimes:
    """Times of the slowest link of a pipeline. All its ranks call it; all get the same.

    Measures half a round trip of a tiny message and of one of `large_bytes`, link after link. All
    times are 0 with a single rank.
    """
    found = torch.zeros(2, dtype=torch.float64, device=device)
    sizes = (1, max(large_bytes, LEAST_BYTES))
    for rank in range(len(groups.ranks) - 1):
        pair = rank, rank + 1
        if groups.rank in pair:
            small, large = (_one_way_ns(groups, pair, size, device) for size in sizes)
            slope = max(0.0, large - small) / sizes[1]
            own = torch.tensor([small, slope], dtype=torch.float64, device=device)
            found = torch.maximum(found, own)
        barrier(groups, device)
    with peer_errors(groups.ranks):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=groups.pipeline)
    latency_ns, ns_per_byte = found.tolist()
    return LinkTimes(latency_ns=latency_ns, ns_per_byte=ns_per_byte)


def barrier(groups: ProcessGroups, device: torch.device) -> None:
    """Wait until all ranks of the pipeline are here."""
    token = torch.zeros(1, device=device)
    with peer_errors(groups.ranks):
        dist.all_reduce(token, group=groups.pipeline)
        token.item()


def _one_way_ns(groups: ProcessGroups, pair: Pair, size: int, device: torch.device) -> float:
    """Half a round trip, as either side measures it."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    first, second = pair
    other = groups.ranks[second if groups.rank == first else first]
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        with peer_errors(groups.ranks, other):
            if groups.rank == first:
                dist.send(message, other, group=groups.links[first, second])
                dist.recv(message, other, group=groups.links[second, first])
            else:
                dist.recv(message, other, group=groups.links[first, second])
                dist.send(message, other, group=groups.links[second, first])
            message[0].item()  # waits until it has arrived
        times.append((time.perf_counter_ns() - begun) / 2)
    return median(times[1:])
