"""Groups sorted so that neighbours cost the same and sources are easy to mix.

For the packer, once per build: `sort_groups`, then `arrange_sources`. Pure, and linear: the 26
million groups of 100 million samples take 4 s and, next to their loads, 17 bytes each.
`former_order.block_shuffle` makes each epoch's order of them.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from former_order.block_shuffle import choose_order
from former_order.rng import TIES
from former_order.shuffle_ties import radix_argsort, shuffle_ties
from isobatch.balance.rng import random_bits
from isobatch.common.types import Groups, IntArray

MAX_COLUMNS = 16
"""Sources told apart, a byte per group each: the 15 with the most samples, and all others."""
SHARE = 255
"""All samples of a group, as a share."""
NEIGHBOURHOOD = 24
"""Groups that a micro-batch spans beyond its window: three nodes of eight ranks."""
COUNTED_LOADS = 1 << 16
"""Vision loads are counted, not sorted, if they are below this or the number of groups."""


def sort_groups(vision_load: IntArray, tokens: IntArray, seed: int) -> IntArray:
    """The permutation (int64) that sorts groups by vision load, tokens up and down in turn.

    Where vision loads are nearly all distinct (ViT tokens at native resolution), they are first put
    into bins, else tokens would jump at every step. `seed` orders ties. Loads are 0 or more.

    >>> sort_groups(np.array([2, 1, 2, 1]), np.array([50, 60, 90, 70]), seed=0).tolist()
    [1, 3, 2, 0]
    """
    bins, span = _vision_bins(vision_load, tokens), int(tokens.max(initial=0)) + 1
    narrow = len(bins) * span < 1 << 32
    dtype: type[np.unsignedinteger[Any]] = np.uint32 if narrow else np.uint64
    keys = np.empty(len(tokens), dtype)
    _set_keys(keys, vision_load, tokens, bins, span)
    order = radix_argsort(keys)
    shuffle_ties(order, keys, random_bits(len(order), seed, TIES))
    return order.astype(np.int64)


def source_shares(groups: Groups, sources: IntArray) -> NDArray[np.uint8]:
    """Share of each group's samples by source, in 255ths, shape (num_groups, at most 16).

    `sources`: a source number from 0 per sample. Beyond 16 the smaller ones share the last column.

    >>> groups = Groups(np.array([0, 1, 2]), np.array([0, 2, 3]))
    >>> source_shares(groups, np.array([0, 1, 1])).tolist()
    [[127, 127], [0, 255]]
    """
    sizes = _source_sizes(groups.samples, sources)
    columns, num_columns = np.arange(len(sizes)), min(len(sizes), MAX_COLUMNS)
    if len(sizes) > MAX_COLUMNS:  # by size, the smaller ones in the last column
        columns = np.argsort(np.argsort(-sizes, kind="stable"))
    columns = np.minimum(columns, MAX_COLUMNS - 1)
    return np.asarray(_shares(groups.samples, groups.offsets, sources, columns, num_columns))


def arrange_sources(order: IntArray, shares: NDArray[np.uint8], window_size: int) -> IntArray:
    """The sorted groups, those of each window arranged by their sources; a permutation of `order`.

    Halves of a window differ in the source that varies most, halves of a half in the one that
    varies most there, and so on (a k-d tree). `BlockShuffle` draws evenly from those halves, so a
    micro-batch has its window's sources although the loader knows none. Windows are short, so
    neighbours still cost the same. int64.

    >>> shares = np.array([[255, 0], [0, 255], [255, 0], [0, 255]], dtype=np.uint8)
    >>> arrange_sources(np.array([0, 1, 2, 3]), shares, 4).tolist()
    [1, 3, 0, 2]
    """
    arranged = order.astype(np.int64, copy=True)
    if shares.shape[1] > 1:
        _arrange(arranged, shares, window_size)
    return arranged


@numba.njit(cache=True)
def _set_keys(keys, vision_load, tokens, bins, span):  # type: ignore[no-untyped-def]
    """Sort keys: each group's bin, then its tokens (fewer than `span`), up and down in turn."""
    for group in range(len(tokens)):
        place = np.searchsorted(bins, vision_load[group], side="right") - 1
        along = tokens[group] if place % 2 == 0 else span - 1 - tokens[group]
        keys[group] = place * span + along


@numba.njit(cache=True)
def _source_sizes(samples, sources):  # type: ignore[no-untyped-def]
    """Samples of each source, int64, up to the last source that there is."""
    num_sources = 0
    for sample in samples:
        num_sources = max(num_sources, sources[sample] + 1)
    sizes = np.zeros(num_sources, np.int64)
    for sample in samples:
        sizes[sources[sample]] += 1
    return sizes


@numba.njit(cache=True)
def _shares(samples, offsets, sources, columns, num_columns):  # type: ignore[no-untyped-def]
    """`source_shares`, given the column of each source."""
    shares = np.empty((len(offsets) - 1, num_columns), np.uint8)
    for group in range(len(shares)):
        sizes = np.zeros(num_columns, np.int64)
        for sample in samples[offsets[group] : offsets[group + 1]]:
            sizes[columns[sources[sample]]] += 1
        size = max(offsets[group + 1] - offsets[group], 1)
        for column in range(num_columns):
            shares[group, column] = sizes[column] * SHARE // size
    return shares


@numba.njit(cache=True)
def _arrange(order, shares, window_size):  # type: ignore[no-untyped-def]
    """Sort each window in place, halving it repeatedly by the share that varies most."""
    for window in range(0, len(order), window_size):
        stack = [(window, min(window + window_size, len(order)))]
        while len(stack) > 0:
            start, stop = stack.pop()
            source = _most_varying(order[start:stop], shares)
            if source < 0:
                continue
            # sort this part by the share of that source
            part = order[start:stop].copy()
            key = np.empty(len(part), np.int64)
            for place in range(len(part)):
                key[place] = shares[part[place], source]
            order[start:stop] = part[np.argsort(key, kind="mergesort")]
            # a power of two: where the halves of `BlockShuffle` end, also in a shorter last window
            half = 1
            while 2 * half < len(part):
                half *= 2
            stack.append((start, start + half))
            stack.append((start + half, stop))


@numba.njit(cache=True)
def _most_varying(groups, shares):  # type: ignore[no-untyped-def]
    """The source whose share varies most among `groups`; -1 if none does or fewer than 3 groups."""
    best, best_spread = -1, np.int64(0)
    if len(groups) < 3:
        return best
    for source in range(shares.shape[1]):
        total, squares = np.int64(0), np.int64(0)
        for group in groups:
            share = np.int64(shares[group, source])
            total += share
            squares += share * share
        spread = len(groups) * squares - total * total
        if spread > best_spread:
            best, best_spread = source, spread
    return best


def _vision_bins(vision_load: IntArray, tokens: IntArray) -> IntArray:
    """Smallest load of each bin, ascending: the quantile bins that make neighbours most similar.

    More bins are narrower, but mean more turns of the tokens' order, so neighbours differ more in
    tokens. Both spreads are estimated relative to the mean load, for 1, 2, 4, ... bins.
    """
    num_groups = len(vision_load)
    values, counts = _distinct(vision_load)
    below = np.cumsum(counts) - counts  # groups of smaller load, per distinct value
    window = (choose_order(num_groups).window_size + NEIGHBOURHOOD) / max(1, num_groups)
    token_spread = float(np.std(tokens)) / max(1.0, float(np.mean(tokens))) if num_groups else 0.0
    best, best_cost, num_bins = np.zeros_like(values), np.inf, 1
    while num_bins < 2 * len(values):
        # bin of each distinct value; equal values share a bin, so some may stay empty
        bins = np.arange(len(values)) if num_bins >= len(values) else below * num_bins // num_groups
        bins = np.unique(bins, return_inverse=True)[1]
        turns = min(1.0, window * (bins.max() + 1))
        cost = _spread_inside(values, counts, bins) + token_spread * turns
        if cost < best_cost:
            best, best_cost = bins, cost
        num_bins *= 2
    return values[np.flatnonzero(np.diff(best, prepend=-1))]


def _distinct(loads: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct loads, ascending, and how often each occurs; int64."""
    if loads.max(initial=0) >= max(COUNTED_LOADS, len(loads)):
        return np.unique(loads, return_counts=True)
    counts = np.bincount(loads)
    values = np.flatnonzero(counts)
    return values, counts[values]


def _spread_inside(values: IntArray, counts: IntArray, bins: IntArray) -> float:
    """Mean over groups of the standard deviation in their bin, relative to the mean value."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    weights = np.add.reduceat(counts, starts)
    means = np.add.reduceat(counts * values, starts) / weights
    variances = np.add.reduceat(counts * (values - means[bins]) ** 2, starts) / weights
    return float(np.sum(weights * np.sqrt(variances)) / max(1, np.sum(counts * values)))
