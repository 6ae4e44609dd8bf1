"""Local search for the fastest partition, and how far from the best it can be.

Minimises the simulated time of the whole step: from several anchors to the partitions that small
moves lead to, then from random places near the best of these. No partition is faster than the
slowest of its stages: of the bounds of all possible stages (`_bounds`) dynamic programming finds
the chain that is fastest, which bounds every partition and is one more start. It ignores
recomputation, and what other stages of the same rank do.

A branch-and-bound search stood here before. It proved 1F1B's partitions the fastest, and found none
that was more than .2 % faster (docs/results/planning.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.bmp import greedy_anchor
from isobatch.engine.planning.partition import METHODS, by_step_time, check_stages, even_partition
from isobatch.engine.planning.recompute import InfeasiblePlan, what_would_fit
from isobatch.engine.planning.search._bounds import window_steps
from isobatch.engine.planning.search.limits import UNLIMITED, SearchLimits
from isobatch.engine.planning.search.local_search import (
    NEVER,
    PartitionEvaluator,
    improve_partition,
)
from isobatch.engine.simulator.schedule import Schedule

STARTS = 3
"""Anchors from which the local search starts."""
DESCENT_SHARE = 0.25
"""Share of the remaining time that one local search may take."""
KICKS = 100
"""Random starts near the best partition at most."""
MOST_ACTIONS = 1_000_000_000
"""Simulated actions after which no such start begins: 5 s."""
FARTHEST_KICK = 4
"""Layers by which such a start moves a border at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best partition found: borders, (stages + 1,), and recomputed layers, (layers,)."""

    borders: IntArray
    recompute: BoolArray
    step_ns: int
    lower_bound_ns: int
    """No partition is faster, whatever it recomputes."""

    @property
    def gap(self) -> float:
        """Share of the time by which another partition could be faster."""
        return (self.step_ns - self.lower_bound_ns) / max(self.step_ns, 1)


def search_partition(
    costs: Costs, schedule: Schedule, memory_bytes: int, limits: SearchLimits = UNLIMITED
) -> SearchResult:
    """The partition and recomputed layers of the fastest step found in which every rank fits.

    Deterministic, but for what a deadline leaves out. Never slower than the fastest anchor.
    InfeasiblePlan if none was found that fits, with what would make the best anchor fit.
    """
    check_stages(costs.num_layers, schedule.num_stages)
    evaluator = PartitionEvaluator(costs, schedule, memory_bytes)
    starts = anchors(costs, schedule.num_stages)
    borders, step_ns = improve_from(evaluator, starts, limits)
    if step_ns == NEVER:
        raise InfeasiblePlan(what_would_fit(costs, borders, schedule, memory_bytes))
    chain_ns, chain = fastest_chain(evaluator, step_ns)
    if chain_ns < step_ns:
        value, best = evaluator.steps, (borders, step_ns)
        through = improve_partition(value, chain, chunk=evaluator.chunk, limits=limits)
        best = min(best, through, key=_value)
        borders, step_ns = improve_nearby(evaluator, value, best, chain_ns, limits)
    recompute = evaluator.choose(borders)
    assert recompute is not None  # it fits
    # one rank takes at least as long as the mean work of a rank
    mean_ns = -(-int((costs.forward_ns + costs.backward_ns).sum()) // schedule.num_ranks)
    return SearchResult(
        borders=borders,
        recompute=recompute,
        step_ns=step_ns,
        lower_bound_ns=min(step_ns, max(chain_ns, mean_ns)),
    )


def anchors(costs: Costs, num_stages: int) -> list[IntArray]:
    """First partitions: even in forward time, step time, parameters, layers, or memory."""
    most_live = costs.saved_bytes.max(axis=1)
    return [
        greedy_anchor(costs, num_stages),
        by_step_time(costs, num_stages),
        *(method(costs, num_stages) for method in METHODS.values()),
        even_partition(costs.state_bytes + costs.kept_bytes.max(axis=1), num_stages),
        even_partition(costs.state_bytes + most_live * num_stages, num_stages),
    ]


def improve_from(
    evaluator: PartitionEvaluator, starts: list[IntArray], limits: SearchLimits
) -> tuple[IntArray, int]:
    """-> (borders, step time) that small moves lead to from the fastest of these starts.

    If none fits, from the one of least memory that small moves lead to; NEVER if it does not fit.
    """
    steps = evaluator.steps(np.stack(starts))
    if steps.min() == NEVER:
        peaks = evaluator.least_peaks(np.stack(starts))
        best = improve_partition(evaluator.least_peaks, starts[int(peaks.argmin())])
        memory = evaluator.memory_bytes
        smallest, _ = improve_nearby(evaluator, evaluator.least_peaks, best, memory, limits)
        starts, steps = [smallest], evaluator.steps(smallest[np.newaxis])
        if steps.min() == NEVER:
            return smallest, NEVER
    results = []
    for row in np.argsort(steps, kind="stable")[:STARTS].tolist():
        if steps[row] < NEVER:
            part, chunk = limits.part(DESCENT_SHARE), evaluator.chunk
            results.append(
                improve_partition(evaluator.steps, starts[row], chunk=chunk, limits=part)
            )
    return min(results, key=_value)


def improve_nearby(
    evaluator: PartitionEvaluator,
    value: Callable[[IntArray, int], IntArray],
    best: tuple[IntArray, int],
    enough: int,
    limits: SearchLimits,
) -> tuple[IntArray, int]:
    """-> (borders, value) that small moves from random places near the best lead to.

    As `improve_partition`; ends early at a value of `enough`. The places are always the same.
    """
    rng = np.random.default_rng(0)
    for _ in range(KICKS):
        if best[1] <= enough or evaluator.actions > MOST_ACTIONS or limits.is_over():
            break
        start = kicked(best[0], rng)
        result = improve_partition(value, start, chunk=evaluator.chunk, limits=limits)
        best = min(best, result, key=_value)
    return best


def _value(found: tuple[IntArray, int]) -> int:
    return found[1]


def fastest_chain(evaluator: PartitionEvaluator, limit_ns: int) -> tuple[int, IntArray]:
    """-> (least time of a step, borders of a partition with that bound), if it is below `limit_ns`.

    Else `limit_ns`, and no partition. Stages whose weights alone do not fit are left out.
    """
    costs, schedule, sums = evaluator.costs, evaluator.schedule, evaluator.sums
    state = np.concatenate([[0], np.cumsum(evaluator.layers.state)])
    places = np.arange(costs.num_layers + 1)
    fits = state - state[:, np.newaxis] <= evaluator.memory_bytes
    fits &= places > places[:, np.newaxis]
    nothing = np.zeros((1, costs.num_micro_batches), np.int64)
    # a stage takes as long as its work: a bound without waiting, for ranges by the million
    work = (sums.forward + sums.input_grad + sums.weight_grad).sum(axis=1)
    works = np.where(fits, work - work[:, np.newaxis], limit_ns)
    # by last border: the slowest stage of the fastest chain so far, and its borders before
    best = np.where(places == 0, 0, limit_ns)
    before: list[IntArray] = []
    for stage in range(schedule.num_stages):
        bounds = works.copy()
        begin, end = np.nonzero(np.maximum(bounds, best[:, np.newaxis]) < limit_ns)
        windows, rows = np.stack([begin, end], axis=1), np.zeros((len(begin), 1), np.int64)
        own_ns = window_steps(schedule, sums, stage, windows, rows, nothing)
        bounds[begin, end] = np.maximum(bounds[begin, end], own_ns)
        through = np.maximum(bounds, best[:, np.newaxis])
        before.append(through.argmin(axis=0))
        best = np.minimum(through.min(axis=0), limit_ns)
    borders = [costs.num_layers]
    for previous in reversed(before):
        borders.append(int(previous[borders[-1]]))
    return int(best[-1]), np.array(borders[::-1])


def kicked(borders: IntArray, rng: np.random.Generator) -> IntArray:
    """A partition near this one: a third of its borders move a little, no stage is empty."""
    inner = len(borders) - 2
    far = int(rng.integers(1, FARTHEST_KICK + 1))
    moves = rng.integers(-far, far + 1, inner) * (rng.random(inner) < 1 / 3)
    # each border after the one before it, and with a layer for each stage behind it
    near = borders.copy()
    for at, move in enumerate(moves.tolist(), 1):
        after = borders[-1] - (inner + 1 - at)
        near[at] = min(max(near[at] + move, near[at - 1] + 1), after)
    return near
