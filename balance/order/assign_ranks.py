"""Groups of a step to ranks, so that each rank's sum over the step is even.

For when only the sum over a step's micro-batches matters: plain data-parallel training with
gradient accumulation waits once per step, so a step's `dp * k` groups may be a random set if each
rank's k groups add up to the same. Where ranks meet in every micro-batch (FSDP, ZeRO-3, pipelines)
`balance.order.block_shuffle` serves. Pure, and computed by every rank itself: integers only, so
that all machines agree. `choose_step_groups` chooses groups that `assign_ranks` can share evenly.

Whatever must add up to a multiple of `dp` is rounded up or down at random, in proportion, and what
waits comes back over several steps. Rounded to the nearest instead, with the rest in the very next
step, heavy and light steps would take turns: an autocorrelation of steps' loads of -.5.

1.2 million samples (benchmarks/order.py), k = 8: dist ratio ViT / LLM .0002 / .0003 at dp 8 in .4
ms a step, .0002 / .0004 at dp 512 in 25 ms; autocorrelation within .1 but for chance. With 4
micro-batches a rank cannot make up for a small group, and ratios are several times larger.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from balance.rng import mix64
from balance.types import IntArray

FEW_VALUES = 64
"""Vision loads of more values than this (native resolution) add up evenly without help."""
RETURNING = 8
"""1 / share of the waiting groups that is due in the next step: they return over as many steps."""
PULL = 10
"""1 / share of the small groups due in the next step, of those beyond a third of the spare ones.
Where rounding alone makes steps differ, autocorrelation is at worst half of either share.
"""
DITHER_BITS = 16

SCALE = 1 << 24
"""A rank's mean load in the search's units: the two loads weigh the same."""
FAR = 1 << 28
"""Deviations count no further than 16 mean loads, so that the sum of their squares fits 64 bits."""
OVER_WEIGHT = 10
"""Extra weight of vision above the best possible: one such rank keeps all the others waiting."""
SINGLE_SWEEPS, DOUBLE_SWEEPS, WORST_ROUNDS, PARTNERS = 48, 12, 64, 24
"""Search effort: twice as much gains less than a tenth."""
EVEN_ENOUGH = SCALE >> 12
"""Excess of the worst rank at which the search ends: 1/4,096 of a rank's load."""
MAX_DOUBLE = 8
"""Most groups per rank for exchanges of two for two: beyond, one for one has choice enough."""
MAX_TRIES = 6_000_000
"""Exchanges that the sweeps over all ranks may try, about 20 ms."""
NO_EXCHANGE = (-1, -1, -1, -1)


def num_spare_groups(dp: int, micro_batches: int) -> int:
    """Groups that `choose_step_groups` should have beyond the step's own; 0 if nothing adds up."""
    return min(2048, max(64, 4 * dp)) if micro_batches > 1 and dp > 1 else 0


def choose_step_groups(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """`dp * micro_batches` of the candidates, ascending, that can be shared evenly among ranks.

    Candidates come longest waiting first, then new ones. The new ones are taken, and some that wait
    in turn, but for two corrections that let a few wait longer: groups so small that no rank could
    make up for them come in multiples of `dp`, and vision loads of few values (image patches) add
    up to a multiple of `dp`, or just below. Depends on the loads alone. int64, shape
    (min(len(vision), dp * micro_batches),): all if there are not more.

    >>> vision, tokens = np.array([3, 2, 2, 2, 3]), np.array([9, 9, 9, 9, 9])
    >>> choose_step_groups(vision, tokens, dp=2, micro_batches=2).tolist()
    [0, 1, 2, 4]
    """
    count = dp * micro_batches
    if len(vision) <= count or micro_batches == 1:
        return np.arange(min(count, len(vision)))
    num_spare = len(vision) - count
    dither = mix64(int(tokens[num_spare:].sum()) ^ int(vision[num_spare:].sum()) << 32)
    # small groups: a multiple of dp
    is_small = _too_small(tokens, micro_batches)
    small, others = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    due = _due(len(small), int(is_small[num_spare:].sum()), num_spare)
    most = min(len(small), count) // dp * dp
    # more than the spare groups cannot wait
    least = max(len(small) - num_spare, 0)
    num_small = min(count, max(least, min(most, _rounded(due, dp, dither))))
    # others: the first few of those that wait, then new ones
    num_waiting = len(others) - (count - num_small)
    returning = min(num_waiting // RETURNING, count - num_small)
    chosen = np.concatenate([others[:returning], others[returning + num_waiting :]])
    spare = others[returning : returning + num_waiting].copy()
    fixed = int(vision[small[:num_small]].sum())
    _even_out(vision.astype(np.int64), chosen, spare, fixed, dp, dither >> DITHER_BITS)
    return np.sort(np.concatenate([small[:num_small], chosen]))


def assign_ranks(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """Assign at most `dp * micro_batches` groups so that ranks' sums of both loads are even.

    Returns int64 of shape (dp, micro_batches): places in `vision` and `tokens`, -1 where groups are
    lacking; each rank's in descending order of tokens, so that micro-batches of one number are
    similar too. Assigned in descending load, then exchanged between pairs of ranks, one for one and
    two for two: first for the least sum of squares, then for the worst rank. Deterministic.

    >>> vision, tokens = np.array([1, 3, 2, 2]), np.array([50, 10, 40, 20])
    >>> assign_ranks(vision, tokens, dp=2, micro_batches=2).tolist()
    [[2, 3], [0, 1]]
    """
    places = dp * micro_batches
    if dp < 1 or micro_batches < 1 or len(vision) > places or len(vision) != len(tokens):
        raise ValueError(
            f"{len(vision)} vision loads and {len(tokens)} token counts for {dp} ranks x"
            f" {micro_batches} micro-batches; give one of each per group, a group or none per place"
        )
    loads = np.zeros((places, 2), np.int64)  # groups that are lacking weigh nothing
    loads[: len(vision), 0], loads[: len(vision), 1] = vision, tokens
    totals = np.maximum(loads.sum(axis=0), 1)
    unit = np.maximum(dp * SCALE // totals, 1)
    best_vision = -(-int(totals[0]) // dp) * int(unit[0])
    held = _search_ranks(loads * unit, dp, best_vision)
    held = np.take_along_axis(held, np.lexsort((held, -loads[held, 0], -loads[held, 1])), axis=1)
    return np.where(held < len(vision), held, -1)


def _too_small(tokens: IntArray, micro_batches: int) -> NDArray[np.bool_]:
    """Groups so far below the median that others of the upper half lack 1/256 to make up for them.

    By tokens: vision loads of few values have halves without spread, and follow tokens.
    """
    scaled = tokens.astype(np.int64) << 16
    ascending = np.sort(scaled)
    half = len(ascending) // 2
    median, upper = int(ascending[half]), int(ascending[half:].sum()) // (len(ascending) - half)
    lacking = micro_batches * median >> 8
    return np.asarray(scaled < micro_batches * median - (micro_batches - 1) * upper - lacking)


def _due(num_small: int, num_new: int, num_spare: int) -> int:
    """Small groups due in this step; `num_small` are candidates, `num_new` of them new.

    As many as are new, and a share of those that wait beyond a third of the spare groups: enough
    wait to round up, and few enough to round down.
    """
    return num_new + (num_small - num_new - num_spare // 3) // PULL


def _even_out(
    load: IntArray, chosen: IntArray, spare: IntArray, fixed: int, dp: int, dither: int
) -> None:
    """Exchange `chosen` and `spare` until `fixed` and the chosen loads are a multiple of `dp`.

    Just below, by a load or two per hundred ranks: a rank that cannot be filled then pushes no
    other over the mean. Where that multiple is out of reach, the one on the other side.
    """
    values = np.unique(load[np.concatenate([chosen, spare])])
    if not len(chosen) or not len(spare) or len(values) > FEW_VALUES:
        return
    slack = dp // 64
    total = fixed + int(load[chosen].sum()) + slack
    missing = _exchange(load, chosen, spare, values, _rounded(total, dp, dither) - total)
    if missing:
        _exchange(load, chosen, spare, values, missing - dp if missing > 0 else missing + dp)


def _rounded(number: int, dp: int, dither: int) -> int:
    """`number` as a multiple of `dp`, rounded by the low bits of `dither`: the mean is right.

    >>> [_rounded(7, 4, dither) for dither in (0, 1 << 14, 1 << 15, 3 << 14)]
    [4, 8, 8, 8]
    """
    part = dither & ((1 << DITHER_BITS) - 1)
    return ((number << DITHER_BITS) + part * dp) // (dp << DITHER_BITS) * dp


@numba.njit(cache=True)
def _exchange(load, chosen, spare, values, missing):  # type: ignore[no-untyped-def]
    """Exchange in place, largest gains first, while `missing` is lacking; -> what still is."""
    in_chosen = np.bincount(np.searchsorted(values, load[chosen]), minlength=len(values))
    in_spare = np.bincount(np.searchsorted(values, load[spare]), minlength=len(values))
    while missing != 0:
        step, away, back = _largest_step(values, in_chosen, in_spare, missing)
        if step == 0:
            return missing
        # the latest goes and the latest comes: others are due sooner anyway
        i, j = len(chosen) - 1, len(spare) - 1
        while load[chosen[i]] != values[away]:
            i -= 1
        while load[spare[j]] != values[back]:
            j -= 1
        chosen[i], spare[j] = spare[j], chosen[i]
        in_chosen[away] -= 1
        in_chosen[back] += 1
        in_spare[back] -= 1
        in_spare[away] += 1
        missing -= step
    return missing


@numba.njit(cache=True)
def _largest_step(values, in_chosen, in_spare, missing):  # type: ignore[no-untyped-def]
    """(gain, value to give, value to take) of the exchange nearest to `missing`, not beyond it."""
    step, away, back = np.int64(0), 0, 0
    for a in range(len(values)):
        for b in range(len(values)):
            gain = values[b] - values[a]
            there = in_chosen[a] > 0 and in_spare[b] > 0
            fits = there and gain * missing > 0 and abs(gain) <= abs(missing)
            if fits and abs(gain) > abs(step):
                step, away, back = gain, a, b
    return step, away, back


@numba.njit(cache=True)
def _search_ranks(loads, dp, best_vision):  # type: ignore[no-untyped-def]
    """Groups held by each rank, int64 of shape (dp, k), after exchanges between pairs of ranks.

    `loads`, int64 of shape (dp * k, 2), are in units of which a rank's mean is `SCALE`;
    `best_vision` is the least that the rank with most vision can have. Deterministic.
    """
    k = len(loads) // dp
    held, sums = _assign_descending(loads, dp, k)
    groups = (held, loads, sums)
    order = np.arange(dp)
    state = np.uint64(0)
    # effort: one for one between all pairs, then two for two if that is not too much
    single_sweeps = min(SINGLE_SWEEPS, max(4, MAX_TRIES // max(1, dp // 2 * k * k)))
    for sweep in range(single_sweeps + (DOUBLE_SWEEPS if k <= MAX_DOUBLE else 0)):
        state = _shuffle(order, state)
        # highest against lowest vision, then tokens, then anyone against anyone
        pairing = order
        if sweep % 3 != 2:
            pairing = order[np.argsort(sums[order, sweep % 3], kind="mergesort")]
        for pair in range(dp // 2):
            ranks = (pairing[dp - 1 - pair], pairing[pair])
            double = sweep >= single_sweeps
            _gain, exchange = _best_exchange(ranks, groups, best_vision, double, False)
            _apply(ranks, exchange, groups)
    if dp > 1:
        _relieve_worst(groups, best_vision, order)
    return held


@numba.njit(cache=True)
def _relieve_worst(groups, best_vision, order):  # type: ignore[no-untyped-def]
    """Exchange groups of the worst rank with one of a few others, in place, while it helps."""
    held, _loads, sums = groups
    state, double = np.uint64(1), held.shape[1] <= MAX_DOUBLE
    for _round in range(WORST_ROUNDS):
        excess = np.maximum(sums[:, 0] - best_vision, sums[:, 1] - SCALE)
        worst = np.argmax(excess)
        if excess[worst] <= EVEN_ENOUGH:
            return
        # the partner that lowers the excess most
        state = _shuffle(order, state)
        best, partner, exchange = np.int64(0), -1, NO_EXCHANGE
        for b in order[: PARTNERS + 1]:
            if b != worst:
                gain, found = _best_exchange((worst, b), groups, best_vision, double, True)
                if gain < best:
                    best, partner, exchange = gain, b, found
        if partner < 0:
            return
        _apply((worst, partner), exchange, groups)


@numba.njit(cache=True)
def _assign_descending(loads, dp, k):  # type: ignore[no-untyped-def]
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
def _best_exchange(ranks, groups, best_vision, double, worst):  # type: ignore[no-untyped-def]
    """(change of cost, (p, q, p2, q2)): places p, p2 of the first rank for q, q2 of the second.

    -1 for no exchange; `double` also tries two for two, `worst` looks at the worse rank alone.
    """
    a, b = ranks
    held, loads, sums = groups
    k = held.shape[1]
    xa, ya, xb, yb = sums[a, 0], sums[a, 1], sums[b, 0], sums[b, 1]
    start = _cost(xa, ya, xb, yb, best_vision, worst)
    best, exchange = start, NO_EXCHANGE
    for p in range(k):
        for q in range(k):
            # one for one
            x = loads[held[a, p], 0] - loads[held[b, q], 0]
            y = loads[held[a, p], 1] - loads[held[b, q], 1]
            cost = _cost(xa - x, ya - y, xb + x, yb + y, best_vision, worst)
            if cost < best:
                best, exchange = cost, (p, q, -1, -1)
            if not double:
                continue
            # two for two
            for p2 in range(p + 1, k):
                for q2 in range(q + 1, k):
                    x2 = x + loads[held[a, p2], 0] - loads[held[b, q2], 0]
                    y2 = y + loads[held[a, p2], 1] - loads[held[b, q2], 1]
                    cost = _cost(xa - x2, ya - y2, xb + x2, yb + y2, best_vision, worst)
                    if cost < best:
                        best, exchange = cost, (p, q, p2, q2)
    return best - start, exchange


@numba.njit(cache=True, inline="always")
def _cost(xa, ya, xb, yb, best_vision, worst):  # type: ignore[no-untyped-def]
    """Cost of two ranks: the excess of the worse one, or the squared deviations of both."""
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
def _apply(ranks, exchange, groups):  # type: ignore[no-untyped-def]
    """Exchange the places that `_best_exchange` gives, if any, in place."""
    a, b = ranks
    held, loads, sums = groups
    for p, q in (exchange[:2], exchange[2:]):
        if p >= 0:
            change = loads[held[b, q]] - loads[held[a, p]]
            sums[a] += change
            sums[b] -= change
            held[a, p], held[b, q] = held[b, q], held[a, p]


@numba.njit(cache=True)
def _shuffle(order, state):  # type: ignore[no-untyped-def]
    """Fisher-Yates in place by Knuth's linear congruential generator; any fixed one will do."""
    for last in range(len(order) - 1, 0, -1):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        place = np.int64((state >> np.uint64(33)) % np.uint64(last + 1))
        order[last], order[place] = order[place], order[last]
    return state
