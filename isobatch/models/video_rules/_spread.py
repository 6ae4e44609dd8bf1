"""Frames evenly from a first one on, rounded as torch's `arange` rounds. Pure."""

import math

import numpy as np

from isobatch.models.video_rules.base import Indices

_LANES, _BLOCK = 8, 16
"""float32 in a vector register, and in the two that torch fills at a time."""


def spread(first: float, total: int, count: int) -> Indices:
    """`torch.arange(first, total, total / count).int()`, without frames that there are not.

    torch computes in float64 and rounds to float32: a whole block from the rounded first entry of
    each register, what is left over entry by entry. One rounding more or less decides whether a
    frame's number is cut off to the one before it.
    """
    step = total / count
    # may be one more than count, by rounding
    places = np.arange(math.ceil((total - first) / step))
    within = np.where(places < len(places) // _BLOCK * _BLOCK, places % _LANES, 0)
    bases = (first + step * (places - within)).astype(np.float32).astype(np.float64)
    numbers = (bases + step * within).astype(np.float32).astype(np.int64)
    return tuple(numbers[numbers < total].tolist())
