"""Groups of equal cost: pairs of them exchange samples until all cost the same.

For the packer, after `balance.grouping.best_fit`, which makes few groups, but some of them with
many images and some with none. Groups of equal cost are balanced in any order, so a random one
serves (`balance.order.step_order`).

Each round takes the groups that are furthest from the mean load (a vector: vision, LLM tokens, and
attention's squared lengths), each with a random partner, and divides the samples of both again:
single samples and pairs of them change sides while that brings both nearer to the mean; a few
random changes and the same again find better divisions. A division that breaks a cap may be on the
way to a better one, but is never kept. Groups that are near enough are left alone, so that most of
the work is in the first rounds. The number of groups stays.

Two sources of images and one of text, 32,768 tokens: loads' spread from .145 / .022 / .37 of the
mean (vision / tokens / attention) to .031 / .0002 / .05. Pure: integers only, and a pair's random
numbers are its own, so the same groups on every machine, with any number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.kernels import free_kernel, inlined, inner
from isobatch.balance.metrics import epoch_ms
from isobatch.balance.rng import EVEN, random_bits, random_permutation
from isobatch.common.types import Groups, IntArray, Limits

MAX_ROUNDS = 24
"""Rounds at most; groups that are near enough, or did not get better, make the last ones short."""
ATTENTION_TOKENS = 1 << 18
"""Tokens of a group at which attention counts as much as the others: 1/8 of it at 32,768."""
SLACK = 500
"""1 / share of the tokens that groups do without, so that they can exchange samples: .2 %."""
VISION_SHARE, TRIAL_DP = 0.25, 8
"""The encoder's share of the time (.1 to .5 in the papers' models), and the ranks it is for."""
PATIENCE, GAIN = 4, 0.02
"""Rounds in a row without a better division, after which a group is left as it is; and share of all
distances that two rounds must bring, or they are the last.
"""
CHANGES = 6
"""Divisions of a pair that are tried: as it is, and after random changes of it."""
UNIT, SCALE_BITS = 1 << 14, 20
"""A group's mean load, in which loads are compared, and fraction bits of their scale."""
FAR = 1 << 24
"""Units that count at most, so that sums of squares fit 64 bits."""
NEAR, NEAR_ENOUGH = UNIT >> 8, UNIT >> 10
"""Vision above the mean by more than 1/256 is costly; groups nearer than 1/1,024 are left alone."""
COSTLY = 64
"""Weight of what a group has beyond `NEAR` or a cap: the slowest rank is what all wait for."""
MAX_MOVABLE = 48
"""Samples of a group that may change sides; of more, a random part."""


class EvenState(NamedTuple):
    """Groups while their samples are exchanged; `num_groups` rows but for `loads`."""

    members: IntArray
    """Group g's samples are `members[starts[g] : starts[g] + sizes[g]]`."""
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    loads: NDArray[np.int32]
    """Vision, tokens and squared length of each sample, shape (num_samples, 3)."""
    above: NDArray[np.int64]
    """Loads above the mean of each group, shape (num_groups, 3)."""
    scale: NDArray[np.int64]
    """A load in `UNIT`s, times 2 ** SCALE_BITS, shape (3,)."""
    near: NDArray[np.int64]
    """Units above the mean beyond which a load is costly, shape (3,)."""
    max_above: NDArray[np.int64]
    """Loads above the mean that the caps allow, shape (3,)."""


def group_balanced(
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    keep: Callable[[Groups], Groups] = lambda groups: groups,
) -> Groups:
    """Group samples under both caps into few groups of about equal loads.

    `vision` and `tokens` are the samples' loads, integers, shape (num_samples,).
    As `group_best_fit`, then `even_out`. Groups that are full to the last token cannot exchange
    samples: where they stay uneven, the same with a little less of it, if that is faster in a
    random order. `keep` chooses among the groups before they are made even.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_balanced(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 3], [1], [2]]
    """
    fitted = keep(group_best_fit(vision, tokens, limits, seed=seed))
    best = even_out(fitted, vision, tokens, limits, seed=seed)
    spare = limits.max_seq_len - limits.max_seq_len // SLACK
    sums = best.sum(vision), best.sum(tokens)
    time = _random_order_time(*sums, seed)
    min_time = _random_order_time(_most_even(sums[0]), _most_even(sums[1]), seed)
    if time <= min_time * (1 + 1 / SLACK) or spare < int(tokens.max(initial=0)):
        return best
    slack = replace(limits, max_seq_len=spare, min_seq_len=min(limits.min_seq_len, spare))
    looser = keep(group_best_fit(vision, tokens, slack, seed=seed))
    looser = even_out(looser, vision, tokens, limits, seed=seed)
    looser_time = _random_order_time(looser.sum(vision), looser.sum(tokens), seed)
    return looser if looser_time < time else best


def _most_even(loads: IntArray) -> IntArray:
    """Loads as even as whole numbers can be, as many and with the same sum, int64."""
    return (int(loads.sum()) + np.arange(len(loads))) // max(1, len(loads))


def _random_order_time(vision: IntArray, tokens: IntArray, seed: int) -> float:
    """Time of an epoch of groups in random order, relative: steps wait for their slowest rank."""
    order = random_permutation(len(vision), seed, EVEN)
    shares = [load[order] / max(1, int(load.sum())) for load in (vision, tokens)]
    times = VISION_SHARE * shares[0] + (1 - VISION_SHARE) * shares[1]
    return epoch_ms(times, min(TRIAL_DP, max(1, len(vision))))


def even_out(
    groups: Groups,
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    rounds: int = MAX_ROUNDS,
) -> Groups:
    """Make loads of groups more equal: as many groups of the same samples within the same caps.

    `vision` and `tokens` are the samples' loads, shape (num_samples,), as for `group_best_fit`.

    >>> limits = Limits(max_seq_len=10, max_vision=8, min_seq_len=9, min_vision=8)
    >>> groups = Groups(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    >>> made = even_out(groups, np.array([4, 4, 0, 0]), np.array([5, 5, 5, 5]), limits, seed=0)
    >>> made.sum(np.array([4, 4, 0, 0])).tolist()
    [4, 4]
    """
    if len(groups) < 2:
        return groups
    state = _state(groups, vision, tokens, limits)
    threads = os.cpu_count() or 1
    # rounds in a row in which a group did not get better
    failures = np.zeros(len(groups), np.int64)
    totals: list[int] = []
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds):
            distances = _distances(state.above, state.scale, state.near)
            totals.append((int((distances >> 32).sum()) << 32) + int((distances % (1 << 32)).sum()))
            if number > 1 and totals[-1] > (1 - GAIN) * totals[-3]:
                break
            pairs = _pairs(distances, failures, seed, number)
            bits = random_bits(len(pairs), seed, EVEN, epoch=number)
            parts = np.array_split(np.arange(len(pairs)), threads)
            futures = [pool.submit(divide_pairs, pairs[part], bits[part], state) for part in parts]
            better = np.concatenate([future.result() for future in futures])
            failures[pairs[:, 0]] = np.where(better, 0, failures[pairs[:, 0]] + 1)
    places = np.arange(len(state.members)) - np.repeat(state.starts[:-1], np.diff(state.starts))
    taken = places < np.repeat(state.sizes, np.diff(state.starts))
    offsets = np.concatenate([[0], np.cumsum(state.sizes)])
    return Groups(state.members[taken].astype(groups.samples.dtype), offsets)


def _state(groups: Groups, vision: IntArray, tokens: IntArray, limits: Limits) -> EvenState:
    num_groups = len(groups)
    sizes = groups.sizes.astype(np.int64)
    squares = tokens.astype(np.int64) ** 2
    # so that the mean group has 24 bits of squares: precise enough, and sums fit 64 bits
    mean = int(squares.mean() * len(groups.samples) / num_groups)
    squares = np.minimum(squares >> max(0, mean.bit_length() - 24), np.iinfo(np.int32).max)
    loads = np.stack([load.astype(np.int32) for load in (vision, tokens, squares)], axis=1)
    sums = np.stack([groups.sum(load) for load in loads.T], axis=1)
    means = sums.sum(axis=0) // num_groups
    scale = (UNIT << SCALE_BITS) // np.maximum(means, 1)
    scale[2] = scale[2] * min(limits.max_seq_len, ATTENTION_TOKENS) // ATTENTION_TOKENS
    # the vision of a group is whole patches: the next number above the mean is as near as can be
    near = np.array([max(NEAR, int(scale[0]) >> SCALE_BITS), FAR, FAR])
    max_above = np.array([limits.max_vision - means[0], limits.max_seq_len - means[1], FAR])
    # a group's places: its samples, and room for more
    places = np.maximum(2 * sizes, 2 * (len(groups.samples) // num_groups) + 4)
    starts = np.concatenate([[0], np.cumsum(places)])
    # one type whatever the caller's, unless there are too many: each has its own kernels compiled
    kind = np.int32 if len(loads) <= np.iinfo(np.int32).max else np.int64
    members = np.full(starts[-1], -1, kind)
    firsts = np.repeat(starts[:-1] - groups.offsets[:-1], sizes)
    members[firsts + np.arange(len(groups.samples))] = groups.samples
    return EvenState(members, starts, sizes, loads, sums - means, scale, near, max_above)


def _distances(above: IntArray, scale: IntArray, near: IntArray) -> IntArray:
    """What `_cost` says of each group, without caps and the fraction of the mean vision load."""
    whole = above - (above > 0) * np.array([1, 0, 0])
    units = np.clip(whole * scale >> SCALE_BITS, -FAR, FAR)
    squares: IntArray = (units**2).sum(axis=1)
    return np.asarray(squares + COSTLY * np.maximum(units[:, 0] - near[0], 0) ** 2)


def _pairs(distances: IntArray, failures: IntArray, seed: int, number: int) -> IntArray:
    """(num_pairs, 2): the groups that are far from the mean, each with a random other one."""
    far = np.flatnonzero((distances > NEAR_ENOUGH**2) & (failures < PATIENCE))
    far = far[np.argsort(-distances[far], kind="stable")][: len(distances) // 2]
    is_far = np.zeros(len(distances), bool)
    is_far[far] = True
    others = np.flatnonzero(~is_far)
    bits = random_bits(len(others), seed, EVEN, epoch=number, place=1)
    partners = others[np.argsort(bits, kind="stable")[: len(far)]]
    return np.stack([far[: len(partners)], partners], axis=1)


# --- a pair divided again ---


class _Work(NamedTuple):
    """Space for the samples of a pair that may change sides, first those of the first group."""

    samples: IntArray
    loads: NDArray[np.int64]
    """Their loads, shape (2 * MAX_MOVABLE + 1, 3); after the last one zeros, for no sample."""
    sides: NDArray[np.bool_]
    """Which are in the second group, in the best division and in one that is tried."""
    above: NDArray[np.int64]
    """Loads above the mean of both groups in the one that is tried, shape (2, 3)."""
    bounds: NDArray[np.int64]
    """`scale`, `near` and `max_above` of the state."""


def divide_pairs(pairs: IntArray, bits: NDArray[np.uint64], state: EvenState) -> NDArray[np.bool_]:
    """Divide the samples of each pair of groups again; -> whether each has become better."""
    work = _Work(
        samples=np.empty(2 * MAX_MOVABLE, np.int64),
        loads=np.empty((2 * MAX_MOVABLE + 1, 3), np.int64),
        sides=np.empty((2, 2 * MAX_MOVABLE), bool),
        above=np.empty((2, 3), np.int64),
        bounds=np.stack([state.scale, state.near, state.max_above]),
    )
    better = np.zeros(len(pairs), bool)
    divide_each(pairs, bits, state, work, better)
    return better


@free_kernel
def divide_each(pairs, bits, state, work, better):  # type: ignore[no-untyped-def]
    """The kernel of `divide_pairs`."""
    members, starts, sizes = state.members, state.starts, state.sizes
    for pair in range(len(pairs)):
        one, other = pairs[pair, 0], pairs[pair, 1]
        num_one = _choose_movable(members, starts[one], sizes[one], bits[pair])
        num = num_one + _choose_movable(members, starts[other], sizes[other], bits[pair])
        for place in range(num):
            group, at = (one, place) if place < num_one else (other, place - num_one)
            work.samples[place] = members[starts[group] + at]
            for kind in range(3):
                work.loads[place, kind] = state.loads[work.samples[place], kind]
        for kind in range(3):
            work.loads[num, kind] = 0
        if not _best_division(num, num_one, (one, other), state.above, bits[pair], work):
            continue
        # to the first group, unless there are no places
        grows = -num_one
        for place in range(num):
            grows += not work.sides[0, place]
        room_one = starts[one + 1] - starts[one] - sizes[one]
        room_other = starts[other + 1] - starts[other] - sizes[other]
        if grows <= room_one and -grows <= room_other:
            _shift_rest(members, starts[one] + num_one, sizes[one] - num_one, grows)
            num_other = num - num_one
            _shift_rest(members, starts[other] + num_other, sizes[other] - num_other, -grows)
            sizes[one] += grows
            sizes[other] -= grows
            _move(num, num_one, one, other, state, work)
            better[pair] = True


@inner
def _move(num, num_one, one, other, state, work):  # type: ignore[no-untyped-def]
    """Put the movable samples on their sides, and their loads."""
    next_one, next_other = state.starts[one], state.starts[other]
    for place in range(num):
        in_second = work.sides[0, place]
        if in_second:
            state.members[next_other] = work.samples[place]
            next_other += 1
        else:
            state.members[next_one] = work.samples[place]
            next_one += 1
        if in_second != (place >= num_one):
            for kind in range(3):
                moved = work.loads[place, kind] if in_second else -work.loads[place, kind]
                state.above[one, kind] -= moved
                state.above[other, kind] += moved


@inner
def _choose_movable(members, start, size, bits):  # type: ignore[no-untyped-def]
    """Put the samples of a group that may change sides first, random ones; -> their number."""
    num = min(size, MAX_MOVABLE)
    if num < size:
        for place in range(num):
            bits = _next_bits(bits)
            other = start + place + np.int64(bits % np.uint64(size - place))
            member = members[start + place]
            members[start + place] = members[other]
            members[other] = member
    return num


@inner
def _shift_rest(members, start, size, places):  # type: ignore[no-untyped-def]
    """Move what is after a group's movable samples, in its order."""
    for number in range(size):
        at = start + (size - 1 - number if places > 0 else number)
        members[at + places] = members[at]


@inner
def _best_division(num, num_one, pair, above, bits, work):  # type: ignore[no-untyped-def]
    """The best division found, into the first of `work.sides`; -> whether it is a better one.

    `above` is what all groups have above the mean.
    """
    sides, tried = work.sides[0], work.sides[1]
    for place in range(num):
        sides[place] = place >= num_one
    _begin(num, num_one, pair, above, sides, work)
    min_cost = _cost(work.above, work.loads, work.bounds, num, num)
    better = False
    for change in range(CHANGES):
        for place in range(num):
            tried[place] = sides[place]
        for _ in range(0 if change == 0 else 1 + change % 3):
            bits = _next_bits(bits)
            changed = np.int64(bits % np.uint64(num))
            tried[changed] = not tried[changed]
        _begin(num, num_one, pair, above, tried, work)
        cost = _descend(num, work.loads, tried, work.above, work.bounds)
        if cost < min_cost and not _breaks(work.above, work.bounds):
            min_cost = cost
            better = True
            for place in range(num):
                sides[place] = tried[place]
        if min_cost <= 2 * NEAR_ENOUGH * NEAR_ENOUGH:
            break
    return better


@inner
def _begin(num, num_one, pair, above, sides, work):  # type: ignore[no-untyped-def]
    """Set what both groups have above the mean in a division."""
    for kind in range(3):
        work.above[0, kind] = above[pair[0], kind]
        work.above[1, kind] = above[pair[1], kind]
    for place in range(num):
        if sides[place] != (place >= num_one):
            _change_side(work.above, work.loads, place, sides[place])


@inner
def _descend(num, loads, sides, above, bounds):  # type: ignore[no-untyped-def]
    """Change the side of the sample or pair of samples that brings most, while any does; -> cost.

    Changes `sides` and the two groups' loads above the mean.
    """
    cost = _cost(above, loads, bounds, num, num)
    for _ in range(4 * num):
        min_cost, single, partner = cost, num, num
        for place in range(num):
            to, back = (num, place) if sides[place] else (place, num)
            changed_cost = _cost(above, loads, bounds, to, back)
            if changed_cost < min_cost:
                min_cost, single, partner = changed_cost, place, num
            for twin in range(num if not sides[place] else 0):
                if sides[twin]:
                    changed_cost = _cost(above, loads, bounds, place, twin)
                    if changed_cost < min_cost:
                        min_cost, single, partner = changed_cost, place, twin
        if single == num:
            break
        cost = min_cost
        sides[single] = not sides[single]
        _change_side(above, loads, single, sides[single])
        if partner < num:
            sides[partner] = False
            _change_side(above, loads, partner, sides[partner])
    return cost


@inner
def _change_side(above, loads, sample, to_second):  # type: ignore[no-untyped-def]
    for kind in range(3):
        moved = loads[sample, kind] if to_second else -loads[sample, kind]
        above[0, kind] -= moved
        above[1, kind] += moved


@inlined
def _cost(above, loads, bounds, to, back):  # type: ignore[no-untyped-def]
    """Cost of both groups after sample `to` has gone to the second, and `back` has come from it."""
    cost = np.int64(0)
    for kind in range(3):
        moved = loads[to, kind] - loads[back, kind]
        cost += _cost_of(kind, above[0, kind] - moved, bounds)
        cost += _cost_of(kind, above[1, kind] + moved, bounds)
    return cost


@inlined
def _cost_of(kind, above, bounds):  # type: ignore[no-untyped-def]
    """Squared distance to the mean of one load; more where it is costly, or over a cap."""
    units = min(max(above * bounds[0, kind] >> SCALE_BITS, -FAR), FAR)
    cost = units * units
    if units > bounds[1, kind]:
        cost += COSTLY * (units - bounds[1, kind]) * (units - bounds[1, kind])
    if above > bounds[2, kind]:
        cost += COSTLY * units * units
    return cost


@inner
def _breaks(above, bounds):  # type: ignore[no-untyped-def]
    for group in range(2):
        if above[group, 0] > bounds[2, 0] or above[group, 1] > bounds[2, 1]:
            return True
    return False


@inner
def _next_bits(bits):  # type: ignore[no-untyped-def]
    """Xorshift (Marsaglia 2003)."""
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    return bits ^ (bits << np.uint64(17))
