"""Step times of many orders of a step's micro-batches under one schedule: what searches over orders
ask for.

For `engine.tuning.order_search` and `engine.tuning.precompute`. A schedule's actions are sorted once so
that each follows all that it waits for (cached); then an order costs one loop over them in numba,
about 6 ns per action: under 1 us for 16 micro-batches in 4 stages. The same nanoseconds as
`engine.simulator.simulate`, of which this is the loop without its queue. Pure.

On request the loop also places the encoder's forward passes in idle time (PipeTune's
pre-computation): where the first stage takes up a micro-batch, its encoding goes back into a gap
that is already known. That moves nothing else, so times stay exact, with one exception: features
that travel from another rank are taken not to delay what goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from engine.simulator.memory import bytes_by_kind
from engine.simulator.program import make_program
from engine.simulator.schedule import Schedule
from engine.simulator.simulate import simulate
from engine.simulator.stages import StageCosts

NONE = -1
"""Place of an action that waits for none; gap of a micro-batch not encoded ahead."""
NEVER = int(np.iinfo(np.int64).max)
"""Time of an order that does not fit into memory."""


class SortedActions(NamedTuple):
    """A schedule's actions so that each follows all it waits for; (actions,) int64."""

    ranks: IntArray
    kinds: IntArray
    stages: IntArray
    places: IntArray
    """In the order of micro-batches."""
    sources: IntArray
    """Place here of the action of another rank whose result it waits for, or NONE."""
    targets: IntArray
    """Rank that its result goes to; its own if to none."""
    own_places: IntArray
    """In the schedule."""


class PassTimes(NamedTuple):
    """What the actions cost; the last axis is micro-batches."""

    durations: IntArray
    """(kinds without ENCODE, stages, micro_batches), ns."""
    sent: IntArray
    """(2, stages, micro_batches), ns: output to the next stage, gradient to the one before."""


class MemoryBudget(NamedTuple):
    """What decides whether an order fits into memory, in bytes."""

    left: IntArray
    most: IntArray
    """`engine.simulator.memory.bytes_by_kind`."""
    state: IntArray
    """(ranks,)."""
    limit: int


class EncodeAhead(NamedTuple):
    """The encoder's forward passes, which may run ahead."""

    encode_ns: IntArray
    """(micro_batches,): part of the first stage's forward pass where it does not run ahead."""
    send_ns: IntArray
    """(micro_batches,): of features, to the first stage."""
    allowed: NDArray[np.bool_]
    """(ranks,): that may encode ahead."""
    window: int
    """Micro-batches whose features may wait at once."""
    reserved_bytes: IntArray
    """(ranks,): memory that orders must leave free: waiting features, encoder copies."""


class Scratch(NamedTuple):
    """EncodeRanks the loop keeps its state; arrays that every order writes anew."""

    now: IntArray
    free: IntArray
    """(ranks, ranks): when what goes from a rank to another has arrived."""
    arrivals: IntArray
    gaps: IntArray
    """(4, actions): start, end, rank, and the place of the action that ends the gap."""
    entered: IntArray
    """(micro_batches,): when the first stage's forward passes end, one after the other."""
    gap_before: IntArray
    """(micro_batches,): action before which a micro-batch is encoded ahead, or NONE."""
    begins: IntArray
    """(micro_batches,): when that begins."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderProblem:
    """Micro-batches of a step to be ordered, for `times_of_orders` and searches."""

    schedule: Schedule
    stages: StageCosts
    """Of the micro-batches as they came; an order is a permutation of them."""
    actions: SortedActions
    work: PassTimes
    sizes: MemoryBudget
    ahead: EncodeAhead
    """Without any rank allowed where nothing shall be encoded ahead."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step."""
        return self.schedule.num_micro_batches

    def scratch(self) -> Scratch:
        """Memory for the loop."""
        ranks, count = self.schedule.num_ranks, self.num_micro_batches
        one, own = np.empty(len(self.schedule), np.int64), np.empty(count, np.int64)
        return Scratch(
            now=np.empty(ranks, np.int64),
            free=np.empty((ranks, ranks), np.int64),
            arrivals=one,
            gaps=np.empty((4, len(self.schedule)), np.int64),
            entered=own,
            gap_before=own.copy(),
            begins=own.copy(),
        )


def order_problem(
    schedule: Schedule,
    stages: StageCosts,
    memory_bytes: int | None = None,
    ahead: EncodeAhead | None = None,
) -> OrderProblem:
    """The orders of these micro-batches; None for memory without end. Deadlock as `simulate`."""
    left, most = bytes_by_kind(stages)
    state = np.zeros(schedule.num_ranks, np.int64)
    np.add.at(state, np.arange(stages.num_stages) % schedule.num_ranks, stages.state_bytes)
    ahead = nothing_ahead(schedule) if ahead is None else ahead
    return OrderProblem(
        schedule=schedule,
        stages=stages,
        actions=_actions(schedule, tuple(stages.sends_grad.tolist())),
        work=PassTimes(
            np.stack(
                [stages.forward_ns, stages.backward_ns, stages.input_grad_ns, stages.weight_grad_ns]
            ),
            np.stack([stages.send_ns, stages.send_back_ns]),
        ),
        sizes=MemoryBudget(
            left,
            most,
            state + ahead.reserved_bytes,
            NEVER if memory_bytes is None else memory_bytes,
        ),
        ahead=ahead,
    )


def nothing_ahead(schedule: Schedule) -> EncodeAhead:
    """No rank may encode ahead."""
    nothing, ranks = (
        np.zeros(schedule.num_micro_batches, np.int64),
        np.zeros(schedule.num_ranks, np.int64),
    )
    return EncodeAhead(nothing, nothing, np.zeros(len(ranks), np.bool_), 0, ranks)


def times_of_orders(problem: OrderProblem, orders: IntArray) -> IntArray:
    """Step time of each order, int64 ns, (orders,); NEVER where a rank's memory is too small for
    it.

    `orders`: (orders, micro_batches), each a permutation: the micro-batches in the order in which
    they enter.
    """
    orders = np.ascontiguousarray(orders, np.int64)
    times: IntArray = _times(
        problem.actions, problem.work, problem.sizes, problem.ahead, orders, problem.scratch()
    )
    return times


@lru_cache(maxsize=64)
def _actions(schedule: Schedule, sends_grad: tuple[bool, ...]) -> SortedActions:
    """Sorted by when actions begin if each takes as long as any other, and nothing travels."""
    shape = schedule.num_stages, schedule.num_micro_batches
    ones, zeros = np.ones(shape, np.int64), np.zeros(shape, np.int64)
    times = {"forward_ns": ones, "input_grad_ns": ones, "weight_grad_ns": ones, "send_ns": zeros}
    sizes = (
        "live_bytes",
        "forward_peak_bytes",
        "backward_peak_bytes",
        "held_bytes",
        "apart_peak_bytes",
    )
    alike = StageCosts(
        **times,
        **dict.fromkeys(sizes, zeros),
        send_back_ns=zeros,
        state_bytes=zeros[:, 0],
        sends_grad=np.array(sends_grad),
    )
    program = make_program(schedule, alike)
    ranks = schedule.ranks
    order = np.lexsort((ranks, simulate(program).start_ns))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    made_by = np.repeat(np.arange(len(schedule)), np.diff(program.edge_offsets))
    travels = ranks[made_by] != ranks[program.edge_targets]
    made_by, wanted = made_by[travels], program.edge_targets[travels]
    sources, targets = np.full(len(schedule), NONE), ranks.copy()
    sources[wanted], targets[made_by] = place[made_by], ranks[wanted]
    return SortedActions(
        ranks=ranks[order],
        kinds=schedule.kinds[order],
        stages=schedule.stages[order],
        places=schedule.micro_batches[order],
        sources=sources[order],
        targets=targets[order],
        own_places=order,
    )


# training goes on while a thread that works ahead tunes a step
@numba.njit(cache=True, nogil=True)
def _times(actions, work, sizes, ahead, orders, scratch):  # type: ignore[no-untyped-def]
    times = np.empty(len(orders), np.int64)
    for number in range(len(orders)):
        times[number] = NEVER
        if fits(actions, sizes, orders[number], scratch.now):
            times[number] = run_order(actions, work, ahead, orders[number], scratch)
    return times


@numba.njit(cache=True)
def fits(actions, sizes, order, live):  # type: ignore[no-untyped-def]
    """Whether an order fits every rank's memory; `live` is scratch space, (ranks,)."""
    if sizes.limit == NEVER:
        return True
    live[:] = sizes.state
    if live.max() > sizes.limit:
        return False
    for at in range(len(actions.ranks)):
        rank, kind, stage, number = (
            actions.ranks[at],
            actions.kinds[at],
            actions.stages[at],
            order[actions.places[at]],
        )
        if live[rank] + sizes.most[kind, stage, number] > sizes.limit:
            return False
        live[rank] += sizes.left[kind, stage, number]
    return True


@numba.njit(cache=True)
def run_order(actions, work, ahead, order, scratch):  # type: ignore[no-untyped-def]
    """Step time of an order; sets `scratch.gap_before` and `begins` for encoding ahead."""
    now, free, arrivals = scratch.now, scratch.free, scratch.arrivals
    now[:], free[:], scratch.gap_before[:] = 0, 0, NONE
    encodes = ahead.window > 0 and ahead.allowed.any()
    least = _least(ahead.encode_ns) if encodes else 0
    num_gaps, num_entered = 0, 0
    for at in range(len(actions.ranks)):
        rank, kind, stage, number = (
            actions.ranks[at],
            actions.kinds[at],
            actions.stages[at],
            order[actions.places[at]],
        )
        start, duration = now[rank], work.durations[kind, stage, number]
        if actions.sources[at] >= 0:
            start = max(start, arrivals[actions.sources[at]])
        if encodes:
            if start - now[rank] >= least and ahead.allowed[rank]:
                scratch.gaps[0, num_gaps], scratch.gaps[1, num_gaps] = now[rank], start
                scratch.gaps[2, num_gaps], scratch.gaps[3, num_gaps] = rank, at
                num_gaps += 1
            if kind == 0 and stage == 0:
                ready = _encode(ahead, number, start, num_gaps, num_entered, scratch)
                if scratch.gap_before[number] >= 0:
                    start, duration = ready, duration - ahead.encode_ns[number]
                scratch.entered[num_entered] = start + duration
                num_entered += 1
        now[rank] = start + duration
        target = actions.targets[at]
        if target != rank:
            arrival = max(now[rank], free[rank, target]) + work.sent[min(kind, 1), stage, number]
            free[rank, target], arrivals[at] = arrival, arrival
    return now.max()


@numba.njit(cache=True)
def _least(encode_ns):  # type: ignore[no-untyped-def]
    """The shortest encoding: gaps that are shorter are of no use."""
    least = NEVER
    for time in encode_ns:
        if 0 < time < least:
            least = time
    return least


@numba.njit(cache=True)
def _encode(ahead, number, now, num_gaps, num_entered, scratch):  # type: ignore[no-untyped-def]
    """Put the encoding of a micro-batch, which enters at `now`, into a gap; -> when its features
    are there.

    Of all gaps from which features come earlier than if they were made now, the one from which they
    come earliest, but no earlier than `now`; then one of the first rank; then the one that it fills
    best.
    """
    encode_ns = ahead.encode_ns[number]
    if encode_ns == 0:
        return now
    # features that wait are those of at most `window` micro-batches
    earliest = scratch.entered[num_entered - ahead.window] if num_entered >= ahead.window else 0
    best, least, travels, waste = NONE, now + encode_ns, False, 0
    for gap in range(num_gaps):
        end, rank = scratch.gaps[0, gap] + encode_ns, scratch.gaps[2, gap]
        left = scratch.gaps[1, gap] - end
        if left < 0 or scratch.gaps[0, gap] < earliest:
            continue
        ready = max(now, end + ahead.send_ns[number] * (rank != 0))
        if (ready, rank != 0, left) < (least, travels, waste):
            best, least, travels, waste = gap, ready, rank != 0, left
    if best >= 0:
        scratch.gap_before[number], scratch.begins[number] = (
            scratch.gaps[3, best],
            scratch.gaps[0, best],
        )
        scratch.gaps[0, best] += encode_ns
    return least
