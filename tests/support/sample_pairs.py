"""How often samples of a group share one of another grouping too."""

import numpy as np

from isobatch.common.types import Groups


def repeated_pairs(groups: Groups, others: Groups) -> float:
    """Share of the pairs of samples in a group of `groups` that also share one of `others`.

    Both hold the same samples, numbered from 0. 0.0 when there are no pairs.

    >>> groups = Groups(np.array([0, 1, 2, 3]), np.array([0, 3, 4]))
    >>> others = Groups(np.array([0, 1, 3, 2]), np.array([0, 3, 4]))
    >>> round(repeated_pairs(groups, others), 3)  # 0 and 1; not 0 and 2, 1 and 2
    0.333
    """
    place = np.empty(len(others.samples), np.int64)
    place[others.samples] = np.repeat(np.arange(len(others)), others.sizes)
    group = np.repeat(np.arange(len(groups)), groups.sizes)
    both = group * max(1, len(others)) + place[groups.samples]
    together = np.unique(both, return_counts=True)[1]
    pairs, repeated = (int((sizes * (sizes - 1)).sum()) for sizes in (groups.sizes, together))
    return repeated / pairs if pairs else 0.0
