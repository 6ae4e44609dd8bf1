"""Message times between neighbouring ranks, from latency and time per byte."""

import time
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from isobatch.common.types import IntArray
from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.communication.process_groups import ProcessGroups

ROUNDS = 7
"""Messages per size; the first warms up, the median of the others counts."""
LEAST_BYTES = 1 << 20
"""Minimum size of a large message: enough for bytes to matter next to the latency."""


def message_times(groups: ProcessGroups, num_bytes: IntArray, device: torch.device) -> IntArray:
    """Times of messages over a pipeline's slowest link, int64 ns; an empty message takes none.

    All its ranks call it; all get the same. Measures half a round trip of a tiny message and of the
    largest, link after link; others are in between. All times are 0 with a single rank.
    """
    slowest = torch.zeros(2, dtype=torch.float64, device=device)
    sizes = (1, max(int(num_bytes.max(initial=0)), LEAST_BYTES))
    for first in range(len(groups.ranks) - 1):
        if groups.rank in (first, first + 1):
            small, large = (_one_way_ns(groups, first, size, device) for size in sizes)
            slope = max(0.0, large - small) / sizes[1]
            link_times = torch.tensor([small, slope], dtype=torch.float64, device=device)
            slowest = torch.maximum(slowest, link_times)
        barrier(groups, device)
    all_reduce(slowest, groups.pipeline, dist.ReduceOp.MAX)
    latency_ns, ns_per_byte = slowest.tolist()
    times = (latency_ns + num_bytes * ns_per_byte) * (num_bytes > 0)
    return np.asarray(np.rint(times), np.int64)


def barrier(groups: ProcessGroups, device: torch.device) -> None:
    """Wait until all ranks of the pipeline are here."""
    token = torch.zeros(1, device=device)
    all_reduce(token, groups.pipeline)
    token.item()


def _one_way_ns(groups: ProcessGroups, first: int, size: int, device: torch.device) -> float:
    """Half a round trip from rank `first` to the next, as either of them measures it."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        if groups.rank == first:
            groups.send(message, first + 1)
            groups.receive(message, first + 1)
        else:
            groups.receive(message, first)
            groups.send(message, first)
        message[0].item()  # waits until it has arrived
        times.append((time.perf_counter_ns() - begun) / 2)
    return median(times[1:])
