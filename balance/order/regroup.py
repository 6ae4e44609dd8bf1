"""Samples grouped again in each epoch, so that they meet different ones.

For the loaders, inside windows of stored groups: as many neighbouring ones as their cache can hold,
so regrouping reads no byte twice. Pure: the same loads, seed and epoch give the same groups on
every rank, so an order's state (`balance.order.global_shuffle`) resumes them exactly. 1.2 million
samples in windows of 4,096 groups need .02 % more groups than all at once, 1 in 5,000 pairs of
samples meets again in the next epoch, and it takes .9 s per epoch in all.
"""

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
    """The epoch's groups of the samples of `stored`, whose groups are sorted, and their order.

    `loads` are the samples' vision loads and tokens, each of shape (num_samples,). Every sample is
    in one group. Windows keep their places; inside, groups are sorted, so a `BlockShuffle` reads at
    most two windows per lane at a time. Epochs may differ by a few groups.

    >>> limits = Limits(max_seq_len=10, max_vision=9, min_seq_len=10, min_vision=9)
    >>> stored = Groups(np.array([2, 0, 1, 3]), np.array([0, 2, 4]))
    >>> loads = np.array([1, 1, 1, 1]), np.array([5, 5, 5, 5])
    >>> groups = regroup(loads, stored, limits, window_groups=2, seed=0, epoch=1)
    >>> sorted(groups.samples.tolist())
    [0, 1, 2, 3]
    """
    vision, tokens = loads
    borders = window_borders(len(stored), window_groups, seed=seed, epoch=epoch)
    seeds = (random_bits(len(borders), seed, WINDOWS, epoch, place=1) >> np.uint64(1)).tolist()
    places = stored.offsets[borders]  # of each window's first sample
    num_windows = len(borders) - 1
    per_strategy = -(-num_windows // STRATEGIES)
    samples, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for window, window_seed in enumerate(seeds[:num_windows]):
        if window % per_strategy == 0:
            end = places[min(window + per_strategy, num_windows)]
            shared = stored.samples[places[window] : end]
            strategy = choose_varied_strategy(
                vision[shared], tokens[shared], limits, seed=window_seed, rounds=STRATEGY_ROUNDS
            )
        members = stored.samples[places[window] : places[window + 1]]
        own = vision[members], tokens[members]
        groups = group_by_strategy(*own, limits, strategy, seed=window_seed, rounds=ROUNDS)
        samples.append(members[groups.samples])
        sizes.append(groups.sizes)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return Groups(np.concatenate(samples), offsets.astype(np.int64))
