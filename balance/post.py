"""Post-balancing: deal the examples that all ranks drew for a step anew, so that every rank's batch costs the same.

OrchMLLM, algorithms 1, 2, 4 and 5, in numba. The ranks draw their mini-batches at random, as ever, and exchange
examples afterwards, so balance costs no randomness. Every function takes the lengths of all examples of a step, rank
after rank, shape (num_examples,), and returns the batch of each example, int64, same shape; inside a batch examples
keep their order, which is how an All-to-All delivers them. Pure and deterministic, ties included: every rank computes
the same answer by itself from the lengths alone.

Which one: packed batches `balance_sums` (any costs, not only lengths); batches padded to their longest example
`balance_padded`; packed batches with even memory *and* even attention `balance_squares`; packed linear layers but
padded attention `balance_conv`. Time for 2,560 ranks of 60 examples: see docs/benchmarks.md; `balance_sums` and
`balance_padded` take less than NumPy's argsort of the same lengths.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from balance.records import Groups, IntArray

Loads = IntArray | NDArray[np.float64]
"""Lengths in tokens, or costs in any unit; never negative."""

EXACT_MEAN = 1 << 20
"""Whole loads are counted exactly up to this mean sum of a batch."""
RESOLUTION = 1 << 17
"""Other loads are counted in this fraction of the mean sum, 8e-6."""

MAX_SUM = 1 << 24
"""`balance_squares` keeps a counter per possible sum of a batch: 16 M tokens, 128 MiB."""

SMALL_LENGTH = 1 << 20
"""Up to this length a counting sort is faster than NumPy's sorts."""


def balance_sums(loads: Loads, num_batches: int) -> IntArray:
    """Batch of each example so that the largest sum of a batch is small (OrchMLLM, Algorithm 1).

    Longest example first, always to the batch of the least sum, of equal ones to the one that has had it longest. At
    most 4/3 of the best largest sum (Graham 1969), in practice within .1 % of the mean. O(n): counting sort, and
    buckets of batches by sum, because the least sum never falls and a batch above the mean is never the least again.
    For linear plus quadratic cost give `lengths + weight * lengths**2`: sums of costs are sums.

    >>> balance_sums(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 1, 2, 2, 0]
    """
    units = _units(_checked(loads, num_batches), num_batches)
    order = _descending(units)
    batches = np.empty(len(units), np.int64)
    _deal(units, order, np.zeros(num_batches, np.int64), batches)
    return batches


def balance_padded(lengths: IntArray, num_batches: int) -> IntArray:
    """Batch of each example so that the largest of (examples x longest example) is least (OrchMLLM, Algorithm 2).

    Exact: bisection on that bound; batches are runs of the sorted examples, each as long as the bound allows. Repaired
    against print: the bounds are the longest length and that times ceil(n / d), not the shortest, and the runs returned
    are those of the final bound, not of the last one tried. O(n + d log(n) log(n / d)).

    >>> balance_padded(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 0, 1, 0, 2]
    """
    lengths = _checked_lengths(lengths, num_batches)
    order = _descending(lengths)[::-1]
    batches = np.empty(len(lengths), np.int64)
    batches[order] = _padded_runs(lengths[order], num_batches)
    return batches


def balance_squares(lengths: IntArray, num_batches: int, *, tolerance: int) -> IntArray:
    """Batch of each example so that sums are even to about `tolerance` and sums of squares too (OrchMLLM, Algorithm 4).

    Longest first, to the batch of the least sum of squares (then of the lowest number) among those whose sum is the
    least or less than `tolerance` tokens above it. Repaired against print, whose comparison is not transitive and so
    defines no queue. With tolerance 0 or 1 it is `balance_sums` but for ties. For the least largest *cost*,
    `balance_sums` of linear plus squared lengths is better; this one also keeps tokens, thus memory, even.
    Raises ValueError where the mean sum plus the tolerance exceeds `MAX_SUM`.

    >>> balance_squares(np.array([6, 2, 2, 2, 1]), 2, tolerance=2).tolist()
    [0, 1, 1, 1, 1]
    """
    lengths = _checked_lengths(lengths, num_batches, power=2)
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance} tokens; give 0 or more")
    mean = int(lengths.sum()) // num_batches
    tolerance = max(1, tolerance)
    if mean + tolerance > MAX_SUM:
        raise ValueError(
            f"mean sum {mean:,} plus tolerance {tolerance:,} is over {MAX_SUM:,} tokens; divide both by a common unit"
        )
    batches = np.empty(len(lengths), np.int64)
    _deal_in_window(lengths, _descending(lengths), num_batches, mean, tolerance, batches)
    return batches


def balance_conv(lengths: IntArray, num_batches: int) -> IntArray:
    """Batch of each example for packed linear layers and padded attention (OrchMLLM, Algorithm 5).

    Longest first, fill batch after batch while (examples x longest) stays within the largest sum of `balance_sums`;
    when all `num_batches` are used up, deal what remains as `balance_sums` does. So the largest sum stays small and
    long examples share batches with long ones. Repaired against print: at most `num_batches` batches, and the padded
    length is that of the batch's *first*, longest, example.

    >>> balance_conv(np.array([6, 6, 2, 2, 2, 2]), 3).tolist()
    [0, 1, 2, 2, 2, 2]
    """
    lengths = _checked_lengths(lengths, num_batches)
    units = _units(lengths, num_batches)
    bound = int(_sums(lengths, balance_sums(lengths, num_batches), num_batches).max())
    order = _descending(lengths)
    batches = np.empty(len(lengths), np.int64)
    placed = _fill_padded(lengths, order, num_batches, bound, batches)
    sums = _sums(units[order[:placed]], batches[order[:placed]], num_batches)
    _deal(units, order[placed:], sums, batches)
    return batches


def as_batches(batches: IntArray, num_batches: int) -> Groups:
    """The examples of each batch, in input order, as groups; empty batches stay.

    >>> as_batches(np.array([1, 1, 2, 1]), 4).offsets.tolist()
    [0, 0, 3, 4, 4]
    """
    sizes = np.bincount(batches, minlength=num_batches)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Groups(_by_batch(batches, offsets), offsets)


def _checked(loads: Loads, num_batches: int) -> Loads:
    """`loads` as a contiguous int64 or float64 array, after the checks that all functions share."""
    loads = np.ascontiguousarray(loads, dtype=np.int64 if np.asarray(loads).dtype.kind in "iub" else np.float64)
    if num_batches < 1:
        raise ValueError(f"num_batches is {num_batches}; give at least one batch")
    if len(loads) and not (float(loads.min()) >= 0 and float(loads.max()) * len(loads) < float("inf")):
        at = int(np.flatnonzero(~((loads >= 0) & np.isfinite(loads)))[0])
        raise ValueError(f"load of example {at} is {loads[at]}; loads must be finite and not negative")
    return loads


def _checked_lengths(lengths: IntArray, num_batches: int, power: int = 1) -> IntArray:
    """`lengths` as int64 whose sums (of `power`s) cannot overflow."""
    if np.asarray(lengths).dtype.kind not in "iub" and len(lengths):
        raise ValueError(f"lengths are {np.asarray(lengths).dtype}; give whole numbers of tokens")
    checked = np.asarray(_checked(np.asarray(lengths, dtype=np.int64), num_batches), dtype=np.int64)
    longest = int(checked.max(initial=0))
    if longest**power * len(checked) >= 1 << 62:
        raise ValueError(f"longest example has {longest:,} tokens, beyond what int64 can sum; divide by a unit")
    return checked


def _units(loads: Loads, num_batches: int) -> IntArray:
    """Loads as whole numbers with a mean sum per batch of at most about EXACT_MEAN; those over the mean all alike.

    An example over the mean sum fills a batch by itself, so how far over it is makes no difference to the others.
    """
    mean = float(loads.sum(dtype=np.float64)) / num_batches
    if loads.dtype.kind == "f" or mean > EXACT_MEAN:
        loads = np.rint(loads * (RESOLUTION / mean)) if mean > 0 else np.zeros(len(loads))
        loads = np.minimum(loads, 2 * RESOLUTION).astype(np.int64)
    return np.minimum(loads, int(loads.sum()) // num_batches + 1)


def _descending(values: IntArray) -> IntArray:
    """Indices by descending value, equal ones in input order."""
    largest = int(values.max(initial=0))
    if largest > SMALL_LENGTH + 1:
        return np.argsort(-values, kind="stable")
    return np.asarray(_counting_sort(values, largest), dtype=np.int64)


def _sums(loads: IntArray, batches: IntArray, num_batches: int) -> IntArray:
    sums = np.zeros(num_batches, np.int64)
    np.add.at(sums, batches, loads)
    return sums


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
def _by_batch(batches, offsets):  # type: ignore[no-untyped-def]
    ends = offsets[:-1].copy()
    samples = np.empty(len(batches), np.int64)
    for sample in range(len(batches)):
        samples[ends[batches[sample]]] = sample
        ends[batches[sample]] += 1
    return samples


@numba.njit(cache=True)
def _deal(loads, order, sums, batches):  # type: ignore[no-untyped-def]
    """Give the examples of `order` to the batch of least sum, starting from `sums`; sets `batches`.

    `waiting` and `last` are the ends of one first-in-first-out list of batches per sum, linked by `behind`. Sums over
    the mean of everything need no list: while anything with a load is left, the least sum is below the mean. One loop
    for the start and the examples, because a function per list operation makes it three times slower.
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
def _padded_runs(ascending, num_batches):  # type: ignore[no-untyped-def]
    """Run of each of the ascending lengths, for the least padded bound that `num_batches` runs can keep."""
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
    """Where a run from `start` must end to keep examples x longest <= bound: bisection, for that product only grows."""
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
def _fill_padded(lengths, order, num_batches, bound, batches):  # type: ignore[no-untyped-def]
    """Fill batches in `order` while examples x first <= bound; -> how many examples all batches together took."""
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
def _deal_in_window(lengths, order, num_batches, mean, tolerance, batches):  # type: ignore[no-untyped-def]
    """Algorithm 4; sets `batches`.

    The least sum never falls, so neither does the window's end: a batch waits in a list of its sum until the window
    reaches it, then takes part in a tournament of squares, whose root is the winner. Sums from mean + tolerance on can
    never be reached. `changed` holds the batches whose games are to be replayed before the next pick.
    """
    num_leaves = 1
    while num_leaves < num_batches:
        num_leaves *= 2
    lost = np.iinfo(np.int64).max
    squares, sums = np.zeros(num_batches, np.int64), np.zeros(num_batches, np.int64)
    values, winners = np.full(2 * num_leaves, lost, np.int64), np.zeros(2 * num_leaves, np.int32)
    reach = mean + tolerance
    counts, waiting = np.zeros(reach, np.int32), np.full(reach, -1, np.int32)
    behind, changed = np.empty(num_batches, np.int32), np.arange(num_batches + 1).astype(np.int32)
    counts[0], num_changed = num_batches, num_batches
    least, end = 0, tolerance
    for place in range(len(order)):
        while counts[least] == 0:
            least += 1
        while end < least + tolerance:
            batch = waiting[end]
            while batch >= 0:
                changed[num_changed] = batch
                num_changed += 1
                batch = behind[batch]
            end += 1
        for slot in range(num_changed):
            batch = changed[slot]
            node, winner = num_leaves + batch, batch
            value = squares[batch] if sums[batch] < end else lost
            values[node], winners[node] = value, winner
            while node > 1:
                rival_value, rival = values[node ^ 1], winners[node ^ 1]
                if (rival_value < value) | ((rival_value == value) & (rival < winner)):
                    value, winner = rival_value, rival
                node >>= 1
                if values[node] == value and winners[node] == winner:
                    break  # nothing changes from here to the root
                values[node], winners[node] = value, winner
        batch, length = winners[1], lengths[order[place]]
        batches[order[place]] = batch
        counts[sums[batch]] -= 1
        sums[batch] += length
        squares[batch] += length * length
        total = sums[batch]
        if total < reach:
            counts[total] += 1
        if end <= total < reach:
            behind[batch] = waiting[total]
            waiting[total] = batch
        changed[0], num_changed = batch, 1
