"""The path: groups in an order in which neighbours cost the same, and in which sources are easy to mix.

For the packer, once per build: `sort_along_path`, then `arrange_sources`. Pure; seconds for a million groups.
`balance.order` makes each epoch's stream of it.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from balance.order import choose_order
from balance.records import Groups, IntArray
from balance.seeds import TIES, random_permutation

MAX_KINDS = 16
"""Sources told apart: the 15 with the most samples, and the others together. A byte per group and kind."""
SHARE = 255
"""All samples of a group, as a share."""
NEIGHBOURHOOD = 24
"""Groups that a micro-batch spans beyond its window: three nodes of eight ranks."""


def sort_along_path(vision_load: IntArray, tokens: IntArray, seed: int) -> IntArray:
    """The permutation (int64) that puts groups in path order: by vision load, tokens up and down in turn.

    Where vision loads are nearly all distinct (ViT tokens of native-resolution models), they are first put into bins,
    else tokens would jump at every step. Ties are in a random order that depends on `seed` alone.

    >>> sort_along_path(np.array([2, 1, 2, 1]), np.array([50, 60, 90, 70]), seed=0).tolist()
    [1, 3, 2, 0]
    """
    bins = _vision_bins(vision_load, tokens)
    span = int(tokens.max(initial=0)) + 1
    key = bins * span + np.where(bins % 2 == 0, tokens, span - 1 - tokens)
    shuffled = random_permutation(len(key), seed, TIES)
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def source_shares(groups: Groups, sources: IntArray) -> NDArray[np.uint8]:
    """Share of each group's samples by source, in 255ths, shape (num_groups, at most 16).

    `sources` is a per-sample source number from 0, shape (num_samples,). Beyond 16 sources the smaller ones share the
    last column.

    >>> source_shares(Groups(np.array([0, 1, 2]), np.array([0, 2, 3])), np.array([0, 1, 1])).tolist()
    [[127, 127], [0, 255]]
    """
    sizes = np.bincount(sources[groups.samples])
    kind = np.minimum(np.argsort(np.argsort(-sizes, kind="stable")), MAX_KINDS - 1) if len(sizes) > MAX_KINDS else None
    kinds = sources if kind is None else kind[sources]
    num_kinds = min(len(sizes), MAX_KINDS)
    shares = np.empty((len(groups), num_kinds), np.uint8)
    for number in range(num_kinds):
        shares[:, number] = groups.sum(kinds == number) * SHARE // np.maximum(groups.sizes, 1)
    return shares


def arrange_sources(path: IntArray, shares: NDArray[np.uint8], window_size: int) -> IntArray:
    """The path with the groups of each window put in order of what sources they hold; int64, a permutation of `path`.

    Halves of a window differ in the source that varies most, halves of a half in the one that varies most there, and so
    on (a k-d tree). `balance.order` draws evenly from those halves, so that a micro-batch has the sources of its
    window without the loader knowing any source. Windows are short, so neighbours still cost the same.

    >>> shares = np.array([[255, 0], [0, 255], [255, 0], [0, 255]], dtype=np.uint8)
    >>> arrange_sources(np.array([0, 1, 2, 3]), shares, 4).tolist()
    [1, 3, 0, 2]
    """
    arranged = path.astype(np.int64, copy=True)
    if shares.shape[1] > 1:
        _arrange(arranged, shares, window_size)
    return arranged


@numba.njit(cache=True)
def _arrange(path, shares, window_size):  # type: ignore[no-untyped-def]
    """Sort each window of `path` in place, halving it again and again by the share that varies most."""
    for window in range(0, len(path), window_size):
        stack = [(window, min(window + window_size, len(path)))]
        while len(stack) > 0:
            start, stop = stack.pop()
            source = _most_varying(path[start:stop], shares)
            if source < 0:
                continue
            part = path[start:stop].copy()
            key = np.empty(len(part), np.int64)
            for place in range(len(part)):
                key[place] = shares[part[place], source]
            order = np.argsort(key, kind="mergesort")
            for place in range(len(part)):
                path[start + place] = part[order[place]]
            half = 1  # a power of two: where the stream's halves end, also in the path's last, shorter window
            while 2 * half < len(part):
                half *= 2
            stack.append((start, start + half))
            stack.append((start + half, stop))


@numba.njit(cache=True)
def _most_varying(groups, shares):  # type: ignore[no-untyped-def]
    """The source whose share has the largest variance among `groups`; -1 if all are alike or there are fewer than 3."""
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
    """Bin of each group: the quantile bins that make neighbours on the path most alike in both loads.

    More bins mean a narrower range of vision loads in each, but a longer path, on which neighbours differ more in
    tokens. Both spreads are estimated relative to the mean load, for 1, 2, 4, ... bins up to one per value.
    """
    num_groups = len(vision_load)
    values, inverse, counts = np.unique(vision_load, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts  # groups of smaller load, per distinct value
    window = (choose_order(num_groups).window_size + NEIGHBOURHOOD) / max(1, num_groups)
    token_spread = float(np.std(tokens)) / max(1.0, float(np.mean(tokens))) if num_groups else 0.0
    best, best_cost, num_bins = np.zeros_like(values), np.inf, 1
    while num_bins < 2 * len(values):
        # bin of each distinct value; equal values share a bin, so some of the num_bins may stay empty
        bins = np.arange(len(values)) if num_bins >= len(values) else below * num_bins // num_groups
        bins = np.unique(bins, return_inverse=True)[1]
        cost = _spread_inside(values, counts, bins) + token_spread * min(1.0, window * (bins.max() + 1))
        if cost < best_cost:
            best, best_cost = bins, cost
        num_bins *= 2
    return np.asarray(best[inverse], dtype=np.int64)


def _spread_inside(values: IntArray, counts: IntArray, bins: IntArray) -> float:
    """Mean over groups of the standard deviation of the values in their bin, relative to the mean value."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    weights = np.add.reduceat(counts, starts)
    means = np.add.reduceat(counts * values, starts) / weights
    variances = np.add.reduceat(counts * (values - means[bins]) ** 2, starts) / weights
    return float(np.sum(weights * np.sqrt(variances)) / max(1, np.sum(counts * values)))
