"""Balanced Model Partitioning (OmniBal 4.2): a greedy anchor, partitions near it, the best-ranked
of them run.

The ranking is additive over stages and cuts, so the best candidates come out of a dynamic programme
that keeps the K best beginnings per border, and not out of (2r + 1)^(N - 1) candidates, 7^7 for 8
stages: 3 ms for 16 stages. How long a step takes is asked of the caller, who simulates
(`engine.planning.recompute.fitted_step`) or measures it.

VAR(fwd_time) + SUM(comm) adds squared times and volumes as printed. Here both are milliseconds of a
micro-batch: VAR is divided by the stages' mean time, and SUM is how long what crosses the cuts
travels, forward and back. The raw figures stand beside. It is a filter only: on the paper's own
Table 4 it would put the slower of two partitions first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.costs import NS_PER_MS, Costs
from engine.planning.partition import check_stages
from engine.planning.recompute import InfeasiblePlan

RADIUS = 3
"""The optimum lies within it of the anchor (OmniBal 5.2)."""
MOST_RUN = 12
"""Candidates that are run: 10 to 15 (OmniBal 5.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCandidate:
    """A partition, what it was ranked by and what came of it."""

    borders: IntArray
    """(stages + 1,)."""
    variance_ms2: float
    """VAR(fwd_time), eq. 4: a sum over stages, not divided by their number; of a mean
    micro-batch.
    """
    comm_bytes: int
    """SUM(comm), eq. 5: the activations of a mean micro-batch that cross the cuts, in bytes."""
    comm_ms: float
    """How long they and their gradients travel."""
    metric_ms: float
    """VAR divided by the stages' mean time, plus `comm_ms`."""
    step_ns: int | None = None
    """None if it does not fit into memory, or was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpResult:
    """What the search found, and out of what."""

    anchor: IntArray
    candidates: tuple[PartitionCandidate, ...]
    """All that were run, by rank; the anchor among them."""
    best: PartitionCandidate


def search_bmp(
    costs: Costs,
    num_stages: int,
    step_ns: Callable[[IntArray], int],
    *,
    radius: int = RADIUS,
    most_run: int = MOST_RUN,
) -> BmpResult:
    """The fastest of the best-ranked partitions near the anchor, and of the anchor itself.

    `step_ns` gives the time of a step with these borders, or raises InfeasiblePlan, which this does
    only if all do. Of equally fast ones the better ranked.
    """
    anchor = greedy_anchor(costs, num_stages)
    candidates = rank_candidates(costs, anchor, radius=radius, most=most_run)
    if not any(np.array_equal(one.borders, anchor) for one in candidates):
        candidates.append(candidate(costs, anchor))
    done, failure = [], None
    for one in candidates:
        try:
            time = step_ns(one.borders)
        except InfeasiblePlan as error:
            time, failure = None, error
        done.append(replace(one, step_ns=time))
    fitting = [one for one in done if one.step_ns is not None]
    if failure is not None and not fitting:
        raise failure
    return BmpResult(
        anchor=anchor, candidates=tuple(done), best=min(fitting, key=lambda one: one.step_ns or 0)
    )


def greedy_anchor(costs: Costs, num_stages: int) -> IntArray:
    """Borders such that each stage in turn comes as close as it can to its share of the forward
    time that is left.
    """
    num_layers = costs.num_layers
    check_stages(num_layers, num_stages)
    running = np.concatenate([[0], np.cumsum(costs.forward_ns.sum(axis=1))])
    borders = [0]
    for stages_left in range(num_stages, 1, -1):
        start = borders[-1]
        share = (running[-1] - running[start]) / stages_left
        ends = np.arange(start + 1, num_layers - stages_left + 2)
        borders.append(int(ends[np.argmin(np.abs(running[ends] - running[start] - share))]))
    return np.array([*borders, num_layers])


def candidate(costs: Costs, borders: IntArray) -> PartitionCandidate:
    """A partition's figures."""
    ranking = _Ranking.of(costs, len(borders) - 1)
    stage_ms, cuts = np.diff(ranking.running_ms[borders]), np.asarray(borders[1:-1]) - 1
    comm_ms = float(ranking.comm_ms[cuts].sum())
    return PartitionCandidate(
        borders=np.asarray(borders),
        variance_ms2=float(((stage_ms - ranking.mean_ms) ** 2).sum()),
        comm_bytes=int(costs.sent_bytes[cuts].mean(axis=1).sum()),
        comm_ms=comm_ms,
        metric_ms=sum(ranking.part(int(a), int(b)) for a, b in pairwise(borders)),
    )


def rank_candidates(
    costs: Costs, anchor: IntArray, *, radius: int, most: int
) -> list[PartitionCandidate]:
    """The `most` partitions of least metric whose inner borders are within `radius` of the
    anchor's, best first.

    Ties go to the borders that are less in lexicographic order. Per stage and pair of borders the
    `most` best beginnings are looked at: O(stages radius^2 most).
    """
    if radius < 0 or most < 1:
        raise ConfigError(
            f"radius {radius}, {most} candidates; give a radius of 0 or more and at least 1 candidate"
        )
    ranking = _Ranking.of(costs, len(anchor) - 1)
    begun: dict[int, list[tuple[float, tuple[int, ...]]]] = {0: [(0.0, (0,))]}  # by last border
    for border in anchor[1:-1].tolist():
        begun = _extend(begun, range(border - radius, border + radius + 1), ranking, most)
    ended = _extend(begun, range(costs.num_layers, costs.num_layers + 1), ranking, most)
    return [candidate(costs, np.array(borders)) for _, borders in ended[costs.num_layers]]


def _extend(
    begun: dict[int, list[tuple[float, tuple[int, ...]]]], ends: range, ranking: _Ranking, most: int
) -> dict[int, list[tuple[float, tuple[int, ...]]]]:
    """The best partitions with one more stage, by its end."""
    longer = {}
    for end in range(ends.start, min(ends.stop, ranking.last_end + 1)):
        found = [
            (metric + ranking.part(start, end), (*borders, end))
            for start, best in begun.items()
            if start < end
            for metric, borders in best
        ]
        if found:
            longer[end] = heapq.nsmallest(most, found)
    return longer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    running_ms: np.ndarray[tuple[int], np.dtype[np.float64]]
    """(layers + 1,): forward time of the layers before."""
    mean_ms: float
    """Of a stage."""
    comm_ms: np.ndarray[tuple[int], np.dtype[np.float64]]
    """(layers,): if the partition cuts behind the layer."""

    @classmethod
    def of(cls, costs: Costs, num_stages: int) -> _Ranking:
        running = np.concatenate([[0.0], np.cumsum(costs.forward_ns.mean(axis=1) / NS_PER_MS)])
        return cls(
            running_ms=running,
            mean_ms=float(running[-1]) / num_stages,
            comm_ms=costs.send_ns.mean(axis=1) / NS_PER_MS * (1 + costs.sends_grad),
        )

    @property
    def last_end(self) -> int:
        return len(self.comm_ms)

    def part(self, start: int, end: int) -> float:
        """What a stage and the cut behind it add to the metric."""
        away = float(self.running_ms[end] - self.running_ms[start]) - self.mean_ms
        comm = float(self.comm_ms[end - 1]) if end < self.last_end else 0.0
        return (away**2 / self.mean_ms if self.mean_ms else 0.0) + comm
