"""Radix sort of numbers by integer keys, in numba.

For the kernels of `balance.grouping`. NumPy's stable argsort takes n log n steps and 8 bytes per
number; this a pass per digit, and 4 bytes below 2^31 numbers. Pure.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.kernels import kernel
from isobatch.common.types import IntArray

DIGIT_BITS = 11
"""Bits of one pass: 2,048 places to write to stay in the first-level cache."""
FEW = 1 << 13
"""Numbers that NumPy sorts about as fast, so that small sets compile no kernel."""


def sort_by(keys: NDArray[np.unsignedinteger[Any]]) -> IntArray:
    """Places of the keys from the smallest to the largest, stable; fewer than 2^31 keys."""
    if len(keys) <= FEW:
        return np.argsort(keys, kind="stable")
    order: IntArray = counting_sort(np.arange(len(keys), dtype=np.int32), keys)
    return order


@kernel
def counting_sort(order, keys):  # type: ignore[no-untyped-def]
    """`order` sorted by one digit of its keys after the other, lowest first; overwrites `order`."""
    here, there = order, np.empty_like(order)
    max_key = np.uint64(keys.max())
    mask = np.uint64((1 << DIGIT_BITS) - 1)
    for turn in range(64 // DIGIT_BITS + 1):
        shift = np.uint64(turn * DIGIT_BITS)
        if max_key >> shift == 0:
            break
        # where each digit's numbers start
        starts = np.zeros((1 << DIGIT_BITS) + 1, np.int64)
        for key in keys:  # in input order, which is the fastest to read
            starts[((np.uint64(key) >> shift) & mask) + np.uint64(1)] += 1
        starts = np.cumsum(starts)
        # move the numbers there
        for number in here:
            digit = (np.uint64(keys[number]) >> shift) & mask
            there[starts[digit]] = number
            starts[digit] += 1
        here, there = there, here
    return here
