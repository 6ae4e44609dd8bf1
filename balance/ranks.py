"""Which rank runs which of a step's groups, when only the sum over its micro-batches matters.

Plain data-parallel training with gradient accumulation waits once per step, so a step's `dp * k` groups may be a random
set if each rank's k groups add up to the same. Not so where ranks meet in every micro-batch (FSDP, ZeRO-3, pipelines):
there `balance.order`'s blocks serve. Two pure functions, for every rank to compute alike: integers only, so that
machines of different make agree; `choose_set` picks groups that can be shared out evenly, `assign_ranks` does it.

1.2 million samples (benchmarks/order.py), k = 8: dist ratio ViT / LLM .0001 / .0003 at dp 8 in 0.4 ms a step, .0002 /
.0004 at dp 512 in 25 ms. With 4 micro-batches a rank cannot make up for a small group, and ratios are several times
larger.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from balance.records import IntArray

SCALE = 1 << 24
"""A rank's mean load in the search's units: the two loads weigh the same."""
FAR = 1 << 28
"""Deviations count no further than 16 mean loads, so that the sum of their squares fits 64 bits."""
OVER_WEIGHT = 10
"""How much dearer a rank above the best possible vision load is: one such rank keeps all the others waiting."""
SINGLE_SWEEPS, DOUBLE_SWEEPS, WORST_ROUNDS, PARTNERS = 48, 12, 64, 24
"""Search effort: twice as much gains less than a tenth."""
EVEN_ENOUGH = SCALE >> 12
"""Excess of the worst rank at which the search ends: 1/4,096 of a rank's load."""
MAX_DOUBLE = 8
"""Exchanges of two for two only up to so many groups per rank: beyond, one for one has choice enough."""
MAX_TRIES = 6_000_000
"""Exchanges that the sweeps over all ranks may try, about 20 ms."""
FEW_VALUES = 64
"""Vision loads of more values than this (native resolution) add up evenly without help."""


def spare_groups(dp: int, micro_batches: int) -> int:
    """Groups that `choose_set` should have beyond the step's own; none where there is nothing to add up."""
    return min(2048, max(64, 4 * dp)) if micro_batches > 1 and dp > 1 else 0


def choose_set(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """`dp * micro_batches` of the candidates, ascending, that can be shared out evenly; all if there are not more.

    The first candidates are taken, but for two corrections, each of which lets a few wait for a later step. Groups so
    small that no rank could make up for them come in multiples of `dp`. And vision loads of few values (image patches)
    add up to a multiple of `dp`, or just below. int64, shape (min(len(vision), dp * micro_batches),).

    >>> choose_set(np.array([3, 2, 2, 2, 3]), np.array([9, 9, 9, 9, 9]), dp=2, micro_batches=2).tolist()
    [0, 1, 2, 4]
    """
    count = dp * micro_batches
    if len(vision) <= count or micro_batches == 1:
        return np.arange(min(count, len(vision)))
    small = np.flatnonzero(_too_small(tokens, micro_batches))
    num_spare = len(vision) - count
    num_small = min(count, max(len(small) // dp * dp, len(small) - num_spare))
    is_small = np.zeros(len(vision), np.bool_)
    is_small[small] = True
    others = np.flatnonzero(~is_small)
    chosen, spare = others[: count - num_small].copy(), others[count - num_small :].copy()
    _even_out(vision.astype(np.int64), chosen, spare, int(vision[small[:num_small]].sum()), dp)
    return np.sort(np.concatenate([small[:num_small], chosen]))


def assign_ranks(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """Share out at most `dp * micro_batches` groups so that ranks' sums of both loads are even.

    Returns int64 of shape (dp, micro_batches): places in `vision` and `tokens`, -1 where groups are lacking. A rank's
    groups come in descending order of tokens, so that micro-batches of one number are alike too. Dealt out in
    descending load, then exchanged between pairs of ranks, one for one and two for two: first for the least sum of
    squares, then for the worst rank. Deterministic; dp 64 with 8 micro-batches takes 3 ms, dp 512 takes 25.

    >>> assign_ranks(np.array([1, 3, 2, 2]), np.array([50, 10, 40, 20]), dp=2, micro_batches=2).tolist()
    [[2, 3], [0, 1]]
    """
    places = dp * micro_batches
    if dp < 1 or micro_batches < 1 or len(vision) > places or len(vision) != len(tokens):
        raise ValueError(
            f"{len(vision)} vision loads and {len(tokens)} token counts for {dp} ranks x {micro_batches} micro-batches;"
            " give one of each per group, and at most one group per place"
        )
    loads = np.zeros((places, 2), np.int64)  # groups that are lacking weigh nothing
    loads[: len(vision), 0], loads[: len(vision), 1] = vision, tokens
    totals = np.maximum(loads.sum(axis=0), 1)
    unit = np.maximum(dp * SCALE // totals, 1)
    best_vision = -(-int(totals[0]) // dp) * int(unit[0])
    held = _search(loads * unit, dp, best_vision)
    held = np.take_along_axis(held, np.lexsort((held, -loads[held, 0], -loads[held, 1])), axis=1)
    return np.where(held < len(vision), held, -1)


def _too_small(tokens: IntArray, micro_batches: int) -> NDArray[np.bool_]:
    """Groups so far below the median that a rank's others, even from the upper half, lack 1/256 of making up for it.

    By tokens alone: vision loads of few values have halves without any spread, and follow tokens where it matters.
    """
    scaled = tokens.astype(np.int64) << 16
    ascending = np.sort(scaled)
    half = len(ascending) // 2
    median, upper = int(ascending[half]), int(ascending[half:].sum()) // (len(ascending) - half)
    lacking = micro_batches * median >> 8
    return np.asarray(scaled < micro_batches * median - (micro_batches - 1) * upper - lacking)


def _even_out(load: IntArray, chosen: IntArray, spare: IntArray, fixed: int, dp: int) -> None:
    """Exchange members of `chosen` and `spare` until `fixed` and the chosen loads add up to a multiple of `dp`.

    Just below, by a load or two per hundred ranks: a rank that cannot be filled then pushes no other over the mean.
    The multiple is the one nearest to what these candidates give on average, so that none is put off for ever.
    """
    values = np.unique(load[np.concatenate([chosen, spare])])
    if not len(chosen) or not len(spare) or len(values) > FEW_VALUES:
        return
    total = int(load[chosen].sum())
    both = total + int(load[spare].sum())
    slack = dp // 64
    expected = fixed + both * len(chosen) // (len(chosen) + len(spare)) + slack
    _exchange(load, chosen, spare, values, (2 * expected + dp) // (2 * dp) * dp - slack - fixed - total)


@numba.njit(cache=True)
def _exchange(load, chosen, spare, values, missing):  # type: ignore[no-untyped-def]
    """Exchange in place, largest steps first, while the sum of `chosen` lacks `missing`."""
    num_values = len(values)
    in_chosen, in_spare = np.zeros(num_values, np.int64), np.zeros(num_values, np.int64)
    for group in chosen:
        in_chosen[np.searchsorted(values, load[group])] += 1
    for group in spare:
        in_spare[np.searchsorted(values, load[group])] += 1
    while missing != 0:
        step, away, back = _largest_step(values, in_chosen, in_spare, missing)
        if step == 0:
            return
        i, j = len(chosen) - 1, 0  # the latest goes, the one that has waited longest comes
        while load[chosen[i]] != values[away]:
            i -= 1
        while load[spare[j]] != values[back]:
            j += 1
        chosen[i], spare[j] = spare[j], chosen[i]
        in_chosen[away] -= 1
        in_chosen[back] += 1
        in_spare[back] -= 1
        in_spare[away] += 1
        missing -= step


@numba.njit(cache=True)
def _largest_step(values, in_chosen, in_spare, missing):  # type: ignore[no-untyped-def]
    """(gain, value to give away, value to take back) of the exchange that comes nearest to `missing`, not beyond it."""
    step, away, back = np.int64(0), 0, 0
    for a in range(len(values)):
        for b in range(len(values)):
            gain = values[b] - values[a]
            fits = in_chosen[a] > 0 and in_spare[b] > 0 and gain * missing > 0 and abs(gain) <= abs(missing)
            if fits and abs(gain) > abs(step):
                step, away, back = gain, a, b
    return step, away, back


@numba.njit(cache=True)
def _search(loads, dp, best_vision):  # type: ignore[no-untyped-def]
    """Groups held by each rank, shape (dp, k): dealt in descending order, then exchanged between pairs of ranks."""
    k = len(loads) // dp
    held, sums = _deal(loads, dp, k)
    order = np.arange(dp)
    state = np.uint64(0)
    double = k <= MAX_DOUBLE
    affordable = max(4, MAX_TRIES // max(1, dp // 2 * k * k))
    single_sweeps = min(SINGLE_SWEEPS, affordable)
    for sweep in range(single_sweeps + (DOUBLE_SWEEPS if double else 0)):
        state = _shuffle(order, state)
        # highest against lowest vision, then tokens, then anyone against anyone
        pairing = order if sweep % 3 == 2 else order[np.argsort(sums[order, sweep % 3], kind="mergesort")]
        for pair in range(dp // 2):
            a, b = pairing[dp - 1 - pair], pairing[pair]
            _cost, p, q, p2, q2 = _best_exchange(a, b, held, loads, sums, best_vision, sweep >= single_sweeps, False)
            _apply(a, b, p, q, held, loads, sums)
            _apply(a, b, p2, q2, held, loads, sums)
    if dp > 1:
        _relieve_worst(held, loads, sums, best_vision, order)
    return held


@numba.njit(cache=True)
def _relieve_worst(held, loads, sums, best_vision, order):  # type: ignore[no-untyped-def]
    """Exchange groups of the worst rank, in place, with whoever of a few others helps it most; until none does."""
    state = np.uint64(1)
    double = held.shape[1] <= MAX_DOUBLE
    for _round in range(WORST_ROUNDS):
        excess = np.maximum(sums[:, 0] - best_vision, sums[:, 1] - SCALE)
        worst = np.argmax(excess)
        if excess[worst] <= EVEN_ENOUGH:
            return
        state = _shuffle(order, state)
        best, best_b, best_p, best_q, best_p2, best_q2 = np.int64(0), -1, -1, -1, -1, -1
        for b in order[: PARTNERS + 1]:
            if b != worst:
                gain, p, q, p2, q2 = _best_exchange(worst, b, held, loads, sums, best_vision, double, True)
                if gain < best:
                    best, best_b, best_p, best_q, best_p2, best_q2 = gain, b, p, q, p2, q2
        if best_b < 0:
            return
        _apply(worst, best_b, best_p, best_q, held, loads, sums)
        _apply(worst, best_b, best_p2, best_q2, held, loads, sums)


@numba.njit(cache=True)
def _deal(loads, dp, k):  # type: ignore[no-untyped-def]
    """Rows of dp groups in descending load, each row's largest to the rank that has least."""
    order = np.argsort(-(loads[:, 0] + loads[:, 1]), kind="mergesort")
    held = np.empty((dp, k), np.int64)
    sums = np.zeros((dp, 2), np.int64)
    for row in range(k):
        ranks = np.argsort(sums[:, 0] + sums[:, 1], kind="mergesort")
        for place in range(dp):
            group = order[row * dp + place]
            held[ranks[place], row] = group
            sums[ranks[place]] += loads[group]
    return held, sums


@numba.njit(cache=True)
def _best_exchange(a, b, held, loads, sums, best_vision, double, worst):  # type: ignore[no-untyped-def]
    """(change of cost, places p, p2 of rank a to exchange with q, q2 of rank b); -1 for no exchange."""
    k = held.shape[1]
    xa, ya, xb, yb = sums[a, 0], sums[a, 1], sums[b, 0], sums[b, 1]
    start = _cost(xa, ya, xb, yb, best_vision, worst)
    best, best_p, best_q, best_p2, best_q2 = start, -1, -1, -1, -1
    for p in range(k):
        for q in range(k):
            x = loads[held[a, p], 0] - loads[held[b, q], 0]
            y = loads[held[a, p], 1] - loads[held[b, q], 1]
            cost = _cost(xa - x, ya - y, xb + x, yb + y, best_vision, worst)
            if cost < best:
                best, best_p, best_q, best_p2, best_q2 = cost, p, q, -1, -1
            if not double:
                continue
            for p2 in range(p + 1, k):
                for q2 in range(q + 1, k):
                    x2 = x + loads[held[a, p2], 0] - loads[held[b, q2], 0]
                    y2 = y + loads[held[a, p2], 1] - loads[held[b, q2], 1]
                    cost = _cost(xa - x2, ya - y2, xb + x2, yb + y2, best_vision, worst)
                    if cost < best:
                        best, best_p, best_q, best_p2, best_q2 = cost, p, q, p2, q2
    return best - start, best_p, best_q, best_p2, best_q2


@numba.njit(cache=True, inline="always")
def _cost(xa, ya, xb, yb, best_vision, worst):  # type: ignore[no-untyped-def]
    """Of two ranks: the excess of the worse one, or the squared deviations of both."""
    if worst:
        return max(max(xa, xb) - best_vision, max(ya, yb) - SCALE)
    return _off(xa, best_vision) + _off(xb, best_vision) + _off(ya, FAR) + _off(yb, FAR)


@numba.njit(cache=True, inline="always")
def _off(load, bearable):  # type: ignore[no-untyped-def]
    """Squared deviation from the mean load, and more of it for what is above `bearable`."""
    deviation = min(max(load - SCALE, -FAR), FAR)
    over = min(max(load - bearable, 0), FAR)
    return deviation * deviation + OVER_WEIGHT * over * over


@numba.njit(cache=True)
def _apply(a, b, p, q, held, loads, sums):  # type: ignore[no-untyped-def]
    """Exchange place p of rank a and q of rank b, if there is one to exchange."""
    if p >= 0:
        change = loads[held[b, q]] - loads[held[a, p]]
        sums[a] += change
        sums[b] -= change
        held[a, p], held[b, q] = held[b, q], held[a, p]


@numba.njit(cache=True)
def _shuffle(order, state):  # type: ignore[no-untyped-def]
    """Fisher-Yates in place; any fixed sequence serves, here Knuth's linear congruential generator."""
    for last in range(len(order) - 1, 0, -1):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        place = np.int64((state >> np.uint64(33)) % np.uint64(last + 1))
        order[last], order[place] = order[place], order[last]
    return state
