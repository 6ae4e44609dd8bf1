"""The search behind `balance.order.assign_ranks.assign_ranks`: exchanges between pairs of ranks
until sums of both loads are even.

Numba kernels on integers, so that machines of different make agree. Groups are dealt out in
descending load, then exchanged one for one and two for two: first for the least sum of squared
deviations, then for the worst rank. Pure; dp 64 with 8 micro-batches takes 3 ms, dp 512 takes 25.
"""

from __future__ import annotations

import numba
import numpy as np

SCALE = 1 << 24
"""A rank's mean load in the search's units: the two loads weigh the same."""
FAR = 1 << 28
"""Deviations count no further than 16 mean loads, so that the sum of their squares fits 64 bits."""
OVER_WEIGHT = 10
"""How much dearer a rank above the best possible vision load is: one such rank keeps all the others
waiting.
"""
SINGLE_SWEEPS, DOUBLE_SWEEPS, WORST_ROUNDS, PARTNERS = 48, 12, 64, 24
"""Search effort: twice as much gains less than a tenth."""
EVEN_ENOUGH = SCALE >> 12
"""Excess of the worst rank at which the search ends: 1/4,096 of a rank's load."""
MAX_DOUBLE = 8
"""Exchanges of two for two only up to so many groups per rank: beyond, one for one has choice
enough.
"""
MAX_TRIES = 6_000_000
"""Exchanges that the sweeps over all ranks may try, about 20 ms."""


@numba.njit(cache=True)
def search_ranks(loads, dp, best_vision):  # type: ignore[no-untyped-def]
    """Groups held by each rank, int64 of shape (dp, k): dealt in descending order, then exchanged
    between pairs.

    `loads`, int64 of shape (dp * k, 2), are in units of which a rank's mean is `SCALE`;
    `best_vision` is the least that the rank with most vision can have. Deterministic.
    """
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
        pairing = (
            order if sweep % 3 == 2 else order[np.argsort(sums[order, sweep % 3], kind="mergesort")]
        )
        for pair in range(dp // 2):
            a, b = pairing[dp - 1 - pair], pairing[pair]
            _cost, p, q, p2, q2 = _best_exchange(
                a, b, held, loads, sums, best_vision, sweep >= single_sweeps, False
            )
            _apply(a, b, p, q, held, loads, sums)
            _apply(a, b, p2, q2, held, loads, sums)
    if dp > 1:
        _relieve_worst(held, loads, sums, best_vision, order)
    return held


@numba.njit(cache=True)
def _relieve_worst(held, loads, sums, best_vision, order):  # type: ignore[no-untyped-def]
    """Exchange groups of the worst rank, in place, with whoever of a few others helps it most;
    until none does.
    """
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
                gain, p, q, p2, q2 = _best_exchange(
                    worst, b, held, loads, sums, best_vision, double, True
                )
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
    """(change of cost, places p, p2 of rank a to exchange with q, q2 of rank b); -1 for no
    exchange.
    """
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
    """Fisher-Yates in place; any fixed sequence serves, here Knuth's linear congruential
    generator.
    """
    for last in range(len(order) - 1, 0, -1):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        place = np.int64((state >> np.uint64(33)) % np.uint64(last + 1))
        order[last], order[place] = order[place], order[last]
    return state
