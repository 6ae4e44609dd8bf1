"""BMP (OmniBal 4.2): partitions near a greedy anchor, the best ones run.

The metric is a sum over stages and cuts, so dynamic programming with the K best beginnings per
border finds the best candidates among (2r + 1)^(N - 1), 7^7 for 8 stages: 3 ms for 16 stages. The
caller gives the time of a step, simulated or measured.

VAR(fwd_time) + SUM(comm) as printed adds squared times to volumes. Here both are milliseconds of a
micro-batch: VAR is divided by the stages' mean time, and SUM is the time of all sends at cuts. It
is only a filter: on the paper's own Table 4 it would rank the slower of two partitions first.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray
from isobatch.engine.cost_model.costs import NS_PER_MS, Costs
from isobatch.engine.planning.partition import check_stages
from isobatch.engine.planning.recompute import InfeasiblePlan

RADIUS = 3
"""Distance from the anchor within which the optimum lies (OmniBal 5.2)."""
MOST_RUN = 12
"""Number of candidates that are run: 10 to 15 (OmniBal 5.2)."""

_Beginnings = dict[int, list[tuple[float, tuple[int, ...]]]]
"""Best beginnings of a partition, by their last border: (metric, borders)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCandidate:
    """A partition, (stages + 1,), its metric, and the time of its step if it was run."""

    borders: IntArray
    variance_ms2: float
    """VAR(fwd_time), eq. 4, of a mean micro-batch: a sum over stages, not a mean."""
    comm_bytes: int
    """SUM(comm), eq. 5: activations of a mean micro-batch that cross the cuts, in bytes."""
    metric_ms: float
    """VAR divided by the stages' mean time, plus that of sending those and their gradients."""
    step_ns: int | None = None
    """Time of the step; None if it does not fit into memory, or was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpResult:
    """The best partition, and all candidates that were run."""

    anchor: IntArray
    candidates: tuple[PartitionCandidate, ...]
    """Candidates by rank, the anchor included."""
    best: PartitionCandidate


def search_bmp(
    costs: Costs,
    num_stages: int,
    step_ns: Callable[[IntArray], int],
    *,
    radius: int = RADIUS,
    most_run: int = MOST_RUN,
) -> BmpResult:
    """The fastest of the best-ranked partitions near the anchor and the anchor itself.

    `step_ns`: time of a step with these borders. InfeasiblePlan only if it raises that for all.
    """
    anchor = greedy_anchor(costs, num_stages)
    candidates = rank_candidates(costs, anchor, radius=radius, max_count=most_run)
    if not any(np.array_equal(one.borders, anchor) for one in candidates):
        candidates.append(candidate(costs, anchor))
    done = []
    failure = None
    for one in candidates:
        try:
            time = step_ns(one.borders)
        except InfeasiblePlan as error:
            time, failure = None, error
        done.append(replace(one, step_ns=time))
    fitting = [one for one in done if one.step_ns is not None]
    if failure is not None and not fitting:
        raise failure
    best = min(fitting, key=lambda one: one.step_ns or 0)
    return BmpResult(anchor=anchor, candidates=tuple(done), best=best)


def greedy_anchor(costs: Costs, num_stages: int) -> IntArray:
    """Borders with each stage in turn nearest to its share of the remaining forward time."""
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
    """A partition with its metric."""
    ranking = _Ranking(costs, len(borders) - 1)
    stage_ms, cuts = np.diff(ranking.running_ms[borders]), np.asarray(borders[1:-1]) - 1
    return PartitionCandidate(
        borders=np.asarray(borders),
        variance_ms2=float(((stage_ms - ranking.mean_ms) ** 2).sum()),
        comm_bytes=int(costs.sent_bytes[cuts].mean(axis=1).sum()),
        metric_ms=sum(
            ranking.part(start, end) for start, end in pairwise(np.asarray(borders).tolist())
        ),
    )


def rank_candidates(
    costs: Costs, anchor: IntArray, *, radius: int, max_count: int
) -> list[PartitionCandidate]:
    """Partitions of least metric with inner borders within `radius` of the anchor's.

    At most `max_count`, best first; ties in lexicographic order of the borders.
    O(stages radius^2 max_count).
    """
    if radius < 0 or max_count < 1:
        raise ConfigError(
            f"radius {radius}, {max_count} candidates; give a radius of 0 or more, a candidate or"
            " more"
        )
    ranking = _Ranking(costs, len(anchor) - 1)
    begun: _Beginnings = {0: [(0.0, (0,))]}
    windows = [range(border - radius, border + radius + 1) for border in anchor[1:-1].tolist()]
    for ends in [*windows, range(costs.num_layers, costs.num_layers + 1)]:
        # the best partitions with one more stage, by its end
        longer = {}
        for end in range(ends.start, min(ends.stop, costs.num_layers + 1)):
            partitions = []
            for start, best in begun.items():
                if start < end:
                    part = ranking.part(start, end)
                    partitions += [(metric + part, (*borders, end)) for metric, borders in best]
            if partitions:
                longer[end] = heapq.nsmallest(max_count, partitions)
        begun = longer
    best = begun.get(costs.num_layers, [])
    return [candidate(costs, np.array(borders)) for _, borders in best]


class _Ranking:
    """The terms of the metric."""

    def __init__(self, costs: Costs, num_stages: int) -> None:
        forward_ms = costs.forward_ns.mean(axis=1) / NS_PER_MS
        self.running_ms: FloatArray = np.concatenate([[0.0], np.cumsum(forward_ms)])
        """(layers + 1,): forward time of the layers before."""
        self.mean_ms = float(self.running_ms[-1]) / num_stages
        """Mean forward time of a stage."""
        self.comm_ms: FloatArray = costs.send_ns.mean(axis=1) / NS_PER_MS * (1 + costs.sends_grad)
        """(layers,): sends if the partition cuts after the layer."""

    def part(self, start: int, end: int) -> float:
        """Contribution of a stage and the cut after it to the metric."""
        away = float(self.running_ms[end] - self.running_ms[start]) - self.mean_ms
        comm = float(self.comm_ms[end - 1]) if end < len(self.comm_ms) else 0.0
        return (away**2 / self.mean_ms if self.mean_ms else 0.0) + comm
