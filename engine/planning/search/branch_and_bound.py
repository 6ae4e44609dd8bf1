"""The fastest partition for a schedule, recomputation and memory included, or how far from it we
may be. Pure.

For planning (`python -m engine plan`) and to judge BMP. Simulated time of the whole step, not a
figure that stands for it. A good partition is found first, by small moves from several anchors;
then it is proved, or bettered: every stage that a partition can have gets a bound of its own
(`engine.planning.search._bounds`), and what no faster partition can contain is dropped; then every
two neighbouring stages that are left, every three, and so on (`engine.planning.search._windows`).
When windows are as long as the pipeline, they are the partitions that are left. All is exact: brute
force agrees to the nanosecond.

Where too many windows are left, only those of the fastest chains go on, and the rest counts with
its bound: the answer then has a proven gap; so too where ranks have several stages and must
recompute, of which bounds know nothing (10 to 30 %, and half a minute for 3 stages per rank). For
64 micro-batches 93 layers in 4 stages take .05 s, 125 in 8 some .2 s, 160 in 16 from .5 to 4 s and,
where micro-batches differ by 15 %, a gap of .4 % is left (benchmarks/partition_speed.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.planning.bmp import greedy_anchor
from engine.planning.partition import METHODS, by_step_time, check_stages, even_partition
from engine.planning.recompute import InfeasiblePlan, what_would_fit
from engine.planning.search._bounds import layer_sums, window_steps
from engine.planning.search._stage_choices import StageChoices, every_stage
from engine.planning.search._windows import (
    Windows,
    best_chain,
    chain_bounds,
    count_joined,
    join,
    prune,
)
from engine.planning.search.local_search import NEVER, PartitionEvaluator, improve_partition
from engine.simulator.schedule import Schedule

MOST_WINDOWS = 600_000
"""Windows that are simulated at most: 1 to 15 us each for 64 micro-batches."""
SHARE = 3
"""One in so many of the windows that may still be simulated goes to the next length."""
STARTS = 3
"""Anchors from which a partition is looked for by small moves."""
MOST_WHOLE = 300
"""Partitions whose recomputation is looked into at the end, where ranks have several stages: 1 to
100 ms each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best partition found."""

    borders: IntArray
    """(stages + 1,)."""
    recompute: NDArray[np.bool_]
    """(layers,)."""
    step_ns: int
    lower_bound_ns: int
    """No partition is faster, whatever it recomputes."""
    windows: int
    """That were simulated."""

    @property
    def is_proven(self) -> bool:
        """Whether there is none faster."""
        return self.lower_bound_ns == self.step_ns

    @property
    def gap(self) -> float:
        """How much faster another one could be, as a share of this one's time."""
        return (self.step_ns - self.lower_bound_ns) / max(self.step_ns, 1)


def search_exact(
    costs: Costs, schedule: Schedule, memory_bytes: int, *, most_windows: int = MOST_WINDOWS
) -> SearchResult:
    """The partition and the recomputed layers of the fastest step of a schedule in which every rank
    fits.

    Deterministic. InfeasiblePlan if none fits, with what would make the best of the anchors fit.
    """
    check_stages(costs.num_layers, schedule.num_stages)
    search = _Search(costs, schedule, memory_bytes, most_windows)
    search.improve_from(anchors(costs, schedule.num_stages))
    search.run()
    return search.result()


def anchors(costs: Costs, num_stages: int) -> list[IntArray]:
    """Partitions to begin with: even in forward time, step time, parameters, layers, weights and
    activations.
    """
    most_live = costs.saved_bytes.max(axis=1)
    return [
        greedy_anchor(costs, num_stages),
        by_step_time(costs, num_stages),
        *(method(costs, num_stages) for method in METHODS.values()),
        even_partition(costs.state_bytes + costs.kept_bytes.max(axis=1), num_stages),
        even_partition(costs.state_bytes + most_live * num_stages, num_stages),
    ]


class _Search:
    """The best partition so far, what is proved, and what both are found with."""

    def __init__(
        self, costs: Costs, schedule: Schedule, memory_bytes: int, most_windows: int
    ) -> None:
        self.costs, self.schedule = costs, schedule
        self.evaluator = PartitionEvaluator(
            costs, schedule, memory_bytes, layer_sums(costs, schedule)
        )
        self.most_windows, self.windows = most_windows, 0
        self.best: tuple[IntArray, NDArray[np.bool_]] | None = None
        self.smallest: IntArray | None = None
        """The partition that needs least memory of those looked at, if no anchor fits."""
        self.step_ns, self.dropped_ns = NEVER, NEVER
        """Time of the best one, and the least bound of what was left out."""
        self.choices = StageChoices(self.evaluator)

    def result(self) -> SearchResult:
        """InfeasiblePlan if nothing was found."""
        if self.best is None:
            assert self.smallest is not None
            evaluator = self.evaluator
            raise InfeasiblePlan(
                what_would_fit(
                    evaluator.costs, self.smallest, self.schedule, evaluator.memory_bytes
                )
            )
        return SearchResult(
            borders=self.best[0],
            recompute=self.best[1],
            step_ns=self.step_ns,
            lower_bound_ns=min(self.step_ns, max(self.dropped_ns, _mean_work(self.evaluator))),
            windows=self.windows,
        )

    def improve_from(self, partitions: list[IntArray]) -> None:
        """Small moves from the fastest of some partitions; where none fits, from the one that needs
        least memory.
        """
        steps = self.evaluator.steps(np.stack(partitions))
        if steps.min() == NEVER and self.best is None:
            self.smallest = _smallest(self.evaluator, partitions)
            partitions, steps = [self.smallest], self.evaluator.steps(self.smallest[np.newaxis])
        for place in dict.fromkeys(np.argsort(steps, kind="stable")[:STARTS].tolist()):
            if steps[place] < NEVER:
                self.offer(*improve_partition(self.evaluator.steps, partitions[place]))

    def offer(
        self, borders: IntArray, step_ns: int, recompute: NDArray[np.bool_] | None = None
    ) -> None:
        """Keep a partition if it is the best."""
        if step_ns < self.step_ns:
            recompute = self.evaluator.recompute(borders) if recompute is None else recompute
            assert recompute is not None
            self.best, self.step_ns = (borders, recompute), step_ns

    def run(self) -> None:
        """Longer and longer windows, until none is left or they are whole partitions."""
        chain = self.stages()
        while all(len(one) for one in chain):
            bounds = chain_bounds(chain)
            if len(chain) > 1:
                self.improve_from([best_chain(chain, bounds)[0]])
            chain = prune(chain, bounds, min(self.step_ns, self.dropped_ns))
            if len(chain) == 1:
                self.end(chain[0])
                return
            chain = [
                self.simulated(first, one) for first, one in enumerate(join(self.affordable(chain)))
            ]

    def stages(self) -> list[Windows]:
        """Windows of one stage."""
        chain = [
            self.simulated(first, one) for first, one in enumerate(every_stage(self.evaluator))
        ]
        chain = prune(chain, chain_bounds(chain), self.step_ns)
        if self.choices.are_of_stages:
            left_out, chain = self.choices.expand(chain)
            self.dropped_ns = min(self.dropped_ns, left_out)
            chain = [self.simulated(first, one) for first, one in enumerate(chain)]
        return chain

    def simulated(self, first: int, windows: Windows) -> Windows:
        """The same with their own bounds."""
        self.windows += len(windows)
        steps = window_steps(
            self.schedule,
            self.evaluator.sums,
            first,
            windows.borders,
            windows.choices,
            self.choices.extra_ns,
        )
        return replace(windows, bound_ns=np.maximum(windows.bound_ns, steps))

    def affordable(self, chain: list[Windows]) -> list[Windows]:
        """The windows of the fastest chains, as many as the rest of the search can join."""
        room = max(0, self.most_windows - self.windows) // SHARE
        if count_joined(chain) <= room:
            return chain
        bounds = chain_bounds(chain)
        limits = np.unique(np.concatenate(bounds))
        fewest, most = 0, len(limits) - 1
        while fewest < most:  # the highest limit that is affordable; the least one leaves nothing
            middle = (fewest + most + 1) // 2
            if count_joined(prune(chain, bounds, int(limits[middle]))) <= room:
                fewest = middle
            else:
                most = middle - 1
        self.dropped_ns = min(self.dropped_ns, int(limits[fewest]))
        return prune(chain, bounds, self.dropped_ns)

    def end(self, partitions: Windows) -> None:
        """Whole partitions, of which the fastest is the answer if it is faster than the one known.

        Where ranks have one stage, the first one is. Where they have several, bounds know nothing
        of recomputation, and at most MOST_WHOLE partitions are looked into; the others count with
        their bounds.
        """
        for looked, place in enumerate(np.argsort(partitions.bound_ns, kind="stable").tolist()):
            bound = int(partitions.bound_ns[place])
            if bound >= self.step_ns:
                break
            if looked == MOST_WHOLE:
                self.dropped_ns = min(self.dropped_ns, bound)
                break
            borders, numbers = partitions.borders[place], partitions.choices[place]
            steps, masks, is_all = self.choices.of_partition(borders, numbers)
            self.windows += len(steps)
            if not is_all:
                self.dropped_ns = min(self.dropped_ns, bound)
            if len(steps):
                best = int(steps.argmin())
                self.offer(borders, int(steps[best]), masks[best])


def _mean_work(evaluator: PartitionEvaluator) -> int:
    """What ranks compute on average: one of them takes at least as long."""
    costs = evaluator.costs
    return -(-int((costs.forward_ns + costs.backward_ns).sum()) // evaluator.schedule.num_ranks)


def _smallest(evaluator: PartitionEvaluator, partitions: list[IntArray]) -> IntArray:
    """Small moves to less memory, everything recomputed."""
    peaks = evaluator.least_peaks(np.stack(partitions))
    return improve_partition(evaluator.least_peaks, partitions[int(peaks.argmin())])[0]
