"""In which order a step's micro-batches enter the pipeline: PipeTune's search over clusters, and
ours over swaps.

For `engine.tuning.tune`. PipeTune (section 5.2) puts micro-batches of like cost into at most five
clusters and simulates all orders of the clusters. Ours goes on from the best of those: exchange two
micro-batches, or move one, and keep what is not slower. 2,000 such changes take 2 ms at 16
micro-batches in 4 stages and find more than 120 orders of clusters do; on steps small enough to try
all orders they find the best one nearly always. Pure, deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np

from balance.steps.repack import cluster_costs, cluster_orders
from balance.types import IntArray
from engine.simulator.schedule import PassKind
from engine.tuning.order_times import NEVER, OrderProblem, fits, run_order, times_of_orders


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderResult:
    """The best order that a search found."""

    order: IntArray
    """(micro_batches,): which one enters first, second, ..."""
    step_ns: int
    """NEVER if no order that was tried fits into memory."""
    num_simulated: int
    """Orders that the search tried."""


class _Bounds(NamedTuple):
    """EncodeRanks a search starts and ends."""

    goal: int
    """A step time that no order beats."""
    trials: int
    seed: int


def search_clusters(problem: OrderProblem) -> OrderResult:
    """The best of the given order and all orders of five clusters (PipeTune, 5.2)."""
    stages = problem.stages
    came = np.arange(problem.num_micro_batches)
    clusters = cluster_costs((stages.forward_ns + stages.backward_ns).sum(axis=0))
    orders = np.stack([came, *cluster_orders(clusters)])
    times = times_of_orders(problem, orders)
    best = int(times.argmin())
    return OrderResult(order=orders[best], step_ns=int(times[best]), num_simulated=len(orders))


def search_swaps(
    problem: OrderProblem, start: IntArray, *, trials: int, seed: int = 0
) -> OrderResult:
    """Go on from `start` by `trials` random exchanges and moves; ends early at `lower_bound`. Never
    worse than `start`.

    A change is kept if the step is not slower, so that the search crosses plateaus. The seed fixes
    the answer.
    """
    order = np.array(start, np.int64)
    bounds = _Bounds(lower_bound(problem), trials, seed)
    step_ns, num = _climb(
        problem.actions,
        problem.work,
        problem.sizes,
        problem.ahead,
        order,
        problem.scratch(),
        bounds,
    )
    return OrderResult(order=order, step_ns=int(step_ns), num_simulated=int(num))


def lower_bound(problem: OrderProblem) -> int:
    """No order of these micro-batches takes less, ns.

    A rank works until it has done all that is its own; before, a micro-batch must have come through
    the stages in front, and after it the last gradient goes back through them.
    """
    stages, num_ranks = problem.stages, problem.schedule.num_ranks
    splits = bool((problem.schedule.kinds == PassKind.WEIGHT_GRAD).any())
    busy = stages.forward_ns.sum(axis=1) + stages.backward_ns.sum(axis=1)
    encoding = problem.ahead.encode_ns
    if problem.ahead.allowed[1:].any():
        # all but the first micro-batch's may run elsewhere
        busy[0] -= encoding.sum() - encoding.min()
    into, out = np.zeros_like(stages.forward_ns), np.zeros_like(stages.forward_ns)
    for stage in range(1, num_ranks):
        into[stage] = into[stage - 1] + stages.forward_ns[stage - 1] + stages.send_ns[stage - 1]
        if stages.sends_grad[stage - 1] and not splits:
            out[stage] = out[stage - 1] + stages.backward_ns[stage - 1] + stages.send_back_ns[stage]
    own = [
        int(busy[rank::num_ranks].sum() + into[rank].min() + out[rank].min())
        for rank in range(num_ranks)
    ]
    return max(own)


# training goes on while a thread that works ahead searches
@numba.njit(cache=True, nogil=True)
def _climb(actions, work, sizes, ahead, order, scratch, bounds):  # type: ignore[no-untyped-def]
    """Improve `order` in place; -> (its step time, orders simulated)."""
    np.random.seed(bounds.seed)
    count, tried = len(order), 0
    least = (
        run_order(actions, work, ahead, order, scratch)
        if fits(actions, sizes, order, scratch.now)
        else NEVER
    )
    changed = order.copy()
    while tried < bounds.trials and least > bounds.goal and count > 1:
        tried += 1
        here, there = np.random.randint(count), np.random.randint(count)
        if here == there:
            continue
        _change(order, here, there, np.random.randint(2) == 0, changed)
        step_ns = run_order(actions, work, ahead, changed, scratch)
        if step_ns <= least and fits(actions, sizes, changed, scratch.now):
            order[:], least = changed, step_ns
    return least, tried


@numba.njit(cache=True)
def _change(order, here, there, exchanges, changed):  # type: ignore[no-untyped-def]
    """Set `changed` to `order` with two exchanged, or with `here` moved to `there`."""
    changed[:] = order
    changed[there] = order[here]
    if exchanges:
        changed[here] = order[there]
    elif here < there:
        changed[here:there] = order[here + 1 : there + 1]
    else:
        changed[there + 1 : here + 1] = order[there:here]
