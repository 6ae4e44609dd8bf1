"""Pairs of groups divided again, for `balance.grouping.even_out`: its kernels."""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from isobatch.common.types import IntArray

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
    """Each group's loads above the mean, shape (num_groups, 3)."""
    scale: NDArray[np.int64]
    """A load in `UNIT`s, times 2 ** SCALE_BITS, shape (3,)."""
    near: NDArray[np.int64]
    """Units above the mean beyond which a load is costly, shape (3,)."""
    max_above: NDArray[np.int64]
    """Loads above the mean that the caps allow, shape (3,)."""


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
    """As `target[:] = source`, which numba takes a second to compile, with all of its errors."""
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
