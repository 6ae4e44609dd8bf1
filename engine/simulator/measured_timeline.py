"""Timelines of measured steps, in the form of simulated ones. Pure.

`Pipeline.timeline` gathers the times of all passes on all ranks. The arrival of a result is known
only where a rank waited for it: then it arrived when the pass began. Other sends take no time.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from balance.types import IntArray
from engine.simulator.program import Program
from engine.simulator.simulate import Timeline

TURN_NS = 200_000
"""Longest time of a rank between two passes if it waits for nothing."""


def measured_timeline(program: Program, start_ns: IntArray, end_ns: IntArray) -> Timeline:
    """The timeline of passes that ran from `start_ns` to `end_ns`; (operations,) int64, one clock.

    Only the edges of `program` are used. The step begins with its first pass, on any rank.
    """
    first = int(start_ns.min(initial=int(end_ns.max(initial=0))))
    start, end = start_ns - first, end_ns - first
    edge_ns = np.zeros_like(program.edge_ns)
    measured = replace(program, duration_ns=end - start, edge_ns=edge_ns)
    ranks, free = program.schedule.ranks.tolist(), dict[tuple[int, int], int]()
    awaited = _awaited(measured, start, end)
    for source, edge in _edges(program):
        target = int(program.edge_targets[edge])
        link = ranks[source], ranks[target]
        if link[0] != link[1]:
            ready = max(int(end[source]), free.get(link, 0))
            if edge in awaited:
                edge_ns[edge] = max(0, int(start[target]) - ready)
            free[link] = ready + int(edge_ns[edge])
    return Timeline(program=measured, start_ns=start, end_ns=end)


def _edges(program: Program) -> Iterator[tuple[int, int]]:
    """(operation whose result is sent, edge)."""
    offsets = program.edge_offsets.tolist()
    for source in range(len(program.schedule)):
        for edge in range(offsets[source], offsets[source + 1]):
            yield source, edge


def _awaited(program: Program, start: IntArray, end: IntArray) -> set[int]:
    """Edges for which an operation's rank waited, the latest one for each."""
    schedule, ranks = program.schedule, program.schedule.ranks.tolist()
    before = np.concatenate([[0], end[:-1]])
    before[schedule.rank_offsets[:-1][np.diff(schedule.rank_offsets) > 0]] = 0
    last: dict[int, tuple[int, int]] = {}
    for source, edge in _edges(program):
        target = int(program.edge_targets[edge])
        if ranks[source] != ranks[target]:
            last[target] = max(last.get(target, (0, edge)), (int(end[source]), edge))
    return {
        edge
        for target, (made, edge) in last.items()
        if made > before[target] or start[target] - before[target] > TURN_NS
    }
