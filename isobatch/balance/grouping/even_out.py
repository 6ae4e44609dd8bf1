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

import numba
import numpy as np
from numpy.typing import NDArray

from isobatch.balance.grouping.best_fit import group_best_fit
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


@numba.njit(cache=True, nogil=True)
def divide_pairs(pairs, bits, state):  # type: ignore[no-untyped-def]
    """Divide the samples of each pair of groups again; -> whether each has become better."""
    better = np.zeros(len(pairs), np.bool_)
    work = np.empty((2 * MAX_MOVABLE, 3), np.int64)
    for pair in range(len(pairs)):
        one, other = pairs[pair]
        num_one = _choose_movable(one, bits[pair], state)
        num_other = _choose_movable(other, bits[pair], state)
        # the samples that may change sides, first those of `one`
        num = num_one + num_other
        for place in range(num):
            group, at = (one, place) if place < num_one else (other, place - num_one)
            _fill(work[place], state.loads[state.members[state.starts[group] + at]])
        sides = np.arange(num) >= num_one
        above = state.above[one], state.above[other]
        is_better = _best_division(work[:num], sides, above, bits[pair], state)
        if is_better and _has_room(sides, num_one, one, other, state):
            _move(sides, num_one, one, other, state)
            better[pair] = True
    return better


@numba.njit(cache=True)
def _choose_movable(group, bits, state):  # type: ignore[no-untyped-def]
    """Put the samples of a group that may change sides first, random ones; -> their number."""
    start, size = state.starts[group], state.sizes[group]
    num = min(size, MAX_MOVABLE)
    if num < size:
        for place in range(num):
            bits = _next_bits(bits)
            other = place + np.int64(bits % np.uint64(size - place))
            members = state.members
            members[start + place], members[start + other] = (
                members[start + other],
                members[start + place],
            )
    return num


@numba.njit(cache=True)
def _best_division(loads, sides, above, bits, state):  # type: ignore[no-untyped-def]
    """The best division found, into `sides`; -> whether it is better than the given one.

    `above` is what each of the two groups has above the mean.
    """
    one, other = above
    min_cost = _cost(one, state) + _cost(other, state)
    before = sides.copy()
    tried = np.empty_like(sides)
    first, second = np.empty_like(one), np.empty_like(other)
    better = False
    for change in range(CHANGES):
        _fill(tried, sides)
        for _ in range(0 if change == 0 else 1 + change % 3):
            bits = _next_bits(bits)
            changed = np.int64(bits % np.uint64(len(sides)))
            tried[changed] = not tried[changed]
        _fill(first, one)
        _fill(second, other)
        for place in range(len(tried)):
            if tried[place] != before[place]:
                _shift(first, second, loads[place], tried[place])
        cost = _descend(loads, tried, first, second, state)
        if cost < min_cost and not _breaks(first, state) and not _breaks(second, state):
            min_cost = cost
            better = True
            _fill(sides, tried)
        if min_cost <= 2 * NEAR_ENOUGH * NEAR_ENOUGH:
            break
    return better


@numba.njit(cache=True)
def _descend(loads, sides, first, second, state):  # type: ignore[no-untyped-def]
    """Change the side of the sample or pair of samples that brings most, while any does; -> cost.

    Changes `sides` and the two groups' loads above the mean.
    """
    cost = _cost(first, state) + _cost(second, state)
    for _ in range(4 * len(sides)):
        min_cost, single, partner = cost, -1, -1
        for place in range(len(sides)):
            changed_cost = _cost_after(first, second, loads[place], sides[place], state)
            if changed_cost < min_cost:
                min_cost, single, partner = changed_cost, place, -1
            if not sides[place]:
                changed_cost, twin = _best_swap(loads, sides, place, first, second, state)
                if changed_cost < min_cost:
                    min_cost, single, partner = changed_cost, place, twin
        if single < 0:
            break
        cost = min_cost
        sides[single] = not sides[single]
        _shift(first, second, loads[single], sides[single])
        if partner >= 0:
            sides[partner] = False
            _shift(first, second, loads[partner], False)
    return cost


@numba.njit(cache=True)
def _best_swap(loads, sides, place, first, second, state):  # type: ignore[no-untyped-def]
    """The best sample of the second group to change sides with one of the first: (cost, place)."""
    min_cost, best = np.int64(1 << 62), -1
    for twin in range(len(sides)):
        if sides[twin]:
            cost = np.int64(0)
            for kind in range(3):
                moved = loads[place, kind] - loads[twin, kind]
                cost += _cost_of(kind, first[kind] - moved, state)
                cost += _cost_of(kind, second[kind] + moved, state)
            if cost < min_cost:
                min_cost, best = cost, twin
    return min_cost, best


@numba.njit(cache=True)
def _fill(target, source):  # type: ignore[no-untyped-def]
    """Copy as `target[:] = source`, which numba takes a second to compile, with its errors."""
    for place in range(len(source)):
        target[place] = source[place]


@numba.njit(cache=True, inline="always")
def _shift(first, second, load, to_second):  # type: ignore[no-untyped-def]
    """Move a sample's loads from one group to the other."""
    sign = -1 if to_second else 1
    for kind in range(3):
        first[kind] += sign * load[kind]
        second[kind] -= sign * load[kind]


@numba.njit(cache=True, inline="always")
def _cost_of(kind, above, state):  # type: ignore[no-untyped-def]
    """Squared distance to the mean of one load; more where it is costly, or over a cap."""
    units = min(max(above * state.scale[kind] >> SCALE_BITS, -FAR), FAR)
    cost = units * units
    if units > state.near[kind]:
        cost += COSTLY * (units - state.near[kind]) * (units - state.near[kind])
    if above > state.max_above[kind]:
        cost += COSTLY * units * units
    return cost


@numba.njit(cache=True)
def _cost(above, state):  # type: ignore[no-untyped-def]
    cost = np.int64(0)
    for kind in range(3):
        cost += _cost_of(kind, above[kind], state)
    return cost


@numba.njit(cache=True, inline="always")
def _cost_after(first, second, load, in_second, state):  # type: ignore[no-untyped-def]
    """Cost of both groups after a sample has changed sides."""
    sign = 1 if in_second else -1
    cost = 0
    for kind in range(3):
        cost += _cost_of(kind, first[kind] + sign * load[kind], state)
        cost += _cost_of(kind, second[kind] - sign * load[kind], state)
    return cost


@numba.njit(cache=True)
def _breaks(above, state):  # type: ignore[no-untyped-def]
    return above[0] > state.max_above[0] or above[1] > state.max_above[1]


@numba.njit(cache=True)
def _has_room(sides, num_one, one, other, state):  # type: ignore[no-untyped-def]
    """Whether both groups have places for the samples of a division."""
    grows = len(sides) - np.int64(np.sum(sides)) - num_one
    room_one = state.starts[one + 1] - state.starts[one] - state.sizes[one]
    room_other = state.starts[other + 1] - state.starts[other] - state.sizes[other]
    return grows <= room_one and -grows <= room_other


@numba.njit(cache=True)
def _move(sides, num_one, one, other, state):  # type: ignore[no-untyped-def]
    """Move the movable samples to their sides."""
    members, starts, sizes = state.members, state.starts, state.sizes
    num = len(sides)
    movable = np.empty(num, np.int64)
    for place in range(num):
        group, at = (one, place) if place < num_one else (other, place - num_one)
        movable[place] = members[starts[group] + at]
    for group, side, had in ((one, False, num_one), (other, True, num - num_one)):
        rest = members[starts[group] + had : starts[group] + sizes[group]].copy()
        at = starts[group]
        for place in range(num):
            if sides[place] == side:
                members[at] = movable[place]
                at += 1
        _fill(members[at : at + len(rest)], rest)
        sizes[group] = at + len(rest) - starts[group]
    for place in range(num):
        if sides[place] != (place >= num_one):
            _shift(state.above[one], state.above[other], state.loads[movable[place]], sides[place])


@numba.njit(cache=True, inline="always")
def _next_bits(bits):  # type: ignore[no-untyped-def]
    """Xorshift (Marsaglia 2003)."""
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    return bits ^ (bits << np.uint64(17))
