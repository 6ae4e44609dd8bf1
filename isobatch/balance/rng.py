"""Random bits that are the same in all versions of NumPy, on every machine.

Orders are resumed from a seed and a position, by other processes and years later, so they are drawn
from raw bits: NumPy keeps those, but not what its shuffles make of them (NEP 19). Pure.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SHUFFLE, WINDOWS, GROUPS, COPIES, TRANSFORMS, STORED, EVEN, PLANNED, SAMPLING, PARTS = range(4, 14)
"""What random bits are for: each purpose draws from a sequence of its own.

A number is never used again, or builds and orders would change. 0 to 3 were version 0.1's.
"""

CHUNK, BIN_BITS = 1 << 16, 16
"""Numbers, and first bits of them, by which a part of an order is found."""


def random_bits(
    count: int, seed: int, purpose: int, epoch: int = 0, place: int = 0
) -> NDArray[np.uint64]:
    """`count` random uint64, a sequence of its own for each (seed, purpose, epoch, place)."""
    return _generator(seed, purpose, epoch, place).random_raw(count)


def random_permutation(
    count: int, seed: int, purpose: int, epoch: int = 0, place: int = 0
) -> NDArray[np.int64]:
    """A random order of `range(count)`, int64."""
    return np.argsort(random_bits(count, seed, purpose, epoch, place), kind="stable")


def permutation_mask(
    count: int, first: int, end: int, seed: int, purpose: int, *, place: int = 0
) -> NDArray[np.bool_]:
    """Which numbers are at places `[first, end)` of `random_permutation`, shape (count,).

    In linear time, and with little more memory than the result: processes make it next to others.
    """

    def chunks() -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.int64]]]:
        """(first number, bits, bins) of parts of the numbers."""
        generator = _generator(seed, purpose, 0, place)
        for start in range(0, count, CHUNK):
            bits = generator.random_raw(min(CHUNK, count - start))
            yield start, bits, (bits >> np.uint64(64 - BIN_BITS)).astype(np.int64)

    # a histogram says in which bins the borders are
    sizes = np.zeros(1 << BIN_BITS, np.int64)
    for _, _, bins in chunks():
        sizes += np.bincount(bins, minlength=len(sizes))
    ends = np.cumsum(sizes)
    first_bin, end_bin = np.searchsorted(ends, [first, end], side="right").tolist()
    # whole bins; and the numbers of those two, with their bits
    mask = np.empty(count, np.bool_)
    members: dict[int, list[tuple[np.uint64, int]]] = {first_bin: [], end_bin: []}
    for start, bits, bins in chunks():
        mask[start : start + len(bins)] = (first_bin <= bins) & (bins < end_bin)
        for number_bin in members:
            rows = np.flatnonzero(bins == number_bin)
            members[number_bin] += zip(bits[rows], (start + rows).tolist(), strict=True)
    for border, number_bin, value in ((end, end_bin, True), (first, first_bin, False)):
        before = border - (int(ends[number_bin - 1]) if number_bin else 0)
        mask[[number for _, number in sorted(members[number_bin])[:before]]] = value
    return mask


def _generator(seed: int, purpose: int, epoch: int, place: int) -> np.random.Philox:
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=(purpose, epoch, place)))
