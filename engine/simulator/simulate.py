"""Simulation of a program: times of operations, critical path, deadlocks.

Exact, in whole nanoseconds, in one pass over the operations (numba): an operation begins when its
rank has ended the previous one and all results have arrived. 16,384 operations take .2 ms. The
discrete-event simulation in `tests/support/oracles` agrees to the last nanosecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.balance.kernels import kernel
from isobatch.common.errors import IsobatchError
from isobatch.common.types import BoolArray, FloatArray, IntArray
from isobatch.engine.simulator.program import Encodings, Program, make_program
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.stages import StageCosts


class Deadlock(IsobatchError):
    """The operations of a program wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each operation of a program begins and ends; int64 arrays of shape (operations,)."""

    program: Program
    start_ns: IntArray
    end_ns: IntArray

    @property
    def step_ns(self) -> int:
        """End of the last operation."""
        return int(self.end_ns.max(initial=0))

    @property
    def busy_ns(self) -> IntArray:
        """Time that each rank computes, (ranks,)."""
        offsets = self.program.schedule.rank_offsets
        return np.diff(np.concatenate([[0], np.cumsum(self.program.duration_ns)])[offsets])

    @property
    def bubble_ratio(self) -> FloatArray:
        """Share of the step that each rank waits, (ranks,)."""
        return 1 - self.busy_ns / max(self.step_ns, 1)


def simulate(program: Program) -> Timeline:
    """Run a program. Deadlock, with the operations that wait, if it cannot finish."""
    edges = program.edge_offsets, program.edge_targets, program.edge_ns
    start, end, done = run(program.schedule.rank_offsets, program.duration_ns, *edges)
    if done < len(program.duration_ns):
        raise Deadlock(_what_waits(program, end))
    return Timeline(program=program, start_ns=start, end_ns=end)


def equal_passes(schedule: Schedule, sends_grad: Sequence[bool]) -> Timeline:
    """The timeline if all passes take equally long, and sends no time. May raise Deadlock.

    `sends_grad`: whether a gradient comes back to each stage from the next.
    """
    ones = np.ones((schedule.num_stages, schedule.num_micro_batches), np.int64)
    stages = StageCosts.of_times(ones, ones, ones, np.array(sends_grad))
    encodings = Encodings(forward_ns=ones[0], send_ns=np.zeros_like(ones[0]))
    return simulate(make_program(schedule, stages, encodings))


def critical_path(timeline: Timeline) -> list[int]:
    """Operations, first to last, each of which begins as soon as the previous one allows.

    Between them lie sends: of the result that the next one waits for, and of those that delayed it
    on the link. Of several paths the one that stays on a rank. Passes of a measured step begin a
    little late: there, the latest of all that each waited for.
    """
    schedule = timeline.program.schedule
    sent = transfers(timeline)
    first_of_rank = set(schedule.rank_offsets.tolist())
    into = np.argsort(sent.targets, kind="stable")  # edges, by the operation that waits
    offsets = np.searchsorted(sent.targets[into], np.arange(len(schedule) + 1))
    at = int(np.argmax(timeline.end_ns))
    path = [at]
    while timeline.start_ns[at] > 0:
        edges = into[offsets[at] : offsets[at + 1]]
        before = -1 if at in first_of_rank else timeline.end_ns[at - 1]
        arrived = sent.end_ns[edges].max(initial=-1)
        if max(before, arrived) < 0:  # in a measured step: the rank began late
            break
        if before >= arrived:
            at -= 1
        else:
            edge = int(edges[np.argmax(sent.end_ns[edges])])
            while sent.start_ns[edge] > timeline.end_ns[sent.sources[edge]]:
                edge = int(sent.previous[edge])
            at = int(sent.sources[edge])
        path.append(at)
    return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The sends of a step, one per edge of its program; int64 arrays of shape (edges,)."""

    sources: IntArray
    """Operation whose result is sent."""
    targets: IntArray
    """Operation that waits for it."""
    start_ns: IntArray
    end_ns: IntArray
    previous: IntArray
    """Edge with the previous send on the same link; -1 for the first, and inside a rank."""
    crosses: BoolArray
    """Whether it goes to another rank."""


def transfers(timeline: Timeline) -> Transfers:
    """The sends of a step."""
    program, schedule = timeline.program, timeline.program.schedule
    sources = program.edge_sources
    edges = program.edge_offsets, program.edge_targets, program.edge_ns
    arrivals = send(schedule.rank_offsets, timeline.end_ns, *edges)
    ranks = schedule.ranks
    links = ranks[sources] * schedule.num_ranks + ranks[program.edge_targets]
    order = np.argsort(links, kind="stable")
    previous = np.full(len(links), -1, np.int64)
    previous[order[1:]] = np.where(links[order[1:]] == links[order[:-1]], order[:-1], -1)
    crosses = ranks[sources] != ranks[program.edge_targets]
    return Transfers(
        sources=sources,
        targets=program.edge_targets,
        start_ns=arrivals - program.edge_ns,
        end_ns=arrivals,
        previous=np.where(crosses, previous, -1),
        crosses=crosses,
    )


def _what_waits(program: Program, end_ns: IntArray) -> str:
    """The first operation of each rank that never ran."""
    schedule = program.schedule
    waiting = []
    for rank in range(schedule.num_ranks):
        operations = np.arange(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1])
        stuck = operations[end_ns[operations] < 0]
        if len(stuck):
            waiting.append(f"rank {rank} waits to begin {schedule.action(int(stuck[0]))}")
    return f"schedule {schedule.name} deadlocks: {'; '.join(waiting)}"


@kernel
def run(  # type: ignore[no-untyped-def]
    rank_offsets, duration, edge_offsets, edge_targets, edge_ns
):
    """-> (start, end, how many operations ran); -1 where an operation never ran.

    A rank runs until it must wait for a result; the rank that computes the result wakes it.
    """
    # what each operation waits for
    num_ranks, num_operations = len(rank_offsets) - 1, len(duration)
    rank_of = np.empty(num_operations, np.int64)
    missing, ready = np.zeros(num_operations, np.int64), np.zeros(num_operations, np.int64)
    for rank in range(num_ranks):
        rank_of[rank_offsets[rank] : rank_offsets[rank + 1]] = rank
    for target in edge_targets:
        missing[target] += 1
    # when the last send from a rank to another has arrived
    free = np.zeros((num_ranks, num_ranks), np.int64)
    start, end = np.full(num_operations, -1, np.int64), np.full(num_operations, -1, np.int64)
    # a stack of ranks that may run
    now, following = np.zeros(num_ranks, np.int64), rank_offsets[:-1].copy()
    awake, queued = np.arange(num_ranks), np.ones(num_ranks, np.bool_)
    num_awake, done = num_ranks, 0
    while num_awake:
        num_awake -= 1
        rank = awake[num_awake]
        queued[rank] = False
        while following[rank] < rank_offsets[rank + 1] and missing[following[rank]] == 0:
            # run the rank's next operation
            at = following[rank]
            start[at] = max(now[rank], ready[at])
            end[at] = start[at] + duration[at]
            now[rank] = end[at]
            # send its result, and wake ranks that waited for it
            for edge in range(edge_offsets[at], edge_offsets[at + 1]):
                target = edge_targets[edge]
                other = rank_of[target]
                arrival = end[at]
                if other != rank:
                    arrival = max(arrival, free[rank, other]) + edge_ns[edge]
                    free[rank, other] = arrival
                ready[target] = max(ready[target], arrival)
                missing[target] -= 1
                is_next = missing[target] == 0 and following[other] == target
                if is_next and other != rank and not queued[other]:
                    awake[num_awake] = other
                    queued[other] = True
                    num_awake += 1
            following[rank] += 1
            done += 1
    return start, end, done


@kernel
def send(rank_offsets, end, edge_offsets, edge_targets, edge_ns):  # type: ignore[no-untyped-def]
    """When the result of each edge arrives, as in `run`."""
    num_ranks = len(rank_offsets) - 1
    rank_of = np.empty(len(end), np.int64)
    for rank in range(num_ranks):
        rank_of[rank_offsets[rank] : rank_offsets[rank + 1]] = rank
    free = np.zeros((num_ranks, num_ranks), np.int64)
    arrivals = np.empty(len(edge_targets), np.int64)
    for at in range(len(end)):
        for edge in range(edge_offsets[at], edge_offsets[at + 1]):
            rank, other = rank_of[at], rank_of[edge_targets[edge]]
            arrivals[edge] = end[at]
            if other != rank:
                arrivals[edge] = max(end[at], free[rank, other]) + edge_ns[edge]
                free[rank, other] = arrivals[edge]
    return arrivals
