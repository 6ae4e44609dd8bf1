"""Sort by integer keys with ties in random order, in numba.

For `former_order.sort_groups`. NumPy would sort twice, in n log n steps; this is linear. Pure.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from isobatch.balance.radix_sort import counting_sort
from isobatch.common.types import index_dtype

MAX_BUCKET_BITS = 20
"""A bucket per number is fastest, but not beyond the second-level cache."""
FEW = 16
"""Up to so many numbers are sorted without buckets."""


def radix_argsort(keys: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.signedinteger[Any]]:
    """The permutation that sorts `keys`, equal ones in input order; int32 where that is enough.

    >>> radix_argsort(np.array([5, 7, 5, 1], dtype=np.uint32)).tolist()
    [3, 0, 2, 1]
    """
    order = np.arange(len(keys), dtype=index_dtype(len(keys)))
    return np.asarray(counting_sort(order, keys)) if len(keys) else order


def shuffle_ties(
    order: NDArray[np.signedinteger[Any]],
    keys: NDArray[np.unsignedinteger[Any]],
    bits: NDArray[np.uint64],
) -> None:
    """Sort equal keys, which are neighbours in `order`, by `bits`, in place; stable.

    `order` is then what `shuffled[np.argsort(keys[shuffled], kind="stable")]` is, where `shuffled`
    is `np.argsort(bits, kind="stable")`. Linear if the bits are random.

    >>> order, keys = np.array([3, 0, 2, 1]), np.array([5, 7, 5, 1], dtype=np.uint32)
    >>> shuffle_ties(order, keys, np.array([9, 1, 4, 3], dtype=np.uint64))
    >>> order.tolist()
    [3, 2, 0, 1]
    """
    _sort_ties(order, keys, bits)


@numba.njit(cache=True)
def _sort_ties(order, keys, bits):  # type: ignore[no-untyped-def]
    """`shuffle_ties`: each range of equal keys by itself."""
    start = 0
    while start < len(order):
        # the range of equal keys from `start`
        key, stop = keys[order[start]], start + 1
        while stop < len(order) and keys[order[stop]] == key:
            stop += 1
        equal = order[start:stop]
        if len(equal) > FEW:
            equal[:] = _in_buckets(equal, bits)
        # insertion sort: buckets leave little to move
        for last in range(1, len(equal)):
            number, place = equal[last], last
            while place > 0 and bits[equal[place - 1]] > bits[number]:
                equal[place] = equal[place - 1]
                place -= 1
            equal[place] = number
        start = stop


@numba.njit(cache=True)
def _in_buckets(numbers, bits):  # type: ignore[no-untyped-def]
    """The numbers sorted by their first bits, as many as there are bits in how many they are."""
    width = 1
    while 1 << width < len(numbers) and width < MAX_BUCKET_BITS:
        width += 1
    shift = np.uint64(64 - width)
    # where each bucket starts
    starts = np.zeros((1 << width) + 1, np.int64)
    for number in numbers:
        starts[(bits[number] >> shift) + np.uint64(1)] += 1
    starts = np.cumsum(starts)
    placed = np.empty_like(numbers)
    for number in numbers:
        bucket = bits[number] >> shift
        placed[starts[bucket]] = number
        starts[bucket] += 1
    return placed
