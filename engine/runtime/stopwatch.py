"""Times of a rank's passes, and offsets between ranks' clocks."""

import time

import numpy as np
import torch
import torch.distributed as dist

from isobatch.common.types import IntArray
from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.errors import peer_errors

ROUNDS = 10
"""Clock queries per rank; the one with the quickest answer counts."""


class Stopwatch:
    """Records times on this rank's clock; on a GPU when the GPU gets there, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self._times: list[int] = []
        if self._events is not None:
            self._wait()
        self.begun_ns = time.perf_counter_ns()
        if self._events is not None:
            self.note()  # the beginning, from which events are counted

    def note(self) -> None:
        """Record the time."""
        if self._events is None:
            self._times.append(time.perf_counter_ns() - self.begun_ns)
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # self._device need not be the current device
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)

    def times_ns(self) -> IntArray:
        """Recorded times since `begun_ns`; waits for the GPU."""
        if self._events is None:
            return np.array(self._times, np.int64)
        first, *others = self._events
        self._wait()
        return np.array([round(1e6 * first.elapsed_time(event)) for event in others], np.int64)

    def _wait(self) -> None:
        """Wait for this GPU's passes, but not for NCCL, which may itself wait for this rank."""
        torch.cuda.current_stream(self._device).synchronize()


def clock_offsets(groups: ProcessGroups, device: torch.device) -> IntArray:
    """Offset of each rank's clock from the first rank's, int64 ns, (ranks,). All ranks call it.

    The first rank asks each for its time, and takes it for half-way between question and answer.
    The error is below half of a round trip, about 50 us on one machine.
    """
    offsets = torch.zeros(len(groups.ranks), dtype=torch.int64, device=device)
    for rank in range(1, len(groups.ranks)):
        if groups.rank == 0:
            offsets[rank] = _ask(groups, rank, device)
        elif groups.rank == rank:
            _answer(groups, device)
    all_reduce(offsets, groups.pipeline)
    return np.asarray(offsets.cpu().numpy())


def _ask(groups: ProcessGroups, rank: int, device: torch.device) -> int:
    answers: list[tuple[int, int]] = []
    theirs = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(ROUNDS):
        with peer_errors(groups.ranks, groups.ranks[rank]):
            asked = time.perf_counter_ns()
            dist.send(theirs, groups.ranks[rank], group=groups.pipeline)
            dist.recv(theirs, groups.ranks[rank], group=groups.pipeline)
            rank_ns, answered = int(theirs), time.perf_counter_ns()
        answers.append((answered - asked, rank_ns - (asked + answered) // 2))
    return min(answers)[1]


def _answer(groups: ProcessGroups, device: torch.device) -> None:
    asked = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(ROUNDS):
        with peer_errors(groups.ranks, groups.ranks[0]):
            dist.recv(asked, groups.ranks[0], group=groups.pipeline)
            int(asked)  # waits until it has arrived
            answer = torch.tensor([time.perf_counter_ns()], device=device)
            dist.send(answer, groups.ranks[0], group=groups.pipeline)
