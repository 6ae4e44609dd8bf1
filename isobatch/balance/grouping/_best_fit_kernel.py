"""One pass of `balance.grouping.best_fit` over a window of samples.

In numba. Makes groups that end as near to their caps as they can. What makes it fast:

- a sample's loads are one number (`balance.grouping.resources`): one subtraction says if it fits;
- a sample's `score` is a weighted sum of its loads. Samples are ranked by descending score, so the
  sample that fills a group best is found in a table of score buckets, and samples that are gone are
  skipped by a union-find;
- samples are one array of records: numba counts references to every array of a tuple, per call.

Integer arithmetic alone: the same groups on every machine.
"""

from typing import NamedTuple

import numba
import numpy as np

from isobatch.balance.grouping.isf import shuffle
from isobatch.balance.radix_sort import counting_sort

LOOKAHEAD = 16
"""Next samples in order, from which a group chooses."""
PROBES = 16
"""Distinct samples that a search looks at before it gives up. Twice the time and no gain with 64,
but up to 4 % fewer groups where two unrelated caps bind.
"""
MAX_TRIES = 2
"""Pairs that are tried to complete a group; 8 save less than .1 % of the groups."""
ADAPT = 4
"""The tolerance moves by 1/16 per group."""

_RANKS = [("after", np.int32), ("next_left", np.int32)]
SAMPLE = np.dtype([("packed", np.uint64), ("score", np.int32), *_RANKS], align=True)
"""A sample in a pool, by rank. `after`: the rank after all samples equal to it. `next_left`:
union-find; a sample that is left points to itself, one that is gone to a later rank.
"""


class FillRules(NamedTuple):
    """What a group may hold and how it is filled."""

    cap: np.uint64
    """All caps, packed, with the guard bits set."""
    guard: np.uint64
    cap_score: int
    """Score of a group that is full in every resource that counts."""
    bucket_shift: int
    """Samples are found by score in buckets of 2 ** bucket_shift scores."""
    seed_largest: bool
    """A group begins with the largest sample left; else with the one that has waited longest."""
    greedy: bool
    """The next member is the largest that fits; else the oldest, while two more may still fit."""


@numba.njit(cache=True, nogil=True)
def run_pass(packed, score, rules, state, tolerance, keep):  # type: ignore[no-untyped-def]
    """Make groups until at most `keep` samples are left; -> (places, ends, slacks, tolerance).

    `packed` (uint64) and `score` (int32) describe the samples, `state` seeds their order. `places`
    (int32) holds all samples, group after group, then those left; `ends` is where each group ends
    in it, `slacks` how much score each lacks to the caps. `tolerance`, the slack at which a group
    is complete, follows the data: it falls with every group completed within it, else rises.
    """
    # the samples by rank, and a random order in which they come up
    by_rank = np.arange(len(packed)).astype(np.int32)
    by_rank = counting_sort(by_rank, (score.max() - score).astype(np.uint32))
    pool = _make_pool(packed, score, by_rank)
    buckets = _make_buckets(pool, rules)
    order = np.arange(len(packed)).astype(np.int32)
    shuffle(order, state)
    # group after group
    places = np.empty(len(packed), np.int32)
    ends, slacks = np.empty(len(packed), np.int32), np.empty(len(packed), np.int32)
    num_groups, size, head = 0, 0, 0
    while len(packed) - size > keep:
        head = _next_in_order(pool, order, head)
        ahead = order[head : head + LOOKAHEAD]
        size, slack, hit = _make_group(pool, buckets, ahead, rules, places, (size, tolerance))
        tolerance += -(tolerance >> ADAPT) if hit else (tolerance >> ADAPT) + 1
        ends[num_groups], slacks[num_groups] = size, slack
        num_groups += 1
    # what is left
    for rank in range(len(packed)):
        if pool[rank].next_left == rank:
            places[size] = rank
            size += 1
    return by_rank[places], ends[:num_groups].copy(), slacks[:num_groups].copy(), tolerance


@numba.njit(cache=True)
def _make_pool(packed, score, by_rank):  # type: ignore[no-untyped-def]
    """The samples by rank, all left, and a last record that is never gone: every search ends."""
    num_samples = len(packed)
    pool = np.empty(num_samples + 1, SAMPLE)
    pool[num_samples].next_left = num_samples
    for rank in range(num_samples - 1, -1, -1):
        sample = pool[rank]
        sample.packed, sample.score = packed[by_rank[rank]], score[by_rank[rank]]
        sample.next_left = rank
        same = rank + 1 < num_samples and sample.packed == pool[rank + 1].packed
        sample.after = pool[rank + 1].after if same else rank + 1
    return pool


@numba.njit(cache=True)
def _make_buckets(pool, rules):  # type: ignore[no-untyped-def]
    """First rank whose score is not above those of each bucket."""
    buckets = np.empty((rules.cap_score >> rules.bucket_shift) + 1, np.int32)
    rank = 0
    for bucket in range(len(buckets) - 1, -1, -1):
        while rank < len(pool) - 1 and pool[rank].score >> rules.bucket_shift > bucket:
            rank += 1
        buckets[bucket] = rank
    return buckets


@numba.njit(cache=True)
def _next_in_order(pool, order, head):  # type: ignore[no-untyped-def]
    """Close the gaps among the next `LOOKAHEAD` samples from `head` on; -> place of the oldest."""
    write = min(head + LOOKAHEAD, len(order))
    for place in range(write - 1, head - 1, -1):
        rank = order[place]
        if pool[rank].next_left == rank:
            write -= 1
            order[write] = rank
    while pool[order[write]].next_left != order[write]:
        write += 1
    return write


@numba.njit(cache=True)
def _make_group(pool, buckets, ahead, rules, places, progress):  # type: ignore[no-untyped-def]
    """One group, from the oldest sample ahead; `progress` is (size of `places`, tolerance).

    -> (new size of `places`, slack, whether completed within the tolerance)
    """
    size, tolerance = progress
    none = len(pool) - 1
    smallest = pool[none - 1].score
    free, slack, hit = rules.cap, rules.cap_score, False
    add, other = _left_from(pool, 0 if rules.seed_largest else ahead[0]), none
    while add < none:
        # take the one or two samples that were chosen
        for rank in (add, other):
            if rank < none:
                pool[rank].next_left = rank + 1
                places[size] = rank
                size += 1
                free, slack = free - pool[rank].packed, slack - pool[rank].score
        add, other = none, none
        if slack < smallest:
            break
        # a sample that completes the group, else a pair, else the next member
        one = _largest_that_fits(pool, buckets, rules, free, slack, -1)
        if one < none and slack - pool[one].score <= tolerance:
            add = one
            hit = True
            continue
        add, other = _completing_pair(pool, buckets, ahead, rules, (free, slack), tolerance)
        if add < none:
            hit = True
            continue
        add = _next_member(pool, ahead, rules, free, slack, one)
    return size, slack, hit


@numba.njit(cache=True)
def _next_member(pool, ahead, rules, free, slack, one):  # type: ignore[no-untyped-def]
    """The oldest or largest sample ahead that fits; or `one`, where that is larger."""
    largest = one
    oldest_will_do = not rules.greedy and slack >= 2 * pool[len(pool) - 2].score
    for rank in ahead:
        if pool[rank].next_left == rank and (free - pool[rank].packed) & rules.guard == rules.guard:
            if oldest_will_do:
                return np.int64(rank)
            largest = min(largest, rank)
    return largest


@numba.njit(cache=True)
def _completing_pair(  # type: ignore[no-untyped-def]
    pool, buckets, ahead, rules, unfilled, tolerance
):
    """A sample ahead and any other that together complete the group; none: past the last rank.

    `unfilled` is what the group can still take: (packed, score).
    """
    free, slack = unfilled
    none = len(pool) - 1
    largest, smallest = pool[0].score, pool[none - 1].score
    tries = MAX_TRIES if 2 * smallest <= slack <= 2 * largest else 0
    for rank in ahead:
        if tries == 0:
            break
        rest = slack - pool[rank].score
        is_there = pool[rank].next_left == rank
        fits = is_there and (free - pool[rank].packed) & rules.guard == rules.guard
        if fits and smallest <= rest <= largest:
            tries -= 1
            other = _largest_that_fits(pool, buckets, rules, free - pool[rank].packed, rest, rank)
            if other < none and rest - pool[other].score <= tolerance:
                return np.int64(rank), other
    return none, none


@numba.njit(cache=True)
def _largest_that_fits(pool, buckets, rules, free, slack, excluded):  # type: ignore[no-untyped-def]
    """Rank of the largest score that is left and fits, not `excluded`; none: past the last rank."""
    none = len(pool) - 1
    rank = _left_from(pool, buckets[slack >> rules.bucket_shift])
    while rank < none and pool[rank].score > slack:
        rank = _left_from(pool, pool[rank].after)
    for _ in range(PROBES):
        if rank == excluded:
            rank = _left_from(pool, rank + 1)
        if rank == none or (free - pool[rank].packed) & rules.guard == rules.guard:
            return rank
        rank = _left_from(pool, pool[rank].after)
    return none


@numba.njit(cache=True)
def _left_from(pool, rank):  # type: ignore[no-untyped-def]
    """The first rank from `rank` on that is left (union-find with path halving)."""
    rank = np.int64(rank)
    while pool[rank].next_left != rank:
        pool[rank].next_left = pool[pool[rank].next_left].next_left
        rank = np.int64(pool[rank].next_left)
    return rank
