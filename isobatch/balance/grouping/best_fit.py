"""The default grouping: complete each group with the samples that fit best.

ISF fills groups in random order and filters. Here the sample or pair that fills a group best
completes it (`run_pass`); then the worst groups, and a few others, are made again, round after
round, wherever that takes no more groups (ruin and recreate: Schrimpf et al. 2000). A part of the
samples tells how to weigh the caps, and which go first (`FitStrategy`).

AI2D + ChartQA (30,730 samples, 4,096 tokens): at 15 patches 7,967 groups in .1 s, where the bound
is 7,939 and 50 ISF iterations give 8,064; from 10 to 16 patches within .4 % of the bound. Large
sets are grouped in windows drawn evenly from all samples; what a window cannot complete goes into
the next. 1.2 million samples take .25 s, 100 million 22 s and, held as uint8 and uint16, 1.4 GB
with the result. Pure, in integers alone: the same groups on every machine. What makes a pass fast:

- a sample's loads are one number (`balance.grouping.resources`): one subtraction says if it fits;
- a sample's `score` is a weighted sum of its loads. Samples are ranked by descending score, so the
  sample that fills a group best is found in a table of score buckets, and samples that are gone are
  skipped by a union-find;
- samples are one array of records: numba counts references to every array of a tuple, per call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.grouping.isf import shuffle
from isobatch.balance.grouping.resources import Load, PackedLoads, Resource, resources_of
from isobatch.balance.kernels import free_kernel, inner
from isobatch.balance.radix_sort import sort_by
from isobatch.balance.rng import GROUPS, random_bits
from isobatch.common.types import Groups, IntArray, Limits, index_dtype

DEFAULT_ROUNDS = 60
"""AI2D + ChartQA, 15 patches: 7,982 groups by 6 rounds, 7,975 by 20, 7,967 by 60, 7,964 by 600."""
WINDOW_SAMPLES = 1 << 15
"""Samples of a window: enough for exact fits, few enough for the second-level cache."""
WINDOW_GROUPS = 512
"""Groups that a window makes at least, so that the few that it cannot complete do not count."""
PASSED_ON = 8
"""1 / share of a window's samples, and of its groups, the worst, that go into the next window."""
TRIAL_SAMPLES, TRIAL_ROUNDS, FINALISTS = 1 << 12, 6, 2
"""Samples and rounds of a trial of all strategies; how many of them are tried on a window."""
LEAST_SHARE = 0.02
"""Share of the groups, the worst, that a round dissolves at least, and as many at random."""
ACTIVE = 0.5
"""Strategies weigh resources that are needed at least so much, relative to the scarcest."""
SCORE_BITS, FRACTION_BITS = 22, 20
"""Bits of the score of a full group, and of the weights that turn loads into scores."""
BUCKET_BITS = 12
"""A table of 4,096 buckets stays in the first-level cache."""
FIRST_TOLERANCE = 1 << 10
"""Score that a complete group may lack, to begin with: one token of 4,096."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStrategy:
    """How to choose a group's samples: how resources are weighed, and which samples go first."""

    weights: tuple[int, ...]
    """Score per unit of each resource, times 2 ** FRACTION_BITS."""
    rules: FillRules

    def scores(self, packing: PackedLoads, samples: IntArray) -> NDArray[np.int32]:
        """Weighted sum of each sample's loads; a group full in all that counts has `cap_score`."""
        total = np.zeros(len(samples), np.int64)
        for resource, weight in zip(packing.resources, self.weights, strict=True):
            if weight:
                total += resource.load[samples].astype(np.int64) * weight
        return (total >> FRACTION_BITS).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _WindowGroups:
    """Groups of one window: group g holds the next `sizes[g]` of `samples`."""

    samples: IntArray
    sizes: NDArray[np.int32]
    slacks: NDArray[np.int32]
    """Score that each lacks to be full in every resource that its strategy weighs."""
    rest: IntArray
    """Samples that are in no group."""
    tolerance: int

    def split(self, dissolved: NDArray[np.bool_]) -> "tuple[_WindowGroups, IntArray]":
        """The groups that stay, and the samples of those that are dissolved."""
        moves = np.repeat(dissolved, self.sizes)
        stays = ~dissolved
        staying = self.samples[~moves], self.sizes[stays], self.slacks[stays]
        return _WindowGroups(*staying, self.rest, self.tolerance), self.samples[moves]

    def worst(self, count: int) -> NDArray[np.bool_]:
        """Which are the `count` groups with the most slack; fewer, if several tie for the last."""
        border = len(self.slacks) - 1 - count
        return self.slacks > (np.partition(self.slacks, border)[border] if border >= 0 else -1)


def group_best_fit(
    vision: Load,
    tokens: Load,
    limits: Limits,
    *,
    seed: int,
    rounds: int = DEFAULT_ROUNDS,
    also: Sequence[Resource] = (),
) -> Groups:
    """Group samples under both caps, and those of `also`, into as few groups as can be found.

    `vision` and `tokens` are the samples' loads, shape (num_samples,), in the unit of
    `limits.max_vision` and in LLM tokens; the filter targets do not matter. Every sample ends in
    exactly one group. `rounds` is the effort, shared among the windows of a large set, so that time
    stays linear; in one window, from 6 on, more rounds never need more groups. Raises ValueError
    for a sample that is over a cap by itself.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_best_fit(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 3], [1], [2]]
    """
    packing = PackedLoads.of(resources_of(vision, tokens, limits, also))
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; give 0 or more")
    num_samples = len(tokens)
    if num_samples == 0:
        return Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    by_samples = num_samples // WINDOW_SAMPLES
    num_windows = max(1, min(by_samples, _fewest(packing) // WINDOW_GROUPS))
    rounds = rounds // num_windows
    draw = _draw(num_samples, num_windows, seed)
    strategy = _best_strategy(packing, draw(0), seed, rounds)
    samples = np.empty(num_samples, index_dtype(num_samples))
    sizes = [np.zeros(1, np.int32)]
    done = 0
    rest = np.empty(0, np.int64)
    tolerance = FIRST_TOLERANCE
    for number in range(num_windows):
        window = np.concatenate([rest, draw(number)])
        if number == num_windows - 1:
            groups = _make_well(packing, strategy, window, seed, number, rounds)
        else:
            # the next window gets the samples that are left and those of the worst groups
            keep = len(window) // PASSED_ON
            bits = _bits(seed, number)
            groups = _make(packing, strategy, window, bits, tolerance, keep)
            groups, weak = groups.split(groups.worst(len(groups.sizes) // PASSED_ON))
            rest = np.concatenate([groups.rest, weak])
            tolerance = groups.tolerance
        samples[done : done + len(groups.samples)] = groups.samples
        done += len(groups.samples)
        sizes.append(groups.sizes)
    return Groups(samples, np.cumsum(np.concatenate(sizes), dtype=np.int64))


def _best_strategy(packing: PackedLoads, window: IntArray, seed: int, rounds: int) -> FitStrategy:
    """The better on a window of the two that make the fewest groups of a part of all samples."""
    num_samples = len(packing.resources[0].load)
    rounds = min(rounds, TRIAL_ROUNDS)
    trial = _draw(num_samples, -(-num_samples // TRIAL_SAMPLES), seed)(0)

    def num_groups(strategy: FitStrategy, samples: IntArray) -> int:
        return len(_make_well(packing, strategy, samples, seed, 0, rounds).sizes)

    every = sorted(_all_strategies(packing), key=partial(num_groups, samples=trial))
    return min(every[:FINALISTS], key=partial(num_groups, samples=window))


def _all_strategies(packing: PackedLoads) -> list[FitStrategy]:
    """Strategies for each scarce resource alone and for all equally, with three ways to choose."""
    caps = [resource.cap for resource in packing.resources]
    needs = [total / max(cap, 1) for total, cap in zip(_sums(packing), caps, strict=True)]
    active = [f for f, need in enumerate(needs) if caps[f] and need >= ACTIVE * max(needs)]
    shares = [{field: 1.0} for field in reversed(active)]
    if len(active) > 1:
        shares.append(dict.fromkeys(active, 1 / len(active)))
    orders = ((False, False), (False, True), (True, True))
    return [_strategy(packing, share, *order) for share, order in product(shares, orders)]


def _strategy(
    packing: PackedLoads, shares: dict[int, float], seed_largest: bool, greedy: bool
) -> FitStrategy:
    full = 1 << SCORE_BITS + FRACTION_BITS
    caps = [resource.cap for resource in packing.resources]
    weights = tuple(int(shares.get(f, 0) * full) // max(cap, 1) for f, cap in enumerate(caps))
    cap_score = sum(map(mul, weights, caps)) >> FRACTION_BITS
    rules = FillRules(
        cap=np.uint64(packing.cap),
        guard=np.uint64(packing.guard),
        cap_score=cap_score,
        bucket_shift=max(0, cap_score.bit_length() - BUCKET_BITS),
        seed_largest=seed_largest,
        greedy=greedy,
    )
    return FitStrategy(weights=weights, rules=rules)


def _draw(num_samples: int, num_windows: int, seed: int) -> Callable[[int], IntArray]:
    """Window number -> its samples, int64: one of each `num_windows` consecutive ones.

    So each window is like the whole, also where samples are sorted by source or length.
    """
    starts = np.arange(0, num_samples, num_windows)
    shifts = (random_bits(len(starts), seed, GROUPS) % np.uint64(num_windows)).astype(np.int64)

    def window(number: int) -> IntArray:
        drawn = starts + (number + shifts) % num_windows
        return drawn[drawn < num_samples]

    return window


def _bits(seed: int, window: int, turn: int = 0, count: int = 1) -> NDArray[np.uint64]:
    return random_bits(count, seed, GROUPS, epoch=1 + window, place=turn)


def _make(
    packing: PackedLoads,
    strategy: FitStrategy,
    window: IntArray,
    bits: NDArray[np.uint64],
    tolerance: int,
    keep: int = 0,
) -> _WindowGroups:
    """Groups of the samples of a window, one pass, until at most `keep` samples are left."""
    loads = packing.pack(window), strategy.scores(packing, window)
    places, ends, slacks, tolerance = run_pass(*loads, strategy.rules, bits[0], tolerance, keep)
    grouped = int(ends[-1]) if len(ends) else 0
    members = window[places]
    sizes = np.diff(ends, prepend=np.int32(0))
    return _WindowGroups(members[:grouped], sizes, slacks, members[grouped:], int(tolerance))


def _make_well(
    packing: PackedLoads,
    strategy: FitStrategy,
    window: IntArray,
    seed: int,
    number: int,
    rounds: int,
) -> _WindowGroups:
    """Groups of all samples of a window: each round makes the worst again, unless that is worse.

    Rounds dissolve 2/3, 2/4, 2/5, ... of the groups. Of as many groups, those are better whose
    slack is less even: some full, and some with much left.
    """
    groups = _make(packing, strategy, window, _bits(seed, number), FIRST_TOLERANCE)
    fewest = _fewest(packing, window)
    for turn in range(1, rounds + 1):
        if len(groups.sizes) <= fewest:
            break
        # dissolve the worst groups, and a few at random
        num_random = 1 + int(len(groups.sizes) * LEAST_SHARE)
        bits = _bits(seed, number, turn, 1 + num_random)
        dissolved = groups.worst(max(num_random, 2 * len(groups.sizes) // (2 + turn)))
        dissolved[(bits[1:] % np.uint64(len(groups.sizes))).astype(np.int64)] = True
        # make groups of their samples, and keep these unless they are worse
        stays, loose = groups.split(dissolved)
        again = _make(packing, strategy, loose, bits, groups.tolerance)
        if _value(again.slacks) >= _value(groups.slacks[dissolved]):
            samples = np.concatenate([stays.samples, again.samples])
            sizes = np.concatenate([stays.sizes, again.sizes])
            slacks = np.concatenate([stays.slacks, again.slacks])
            groups = _WindowGroups(samples, sizes, slacks, groups.rest, again.tolerance)
    return groups


def _value(slacks: NDArray[np.int32]) -> tuple[int, int]:
    """More is better: fewer groups, then more uneven slack."""
    return -len(slacks), int(np.square(slacks, dtype=np.int64).sum())


def _fewest(packing: PackedLoads, samples: IntArray | slice = slice(None)) -> int:
    """Least number of groups of `samples` that any grouping can have, by each resource alone."""
    sums = zip(_sums(packing, samples), packing.resources, strict=True)
    return max(-(-total // max(resource.cap, 1)) for total, resource in sums)


def _sums(packing: PackedLoads, samples: IntArray | slice = slice(None)) -> list[int]:
    return [int(r.load[samples].sum(dtype=np.int64)) for r in packing.resources]


# --- one pass over a window ---


def run_pass(
    packed: NDArray[np.uint64],
    score: NDArray[np.int32],
    rules: FillRules,
    bits: np.uint64,
    tolerance: int,
    keep: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
    """Make groups until at most `keep` samples are left; -> (places, ends, slacks, tolerance).

    `packed` and `score` describe the samples, `bits` seeds their order. `places` holds all samples,
    group after group, then those left; `ends` is where each group ends in it, `slacks` how much
    score each lacks to the caps. `tolerance`, the slack at which a group is complete, follows the
    data: it falls with every group completed within it, else rises.
    """
    num_samples = len(packed)
    by_rank = sort_by((score.max() - score).astype(np.uint32)).astype(np.int32)
    pool = _make_pool(packed[by_rank], score[by_rank])
    # first rank whose score is not above those of each bucket
    num_buckets = (rules.cap_score >> rules.bucket_shift) + 1
    counts = np.bincount(score >> rules.bucket_shift, minlength=num_buckets)
    buckets = (num_samples - np.cumsum(counts)).astype(np.int32)
    places, ends, slacks = (np.empty(num_samples, np.int32) for _ in range(3))
    order = np.arange(num_samples, dtype=np.int32)
    start = bits, tolerance, keep
    num_groups, size, tolerance = fill_groups(
        pool, buckets, order, rules, (places, ends, slacks), start
    )
    places[size:] = np.flatnonzero(pool["next_left"][:-1] == np.arange(num_samples))
    return by_rank[places], ends[:num_groups].copy(), slacks[:num_groups].copy(), tolerance


def _make_pool(packed: NDArray[np.uint64], score: NDArray[np.int32]) -> NDArray[np.void]:
    """The samples by rank, all left, and a last record that is never gone: every search ends."""
    num_samples = len(packed)
    ends = np.append(np.flatnonzero(packed[1:] != packed[:-1]) + 1, num_samples)
    pool = np.zeros(num_samples + 1, SAMPLE)
    pool["next_left"] = np.arange(num_samples + 1)
    pool["packed"][:-1] = packed
    pool["score"][:-1] = score
    pool["after"][:-1] = np.repeat(ends, np.diff(ends, prepend=0))
    return pool


@free_kernel
def fill_groups(pool, buckets, order, rules, result, start):  # type: ignore[no-untyped-def]
    """The kernel of `run_pass`; -> (number of groups, samples in them, tolerance)."""
    places, ends, slacks = result
    bits, tolerance, keep = start
    shuffle(order, bits)
    num_groups, size, head = 0, np.int64(0), np.int64(0)
    while len(order) - size > keep:
        head = _next_in_order(pool, order, head)
        ahead = order[head : head + LOOKAHEAD]
        size, slack, hit = _make_group(pool, buckets, ahead, rules, places, (size, tolerance))
        tolerance += -(tolerance >> ADAPT) if hit else (tolerance >> ADAPT) + 1
        ends[num_groups], slacks[num_groups] = size, slack
        num_groups += 1
    return num_groups, size, tolerance


@inner
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


@inner
def _make_group(pool, buckets, ahead, rules, places, progress):  # type: ignore[no-untyped-def]
    """One group, from the oldest sample ahead; `progress` is (size of `places`, tolerance).

    -> (new size of `places`, slack, whether completed within the tolerance)
    """
    size, tolerance = progress
    none = len(pool) - 1
    smallest = pool[none - 1].score
    free, slack, hit = rules.cap, rules.cap_score, False
    add, other = _left_from(pool, np.int64(0 if rules.seed_largest else ahead[0])), none
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
        one = _largest_that_fits(pool, buckets, rules, free, slack, np.int64(-1))
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


@inner
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


@inner
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
            less = free - pool[rank].packed
            other = _largest_that_fits(pool, buckets, rules, less, rest, np.int64(rank))
            if other < none and rest - pool[other].score <= tolerance:
                return np.int64(rank), other
    return none, none


@inner
def _largest_that_fits(pool, buckets, rules, free, slack, excluded):  # type: ignore[no-untyped-def]
    """Rank of the largest score that is left and fits, not `excluded`; none: past the last rank."""
    none = len(pool) - 1
    rank = _left_from(pool, np.int64(buckets[slack >> rules.bucket_shift]))
    while rank < none and pool[rank].score > slack:
        rank = _left_from(pool, np.int64(pool[rank].after))
    for _ in range(PROBES):
        if rank == excluded:
            rank = _left_from(pool, rank + 1)
        if rank == none or (free - pool[rank].packed) & rules.guard == rules.guard:
            return rank
        rank = _left_from(pool, np.int64(pool[rank].after))
    return none


@inner
def _left_from(pool, rank):  # type: ignore[no-untyped-def]
    """The first rank from `rank` on that is left (union-find with path halving)."""
    while pool[rank].next_left != rank:
        pool[rank].next_left = pool[pool[rank].next_left].next_left
        rank = np.int64(pool[rank].next_left)
    return rank
