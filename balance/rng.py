"""Random bits that are the same in all versions of NumPy, on every machine.

Orders are resumed from a seed and a position, by other processes and years later, so they are drawn
from raw bits: NumPy keeps those, but not what its shuffles make of them (NEP 19). Pure.
"""

import numpy as np
from numpy.typing import NDArray

SHUFFLE, WINDOWS, GROUPS, COPIES, TRANSFORMS, STORED, EVEN = range(4, 11)
"""What random bits are for: each purpose draws from a sequence of its own.

A number is never used again, or builds and orders would change. 0 to 3 were version 0.1's.
"""


def random_bits(
    count: int, seed: int, purpose: int, epoch: int = 0, place: int = 0
) -> NDArray[np.uint64]:
    """`count` random uint64, a sequence of its own for each (seed, purpose, epoch, place)."""
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, epoch, place))
    return np.random.Philox(sequence).random_raw(count)


def random_permutation(
    count: int, seed: int, purpose: int, epoch: int = 0, place: int = 0
) -> NDArray[np.int64]:
    """A random order of `range(count)`, int64.

    >>> sorted(random_permutation(5, 0, SHUFFLE).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(random_bits(count, seed, purpose, epoch, place), kind="stable")


def permutation_slice(
    count: int, first: int, end: int, seed: int, purpose: int, *, place: int = 0
) -> NDArray[np.int64]:
    """Sorted numbers at places `[first, end)` of `random_permutation`, in linear time.

    >>> order = random_permutation(9, 0, SHUFFLE)
    >>> np.array_equal(np.sort(order[2:6]), permutation_slice(9, 2, 6, 0, SHUFFLE))
    True
    """
    if end - first == count:
        return np.arange(count)
    bits = random_bits(count, seed, purpose, place=place)
    before_first, before_end = _smallest(bits, first), _smallest(bits, end)
    if before_first.sum() != first or before_end.sum() != end:  # equal bits on both sides
        return np.sort(random_permutation(count, seed, purpose, place=place)[first:end])
    return np.flatnonzero(before_end & ~before_first)


def _smallest(bits: NDArray[np.uint64], count: int) -> NDArray[np.bool_]:
    """Which are the `count` smallest; fewer if the next is equal to one of them."""
    if count == len(bits):
        return np.ones(count, np.bool_)
    return np.asarray(bits < np.partition(bits, count)[count])
