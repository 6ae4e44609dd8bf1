"""Which ranks load how much, and in which order they give their groups. Pure.

Where each rank loads what it measures. A round is a micro-batch: one group of every rank.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from isobatch.common.types import Groups, IntArray

UNIT = 1 << 16
"""A mean load, in which loads are compared."""


def deal(count: int, held: Sequence[int]) -> list[int]:
    """How many of `count` more samples each rank gets, so that all then hold equally many.

    A rank with longer samples keeps more for later, and so gets fewer.

    >>> deal(8, [5, 1, 0])
    [0, 4, 4]
    """
    counts = [0] * len(held)
    ranks = [(number, rank) for rank, number in enumerate(held)]
    heapify(ranks)
    for _ in range(count):
        total, rank = ranks[0]
        heapreplace(ranks, (total + 1, rank))
        counts[rank] += 1
    return counts


def make_rounds(
    per_rank: Sequence[Groups], loads: Sequence[IntArray], count: int, order: IntArray
) -> Groups:
    """So many rounds of the ranks' groups, each of groups that cost about the same.

    `per_rank` are the groups of each rank, of samples that index the columns of `loads`: vision,
    and tokens. Of a rank with more groups the emptiest are left out; those of a rank with fewer are
    split, and where it has too few samples for that, some are empty. Rounds come in the order
    `order`, in each of them rank after rank.

    >>> first = Groups(np.array([0, 1]), np.arange(3))
    >>> second = Groups(np.array([2, 3]), np.array([0, 2]))
    >>> tokens = np.array([5, 9, 4, 5])
    >>> rounds = make_rounds([first, second], [tokens * 0, tokens], 1, np.arange(1))
    >>> [rounds[group].tolist() for group in range(2)]
    [[1], [2, 3]]
    """
    means = [max(1, int(load.sum()) // max(1, sum(map(len, per_rank)))) for load in loads]
    size = np.sum([load * UNIT // mean for load, mean in zip(loads, means, strict=True)], axis=0)
    ranks = [_fitted(groups, size, count) for groups in per_rank]
    parts = [rank[number] for number in order.tolist() for rank in ranks]
    return Groups(np.concatenate([_NONE, *parts]), np.cumsum([0, *map(len, parts)]))


def _fitted(groups: Groups, size: IntArray, count: int) -> list[IntArray]:
    """So many groups, the largest first."""
    parts = [groups[number] for number in range(len(groups))]
    while len(parts) < count:
        parts.sort(key=lambda part: int(size[part].sum()) if len(part) > 1 else -1)
        if not parts or len(parts[-1]) < 2:
            return parts[::-1] + [_NONE] * (count - len(parts))
        largest = parts.pop()
        largest = largest[np.argsort(-size[largest], kind="stable")]
        parts += [largest[::2], largest[1::2]]
    return sorted(parts, key=lambda part: -int(size[part].sum()))[:count]


_NONE: IntArray = np.zeros(0, np.int64)
