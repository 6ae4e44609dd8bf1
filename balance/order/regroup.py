"""Groups made anew in each epoch, inside windows of stored groups, so that samples do not always
meet the same ones.

For the loaders: a window is as many neighbouring stored groups as their cache can hold, so
regrouping reads no byte twice. Pure: the same loads, seed and epoch give the same groups on every
rank, so an order's state (`balance.order.block_shuffle`) resumes them exactly. What it costs is
balance, since each window has a path of its own, and time: 1.2 million samples in windows of 4,096
groups: .02 % more groups than globally, 1 in 5,000 pairs of samples meets again in the next epoch,
the dist ratio ViT / LLM at dp 8 is .0003 / .0003 (stored .0001 / .0001), at dp 64 .001 / .001; .9 s
per epoch in all.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from balance.grouping.best_fit import choose_strategy, group_best_fit
from balance.order.block_shuffle import MIN_WINDOW, OrderConfig, choose_order
from balance.order.sort_groups import sort_groups
from balance.rng import WINDOWS, random_bits
from balance.types import Groups, IntArray, Limits

ROUNDS = 12
"""Effort of a window's grouping: this is done again in every epoch."""
PLANS, PLAN_ROUNDS = 12, 2
"""Windows share so many plans along the path. One of its own for each takes three times as long and
saves no groups; one for all saves .2 s of 1.2 million samples, but takes up to .3 % more groups
where the path's ends lack other things than its middle. All are varied: others save .4 % of the
groups at 9 patches, but bring a fifth of the pairs together again in every epoch.
"""


def window_borders(num_groups: int, window_groups: int, *, seed: int, epoch: int) -> IntArray:
    """Borders of an epoch's windows in stored groups, int64: first 0, last `num_groups`, at most
    `window_groups` apart.

    They are shifted in each epoch, so that no border keeps samples apart for ever.

    >>> window_borders(10, 4, seed=0, epoch=0).tolist()
    [0, 2, 6, 10]
    """
    if window_groups < 1:
        raise ValueError(f"window_groups is {window_groups}; a window needs at least one group")
    shift = int(random_bits(1, seed, WINDOWS, epoch)[0]) % window_groups
    inner = np.arange(shift, num_groups, window_groups)
    return np.unique(np.concatenate([[0], inner, [num_groups]])).astype(np.int64)


def regroup(
    vision: IntArray,
    tokens: IntArray,
    stored: Groups,
    limits: Limits,
    *,
    window_groups: int,
    seed: int,
    epoch: int,
) -> tuple[Groups, OrderConfig]:
    """The epoch's groups of the samples of `stored`, whose groups are in path order, and the order
    to stream them in.

    `vision` and `tokens` are the samples' loads, shape (num_samples,). Every sample is in one
    group. Windows keep their places; inside, groups are in path order, so a `GroupStream` reads at
    most two windows per lane at a time. `window_groups` bounds what a window holds, not how many
    groups come of it: epochs may differ by a few.

    >>> limits = Limits(max_seq_len=10, max_vision=9, min_seq_len=10, min_vision=9)
    >>> stored = Groups(np.array([2, 0, 1, 3]), np.array([0, 2, 4]))
    >>> loads = np.array([5, 5, 5, 5])
    >>> groups, order = regroup(loads // 5, loads, stored, limits, window_groups=2, seed=0, epoch=1)
    >>> sorted(groups.samples.tolist())
    [0, 1, 2, 3]
    """
    borders = window_borders(len(stored), window_groups, seed=seed, epoch=epoch)
    seeds = (random_bits(len(borders), seed, WINDOWS, epoch, place=1) >> np.uint64(1)).tolist()
    places = stored.offsets[borders]  # of each window's first sample
    num_windows = len(borders) - 1
    per_plan = max(1, -(-num_windows // PLANS))
    samples, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for window, window_seed in enumerate(seeds[:num_windows]):
        if window % per_plan == 0:
            alike = stored.samples[places[window] : places[min(window + per_plan, num_windows)]]
            plan = choose_strategy(
                vision[alike],
                tokens[alike],
                limits,
                seed=window_seed,
                rounds=PLAN_ROUNDS,
                varied=True,
            )
        members = stored.samples[places[window] : places[window + 1]]
        loads = vision[members], tokens[members]
        groups = group_best_fit(*loads, limits, seed=window_seed, rounds=ROUNDS, plan=plan)
        groups = groups.take(
            sort_groups(groups.sum(loads[0]), groups.sum(loads[1]), window_seed)
        )
        samples.append(members[groups.samples])
        sizes.append(groups.sizes)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    groups = Groups(np.concatenate(samples), offsets.astype(np.int64))
    # the path starts anew in each window, so only the nearest neighbours cost about the same
    return groups, replace(choose_order(len(groups)), window_size=MIN_WINDOW)


def repeated_pairs(groups: Groups, others: Groups) -> float:
    """Share of the pairs of samples that a group of `groups` brings together and one of `others`
    does, too.

    Both hold the same samples, numbered from 0. 0.0 when there are no pairs.

    >>> groups, others = (Groups(np.array(samples), np.array([0, 3, 4])) for samples in ([0, 1, 2, 3], [0, 1, 3, 2]))
    >>> round(repeated_pairs(groups, others), 3)  # 0 and 1; not 0 and 2, 1 and 2
    0.333
    """
    place = np.empty(len(others.samples), np.int64)
    place[others.samples] = np.repeat(np.arange(len(others)), others.sizes)
    both = (
        np.repeat(np.arange(len(groups)), groups.sizes) * max(1, len(others))
        + place[groups.samples]
    )
    together = np.unique(both, return_counts=True)[1]
    pairs, repeated = (int((sizes * (sizes - 1)).sum()) for sizes in (groups.sizes, together))
    return repeated / pairs if pairs else 0.0
