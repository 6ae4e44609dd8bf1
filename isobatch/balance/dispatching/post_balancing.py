"""Post-balancing: a step's examples to batches that all cost the same.

OrchMLLM, algorithms 1, 2, 4 and 5. The ranks draw mini-batches at random, then exchange examples,
so balance costs no randomness. Every function takes the lengths of all examples of a step, rank
after rank, shape (num_examples,), and returns the batch of each example, int64, same shape; inside
a batch examples keep their order, which is how an All-to-All delivers them. Pure and deterministic,
ties included: every rank computes the same answer by itself.

Which one: packed batches `balance_sums` (any costs, not only lengths); batches padded to their
longest example `balance_padded`; packed batches with even memory *and* even attention
`balance_squares`; packed linear layers but padded attention `balance_padded_attention`, or as
published `balance_conv`. For 2,560 ranks of 60 examples the first two take as long as NumPy's
fastest argsort of the lengths, 2 ms; the others 2 to 6 times that (benchmarks/post_balancing.py).

*Longest first* (`_assign_by_sum`, `_assign_by_squares`), O(n). Batches wait in lists by their sum,
not in a heap: the least sum never falls, and a batch above the final mean is never the least again,
so the lists end at the mean and one pointer moves over them once. 153,600 examples to 2,560
batches: 1.2 ms; a prototype with a heap took 9.

*Sorted* (`_split_padded`, `_split_attention`). Where batches are padded to their longest example,
they are ranges of the sorted examples. A range's cost only grows with its end, so for a bound the
longest ranges are the fewest, found by bisection: O(d log n) per bound, some 18 bounds.
"""

from typing import Literal, get_args

import numpy as np

from isobatch.balance.kernels import kernel
from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, Groups, IntArray

Algorithm = Literal["sums", "padded", "squares", "padded_attention", "conv"]
"""OrchMLLM's algorithms 1, 2, 4, ours for padded attention, and 5."""

LengthsOrCosts = IntArray | FloatArray
"""Lengths in tokens, or costs in any unit; never negative."""

EXACT_MEAN = 1 << 20
"""Whole loads are counted exactly up to this mean sum of a batch."""
RESOLUTION = 1 << 17
"""Parts of the mean sum in which other loads are counted: 8e-6 of it."""

MAX_SUM = 1 << 24
"""`balance_squares` keeps a counter per possible sum of a batch: 16 M tokens, 128 MiB."""

SMALL_LENGTH = 1 << 20
"""Up to this length a counting sort is faster than NumPy's sorts."""
OUTSIDE = np.iinfo(np.int64).max
"""Value of a batch that does not take part in a tournament."""
PRECISION = 1e-4
"""`_split_attention` ends this near to the best bound."""


def balance_sums(loads: LengthsOrCosts, num_batches: int) -> IntArray:
    """Batch of each example so that the largest sum of a batch is small (OrchMLLM, Algorithm 1).

    Longest example first, always to the batch of the least sum, of equal ones to the one that has
    had it longest. At most 4/3 of the best largest sum (Graham 1969), in practice within .1 % of
    the mean. O(n). For linear plus quadratic cost give `lengths + weight * lengths**2`.

    >>> balance_sums(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 1, 2, 2, 0]
    """
    units = _units(_checked(loads, num_batches), num_batches)
    order = _descending(units)
    batches = np.empty(len(units), np.int64)
    _assign_by_sum(units, order, np.zeros(num_batches, np.int64), batches)
    return batches


def balance_padded(lengths: IntArray, num_batches: int) -> IntArray:
    """Batch of each example for the least largest (examples x longest) (OrchMLLM, Algorithm 2).

    Exact, O(n + d log(n) log(n / d)): bisection on that bound; batches are ranges of the sorted
    examples, each as long as the bound allows. Repaired against print: bisects from the longest
    length, not the shortest, to that times ceil(n / d); the ranges are those of the final bound.

    >>> balance_padded(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 0, 1, 0, 2]
    """
    lengths = _checked_lengths(lengths, num_batches)
    order = _descending(lengths)[::-1]
    batches = np.empty(len(lengths), np.int64)
    batches[order] = _split_padded(lengths[order], num_batches)
    return batches


def balance_squares(lengths: IntArray, num_batches: int, *, tolerance: int) -> IntArray:
    """Batch of each example for even sums, to `tolerance`, and squares (OrchMLLM, Algorithm 4).

    Longest first, to the batch of the least sum of squares (then of the lowest number) among those
    whose sum is the least or less than `tolerance` tokens above it. Repaired against print, whose
    comparison is not transitive and so defines no queue. Tolerance 0 or 1 is `balance_sums` but for
    ties. For the least largest *cost*, `balance_sums` of linear plus squared lengths is better;
    this one also keeps memory even. ValueError for a mean sum plus tolerance over `MAX_SUM`.

    >>> balance_squares(np.array([6, 2, 2, 2, 1]), 2, tolerance=2).tolist()
    [0, 1, 1, 1, 1]
    """
    lengths = _checked_lengths(lengths, num_batches, power=2)
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance} tokens; give 0 or more")
    mean = int(lengths.sum()) // num_batches
    tolerance = max(1, tolerance)
    if mean + tolerance > MAX_SUM:
        total = f"mean sum {mean:,} plus tolerance {tolerance:,}"
        raise ValueError(f"{total} is over {MAX_SUM:,} tokens; divide both by a common unit")
    batches, sums = np.empty(len(lengths), np.int64), np.zeros(num_batches, np.int64)
    _assign_by_squares(lengths, _descending(lengths), mean, tolerance, sums, batches)
    return batches


def balance_conv(lengths: IntArray, num_batches: int) -> IntArray:
    """Batch of each example for packed linear layers, padded attention (OrchMLLM, Algorithm 5).

    Longest first, fill batch after batch while (examples x longest) stays within the largest sum of
    `balance_sums`; when all `num_batches` are used up, assign the rest as `balance_sums` does.
    Repaired against print: at most `num_batches` batches, and the padded length is that of the
    batch's *first*, longest, example. On heavy tails the short remainder joins, and is padded to,
    the longest examples: `balance_padded_attention` is many times better.

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
    _assign_by_sum(units, order[placed:], sums, batches)
    return batches


def balance_padded_attention(lengths: IntArray, num_batches: int, *, weight: float) -> IntArray:
    """Batch of each example for a small largest (sum + weight x examples x longest^2).

    The objective of OrchMLLM's Algorithm 5, minimised itself: the best of all cuts of the sorted
    examples into ranges, to a ten-thousandth, by bisection as in `balance_padded`. `weight` is the
    cost of a squared token in tokens (OrchMLLM: lambda). With little weight `balance_sums` may be
    better, because it need not keep like lengths together.

    >>> balance_padded_attention(np.array([6, 6, 2, 2, 2, 2]), 3, weight=1.0).tolist()
    [2, 1, 0, 0, 0, 0]
    """
    lengths = _checked_lengths(lengths, num_batches, power=2)
    if not 0 <= weight < float("inf"):
        raise ValueError(f"weight is {weight}; give a finite one from 0 on")
    order = _descending(lengths)[::-1]
    batches = np.empty(len(lengths), np.int64)
    batches[order] = _split_attention(lengths[order], num_batches, float(weight))
    return batches


def assign_batches(  # noqa: PLR0913 - options by name
    lengths: IntArray,
    num_batches: int,
    *,
    algorithm: Algorithm = "sums",
    squares: IntArray | None = None,
    weight: float = 0.0,
    tolerance: float = 0.02,
    name: str = "a phase",
) -> IntArray:
    """Batch of each example by an algorithm's name, int64, (num_examples,).

    `squares`: sums of squared lengths of what attends together, by default the squared lengths;
    `weight`: cost of a squared token in tokens (OrchMLLM: beta / alpha). `tolerance`: of "squares",
    as a share of the mean sum. ConfigError, which names the phase, for another algorithm.

    >>> assign_batches(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 1, 2, 2, 0]
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if algorithm == "sums":
        added = np.square(lengths) if squares is None else squares
        costs = np.asarray(lengths + weight * added, np.float64)
        return balance_sums(costs if weight else lengths, num_batches)
    if algorithm == "squares":
        tokens = int(tolerance * lengths.sum() / num_batches)
        return balance_squares(lengths, num_batches, tolerance=tokens)
    if algorithm == "padded_attention":
        return balance_padded_attention(lengths, num_batches, weight=weight)
    if algorithm not in ("padded", "conv"):
        known = ", ".join(get_args(Algorithm))
        raise ConfigError(f"algorithm of {name} is {algorithm!r}; use one of {known}")
    return (balance_padded if algorithm == "padded" else balance_conv)(lengths, num_batches)


def batch_costs(
    lengths: IntArray,
    batches: IntArray,
    num_batches: int,
    *,
    algorithm: Algorithm = "sums",
    squares: IntArray | None = None,
    weight: float = 0.0,
) -> FloatArray:
    """Cost in tokens of each batch, of what the algorithm makes even, float64, (num_batches,).

    Tokens, those of padding too for "padded", and `weight` x squared tokens, padded where attention
    is. For "squares" and "conv", which balance squares without a weight, weight 0 means that all
    tokens cost as much as all squares. Arguments as of `assign_batches`.

    >>> lengths, batches = np.array([9, 1, 1]), np.array([0, 0, 1])
    >>> [batch_costs(lengths, batches, 2, algorithm=name).tolist() for name in ("sums", "padded")]
    [[10.0, 1.0], [18.0, 1.0]]
    """
    lengths = np.asarray(lengths, np.float64)
    longest = np.zeros(num_batches)
    np.maximum.at(longest, batches, lengths)
    sizes = np.bincount(batches, minlength=num_batches)
    tokens: FloatArray = np.asarray(np.bincount(batches, lengths, num_batches), np.float64)
    if algorithm in ("sums", "squares"):
        attended = np.bincount(
            batches, np.square(lengths) if squares is None else squares, num_batches
        )
    else:
        attended = sizes * np.square(longest)
    if algorithm == "padded":
        tokens = sizes * longest
    if algorithm in ("squares", "conv") and not weight:
        weight = float(lengths.sum() / max(1.0, np.square(lengths).sum()))
    return np.asarray(tokens + weight * attended, np.float64)


def as_batches(batches: IntArray, num_batches: int) -> Groups:
    """The examples of each batch, in input order, as groups; empty batches stay.

    >>> as_batches(np.array([1, 1, 2, 1]), 4).offsets.tolist()
    [0, 0, 3, 4, 4]
    """
    sizes = np.bincount(batches, minlength=num_batches)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Groups(_by_batch(batches, offsets), offsets)


def _checked(loads: LengthsOrCosts, num_batches: int) -> LengthsOrCosts:
    """`loads` as a contiguous int64 or float64 array, after the checks that all functions share."""
    if np.asarray(loads).dtype.kind in "iub":
        loads = np.ascontiguousarray(loads, np.int64)
    else:
        loads = np.ascontiguousarray(loads, np.float64)
    if num_batches < 1:
        raise ValueError(f"num_batches is {num_batches}; give at least one batch")
    if len(loads) and not (loads.min() >= 0 and loads.max() < np.inf):
        at = int(np.flatnonzero(~((loads >= 0) & np.isfinite(loads)))[0])
        raise ValueError(f"load of example {at} is {loads[at]}; must be finite and not negative")
    return loads


def _checked_lengths(lengths: IntArray, num_batches: int, power: int = 1) -> IntArray:
    """`lengths` as int64 whose sums (of `power`s) cannot overflow."""
    if np.asarray(lengths).dtype.kind not in "iub" and len(lengths):
        raise ValueError(f"lengths are {np.asarray(lengths).dtype}; give whole numbers of tokens")
    checked = np.asarray(_checked(np.asarray(lengths, dtype=np.int64), num_batches), dtype=np.int64)
    longest = int(checked.max(initial=0))
    if longest**power * len(checked) >= 1 << 62:
        raise ValueError(
            f"longest example has {longest:,} tokens, beyond what int64 can sum; divide by a unit"
        )
    return checked


def _units(loads: LengthsOrCosts, num_batches: int) -> IntArray:
    """Loads as whole numbers with a mean sum per batch of at most about EXACT_MEAN.

    An example over the mean sum fills a batch by itself, so how far over it is makes no difference
    to the others: all such are made equal.
    """
    mean = float(loads.sum(dtype=np.float64)) / num_batches
    if loads.dtype.kind == "f" or mean > EXACT_MEAN:
        fractions = loads * (RESOLUTION / mean) if mean > 0 else np.zeros(len(loads))
        units = np.rint(np.minimum(fractions, 2 * RESOLUTION)).astype(np.int64)
    else:
        units = loads.astype(np.int64, copy=False)
    return np.minimum(units, int(units.sum()) // num_batches + 1)


def _sums(loads: IntArray, batches: IntArray, num_batches: int) -> IntArray:
    sums = np.zeros(num_batches, np.int64)
    np.add.at(sums, batches, loads)
    return sums


@kernel
def _by_batch(batches, offsets):  # type: ignore[no-untyped-def]
    ends = offsets[:-1].copy()
    samples = np.empty(len(batches), np.int64)
    for sample in range(len(batches)):
        samples[ends[batches[sample]]] = sample
        ends[batches[sample]] += 1
    return samples


def _descending(values: IntArray) -> IntArray:
    """Indices by descending value, equal ones in input order."""
    largest = int(values.max(initial=0))
    if largest > SMALL_LENGTH + 1:
        return np.argsort(-values, kind="stable")
    return np.asarray(_counting_sort(values, largest), dtype=np.int64)


@kernel
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


@kernel
def _assign_by_sum(loads, order, sums, batches):  # type: ignore[no-untyped-def]
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


@kernel
def _assign_by_squares(  # type: ignore[no-untyped-def]
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
        # count its sum; beyond the window it also joins that sum's list
        total = sums[batch]
        if total < len(counts):
            counts[total] += 1
            if total >= end:
                after[batch] = waiting[total]
                waiting[total] = batch


@kernel
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


@kernel
def _fill_padded(lengths, order, num_batches, bound, batches):  # type: ignore[no-untyped-def]
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


@kernel
def _split_padded(ascending, num_batches):  # type: ignore[no-untyped-def]
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


@kernel
def _num_ranges(ascending, bound, enough):  # type: ignore[no-untyped-def]
    """Number of ranges that keep `bound`; stops counting above `enough`."""
    start, ranges = 0, 0
    while start < len(ascending) and ranges <= enough:
        start = _range_end(ascending, start, bound)
        ranges += 1
    return ranges


@kernel
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


@kernel
def _split_attention(ascending, num_batches, weight):  # type: ignore[no-untyped-def]
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


@kernel
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
