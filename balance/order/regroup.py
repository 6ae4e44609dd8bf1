"""Samples grouped again in each epoch, so that they meet different ones.

For the loaders, inside windows of stored groups, which cores group at the same time. The new groups
are few, but not evened out (`balance.grouping.even_out`). Pure: the same loads, seed and epoch give
the same groups on every rank, so an order's state (`balance.order.global_shuffle`) resumes them
exactly. 1.2 million samples in windows of 4,096 groups need .02 % more groups than all at once, 1
in 5,000 pairs of samples meets again in the next epoch, and it takes 1.9 s of CPU per epoch in all.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from balance.grouping.best_fit import choose_varied_strategy, group_by_strategy
from balance.rng import WINDOWS, random_bits
from balance.types import Groups, IntArray, Limits

ROUNDS = 12
"""Effort of a window's grouping: this is done again in every epoch."""
STRATEGIES, STRATEGY_ROUNDS = 12, 2
"""Windows share so many strategies. One for each takes three times as long and saves no groups; one
for all saves .2 s of 1.2 million samples, but takes up to .3 % more groups. All are varied: others
save .4 % of the groups at 9 patches, but bring a fifth of the pairs together in every epoch.
"""
MOST_THREADS = 8
"""Threads that group windows; the groups are the same with any number of them."""


def window_borders(num_groups: int, window_groups: int, *, seed: int, epoch: int) -> IntArray:
    """Borders of an epoch's windows in stored groups, int64: first 0, last `num_groups`.

    At most `window_groups` apart; each epoch shifts them, so that none always parts the same pairs.

    >>> window_borders(10, 4, seed=0, epoch=0).tolist()
    [0, 2, 6, 10]
    """
    if window_groups < 1:
        raise ValueError(f"window_groups is {window_groups}; a window needs at least one group")
    shift = int(random_bits(1, seed, WINDOWS, epoch)[0]) % window_groups
    inner = np.arange(shift, num_groups, window_groups)
    return np.unique(np.concatenate([[0], inner, [num_groups]])).astype(np.int64)


def regroup(
    loads: tuple[IntArray, IntArray],
    stored: Groups,
    limits: Limits,
    *,
    window_groups: int,
    seed: int,
    epoch: int,
) -> Groups:
    """The epoch's groups of the samples of `stored`, window after window.

    `loads` are the samples' vision loads and tokens, each of shape (num_samples,). Every sample is
    in one group. Windows keep their places. Epochs may differ by a few groups.

    >>> limits = Limits(max_seq_len=10, max_vision=9, min_seq_len=10, min_vision=9)
    >>> stored = Groups(np.array([2, 0, 1, 3]), np.array([0, 2, 4]))
    >>> loads = np.array([1, 1, 1, 1]), np.array([5, 5, 5, 5])
    >>> groups = regroup(loads, stored, limits, window_groups=2, seed=0, epoch=1)
    >>> sorted(groups.samples.tolist())
    [0, 1, 2, 3]
    """
    borders = window_borders(len(stored), window_groups, seed=seed, epoch=epoch)
    seeds = (random_bits(len(borders), seed, WINDOWS, epoch, place=1) >> np.uint64(1)).tolist()
    places = stored.offsets[borders]  # of each window's first sample
    num_windows = len(borders) - 1
    firsts = range(0, num_windows, max(1, -(-num_windows // STRATEGIES)))

    def group_windows(first: int) -> list[Groups]:
        """The groups of the windows that share a strategy."""
        windows = range(first, min(first + firsts.step, num_windows))
        shared = stored.samples[places[first] : places[windows.stop]]
        own = loads[0][shared], loads[1][shared]
        strategy = choose_varied_strategy(*own, limits, seed=seeds[first], rounds=STRATEGY_ROUNDS)
        made = []
        for window in windows:
            start, end = places[window : window + 2] - places[first]
            inside = own[0][start:end], own[1][start:end]
            groups = group_by_strategy(*inside, limits, strategy, seed=seeds[window], rounds=ROUNDS)
            made.append(Groups(shared[start:end][groups.samples], groups.offsets))
        return made

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "isobatch-regroup") as pool:
        parts = [groups for made in pool.map(group_windows, firsts) for groups in made]
    samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
    sizes = np.concatenate([np.zeros(1, np.int64), *(part.sizes for part in parts)])
    return Groups(samples, np.cumsum(sizes))
