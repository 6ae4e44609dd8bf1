"""How long messages take between neighbouring ranks of a pipeline: `link_times`, measured, latency
and bytes apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from balance.types import IntArray
from engine.runtime.communication.process_groups import Pair, ProcessGroups
from engine.runtime.errors import peers

ROUNDS = 7
"""Of each size; the first warms up, the median of the others counts."""
LEAST_BYTES = 1 << 20
"""Of a large message: enough for bytes to matter beside the latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """What a message takes from one rank to the next."""

    latency_ns: float
    ns_per_byte: float

    def travel_ns(self, num_bytes: IntArray) -> IntArray:
        """What messages take, int64; nothing takes no time.

        >>> LinkTimes(latency_ns=100.0, ns_per_byte=0.5).travel_ns(np.array([0, 1_000])).tolist()
        [0, 600]
        """
        return np.asarray(
            np.rint((self.latency_ns + num_bytes * self.ns_per_byte) * (num_bytes > 0)), np.int64
        )


def link_times(groups: ProcessGroups, large_bytes: int, device: torch.device) -> LinkTimes:
    """Of the slowest of a pipeline's links, one after the other. All ranks of the pipeline call it;
    all get the same.

    A tiny message and one of `large_bytes` go to and fro; half of that is what each takes. With one
    rank there is no link: all is 0.
    """
    found = torch.zeros(2, dtype=torch.float64, device=device)
    sizes = (1, max(large_bytes, LEAST_BYTES))
    for rank in range(len(groups.ranks) - 1):
        pair = rank, rank + 1
        if groups.rank in pair:
            small, large = (_one_way_ns(groups, pair, size, device) for size in sizes)
            slope = max(0.0, large - small) / sizes[1]
            found = torch.maximum(
                found, torch.tensor([small, slope], dtype=torch.float64, device=device)
            )
        meet(groups, device)
    with peers(groups.ranks):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=groups.pipeline)
    latency_ns, ns_per_byte = found.tolist()
    return LinkTimes(latency_ns=latency_ns, ns_per_byte=ns_per_byte)


def meet(groups: ProcessGroups, device: torch.device) -> None:
    """Wait until all ranks of the pipeline have come here."""
    token = torch.zeros(1, device=device)
    with peers(groups.ranks):
        dist.all_reduce(token, group=groups.pipeline)
        token.item()


def _one_way_ns(groups: ProcessGroups, pair: Pair, size: int, device: torch.device) -> float:
    """Half of the way to and fro, as either side sees it."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    first, second = pair
    other = groups.ranks[second if groups.rank == first else first]
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        with peers(groups.ranks, other):
            if groups.rank == first:
                dist.send(message, other, group=groups.links[first, second])
                dist.recv(message, other, group=groups.links[second, first])
            else:
                dist.recv(message, other, group=groups.links[first, second])
                dist.send(message, other, group=groups.links[second, first])
            message[0].item()  # it is here
        times.append((time.perf_counter_ns() - begun) / 2)
    return median(times[1:])
