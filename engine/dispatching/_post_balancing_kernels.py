"""Kernels of `engine.dispatching.post_balancing`: examples to even batches.

*Longest first* (`assign_by_sum`, `assign_by_squares`), O(n). Batches wait in lists by their sum,
not in a heap: the least sum never falls, and a batch above the final mean is never the least again,
so the lists end at the mean and one pointer moves over them once. 153,600 examples to 2,560
batches: 1.2 ms; a prototype with a heap took 9.

*Sorted* (`split_padded`, `split_attention`). Where batches are padded to their longest example,
they are ranges of the sorted examples. A range's cost only grows with its end, so for a bound the
longest ranges are the fewest, found by bisection: O(d log n) per bound, some 18 bounds.

Pure: kernels set the output arrays that they are given.
"""

import numba
import numpy as np

from isobatch.common.types import IntArray

SMALL_LENGTH = 1 << 20
"""Up to this length a counting sort is faster than NumPy's sorts."""
OUTSIDE = np.iinfo(np.int64).max
"""Value of a batch that does not take part in a tournament."""
PRECISION = 1e-4
"""`split_attention` ends this near to the best bound."""


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
def assign_by_sum(loads, order, sums, batches):  # type: ignore[no-untyped-def]
    """Give the examples of `order` to the batch of least sum, starting from `sums`; sets `batches`.

    `waiting` and `last` are the ends of one first-in-first-out list of batches per sum, linked by
    `after`. Sums over the mean need no list: while any load is left, the least sum is below it. One
    loop for the start and the examples: a function per list operation is three times slower.
    """
    mean = loads.sum() // len(sums)
    waiting = np.full(mean + 1, -1, np.int32)
    last = np.empty(mean + 1, np.int32)
    after = np.empty(len(sums), np.int32)
    smallest = 0
    for turn in range(-len(sums), len(order)):
        if turn < 0:  # first every batch joins the list of the sum that it starts from
            batch = turn + len(sums)
            total = sums[batch]
        else:
            # the first batch of the least sum gets the example
            while waiting[smallest] < 0:
                smallest += 1
            batch = waiting[smallest]
            waiting[smallest] = after[batch]
            batches[order[turn]] = batch
            total = smallest + loads[order[turn]]
        # join the end of the list of its sum
        if total <= mean:
            after[batch] = -1
            if waiting[total] < 0:
                waiting[total] = batch
            else:
                after[last[total]] = batch
            last[total] = batch


@numba.njit(cache=True)
def assign_by_squares(  # type: ignore[no-untyped-def]
    lengths, order, mean, tolerance, sums, batches
):
    """Give examples to the batch of least squares among those of sums < least + `tolerance`.

    Sets `batches` and, from zeros, `sums`. The least sum never falls, so neither does the window's
    end: a batch waits in a list of its sum until the window reaches it, then plays in a tournament
    of squares. Sums from `mean` + `tolerance` on are never in the window: no list, no count.
    """
    # the tournament: a binary tree with a leaf per batch
    num_leaves = 1
    while num_leaves < len(sums):
        num_leaves *= 2
    squares = np.zeros(len(sums), np.int64)
    values, winners = np.full(2 * num_leaves, OUTSIDE, np.int64), np.zeros(2 * num_leaves, np.int32)
    for batch in range(len(sums)):
        _play(values, winners, batch, np.int64(0))
    # batches per sum, and lists of those beyond the window
    counts, waiting = np.zeros(mean + tolerance, np.int32), np.full(mean + tolerance, -1, np.int32)
    after = np.empty(len(sums), np.int32)
    counts[0], smallest, end = len(sums), 0, tolerance
    for example in order:
        # move the window to the least sum
        while counts[smallest] == 0:
            smallest += 1
        while end < smallest + tolerance:
            batch = waiting[end]
            while batch >= 0:
                _play(values, winners, batch, squares[batch])
                batch = after[batch]
            end += 1
        # the winner gets the example
        batch, length = winners[1], lengths[example]
        batches[example] = batch
        counts[sums[batch]] -= 1
        sums[batch] += length
        squares[batch] += length * length
        _play(values, winners, batch, squares[batch] if sums[batch] < end else OUTSIDE)
        _wait(counts, waiting, after, sums[batch], end, batch)


@numba.njit(cache=True)
def _play(values, winners, batch, value):  # type: ignore[no-untyped-def]
    """Set a batch's value and replay its games up to the root: the least value wins, then batch."""
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
def _wait(counts, waiting, after, total, end, batch):  # type: ignore[no-untyped-def]
    """Count a batch's sum; beyond the window the batch also joins that sum's list."""
    if total < len(counts):
        counts[total] += 1
        if total >= end:
            after[batch] = waiting[total]
            waiting[total] = batch


@numba.njit(cache=True)
def fill_padded(lengths, order, num_batches, bound, batches):  # type: ignore[no-untyped-def]
    """Fill batches in `order` while examples x first <= bound; -> examples in all batches."""
    batch, size, first = -1, 0, np.int64(0)
    for place in range(len(order)):
        if batch < 0 or (size + 1) * first > bound:
            if batch + 1 == num_batches:
                return place
            batch, size, first = batch + 1, 0, lengths[order[place]]
        batches[order[place]] = batch
        size += 1
    return len(order)


@numba.njit(cache=True)
def split_padded(ascending, num_batches):  # type: ignore[no-untyped-def]
    """Batch of each of the ascending lengths, for the least padded bound that the batches keep."""
    batches = np.empty(len(ascending), np.int64)
    if len(ascending) == 0:
        return batches
    # bisect the bound
    low, high = ascending[-1], ascending[-1] * (-(-len(ascending) // num_batches))
    while low < high:
        middle = (low + high) // 2
        if _num_ranges(ascending, middle, num_batches) <= num_batches:
            high = middle
        else:
            low = middle + 1
    # cut at that bound
    start, batch = 0, 0
    while start < len(ascending):
        end = _range_end(ascending, start, low)
        batches[start:end] = batch
        start, batch = end, batch + 1
    return batches


@numba.njit(cache=True)
def _num_ranges(ascending, bound, enough):  # type: ignore[no-untyped-def]
    """Number of ranges that keep `bound`; stops counting above `enough`."""
    start, ranges = 0, 0
    while start < len(ascending) and ranges <= enough:
        start = _range_end(ascending, start, bound)
        ranges += 1
    return ranges


@numba.njit(cache=True)
def _range_end(ascending, start, bound):  # type: ignore[no-untyped-def]
    """The last end from `start` with examples x longest <= bound: that product only grows."""
    low, high = start + 1, len(ascending)
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
def split_attention(ascending, num_batches, weight):  # type: ignore[no-untyped-def]
    """Batch of each of the ascending lengths, for nearly the least bound on a batch's cost."""
    num = len(ascending)
    batches = np.zeros(num, np.int64)
    if num == 0:
        return batches
    before = np.zeros(num + 1)
    before[1:] = np.cumsum(ascending)
    low, high = 0.0, before[num] + weight * num * ascending[-1] ** 2
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if _cut_within(ascending, before, weight, middle, num_batches, batches):
            high = middle
        else:
            low = middle
    _cut_within(ascending, before, weight, high, num_batches, batches)
    return batches


@numba.njit(cache=True)
def _cut_within(  # type: ignore[no-untyped-def]
    ascending, before, weight, bound, num_batches, batches
):
    """Cut into ranges that cost at most `bound`; sets `batches`; -> whether they were enough."""
    start = 0
    for batch in range(num_batches):
        if start == len(ascending):
            return True
        # the longest range from `start`: its cost only grows with its end
        low, high = start, len(ascending)
        while low < high:
            end = (low + high + 1) // 2
            attention = (end - start) * ascending[end - 1] ** 2
            if before[end] - before[start] + weight * attention <= bound:
                low = end
            else:
                high = end - 1
        batches[start:low] = batch
        start = low
    return start == len(ascending)
