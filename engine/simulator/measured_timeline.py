"""Timelines of measured steps, in the form of simulated ones. Pure.

`Pipeline.timeline` gathers the times of all passes on all ranks. The arrival of a result is known
only where a rank waited for it: then it arrived when the pass began. Other sends take no time.
"""

from dataclasses import replace

import numpy as np

from isobatch.common.types import IntArray
from isobatch.engine.simulator.program import Program
from isobatch.engine.simulator.simulate import Timeline

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
    ranks = program.schedule.ranks.tolist()
    free = dict[tuple[int, int], int]()
    awaited = _awaited(measured, start, end)
    for edge, source, target in _sends(program):
        link = ranks[source], ranks[target]
        ready = max(int(end[source]), free.get(link, 0))
        if edge in awaited:
            edge_ns[edge] = max(0, int(start[target]) - ready)
        free[link] = ready + int(edge_ns[edge])
    return Timeline(program=measured, start_ns=start, end_ns=end)


def _sends(program: Program) -> list[list[int]]:
    """(edge, source operation, target operation) of the results that go to another rank."""
    ranks, sources, targets = program.schedule.ranks, program.edge_sources, program.edge_targets
    edges = np.flatnonzero(ranks[sources] != ranks[targets])
    rows: list[list[int]] = np.stack([edges, sources[edges], targets[edges]], axis=1).tolist()
    return rows


def _awaited(program: Program, start: IntArray, end: IntArray) -> set[int]:
    """Edges for which an operation's rank waited, the latest one for each."""
    schedule = program.schedule
    before = np.concatenate([[0], end[:-1]])
    before[schedule.rank_offsets[:-1][np.diff(schedule.rank_offsets) > 0]] = 0
    last: dict[int, tuple[int, int]] = {}
    for edge, source, target in _sends(program):
        last[target] = max(last.get(target, (0, edge)), (int(end[source]), edge))
    return {
        edge
        for target, (ready, edge) in last.items()
        if ready > before[target] or start[target] - before[target] > TURN_NS
    }
