"""Which rank runs which of a step's groups, when only the sum over its micro-batches matters.

Plain data-parallel training with gradient accumulation waits once per step, so a step's `dp * k`
groups may be a random set if each rank's k groups add up to the same. Not so where ranks meet in
every micro-batch (FSDP, ZeRO-3, pipelines): there `balance.order.block_shuffle`'s blocks serve. Two
pure functions, for every rank to compute alike: integers only, so that machines of different make
agree; `choose_step_groups` picks groups that can be shared out evenly, `assign_ranks` does it.

Whatever must add up to a multiple of `dp` is rounded up or down at random, in proportion, and what
waits comes back over several steps. Rounded to the nearest instead, with the rest in the very next
step, heavy and light steps would take turns: an autocorrelation of steps' loads of -.5.

1.2 million samples (benchmarks/order.py), k = 8: dist ratio ViT / LLM .0002 / .0003 at dp 8 in 0.4
ms a step, .0002 / .0004 at dp 512 in 25 ms; autocorrelation within .1 but for chance. With 4
micro-batches a rank cannot make up for a small group, and ratios are several times larger.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from balance.order._rank_search import SCALE, search_ranks
from balance.rng import mix64
from balance.types import IntArray

FEW_VALUES = 64
"""Vision loads of more values than this (native resolution) add up evenly without help."""
RETURNING = 8
"""One in so many of the groups that wait is due in the next step: they come back over as many
steps.
"""
PULL = 10
"""One in so many of the small groups that wait beyond a third of those that can are due in the next
step.

Autocorrelation is at worst half of either share, where rounding is all that makes steps differ.
"""
DITHER_BITS = 16


def num_spare_groups(dp: int, micro_batches: int) -> int:
    """Groups that `choose_step_groups` should have beyond the step's own; none where there is nothing to
    add up.
    """
    return min(2048, max(64, 4 * dp)) if micro_batches > 1 and dp > 1 else 0


def choose_step_groups(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """`dp * micro_batches` of the candidates, ascending, that can be shared out evenly; all if
    there are not more.

    Candidates come longest waiting first, then new ones. The new ones are taken, and some that wait
    in turn, but for two corrections, each of which lets a few wait for a later step. Groups so
    small that no rank could make up for them come in multiples of `dp`. And vision loads of few
    values (image patches) add up to a multiple of `dp`, or just below. Depends on the loads alone.
    int64, shape (min(len(vision), dp * micro_batches),).

    >>> choose_step_groups(np.array([3, 2, 2, 2, 3]), np.array([9, 9, 9, 9, 9]), dp=2, micro_batches=2).tolist()
    [0, 1, 2, 4]
    """
    count = dp * micro_batches
    if len(vision) <= count or micro_batches == 1:
        return np.arange(min(count, len(vision)))
    num_spare = len(vision) - count
    dither = mix64(int(tokens[num_spare:].sum()) ^ int(vision[num_spare:].sum()) << 32)
    is_small = _too_small(tokens, micro_batches)
    small, others = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    num_small = _num_small(
        len(small), int(is_small[num_spare:].sum()), num_spare, dp, count, dither
    )
    num_others = count - num_small
    num_waiting = len(others) - num_others
    returning = min(num_waiting // RETURNING, num_others)
    chosen = np.concatenate([others[:returning], others[returning + num_waiting :]])
    spare = others[returning : returning + num_waiting].copy()
    fixed = int(vision[small[:num_small]].sum())
    _even_out(vision.astype(np.int64), chosen, spare, fixed, dp, dither >> DITHER_BITS)
    return np.sort(np.concatenate([small[:num_small], chosen]))


def assign_ranks(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """Share out at most `dp * micro_batches` groups so that ranks' sums of both loads are even.

    Returns int64 of shape (dp, micro_batches): places in `vision` and `tokens`, -1 where groups are
    lacking. A rank's groups come in descending order of tokens, so that micro-batches of one number
    are alike too. Dealt out in descending load, then exchanged between pairs of ranks, one for one
    and two for two: first for the least sum of squares, then for the worst rank. Deterministic; dp
    64 with 8 micro-batches takes 3 ms, dp 512 takes 25.

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
    held = search_ranks(loads * unit, dp, best_vision)
    held = np.take_along_axis(held, np.lexsort((held, -loads[held, 0], -loads[held, 1])), axis=1)
    return np.where(held < len(vision), held, -1)


def _too_small(tokens: IntArray, micro_batches: int) -> NDArray[np.bool_]:
    """Groups so far below the median that a rank's others, even from the upper half, lack 1/256 of
    making up for it.

    By tokens alone: vision loads of few values have halves without any spread, and follow tokens
    where it matters.
    """
    scaled = tokens.astype(np.int64) << 16
    ascending = np.sort(scaled)
    half = len(ascending) // 2
    median, upper = int(ascending[half]), int(ascending[half:].sum()) // (len(ascending) - half)
    lacking = micro_batches * median >> 8
    return np.asarray(scaled < micro_batches * median - (micro_batches - 1) * upper - lacking)


def _num_small(
    num_small: int, num_new: int, num_spare: int, dp: int, count: int, dither: int
) -> int:
    """Small groups of this step, a multiple of `dp` where possible; `num_small` are candidates,
    `num_new` of them new.

    As many as are new, and a share of what keeps more waiting than a third of the spare groups:
    enough in stock to round up, and room enough to round down.
    """
    due = num_new + (num_small - num_new - num_spare // 3) // PULL
    most = min(num_small, count) // dp * dp
    # more than the spare groups cannot wait
    return min(count, max(num_small - num_spare, 0, min(most, _rounded(due, dp, dither))))


def _even_out(
    load: IntArray, chosen: IntArray, spare: IntArray, fixed: int, dp: int, dither: int
) -> None:
    """Exchange members of `chosen` and `spare` until `fixed` and the chosen loads add up to a
    multiple of `dp`.

    Just below, by a load or two per hundred ranks: a rank that cannot be filled then pushes no
    other over the mean. Where the multiple that was drawn is out of reach, the one on the other
    side.
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
    """`number` rounded to a multiple of `dp`, up or down as the low bits of `dither` fall, so that
    the mean is right.

    >>> [_rounded(7, 4, dither) for dither in (0, 1 << 14, 1 << 15, 3 << 14)]
    [4, 8, 8, 8]
    """
    part = dither & ((1 << DITHER_BITS) - 1)
    return ((number << DITHER_BITS) + part * dp) // (dp << DITHER_BITS) * dp


@numba.njit(cache=True)
def _exchange(load, chosen, spare, values, missing):  # type: ignore[no-untyped-def]
    """Exchange in place, largest steps first, while the sum of `chosen` lacks `missing`; -> what it
    still lacks.
    """
    num_values = len(values)
    in_chosen, in_spare = np.zeros(num_values, np.int64), np.zeros(num_values, np.int64)
    for group in chosen:
        in_chosen[np.searchsorted(values, load[group])] += 1
    for group in spare:
        in_spare[np.searchsorted(values, load[group])] += 1
    while missing != 0:
        step, away, back = _largest_step(values, in_chosen, in_spare, missing)
        if step == 0:
            return missing
        i, j = (
            len(chosen) - 1,
            len(spare) - 1,
        )  # the latest goes and the latest comes: others are due sooner anyway
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
    """(gain, value to give away, value to take back) of the exchange that comes nearest to
    `missing`, not beyond it.
    """
    step, away, back = np.int64(0), 0, 0
    for a in range(len(values)):
        for b in range(len(values)):
            gain = values[b] - values[a]
            fits = (
                in_chosen[a] > 0
                and in_spare[b] > 0
                and gain * missing > 0
                and abs(gain) <= abs(missing)
            )
            if fits and abs(gain) > abs(step):
                step, away, back = gain, a, b
    return step, away, back
