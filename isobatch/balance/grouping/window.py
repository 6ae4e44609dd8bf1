"""Groups of a window of a stream of samples: the emptiest groups wait.

For loaders that pack while they train. A window of a random order is grouped by itself; what does
not fill groups joins the next window, so that a small window packs as tightly as a large one. Pure.
"""

import math

import numpy as np

from isobatch.balance.grouping.even_out import group_balanced
from isobatch.balance.rng import PLANNED, random_permutation
from isobatch.common.types import Groups, IntArray, Limits

WAITING_SHARE = 0.03
"""Share of a window's groups, the emptiest ones, whose samples wait for the next window."""


def group_window(
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    place: tuple[int, int] = (0, 0),
    is_last: bool = True,
) -> tuple[Groups, IntArray]:
    """Groups of about equal loads in random order, and the samples that wait, int64.

    `vision` and `tokens` are the samples' loads, shape (num_samples,). A sample over a cap is a
    group of its own. `place` is the epoch and the window, for the order; after the last window
    nothing waits.
    """
    is_over = (vision > limits.max_vision) | (tokens > limits.max_seq_len)
    over, rows = np.flatnonzero(is_over), np.flatnonzero(~is_over)
    loads = vision[rows], tokens[rows]

    def keep(groups: Groups) -> Groups:
        """Leave out the emptiest groups."""
        fills = [
            groups.sum(load) / max(1, cap)
            for load, cap in zip(loads, (limits.max_vision, limits.max_seq_len), strict=True)
        ]
        count = 0 if is_last else min(math.ceil(len(groups) * WAITING_SHARE), len(groups) - 1)
        by_fill = np.argsort(np.maximum(*fills), kind="stable")
        return groups.take(np.sort(by_fill[count:]))

    groups = Groups(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if len(rows):
        groups = group_balanced(*loads, limits, seed=seed, keep=keep)
    waiting = np.setdiff1d(np.arange(len(rows)), groups.samples)
    groups = Groups(rows[groups.samples], groups.offsets)
    return planned_order(groups, over, seed=seed, place=place), rows[waiting]


def load_kernels() -> None:
    """Load what `group_window` runs, or compile it: some .7 s of CPU, once in a process."""
    loads = np.arange(1, 9)
    limits = Limits(max_seq_len=16, max_vision=16, min_seq_len=15, min_vision=15)
    group_window(loads, loads, limits, seed=0)


def planned_order(groups: Groups, over: IntArray, *, seed: int, place: tuple[int, int]) -> Groups:
    """A window's groups, and each sample `over` a cap as a group, in random order."""
    all_groups = Groups.joined([groups, Groups(over, np.arange(len(over) + 1))])
    return all_groups.take(random_permutation(len(all_groups), seed, PLANNED, *place))
