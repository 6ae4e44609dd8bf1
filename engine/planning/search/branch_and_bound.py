"""Branch and bound: the fastest partition, or a proven gap. Reads a clock only.

Minimises the simulated time of the whole step. A local search from several anchors finds a good
partition. Then it is proved or improved: every possible stage gets a lower bound (`_bounds`), and
stages that no faster partition can contain are pruned; then every two remaining neighbouring
stages, every three, and so on (`_windows`), up to whole partitions. Brute force agrees to the ns.

Where too many windows remain, only those of the fastest chains continue and the others count with
their bound, so the result has a proven gap. So too when the time is up (`limits`), and where ranks
have several stages and must recompute, which bounds ignore (10 to 30 %, and half a minute for 3
stages per rank). For 64 micro-batches 93 layers in 4 stages take .02 s, 125 in 8 some .2 s, 160 in
16 from .5 to 4 s and, where micro-batches differ by 15 %, a gap of .4 % remains
(benchmarks/partition_speed.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.bmp import greedy_anchor
from isobatch.engine.planning.partition import METHODS, by_step_time, check_stages, even_partition
from isobatch.engine.planning.recompute import InfeasiblePlan, what_would_fit
from isobatch.engine.planning.search._bounds import window_steps
from isobatch.engine.planning.search._stage_choices import StageChoices, every_stage
from isobatch.engine.planning.search._windows import (
    Windows,
    best_chain,
    chain_bounds,
    count_joined,
    join,
    prune,
)
from isobatch.engine.planning.search.limits import (
    CHUNK_ACTIONS,
    UNLIMITED,
    SearchLimits,
    SearchProgress,
)
from isobatch.engine.planning.search.local_search import (
    NEVER,
    PartitionEvaluator,
    improve_partition,
)
from isobatch.engine.simulator.schedule import Schedule

SHARE = 3
"""The next length gets 1 / SHARE of the windows that may still be simulated."""
STARTS = 3
"""Anchors from which the local search starts."""
DESCENT_SHARE = 0.25
"""Share of the remaining time that one local search may take."""
CHOICES_SHARE = 0.5
"""Share of the remaining time for finding the stages' choices of recomputed layers."""
MOST_WHOLE = 300
"""Partitions that are tried at the end with several stages per rank: 1 to 100 ms each."""
UNFINISHED = "; the search did not try every partition, so one may fit: give it more time"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best partition found: borders, (stages + 1,), and recomputed layers, (layers,)."""

    borders: IntArray
    recompute: BoolArray
    step_ns: int
    lower_bound_ns: int
    """No partition is faster, whatever it recomputes; `step_ns` if this one is proven best."""
    windows: int
    """Number of simulated windows."""

    @property
    def gap(self) -> float:
        """Share of the time by which another partition could be faster."""
        return (self.step_ns - self.lower_bound_ns) / max(self.step_ns, 1)


def search_exact(
    costs: Costs, schedule: Schedule, memory_bytes: int, limits: SearchLimits = UNLIMITED
) -> SearchResult:
    """The partition and recomputed layers of the fastest step in which every rank fits.

    Deterministic, but for what a deadline leaves out. Never slower than the fastest anchor.
    InfeasiblePlan if none was found that fits, with what would make the best anchor fit.
    """
    check_stages(costs.num_layers, schedule.num_stages)
    search = _Search(costs, schedule, memory_bytes, limits)
    search.improve_from(anchors(costs, schedule.num_stages))
    search.run()
    return search.result()


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


class _Search:
    """The best partition so far and its bound."""

    def __init__(
        self, costs: Costs, schedule: Schedule, memory_bytes: int, limits: SearchLimits
    ) -> None:
        self.evaluator = PartitionEvaluator(costs, schedule, memory_bytes)
        self.limits, self.windows = limits, 0
        self.best: tuple[IntArray, BoolArray] | None = None
        self.smallest: IntArray | None = None
        """The partition of least memory that was tried, if no anchor fits."""
        self.step_ns, self.dropped_ns = NEVER, NEVER
        """Time of the best partition, and the least bound of those that were not examined."""
        self.choices = StageChoices(self.evaluator)

    def result(self) -> SearchResult:
        """InfeasiblePlan if nothing was found."""
        if self.best is None:
            assert self.smallest is not None
            costs, schedule = self.evaluator.costs, self.evaluator.schedule
            lacks = what_would_fit(costs, self.smallest, schedule, self.evaluator.memory_bytes)
            hint = "" if self.dropped_ns == NEVER else UNFINISHED
            raise InfeasiblePlan(lacks + hint)
        # one rank takes at least as long as the mean work of a rank
        work = int((self.evaluator.costs.forward_ns + self.evaluator.costs.backward_ns).sum())
        mean_ns = -(-work // self.evaluator.schedule.num_ranks)
        return SearchResult(
            borders=self.best[0],
            recompute=self.best[1],
            step_ns=self.step_ns,
            lower_bound_ns=min(self.step_ns, max(self.dropped_ns, mean_ns)),
            windows=self.windows,
        )

    def improve_from(self, partitions: list[IntArray]) -> None:
        """Local search from the fastest partitions, or from that of least memory if none fits."""
        steps = self.evaluator.steps(np.stack(partitions))
        if steps.min() == NEVER and self.best is None:
            peaks = self.evaluator.least_peaks(np.stack(partitions))
            smallest = partitions[int(peaks.argmin())]
            self.smallest, _ = improve_partition(self.evaluator.least_peaks, smallest)
            partitions = [self.smallest]
            steps = self.evaluator.steps(self.smallest[np.newaxis])
        order = np.argsort(steps, kind="stable")[:STARTS].tolist()
        for row in order:
            if steps[row] < NEVER:
                self.offer(partitions[row], int(steps[row]))
                chunk = self.evaluator.chunk
                limits = self.limits.part(DESCENT_SHARE)
                begun = self.evaluator.steps, partitions[row]
                self.offer(*improve_partition(*begun, chunk=chunk, limits=limits))

    def offer(self, borders: IntArray, step_ns: int, recompute: BoolArray | None = None) -> None:
        """Keep a partition if it is the best."""
        if step_ns < self.step_ns:
            recompute = self.evaluator.choose(borders) if recompute is None else recompute
            assert recompute is not None
            self.best, self.step_ns = (borders, recompute), step_ns

    def run(self) -> None:
        """Longer and longer windows, until none remains or they are whole partitions."""
        chain = self.stages()
        while all(len(one) for one in chain):
            bounds = chain_bounds(chain)
            self.tell(chain, int(bounds[0].min()))
            if self.limits.is_over():
                self.drop_from(int(bounds[0].min()))
                return
            if len(chain) > 1:
                self.improve_from([best_chain(chain, bounds)[0]])
            chain = prune(chain, bounds, min(self.step_ns, self.dropped_ns))
            if len(chain) == 1:
                self.finish(chain[0])
                return
            chain = self.bounded(join(self.affordable(chain, count_joined)))

    def stages(self) -> list[Windows]:
        """Windows of one stage."""
        chain = every_stage(self.evaluator, self.step_ns)
        chain = self.bounded(self.affordable(chain, _count))
        chain = prune(chain, chain_bounds(chain), min(self.step_ns, self.dropped_ns))
        if self.choices.are_of_stages:
            limits = self.limits.part(CHOICES_SHARE)
            left_out, chain = self.choices.expand(chain, chain_bounds(chain), limits)
            self.drop_from(left_out)
            chain = self.bounded(self.affordable(chain, _count))
        return chain

    def drop_from(self, bound_ns: int) -> None:
        """Leave out all windows with at least this bound."""
        self.dropped_ns = min(self.dropped_ns, bound_ns)

    def tell(self, chain: list[Windows], bound_ns: int) -> None:
        """Report where the search is."""
        lower_bound = min(self.step_ns, self.dropped_ns, bound_ns)
        self.limits.report(
            SearchProgress(
                width=chain[0].choices.shape[1],
                num_stages=self.evaluator.schedule.num_stages,
                step_ns=None if self.best is None else self.step_ns,
                gap=(self.step_ns - lower_bound) / max(self.step_ns, 1),
            )
        )

    def bounded(self, chain: list[Windows]) -> list[Windows]:
        """The windows with their own bounds; what time does not suffice for keeps what it has."""
        schedule, sums = self.evaluator.schedule, self.evaluator.sums
        extra_ns = self.choices.extra_ns
        chains = []
        actions = len(schedule.kinds) // schedule.num_stages * chain[0].choices.shape[1]
        chunk = max(1, CHUNK_ACTIONS // actions)
        for first, one in enumerate(chain):
            bounds = one.bound_ns.copy()
            for begin in range(0, len(one), chunk):
                if self.limits.is_over():
                    break
                part = slice(begin, begin + chunk)
                borders, choices = one.borders[part], one.choices[part]
                steps = window_steps(schedule, sums, first, borders, choices, extra_ns)
                bounds[part] = np.maximum(bounds[part], steps)
                self.windows += len(steps)
            chains.append(replace(one, bound_ns=bounds))
        return chains

    def affordable(
        self, chain: list[Windows], count: Callable[[list[Windows], list[IntArray], int], int]
    ) -> list[Windows]:
        """The windows of the fastest chains, as many as the rest of the search can simulate.

        `count`: number of simulated windows if those of chains with a bound below a limit remain.
        """
        max_windows = max(0, self.limits.most_windows - self.windows) // SHARE
        bounds = chain_bounds(chain)
        if count(chain, bounds, NEVER) <= max_windows:
            return prune(chain, bounds, NEVER)
        limits = np.unique(np.concatenate(bounds))
        low, high = 0, len(limits) - 1
        while low < high:  # the highest limit that is affordable; the least one leaves nothing
            middle = (low + high + 1) // 2
            if count(chain, bounds, int(limits[middle])) <= max_windows:
                low = middle
            else:
                high = middle - 1
        self.drop_from(int(limits[low]))
        return prune(chain, bounds, self.dropped_ns)

    def finish(self, partitions: Windows) -> None:
        """Offer the fastest of the remaining whole partitions.

        Where ranks have one stage, that is the first one. Otherwise bounds ignore recomputation: at
        most MOST_WHOLE are tried, the others count with their bounds.
        """
        for tried, row in enumerate(np.argsort(partitions.bound_ns, kind="stable").tolist()):
            bound = int(partitions.bound_ns[row])
            if bound >= self.step_ns:
                break
            if tried == MOST_WHOLE or self.limits.is_over():
                self.drop_from(bound)
                break
            borders, numbers = partitions.borders[row], partitions.choices[row]
            steps, masks, is_all = self.choices.of_partition(borders, numbers)
            self.windows += len(steps)
            if not is_all:
                self.drop_from(bound)
            if len(steps):
                best = int(steps.argmin())
                self.offer(borders, int(steps[best]), masks[best])


def _count(chain: list[Windows], bounds: list[IntArray], limit_ns: int) -> int:
    """Number of windows of chains with a bound below `limit_ns`."""
    return sum(int((bound_ns < limit_ns).sum()) for bound_ns in bounds)
