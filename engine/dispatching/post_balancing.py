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
"""

import numba
import numpy as np

from isobatch.common.types import FloatArray, Groups, IntArray
from isobatch.engine.dispatching._post_balancing_kernels import (
    assign_by_squares,
    assign_by_sum,
    descending,
    fill_padded,
    split_attention,
    split_padded,
)

LengthsOrCosts = IntArray | FloatArray
"""Lengths in tokens, or costs in any unit; never negative."""

EXACT_MEAN = 1 << 20
"""Whole loads are counted exactly up to this mean sum of a batch."""
RESOLUTION = 1 << 17
"""Other loads are counted in this fraction of the mean sum, 8e-6."""

MAX_SUM = 1 << 24
"""`balance_squares` keeps a counter per possible sum of a batch: 16 M tokens, 128 MiB."""


def balance_sums(loads: LengthsOrCosts, num_batches: int) -> IntArray:
    """Batch of each example so that the largest sum of a batch is small (OrchMLLM, Algorithm 1).

    Longest example first, always to the batch of the least sum, of equal ones to the one that has
    had it longest. At most 4/3 of the best largest sum (Graham 1969), in practice within .1 % of
    the mean. O(n). For linear plus quadratic cost give `lengths + weight * lengths**2`.

    >>> balance_sums(np.array([5, 1, 4, 2, 6]), 3).tolist()
    [1, 1, 2, 2, 0]
    """
    units = _units(_checked(loads, num_batches), num_batches)
    order = descending(units)
    batches = np.empty(len(units), np.int64)
    assign_by_sum(units, order, np.zeros(num_batches, np.int64), batches)
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
    order = descending(lengths)[::-1]
    batches = np.empty(len(lengths), np.int64)
    batches[order] = split_padded(lengths[order], num_batches)
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
    assign_by_squares(lengths, descending(lengths), mean, tolerance, sums, batches)
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
    order = descending(lengths)
    batches = np.empty(len(lengths), np.int64)
    placed = fill_padded(lengths, order, num_batches, bound, batches)
    sums = _sums(units[order[:placed]], batches[order[:placed]], num_batches)
    assign_by_sum(units, order[placed:], sums, batches)
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
    order = descending(lengths)[::-1]
    batches = np.empty(len(lengths), np.int64)
    batches[order] = split_attention(lengths[order], num_batches, float(weight))
    return batches


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


@numba.njit(cache=True)
def _by_batch(batches, offsets):  # type: ignore[no-untyped-def]
    ends = offsets[:-1].copy()
    samples = np.empty(len(batches), np.int64)
    for sample in range(len(batches)):
        samples[ends[batches[sample]]] = sample
        ends[batches[sample]] += 1
    return samples
