"""Lower bounds of a step's time from a few neighbouring stages. Numba.

For `partition_search`. The window's ranks run their operations in the schedule's order, exactly as
in `engine.simulator.simulate`. All other ranks are relaxed: a micro-batch passes their layers
without waiting, with the shortest sends that their cuts can have. Orders are fixed, so no operation
begins earlier because another one takes longer: the window's step is a lower bound. A window of all
stages is the step itself, to the nanosecond. 4 ns per operation.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from isobatch.balance.kernels import fill, inner, kernel
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.rank_memory import BACKWARD, FORWARD, INPUT_GRAD, ActionOrder
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.simulate import equal_passes


class LayerSums(NamedTuple):
    """Times of the layers before each cut, int64, (layers + 1, micro_batches)."""

    forward: IntArray
    input_grad: IntArray
    weight_grad: IntArray
    backward: IntArray
    """What the previous stage waits for: both gradients, or the input's where they run apart."""
    send: IntArray
    """Send of the output if the partition cuts here; 0 at both ends."""
    send_back: IntArray
    """Send of the gradient."""
    min_before: IntArray
    """Shortest send of an output at any cut before; 0 if there is none."""
    min_back_before: IntArray
    """Shortest send of a gradient at any cut before."""
    min_after: IntArray
    """Shortest send of both together at any cut after."""
    sends_grad: BoolArray
    """(layers + 1,): whether a gradient crosses the cut."""
    last: IntArray
    """(micro_batches,): least time after the first stage has computed the gradient of its input."""


def layer_sums(costs: Costs, schedule: Schedule) -> LayerSums:
    """Sums for the windows of a schedule."""
    is_apart = schedule.splits_backward
    nothing = np.zeros((1, costs.num_micro_batches), np.int64)
    forward, input_grad, weight_grad = (
        np.concatenate([nothing, np.cumsum(times, axis=0)])
        for times in (costs.forward_ns, costs.input_grad_ns, costs.weight_grad_ns)
    )
    # one rank alone sends nothing
    send = np.concatenate([nothing, costs.send_ns[:-1] * (schedule.num_ranks > 1), nothing])
    sends_grad = np.concatenate([[False], costs.sends_grad[:-1], [False]])
    back = send * sends_grad[:, np.newaxis]
    return LayerSums(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        backward=input_grad if is_apart else input_grad + weight_grad,
        send=send,
        send_back=back,
        min_before=_min_before(send),
        min_back_before=_min_before(back),
        min_after=_min_before((send + back)[::-1])[::-1].copy(),
        sends_grad=sends_grad,
        last=costs.weight_grad_ns[0] * is_apart,
    )


def _min_before(sends: IntArray) -> IntArray:
    """Least send of the cuts before each cut, without both ends; 0 where there is none."""
    shortest = np.zeros_like(sends)
    shortest[2:-1] = np.minimum.accumulate(sends[1:-2], axis=0)
    return shortest


@lru_cache(maxsize=64)
def operations(schedule: Schedule) -> ActionOrder:
    """A schedule's actions in the order in which they begin if all take the same time."""
    sends_grad = [True] * (schedule.num_stages - 1) + [False]
    order = np.argsort(equal_passes(schedule, sends_grad).start_ns, kind="stable")
    return ActionOrder(schedule.kinds[order], schedule.stages[order], schedule.micro_batches[order])


def window_steps(
    schedule: Schedule,
    sums: LayerSums,
    first: int,
    borders: IntArray,
    choices: IntArray,
    extra_ns: IntArray,
) -> IntArray:
    """Least times of a step, (windows,), whose stages from `first` on have these borders.

    `borders`: (windows, stages + 1). `choices`, (windows, stages), are rows of `extra_ns`,
    (choices, micro_batches): the time of recomputation in a stage's backward passes.
    """
    every = operations(schedule)
    is_inside = (every.stages >= first) & (every.stages < first + choices.shape[1])
    inside = ActionOrder(*(column[is_inside] for column in every))
    span = first, schedule.num_stages, schedule.num_ranks
    cuts = np.ascontiguousarray(borders)
    return np.asarray(run_windows(inside, sums, span, cuts, choices, extra_ns))


@kernel
def run_windows(inside, sums, span, borders, choices, extra_ns):  # type: ignore[no-untyped-def]
    """The kernel of `window_steps`; `span`: (first stage of windows, stages, ranks)."""
    # memory that all windows share
    num_windows, width = choices.shape
    first, num_stages, num_ranks = span
    shape = width, sums.forward.shape[1]
    forward, input_grad = np.empty(shape, np.int64), np.empty(shape, np.int64)
    weight_grad = np.empty(shape, np.int64)
    ready, ready_back = np.empty(shape, np.int64), np.empty(shape, np.int64)
    turn, tail = np.empty(shape[1], np.int64), np.empty(shape[1], np.int64)
    now, free = np.empty(num_ranks, np.int64), np.empty((num_ranks, num_ranks), np.int64)
    steps = np.empty(num_windows, np.int64)
    for window in range(num_windows):
        # times of the window's stages
        cuts = borders[window]
        for stage in range(width):
            start, end = cuts[stage], cuts[stage + 1]
            choice = choices[window, stage]
            for number in range(shape[1]):
                forward[stage, number] = sums.forward[end, number] - sums.forward[start, number]
                both = sums.input_grad[end, number] - sums.input_grad[start, number]
                input_grad[stage, number] = both + extra_ns[choice, number]
                weight_grad[stage, number] = (
                    sums.weight_grad[end, number] - sums.weight_grad[start, number]
                )
        # times outside, then the step
        _outside(sums, (first, num_stages), cuts, ready[0], turn, tail)
        for stage in range(width):
            fill(ready_back[stage], 0)
        fill(now, 0)
        for rank in range(num_ranks):
            fill(free[rank], 0)
        times = (forward, input_grad, weight_grad)
        state = (ready, ready_back, turn, tail, now, free)
        steps[window] = _run(inside, sums, first, cuts, times, state)
    return steps


@inner
def _outside(sums, span, cuts, head, turn, tail):  # type: ignore[no-untyped-def]
    """Least times of micro-batches outside a window: before, between exit and return, after."""
    first, num_stages = span
    start, end = cuts[0], cuts[-1]
    # further cuts, besides those at both ends
    before, after = first - 1, num_stages - first - len(cuts)
    for number in range(len(head)):
        head[number], turn[number], tail[number] = 0, 0, 0
        if before >= 0:
            head[number] = sums.forward[start, number] + sums.send[start, number]
            head[number] += before * sums.min_before[start, number]
        if after >= 0 and sums.sends_grad[end]:
            turn[number] = sums.forward[-1, number] - sums.forward[end, number]
            turn[number] += sums.backward[-1, number] - sums.backward[end, number]
            turn[number] += sums.send[end, number] + sums.send_back[end, number]
            turn[number] += after * sums.min_after[end, number]
        if before >= 0 and sums.sends_grad[start]:
            tail[number] = sums.backward[start, number] + sums.last[number]
            tail[number] += sums.send_back[start, number]
            tail[number] += before * sums.min_back_before[start, number]


@inner
def _run(inside, sums, first, cuts, durations, state):  # type: ignore[no-untyped-def]
    """The time of a step. `free[a, b]`: when the last send from rank a to rank b has arrived."""
    forward, input_grad, weight_grad = durations
    ready, ready_back, turn, tail, now, free = state
    width, num_ranks, step = len(forward), len(now), np.int64(0)
    for at in range(len(inside.kinds)):
        kind, stage, number = inside.kinds[at], inside.stages[at] - first, inside.micro_batches[at]
        # no division where each rank has one stage: it takes as long as all the rest
        rank = first + stage
        rank = rank if rank < num_ranks else rank % num_ranks
        if kind == FORWARD:
            # the output goes to the next stage, or out of the window and back
            end = max(now[rank], ready[stage, number]) + forward[stage, number]
            cut = cuts[stage + 1]
            if stage + 1 == width:
                ready_back[stage, number] = end + turn[number]
            else:
                other = rank + 1 if rank + 1 < num_ranks else 0
                free[rank, other] = max(end, free[rank, other]) + sums.send[cut, number]
                ready[stage + 1, number] = free[rank, other] if num_ranks > 1 else end
        elif kind in (BACKWARD, INPUT_GRAD):
            # the gradient goes to the previous stage, or out of the window
            end = max(now[rank], ready_back[stage, number]) + input_grad[stage, number]
            if kind == BACKWARD:
                end += weight_grad[stage, number]
            cut = cuts[stage]
            if stage == 0:
                step = max(step, end + tail[number])
            elif sums.sends_grad[cut]:
                other = rank - 1 if rank else num_ranks - 1
                free[rank, other] = max(end, free[rank, other]) + sums.send_back[cut, number]
                ready_back[stage - 1, number] = free[rank, other] if num_ranks > 1 else end
        else:
            end = now[rank] + weight_grad[stage, number]
        now[rank] = end
    for rank in range(num_ranks):
        step = max(step, now[rank])
    return step
