"""Samples that change groups in each epoch, so that they meet different ones.

For the loaders, inside windows of stored groups, which cores exchange at the same time. Samples of
nearly equal size trade places, so groups keep their number and their loads, and those that the
packer evened out (`balance.grouping.even_out`) stay as even. Samples are ranked by vision and
tokens; a sweep offers each one a random other one within a reach of ranks, first far away and then
ever nearer. They trade places where no group goes over its caps or becomes more uneven.

Grouping the samples again by best fit would take 5 to 20 times as long, need up to .9 % more groups
and leave them uneven. Pairs of samples meet again in the next epoch rarely (.1 % of them in most
builds); those of sizes that few others have, more often: 3 % of long documents' pairs.

Pure, and integers only: the same loads, seed and epoch give the same groups on every machine with
any number of threads, so an order's state (`balance.order.step_order`) resumes them exactly.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from isobatch.balance.grouping.isf import mix
from isobatch.balance.grouping.resources import Load
from isobatch.balance.kernels import free_kernel
from isobatch.balance.radix_sort import counting_sort
from isobatch.balance.rng import WINDOWS, random_bits
from isobatch.common.types import Groups, IntArray, Limits, index_dtype

SWEEPS = 24
"""Offers per sample. With 12, up to four times as many pairs meet again; 48 bring little more."""
MOST_REACH = 12
"""Bits of the ranks within which the first sweep's offers are; each sweep takes one bit off, and
after as many sweeps they begin again.
"""
UNIT_BITS, UNEVEN = 24, 1 << 16
"""A cap, in which loads are compared, and what groups may become more uneven in a trade: 1/256 of
the caps, so that all sizes mix; the last third of the sweeps evens them out again.
"""
LEVEL_BITS = 6
"""Vision loads count as equal, when samples are ranked, within 1/64 of the largest, for loads in
ViT tokens have too many values for a rank each.
"""
MOST_THREADS = 8
"""Threads that exchange; the groups are the same with any number of them."""


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
    loads: tuple[Load, Load],
    stored: Groups,
    limits: Limits,
    *,
    window_groups: int,
    seed: int,
    epoch: int,
) -> Groups:
    """The epoch's groups of the samples of `stored`: as many, each with as many samples.

    `loads` are the samples' vision loads and tokens, of any integer type, shape (num_samples,).
    Every sample is in one group, in its window. `stored` is within `limits`, and so is the result.
    """
    borders = window_borders(len(stored), window_groups, seed=seed, epoch=epoch)
    seeds = random_bits(len(borders), seed, WINDOWS, epoch, place=1)
    samples = np.empty(len(stored.samples), index_dtype(int(stored.samples.max(initial=0)) + 1))
    # units per vision load and token, whole ones, and the caps in units
    caps = np.array([limits.max_vision, limits.max_seq_len])
    weights = np.maximum(1, (1 << UNIT_BITS) // np.maximum(1, caps))
    caps = weights * caps
    shift = max(0, int(loads[0].max(initial=0)).bit_length() - LEVEL_BITS)

    def exchange_window(window: int) -> None:
        offsets = stored.offsets[borders[window] : borders[window + 1] + 1]
        members = stored.samples[offsets[0] : offsets[-1]]
        window_loads = np.stack([load[members] for load in loads], axis=1, dtype=np.int64)
        vision, tokens = window_loads.T
        keys = (vision >> shift) << int(tokens.max()).bit_length() | tokens
        places = _exchange(window_loads * weights, keys, offsets - offsets[0], caps, seeds[window])
        samples[offsets[0] : offsets[-1]] = members[places]

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "isobatch-regroup") as pool:
        list(pool.map(exchange_window, range(len(borders) - 1)))
    return Groups(samples, stored.offsets)


@free_kernel
def _exchange(loads, keys, offsets, caps, state):  # type: ignore[no-untyped-def]
    """Places of the samples after trades, group after group, int32.

    `loads` (samples, 2) are in units, `keys` rank the samples, `state` seeds the offers.
    """
    num_samples, num_groups = len(loads), len(offsets) - 1
    # each group's loads
    vision, tokens = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
    group_of = np.empty(num_samples, np.int32)
    for group in range(num_groups):
        for place in range(offsets[group], offsets[group + 1]):
            group_of[place] = group
            vision[group] += loads[place, 0]
            tokens[group] += loads[place, 1]
    # the samples by rank: their loads, and their group from here on
    by_rank = counting_sort(np.arange(num_samples).astype(np.int32), keys)
    loads, group_of = loads[by_rank], group_of[by_rank]
    # trades
    for sweep in range(SWEEPS):
        reach = np.uint64(min(num_samples, 1 << (MOST_REACH - sweep % MOST_REACH)))
        max_growth = UNEVEN * UNEVEN if sweep < SWEEPS - SWEEPS // 3 else 0
        for one in range(num_samples - 1):
            state += np.uint64(0x9E3779B97F4A7C15)  # SplitMix64
            other = one + 1 + np.int64(((mix(state) >> np.uint64(32)) * reach) >> np.uint64(32))
            if other >= num_samples:
                continue
            first, second = group_of[one], group_of[other]
            # what the first group gets, the second gives
            more_vision = loads[other, 0] - loads[one, 0]
            more_tokens = loads[other, 1] - loads[one, 1]
            # half of what the squares of both groups' loads grow by
            growth = more_vision * (vision[first] - vision[second] + more_vision)
            growth += more_tokens * (tokens[first] - tokens[second] + more_tokens)
            if (
                first == second
                or growth > max_growth
                or vision[first] + more_vision > caps[0]
                or vision[second] - more_vision > caps[0]
                or tokens[first] + more_tokens > caps[1]
                or tokens[second] - more_tokens > caps[1]
            ):
                continue
            vision[first] += more_vision
            vision[second] -= more_vision
            tokens[first] += more_tokens
            tokens[second] -= more_tokens
            group_of[one], group_of[other] = second, first
    # the samples of each group
    starts = offsets[:-1].copy()
    places = np.empty(num_samples, np.int32)
    for rank in range(num_samples):
        group = group_of[rank]
        places[starts[group]] = by_rank[rank]
        starts[group] += 1
    return places
