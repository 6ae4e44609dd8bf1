"""Cutting sorted examples into runs of least largest padded cost: the bisection kernels of
`balance.steps.post_balancing`, in numba.

Where batches are padded to their longest example, like belongs with like: batches are runs of the
sorted examples. A run's cost only grows with its end, so for a given bound the longest runs from
the start are the fewest, found by bisection inside a bisection: O(d log n) per bound, some 18
bounds. Pure.
"""

from __future__ import annotations

import numba
import numpy as np

PRECISION = 1e-4
"""`attention_runs` ends this near to the best bound."""


@numba.njit(cache=True)
def padded_runs(ascending, num_batches):  # type: ignore[no-untyped-def]
    """Run of each of the ascending lengths, for the least padded bound that `num_batches` runs can
    keep.
    """
    batches = np.empty(len(ascending), np.int64)
    if len(ascending) == 0:
        return batches
    low = ascending[-1]
    high = ascending[-1] * (-(-len(ascending) // num_batches))
    while low < high:
        middle = (low + high) // 2
        if _num_runs(ascending, middle, num_batches) <= num_batches:
            high = middle
        else:
            low = middle + 1
    start, run = 0, 0
    while start < len(ascending):
        end = _run_end(ascending, start, low)
        batches[start:end] = run
        start, run = end, run + 1
    return batches


@numba.njit(cache=True)
def _num_runs(ascending, bound, enough):  # type: ignore[no-untyped-def]
    """Number of runs that keep `bound`; stops counting above `enough`."""
    start, runs = 0, 0
    while start < len(ascending) and runs <= enough:
        start = _run_end(ascending, start, bound)
        runs += 1
    return runs


@numba.njit(cache=True)
def _run_end(ascending, start, bound):  # type: ignore[no-untyped-def]
    """Where a run from `start` must end to keep examples x longest <= bound: bisection, for that
    product only grows.
    """
    low = start + 1
    high = len(ascending)
    if ascending[start] > 0:
        high = min(high, start + bound // ascending[start])
    while low < high:
        middle = (low + high + 1) // 2
        if (middle - start) * ascending[middle - 1] <= bound:
            low = middle
        else:
            high = middle - 1
    return low


@numba.njit(cache=True)
def attention_runs(ascending, num_batches, weight):  # type: ignore[no-untyped-def]
    """Run of each of the ascending lengths, for nearly the least bound on the cost that
    `num_batches` runs can keep.
    """
    num = len(ascending)
    runs = np.zeros(num, np.int64)
    if num == 0:
        return runs
    before = np.zeros(num + 1)
    before[1:] = np.cumsum(ascending)
    low, high = 0.0, before[num] + weight * num * ascending[-1] ** 2
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if _cut_within(ascending, before, weight, middle, num_batches, runs):
            high = middle
        else:
            low = middle
    _cut_within(ascending, before, weight, high, num_batches, runs)
    return runs


@numba.njit(cache=True)
def _cut_within(ascending, before, weight, bound, num_batches, runs):  # type: ignore[no-untyped-def]
    """Cut into runs that cost at most `bound`; sets `runs`; -> whether `num_batches` were
    enough.
    """
    start = 0
    for run in range(num_batches):
        if start == len(ascending):
            return True
        low, high = start, len(ascending)
        while low < high:  # the cost of a run only grows with its end
            end = (low + high + 1) // 2
            if (
                before[end] - before[start] + weight * (end - start) * ascending[end - 1] ** 2
                <= bound
            ):
                low = end
            else:
                high = end - 1
        runs[start:low] = run
        start = low
    return start == len(ascending)
