"""Dealing examples to batches one by one, longest first: the kernels of
`balance.steps.post_balancing`, in numba, O(n).

A heap costs O(log d) per example and most of the time of an LPT. Here batches wait in lists by
their sum: the least sum never falls, and a batch above the final mean is never the least again, so
the lists end at the mean and one pointer moves over them once. 153,600 examples to 2,560 batches:
1.2 ms; a prototype with a heap took 9. Pure: kernels set the output arrays that they are given.
"""

from __future__ import annotations

import numba
import numpy as np

from balance.types import IntArray

SMALL_LENGTH = 1 << 20
"""Up to this length a counting sort is faster than NumPy's sorts."""

OUTSIDE = np.iinfo(np.int64).max
"""Value of a batch that does not take part in a tournament."""


def descending(values: IntArray) -> IntArray:
    """Indices by descending value, equal ones in input order."""
    largest = int(values.max(initial=0))
    if largest > SMALL_LENGTH + 1:
        return np.argsort(-values, kind="stable")
    return np.asarray(_counting_sort(values, largest), dtype=np.int64)


@numba.njit(cache=True)
def _counting_sort(values, largest):  # type: ignore[no-untyped-def]
    starts = np.zeros(largest + 2, np.int32)
    for value in values:
        starts[largest - value + 1] += 1
    for key in range(1, largest + 1):
        starts[key] += starts[key - 1]
    order = np.empty(len(values), np.int64)
    for index in range(len(values)):
        key = largest - values[index]
        order[starts[key]] = index
        starts[key] += 1
    return order


@numba.njit(cache=True)
def deal(loads, order, sums, batches):  # type: ignore[no-untyped-def]
    """Give the examples of `order` to the batch of least sum, starting from `sums`; sets `batches`.

    `waiting` and `last` are the ends of one first-in-first-out list of batches per sum, linked by
    `behind`. Sums over the mean of everything need no list: while anything with a load is left, the
    least sum is below the mean. One loop for the start and the examples, because a function per
    list operation makes it three times slower.
    """
    mean = loads.sum() // len(sums)
    waiting = np.full(mean + 1, -1, np.int32)
    last = np.empty(mean + 1, np.int32)
    behind = np.empty(len(sums), np.int32)
    least = 0
    for turn in range(-len(sums), len(order)):
        if turn < 0:  # first every batch queues up with the sum that it starts from
            batch = turn + len(sums)
            total = sums[batch]
        else:
            while waiting[least] < 0:
                least += 1
            batch = waiting[least]
            waiting[least] = behind[batch]
            batches[order[turn]] = batch
            total = least + loads[order[turn]]
        if total <= mean:
            behind[batch] = -1
            if waiting[total] < 0:
                waiting[total] = batch
            else:
                behind[last[total]] = batch
            last[total] = batch


@numba.njit(cache=True)
def deal_in_window(lengths, order, mean, tolerance, sums, batches):  # type: ignore[no-untyped-def]
    """Give the examples of `order` to the batch of least squares among those of sums < least +
    `tolerance`.

    Sets `batches` and, from zeros, `sums`. The least sum never falls, so neither does the window's
    end: a batch waits in a list of its sum until the window reaches it, then plays in a tournament
    of squares, whose root is the winner. Sums from `mean` + `tolerance` on can never be reached
    again, so they need neither list nor count.
    """
    num_leaves = 1
    while num_leaves < len(sums):
        num_leaves *= 2
    squares = np.zeros(len(sums), np.int64)
    values, winners = np.full(2 * num_leaves, OUTSIDE, np.int64), np.zeros(2 * num_leaves, np.int32)
    for batch in range(len(sums)):
        _play(values, winners, batch, np.int64(0))
    counts, waiting = np.zeros(mean + tolerance, np.int32), np.full(mean + tolerance, -1, np.int32)
    behind = np.empty(len(sums), np.int32)
    counts[0], least, end = len(sums), 0, tolerance
    for example in order:
        while counts[least] == 0:
            least += 1
        while end < least + tolerance:
            batch = waiting[end]
            while batch >= 0:
                _play(values, winners, batch, squares[batch])
                batch = behind[batch]
            end += 1
        batch, length = winners[1], lengths[example]
        batches[example] = batch
        counts[sums[batch]] -= 1
        sums[batch] += length
        squares[batch] += length * length
        _play(values, winners, batch, squares[batch] if sums[batch] < end else OUTSIDE)
        _wait(counts, waiting, behind, sums[batch], end, batch)


@numba.njit(cache=True)
def _play(values, winners, batch, value):  # type: ignore[no-untyped-def]
    """Set a batch's value and replay its games up to the root: the least value wins, of equal ones
    the lower batch.
    """
    node, winner = len(values) // 2 + batch, batch
    values[node], winners[node] = value, winner
    while node > 1:
        rival_value, rival = values[node ^ 1], winners[node ^ 1]
        if (rival_value < value) | ((rival_value == value) & (rival < winner)):
            value, winner = rival_value, rival
        node >>= 1
        if values[node] == value and winners[node] == winner:
            return  # nothing changes from here to the root
        values[node], winners[node] = value, winner


@numba.njit(cache=True)
def _wait(counts, waiting, behind, total, end, batch):  # type: ignore[no-untyped-def]
    """Count a batch's sum, and put the batch on that sum's list if the window has not reached
    it.
    """
    if total < len(counts):
        counts[total] += 1
        if total >= end:
            behind[batch] = waiting[total]
            waiting[total] = batch
