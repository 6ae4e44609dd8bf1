"""Which layers of one rank must be recomputed: every minimal choice that fits into its memory.
Numba.

For `engine.planning.recompute` and `engine.planning.search.branch_and_bound`. The peak is that of
`engine.simulator.memory`, byte for byte, for one rank and one choice of layers: 3 us for 20 layers
and 64 micro-batches.

Layers of a kind in one stage cost the same, so a choice is how many of each kind, and it is always
the first ones: what a recomputed layer brings back for its own turn comes on top of what the layers
before it left, so the later a layer is, the more it matters that those before it left little. One
more never needs more memory. So for given numbers of all kinds but one the least number of that one
is found by bisection; and kind by kind, the least number with which the kinds that follow can still
make it fit, so that what cannot fit is never looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.simulator.schedule import PassKind, Schedule

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = (int(kind) for kind in list(PassKind)[:4])

MOST_TRIED = 20_000
"""Choices of one rank that are looked at: thousands suffice for a handful of kinds; .1 s."""
MOST_FOUND = 2_000
"""Of which so many fit at most."""


class LayerMemory(NamedTuple):
    """What a rank's memory holds of layers, from `Costs`."""

    saved: IntArray
    """(layers, micro_batches), as the next two."""
    kept: IntArray
    working: IntArray
    state: IntArray
    """(layers,)."""
    kind: IntArray
    """(layers,): a number per kind of layer; -1 where recomputation frees nothing."""
    extra_ns: IntArray
    """(layers,): time of recomputation, all micro-batches."""


class RankOrder(NamedTuple):
    """What a rank runs, in order; (actions,)."""

    kinds: IntArray
    chunks: IntArray
    """Which of the rank's stages."""
    micro_batches: IntArray


class RecomputeGroups(NamedTuple):
    """Layers of a rank by group, those of a group alike, and which are recomputed at the moment."""

    members: IntArray
    firsts: IntArray
    """(groups + 1,): of each group in `members`."""
    counts: IntArray
    """(groups,): that are recomputed, the first ones."""
    recompute: NDArray[np.bool_]
    """(layers,), of the model."""


def layer_memory(costs: Costs) -> LayerMemory:
    """Layers' bytes, and which are alike. A layer whose input is more than its activations is never
    recomputed.
    """
    frees = (costs.saved_bytes >= costs.kept_bytes).all(axis=1) & (
        costs.saved_bytes > costs.kept_bytes
    ).any(axis=1)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(costs.kinds))}
    kind = np.array([numbers[kind] for kind in costs.kinds])
    return LayerMemory(
        saved=np.ascontiguousarray(costs.saved_bytes),
        kept=np.ascontiguousarray(costs.kept_bytes),
        working=np.ascontiguousarray(costs.working_bytes),
        state=np.ascontiguousarray(costs.state_bytes),
        kind=np.where(frees, kind, -1),
        extra_ns=costs.recompute_ns.sum(axis=1),
    )


def rank_order(schedule: Schedule, rank: int) -> RankOrder:
    """A rank's part of a schedule."""
    own = slice(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1])
    return RankOrder(
        schedule.kinds[own].copy(),
        schedule.stages[own] // schedule.num_ranks,
        schedule.micro_batches[own],
    )


@numba.njit(cache=True)
def peak_bytes(layers, order, starts, ends, recompute):  # type: ignore[no-untyped-def]
    """The most that a rank holds whose stages are the layers `starts[i]:ends[i]`; `recompute` of
    all layers.

    As `engine.simulator.stages.stage_costs` and `engine.simulator.memory.memory_of`.
    """
    shape = len(starts), layers.saved.shape[1]
    live, held = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    most, apart = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    now = np.int64(0)
    for chunk in range(len(starts)):
        for layer in range(starts[chunk], ends[chunk]):
            now += layers.state[layer]
            left = layers.kept[layer] if recompute[layer] else layers.saved[layer]
            _add_layer(layers, layer, left, live[chunk], held[chunk], most[chunk], apart[chunk])
    peak = now
    for at in range(len(order.kinds)):
        kind, chunk, number = order.kinds[at], order.chunks[at], order.micro_batches[at]
        left = live[chunk, number]
        if kind == FORWARD:
            peak = max(peak, now + most[chunk, number])
            now += left
        elif kind == BACKWARD:
            now -= left
            peak = max(peak, now + most[chunk, number])
        elif kind == INPUT_GRAD:
            peak = max(peak, now - left + apart[chunk, number])
            now += held[chunk, number] - left
        elif kind == WEIGHT_GRAD:
            now -= held[chunk, number]
    return peak


@numba.njit(cache=True)
def _add_layer(layers, layer, left, live, held, most, apart):  # type: ignore[no-untyped-def]
    """Add the next layer to what a stage holds of each micro-batch, (micro_batches,) each.

    `live`: what the forward pass leaves; `held`: the same with all that was recomputed. `most` and
    `apart`: at most, on top of what is live before: in the forward or joint backward pass, and if
    the weights' gradients come later.
    """
    for number in range(len(live)):
        whole = max(layers.saved[layer, number], left[number])
        turn = live[number] + whole + layers.working[layer, number]
        most[number] = max(most[number], turn)
        # what comes behind a layer is whole when it is that layer's turn to go back
        apart[number] = max(apart[number] + whole, turn)
        live[number] += left[number]
        held[number] += whole


@numba.njit(cache=True)
def _groups(kind, starts, ends):  # type: ignore[no-untyped-def]
    """Layers that are alike: -> (layers, first of each group); those of a group in order, the
    largest group last.
    """
    count = 0
    for chunk in range(len(starts)):
        count += ends[chunk] - starts[chunk]
    keys, places = np.empty(count, np.int64), np.empty(count, np.int64)
    num_kinds, count = kind.max() + 1, 0
    for chunk in range(len(starts)):
        for layer in range(starts[chunk], ends[chunk]):
            if kind[layer] >= 0:
                keys[count], places[count] = chunk * num_kinds + kind[layer], layer
                count += 1
    order = np.argsort(keys[:count], kind="mergesort")
    keys, places = keys[:count][order], places[:count][order]
    bounds = [0]
    for at in range(1, count):
        if keys[at] != keys[at - 1]:
            bounds.append(at)
    bounds.append(count)
    sizes = np.diff(np.array(bounds))
    layers, firsts = np.empty(count, np.int64), np.zeros(len(sizes) + 1, np.int64)
    for at, group in enumerate(np.argsort(sizes, kind="mergesort")):
        firsts[at + 1] = firsts[at] + sizes[group]
        layers[firsts[at] : firsts[at + 1]] = places[bounds[group] : bounds[group + 1]]
    return layers, firsts


@numba.njit(cache=True)
def _set(search, group, count):  # type: ignore[no-untyped-def]
    """Recompute the first `count` layers of a group, and no other of it."""
    search.counts[group] = count
    first = search.firsts[group]
    for at in range(first, search.firsts[group + 1]):
        search.recompute[search.members[at]] = at < first + count


@numba.njit(cache=True)
def _least_of(search, layers, order, starts, ends, memory_bytes, group):  # type: ignore[no-untyped-def]
    """Recompute as few layers of a group as fit, the other groups as they are; -> whether any
    number fits.
    """
    size = search.firsts[group + 1] - search.firsts[group]
    low, high = 0, size + 1
    while low < high:
        middle = (low + high) // 2
        _set(search, group, middle)
        if peak_bytes(layers, order, starts, ends, search.recompute) <= memory_bytes:
            high = middle
        else:
            low = middle + 1
    _set(search, group, min(low, size))
    return low <= size


@numba.njit(cache=True)
def _complete(search, layers, order, starts, ends, memory_bytes, first):  # type: ignore[no-untyped-def]
    """Give the groups from `first` on the least numbers that fit, one after the other; all of them
    must fit.
    """
    for group in range(first, len(search.counts)):
        _set(search, group, search.firsts[group + 1] - search.firsts[group])
    for group in range(first, len(search.counts)):
        _least_of(search, layers, order, starts, ends, memory_bytes, group)


@numba.njit(cache=True)
def _next(search, each_ns, least_ns):  # type: ignore[no-untyped-def]
    """One more of a group, none of those behind it, leaving out what takes `least_ns`; -> that
    group, or -1.

    More of the last group that has any, with as many of the others, would not be minimal.
    """
    group = len(search.counts) - 1
    while group >= 0 and search.counts[group] == 0:
        group -= 1
    while group > 0:
        _set(search, group, 0)
        group -= 1
        if search.counts[group] < search.firsts[group + 1] - search.firsts[group]:
            _set(search, group, search.counts[group] + 1)
            if (search.counts * each_ns).sum() < least_ns:
                return group
    return -1


@numba.njit(cache=True)
def minimal_choices(layers, order, starts, ends, memory_bytes, only_least):  # type: ignore[no-untyped-def]
    """Choices of recomputed layers with which a rank fits; without any one of them it would not.

    -> ((choices, layers) bool, whether that is all of them). None if the rank does not fit at all. With `only_least`
    the last one takes least time, of all micro-batches together, and others are left out.
    """
    members, firsts = _groups(layers.kind, starts, ends)
    num_groups, num_layers = len(firsts) - 1, len(layers.kind)
    search = RecomputeGroups(
        members, firsts, np.zeros(num_groups, np.int64), np.zeros(num_layers, np.bool_)
    )
    for group in range(num_groups):
        _set(search, group, firsts[group + 1] - firsts[group])
    if peak_bytes(layers, order, starts, ends, search.recompute) > memory_bytes:
        return np.zeros((0, num_layers), np.bool_), True
    each_ns = np.array(
        [layers.extra_ns[members[first]] if len(members) else 0 for first in firsts[:-1]]
    )
    found = np.zeros((MOST_FOUND, num_groups), np.int64)
    for group in np.argsort(-each_ns):  # a good one to begin with
        _least_of(search, layers, order, starts, ends, memory_bytes, group)
    found[0] = search.counts
    num_found, tried, least_ns, changed = 1, 0, (search.counts * each_ns).sum(), -1
    while tried < MOST_TRIED and num_found < MOST_FOUND:
        tried += 1
        _complete(search, layers, order, starts, ends, memory_bytes, changed + 1)
        time = (search.counts * each_ns).sum()
        if time < least_ns or not only_least:
            found[num_found], least_ns = search.counts, min(time, least_ns)
            num_found += 1
        changed = _next(search, each_ns, least_ns if only_least else np.iinfo(np.int64).max)
        if changed < 0:
            break
    kept = found[num_found - 1 : num_found] if only_least else _minimal(found[:num_found])
    return _masks(search, kept), changed < 0


@numba.njit(cache=True)
def _minimal(counts):  # type: ignore[no-untyped-def]
    """Those of which no other is a part, each once."""
    keep = np.ones(len(counts), np.bool_)
    for one in range(len(counts)):
        for other in range(len(counts)):
            if one != other and keep[other] and (counts[other] <= counts[one]).all():
                keep[one] = False
                break
    return counts[keep]


@numba.njit(cache=True)
def _masks(search, counts):  # type: ignore[no-untyped-def]
    masks = np.zeros((len(counts), len(search.recompute)), np.bool_)
    for row in range(len(counts)):
        for group in range(len(search.counts)):
            _set(search, group, counts[row, group])
        masks[row] = search.recompute
    return masks


@numba.njit(cache=True)
def stage_peaks(layers, order, borders, recompute):  # type: ignore[no-untyped-def]
    """`peak_bytes` of a rank for each stage that it could have, `borders` (stages, 2); `recompute`
    of all layers.
    """
    peaks = np.empty(len(borders), np.int64)
    for at in range(len(borders)):
        peaks[at] = peak_bytes(layers, order, borders[at, :1], borders[at, 1:], recompute)
    return peaks
