"""Minimal recomputation with which one rank fits into its memory. Numba.

The peak is that of `engine.simulator.evaluate`, byte for byte, for one rank and one choice: 3 us
for 20 layers and 64 micro-batches.

Layers of a kind in one stage cost the same, so a choice is a number per kind, and the first layers
are recomputed: what a recomputed layer needs in its turn comes on top of what those before it left.
One more never needs more memory: for given numbers of all other kinds the least number of one is
found by bisection, and kind by kind the least with which the following kinds can still make it fit.
"""

from typing import NamedTuple

import numpy as np

from isobatch.balance.kernels import copy_into, inner, kernel
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.schedule import PassKind, Schedule
from isobatch.engine.simulator.stages import message_bytes

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = (int(kind) for kind in list(PassKind)[:4])

MOST_TRIED = 2_000
"""Choices of one rank that are tried: thousands suffice for a handful of kinds; .1 s."""


class LayerMemory(NamedTuple):
    """Memory of layers and time of their recomputation, from `Costs`."""

    saved: IntArray
    """(layers, micro_batches), as the next five."""
    recomputed: IntArray
    """What of `saved` is live between the passes if the layer is recomputed: its input."""
    working: IntArray
    input_working: IntArray
    weight_working: IntArray
    deferred: IntArray
    state: IntArray
    """(layers,)."""
    messages: IntArray
    """(layers + 1, micro_batches): at each cut, on their way; 0 in a pipeline of one rank."""
    kind: IntArray
    """(layers,): number of the layer's kind; -1 where recomputation frees nothing."""
    extra_ns: IntArray
    """(layers,): time of recomputation, all micro-batches."""


class ActionOrder(NamedTuple):
    """Actions in order; (actions,)."""

    kinds: IntArray
    stages: IntArray
    """Numbers among the rank's stages."""
    micro_batches: IntArray


class RankStages(NamedTuple):
    """A rank with its stages, the layers `starts[i]:ends[i]`, and its memory limit."""

    layers: LayerMemory
    order: ActionOrder
    starts: IntArray
    ends: IntArray
    memory_bytes: int


class RecomputeGroups(NamedTuple):
    """A rank's layers in groups of equal ones, and which are recomputed now."""

    members: IntArray
    firsts: IntArray
    """(groups + 1,): first member of each group."""
    counts: IntArray
    """(groups,): recomputed layers, the first ones of the group."""
    recompute: BoolArray
    """(layers,), of the model."""


def layer_memory(costs: Costs, num_ranks: int) -> LayerMemory:
    """Memory of layers in a pipeline of so many ranks.

    A layer whose input is larger than its activations is never recomputed.
    """
    saved, recomputed = costs.saved_bytes, costs.kept_bytes
    frees = (saved >= recomputed).all(axis=1) & (saved > recomputed).any(axis=1)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(costs.kinds))}
    kind = np.array([numbers[kind] for kind in costs.kinds])
    return LayerMemory(
        saved=np.ascontiguousarray(saved),
        recomputed=np.ascontiguousarray(recomputed),
        working=np.ascontiguousarray(costs.working_bytes),
        input_working=np.ascontiguousarray(costs.input_working_bytes),
        weight_working=np.ascontiguousarray(costs.weight_working_bytes),
        deferred=np.ascontiguousarray(costs.deferred_bytes),
        state=np.ascontiguousarray(costs.state_bytes),
        messages=message_bytes(costs) * (num_ranks > 1),
        kind=np.where(frees, kind, -1),
        extra_ns=costs.recompute_ns.sum(axis=1),
    )


def rank_order(schedule: Schedule, rank: int) -> ActionOrder:
    """A rank's part of a schedule."""
    actions = slice(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1])
    stages = schedule.stages[actions] // schedule.num_ranks
    return ActionOrder(schedule.kinds[actions], stages, schedule.micro_batches[actions])


@kernel
def peak_bytes(layers, order, starts, ends, recompute):  # type: ignore[no-untyped-def]
    """Peak of a rank whose stages are the layers `starts[i]:ends[i]`; `recompute`: of all layers.

    Equal to `engine.simulator.evaluate.memory_of`.
    """
    # memory of each stage and micro-batch
    shape = len(starts), layers.saved.shape[1]
    live, held = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    forward, joint = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    apart, weights = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    now = messages = np.int64(0)
    for chunk in range(len(starts)):
        for number in range(shape[1]):
            before, after = layers.messages[starts[chunk]], layers.messages[ends[chunk]]
            messages = max(messages, before[number] + after[number])
        peaks = forward[chunk], joint[chunk], apart[chunk], weights[chunk]
        for layer in range(starts[chunk], ends[chunk]):
            now += layers.state[layer]
            activations = layers.recomputed[layer] if recompute[layer] else layers.saved[layer]
            _add_layer(layers, layer, activations, live[chunk], held[chunk], peaks)
    # live bytes along the rank's order
    now += messages
    peak = now
    for at in range(len(order.kinds)):
        kind, chunk, number = order.kinds[at], order.stages[at], order.micro_batches[at]
        activations = live[chunk, number]
        if kind == FORWARD:
            peak = max(peak, now + forward[chunk, number])
            now += activations
        elif kind == BACKWARD:
            now -= activations
            peak = max(peak, now + joint[chunk, number])
        elif kind == INPUT_GRAD:
            peak = max(peak, now - activations + apart[chunk, number])
            now += held[chunk, number] - activations
        elif kind == WEIGHT_GRAD:
            peak = max(peak, now + weights[chunk, number])
            now -= held[chunk, number]
    return peak


@inner
def _add_layer(layers, layer, live_bytes, live, held, peaks):  # type: ignore[no-untyped-def]
    """Add the next layer to a stage's memory of each micro-batch, (micro_batches,) each.

    `live`: between the passes; `held`: for deferred weight gradients. `peaks`: of the forward pass
    and the joint backward pass, of one without weight gradients, and of these on top of `held`.
    """
    forward, joint, apart, weights = peaks
    for number in range(len(live)):
        whole = max(layers.saved[layer, number], live_bytes[number])
        working, of_input = layers.working[layer, number], layers.input_working[layer, number]
        forward[number] = max(forward[number], live[number] + whole + min(working, of_input))
        joint[number] = max(joint[number], live[number] + whole + working)
        # the layers after a layer have left what they defer when its backward pass runs
        deferred = layers.deferred[layer, number]
        turn = live[number] + max(whole, deferred) + of_input
        apart[number] = max(apart[number] + deferred, turn)
        # the weight gradients of the layers before it are done, and their inputs released
        weights[number] = max(weights[number], layers.weight_working[layer, number] - held[number])
        live[number] += live_bytes[number]
        held[number] += deferred


@inner
def _groups(kind, starts, ends):  # type: ignore[no-untyped-def]
    """Groups of equal layers, the largest group last: -> (layers, first of each group)."""
    # sizes of all stages and kinds, also of those without layers
    num_kinds = 0
    for layer in range(len(kind)):
        num_kinds = max(num_kinds, kind[layer] + 1)
    sizes = np.zeros(len(starts) * num_kinds, np.int64)
    count = num_groups = 0
    for chunk in range(len(starts)):
        for layer in range(starts[chunk], ends[chunk]):
            if kind[layer] >= 0:
                key = chunk * num_kinds + kind[layer]
                count += 1
                num_groups += sizes[key] == 0
                sizes[key] += 1
    # by size, those of one size by stage and kind
    layers, firsts = np.empty(count, np.int64), np.zeros(num_groups + 1, np.int64)
    for group in range(num_groups):
        best = -1
        for key in range(len(sizes)):
            if sizes[key] > 0 and (best < 0 or sizes[key] < sizes[best]):
                best = key
        sizes[best] = 0
        at = firsts[group]
        chunk = best // num_kinds
        for layer in range(starts[chunk], ends[chunk]):
            if kind[layer] == best % num_kinds:
                layers[at] = layer
                at += 1
        firsts[group + 1] = at
    return layers, firsts


@inner
def _fits(rank, recompute):  # type: ignore[no-untyped-def]
    peak = peak_bytes(rank.layers, rank.order, rank.starts, rank.ends, recompute)
    return peak <= rank.memory_bytes


@inner
def _set(groups, group, count):  # type: ignore[no-untyped-def]
    """Recompute the first `count` layers of a group, and no other of it."""
    groups.counts[group] = count
    first = groups.firsts[group]
    for at in range(first, groups.firsts[group + 1]):
        groups.recompute[groups.members[at]] = at < first + count


@inner
def _set_fewest(groups, rank, group):  # type: ignore[no-untyped-def]
    """Recompute as few layers of one group as fit; -> whether any number fits."""
    size = groups.firsts[group + 1] - groups.firsts[group]
    low, high = 0, size + 1
    while low < high:
        middle = (low + high) // 2
        _set(groups, group, middle)
        if _fits(rank, groups.recompute):
            high = middle
        else:
            low = middle + 1
    _set(groups, group, min(low, size))
    return low <= size


@inner
def _complete(groups, rank, first):  # type: ignore[no-untyped-def]
    """Give the groups from `first` on the least numbers that fit, one after the other."""
    for group in range(first, len(groups.counts)):
        _set(groups, group, groups.firsts[group + 1] - groups.firsts[group])
    for group in range(first, len(groups.counts)):
        _set_fewest(groups, rank, group)


@inner
def _time(groups, each_ns):  # type: ignore[no-untyped-def]
    """Of all that is recomputed now."""
    time = np.int64(0)
    for group in range(len(each_ns)):
        time += groups.counts[group] * each_ns[group]
    return time


@inner
def _next(groups, each_ns, best_ns):  # type: ignore[no-untyped-def]
    """One more of a group and none of those after it, under `best_ns`; -> that group, or -1.

    More of the last group that has any, with as many of the others, would not be minimal.
    """
    group = len(groups.counts) - 1
    while group >= 0 and groups.counts[group] == 0:
        group -= 1
    while group > 0:
        _set(groups, group, 0)
        group -= 1
        if groups.counts[group] < groups.firsts[group + 1] - groups.firsts[group]:
            _set(groups, group, groups.counts[group] + 1)
            if _time(groups, each_ns) < best_ns:
                return group
    return -1


@kernel
def fastest_choice(layers, order, starts, ends, memory_bytes):  # type: ignore[no-untyped-def]
    """-> (recomputed layers with which a rank fits, (layers,) bool, of least time; choices tried).

    0 tried if none fits.
    """
    rank = RankStages(layers, order, starts, ends, memory_bytes)
    members, firsts = _groups(layers.kind, starts, ends)
    num_groups, num_layers = len(firsts) - 1, len(layers.kind)
    groups = RecomputeGroups(
        members, firsts, np.zeros(num_groups, np.int64), np.zeros(num_layers, np.bool_)
    )
    # everything recomputed
    for group in range(num_groups):
        _set(groups, group, firsts[group + 1] - firsts[group])
    if not _fits(rank, groups.recompute):
        return groups.recompute, 0
    # a good first choice: least of the slowest groups first
    each_ns, saved_ns = np.empty(num_groups, np.int64), np.empty(num_groups, np.int64)
    for group in range(num_groups):
        each_ns[group] = layers.extra_ns[members[firsts[group]]]
        saved_ns[group] = -each_ns[group]
    for group in np.argsort(saved_ns):
        _set_fewest(groups, rank, group)
    best_ns = _time(groups, each_ns)
    best = np.empty(num_groups, np.int64)
    copy_into(best, groups.counts)
    # all choices, the first group's number changing slowest
    changed, tried = -1, 0
    while tried < MOST_TRIED:
        tried += 1
        _complete(groups, rank, changed + 1)
        time = _time(groups, each_ns)
        if time < best_ns:
            best_ns = time
            copy_into(best, groups.counts)
        changed = _next(groups, each_ns, best_ns)
        if changed < 0:
            break
    for group in range(num_groups):
        _set(groups, group, best[group])
    return groups.recompute, tried
