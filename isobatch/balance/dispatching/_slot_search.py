"""The search of `even_ranks`: samples change slots while squares fall. Numba.

A slot is micro-batch * num_ranks + rank. A change takes sample i from slot a to b, or exchanges it
for j. Squared distances from the micro-batch's mean then change by 2 c (q c + Db - Da) per phase,
where c is what moves, D a slot's distance, and q = 1, or 1 - 1 / ranks between micro-batches, whose
means move. Pure; the order of additions is fixed, and costs are rounded so that sums are exact.
"""

from typing import NamedTuple

import numpy as np

from isobatch.balance.kernels import copy_into, fill, inner, kernel
from isobatch.common.types import BoolArray, FloatArray, IntArray

MAX_PARTNERS = 16
"""Slots with which one exchanges samples: those whose loads lie most to the other side."""
CHANGES = 8
"""Changes per sample at most, to bound the time."""
NO_GAIN = 1e-6
"""Share of a mean slot's square that a change must bring."""
OVER = 1e6
"""Weight of sizes over their caps: no plan over one is better than one within."""
ANY_MOVE = 1e-6
"""Bytes that a moved sample counts as at least."""
ONE = np.int64(1)
"""An argument: for a number that is written in a call numba compiles the function once more."""


class SlotProblem(NamedTuple):
    """Samples, and what limits and prices their places."""

    costs: FloatArray
    """(num_samples + 1, num_phases); the last row, number -1, is of no sample: 0."""
    mean_cost: float
    """Of a slot, all phases together."""
    sizes: FloatArray
    """What fills a slot, (num_samples + 1, num_sizes), as `costs`."""
    max_sizes: FloatArray
    """Of a slot, (num_sizes,); inf: no cap."""
    num_ranks: int
    num_rounds: int
    swaps_only: bool
    sources: IntArray
    """Rank that holds each sample."""
    num_bytes: IntArray
    bytes_per_ms: float
    latency_ms: float


class SlotState(NamedTuple):
    """Slots while samples change them."""

    slots: IntArray
    first: IntArray
    """First sample of each slot, -1 if none; `after` has the next one of each sample."""
    after: IntArray
    loads: FloatArray
    """(slots, phases)."""
    distances: FloatArray
    """From the mean of the micro-batch, (slots, phases)."""
    used: FloatArray
    """Sums of sizes, (slots, num_sizes)."""
    counts: IntArray
    """Samples of each slot."""
    moves: FloatArray
    """Bytes that each rank sends, and receives, (2, ranks)."""
    stuck: BoolArray
    """Slots for which no change was found."""


@kernel
def deal(problem, order, room):  # type: ignore[no-untyped-def]
    """Samples in `order`, each to the slot that has least of what it needs; -> slots.

    A slot takes `room` samples, which is counted down, and no more than `max_sizes` while others
    can take the sample.
    """
    costs, sizes, max_sizes = problem.costs, problem.sizes, problem.max_sizes
    loads = np.zeros((len(room), costs.shape[1]))
    used = np.zeros((len(room), len(max_sizes)))
    slots = np.empty(len(order), np.int64)
    for sample in order:
        best, min_load, min_over = -1, np.inf, True
        for slot in range(len(room)):
            if room[slot] == 0:
                continue
            over = False
            for size in range(len(max_sizes)):
                over |= used[slot, size] + sizes[sample, size] > max_sizes[size]
            load = 0.0
            for phase in range(costs.shape[1]):
                load += costs[sample, phase] * (loads[slot, phase] + costs[sample, phase])
            if best < 0 or over < min_over or (over == min_over and load < min_load):
                best, min_load, min_over = slot, load, over
        slots[sample] = best
        room[best] -= 1
        for size in range(len(max_sizes)):
            used[best, size] += sizes[sample, size]
        for phase in range(costs.shape[1]):
            loads[best, phase] += costs[sample, phase]
    return slots


@kernel
def search(problem, slots):  # type: ignore[no-untyped-def]
    """Change slots while squares fall; -> those of the least time (step and move) on the way."""
    state = _begun(problem, slots)
    min_time = _time(problem, state)
    best = np.empty(len(slots), np.int64)
    copy_into(best, slots)
    changed = False
    for _ in range(CHANGES * len(slots) + len(state.used)):
        slot = _furthest(problem, state)
        if slot < 0:
            if not changed:
                break
            # others have changed since: try all slots again
            fill(state.stuck, False)
            changed = False
            continue
        i, j, other = _best_change(problem, state, slot)
        if other < 0:
            state.stuck[slot] = True
            continue
        changed = True
        state.stuck[slot] = state.stuck[other] = False
        if i >= 0:
            _take(problem, state, i, other)
        if j >= 0:
            _take(problem, state, j, slot)
        _measure(problem, state, slot // problem.num_ranks)
        _measure(problem, state, other // problem.num_ranks)
        time = _time(problem, state)
        if time < min_time:
            min_time = time
            copy_into(best, state.slots)
    return best


@inner
def _begun(problem, slots):  # type: ignore[no-untyped-def]
    num_slots, num_phases = problem.num_ranks * problem.num_rounds, problem.costs.shape[1]
    state = SlotState(
        np.empty(len(slots), np.int64),
        np.empty(num_slots, np.int64),
        np.empty(len(slots), np.int64),
        np.zeros((num_slots, num_phases)),
        np.zeros((num_slots, num_phases)),
        np.zeros((num_slots, len(problem.max_sizes))),
        np.zeros(num_slots, np.int64),
        np.zeros((2, problem.num_ranks)),
        np.zeros(num_slots, np.bool_),
    )
    copy_into(state.slots, slots)
    fill(state.first, -1)
    for sample in range(len(slots) - 1, -1, -1):
        _add(problem, state, sample, slots[sample], ONE)
        state.after[sample] = state.first[slots[sample]]
        state.first[slots[sample]] = sample
    for number in range(problem.num_rounds):
        _measure(problem, state, number)
    return state


@inner
def _furthest(problem, state):  # type: ignore[no-untyped-def]
    """The slot furthest from its mean that is not stuck; -1 if all are."""
    best, max_distance = -1, -1.0
    penalty = OVER * problem.mean_cost**2
    for slot in range(len(state.used)):
        if not state.stuck[slot]:
            distance = penalty * _over(state.used[slot], problem.max_sizes)
            for phase in range(state.loads.shape[1]):
                distance += state.distances[slot, phase] ** 2
            if distance > max_distance:
                best, max_distance = slot, distance
    return best


@inner
def _best_change(problem, state, slot):  # type: ignore[no-untyped-def]
    """The change of `slot` that brings most: (its sample, the other's, the other slot).

    A sample is -1 where only the other moves; the other slot is -1 if nothing gains enough.
    """
    num_slots, num_phases = state.loads.shape
    dots = np.zeros(num_slots)
    for other in range(num_slots):
        for phase in range(num_phases):
            dots[other] += state.distances[slot, phase] * state.distances[other, phase]
    dots[slot] = np.inf
    best_i, best_j, partner = -1, -1, -1
    max_gain = NO_GAIN * problem.mean_cost * problem.mean_cost
    members = _members(problem, state, slot)
    order = np.argsort(dots)
    apart = np.empty(num_phases)
    for place in range(min(MAX_PARTNERS, num_slots - 1)):
        other = order[place]
        for phase in range(num_phases):
            apart[phase] = state.distances[other, phase] - state.distances[slot, phase]
        scale = 1.0
        if slot // problem.num_ranks != other // problem.num_ranks:
            scale -= 1.0 / problem.num_ranks
        others = _members(problem, state, other)
        used = state.used[slot], state.used[other]
        gain, i, j = _best_pair(problem, (members, others), (scale, apart), used, max_gain)
        if gain > max_gain:
            max_gain, best_i, best_j, partner = gain, i, j, other
    return best_i, best_j, partner


@inner
def _best_pair(problem, members, shift, used, min_gain):  # type: ignore[no-untyped-def]
    """The samples of two slots that lower squares most: (by how much, of the first, of the second).

    One loop without calls: numba counts references to every array of a tuple, per call.
    """
    costs, sizes, max_sizes = problem.costs, problem.sizes, problem.max_sizes
    scale, apart = shift
    penalty = OVER * problem.mean_cost**2
    over = _over(used[0], max_sizes) + _over(used[1], max_sizes)
    best = min_gain, np.int64(-1), np.int64(-1)
    for i in members[0]:
        for j in members[1]:
            gain = 0.0
            for phase in range(costs.shape[1]):
                moved = costs[i, phase] - costs[j, phase]
                gain -= 2.0 * moved * (scale * moved + apart[phase])
            gain += penalty * over
            for size in range(len(max_sizes)):
                added = sizes[i, size] - sizes[j, size]
                cap = max_sizes[size]
                share = max(0.0, used[0][size] - added - cap) / cap
                other_share = max(0.0, used[1][size] + added - cap) / cap
                gain -= penalty * (share**2 + other_share**2)
            if gain > best[0]:
                best = gain, i, j
    return best


@inner
def _members(problem, state, slot):  # type: ignore[no-untyped-def]
    """Samples of a slot, after -1 for none if not only exchanges are wanted."""
    none = 0 if problem.swaps_only else 1
    members = np.empty(none + state.counts[slot], np.int64)
    for place in range(none):
        members[place] = -1
    sample = state.first[slot]
    for place in range(none, len(members)):
        members[place] = sample
        sample = state.after[sample]
    return members


@inner
def _take(problem, state, sample, target):  # type: ignore[no-untyped-def]
    """Put a sample into another slot."""
    first, after, source = state.first, state.after, state.slots[sample]
    if first[source] == sample:
        first[source] = after[sample]
    else:
        before = first[source]
        while after[before] != sample:
            before = after[before]
        after[before] = after[sample]
    after[sample] = first[target]
    first[target] = sample
    _add(problem, state, sample, source, -ONE)
    _add(problem, state, sample, target, ONE)
    state.slots[sample] = target


@inner
def _add(problem, state, sample, slot, sign):  # type: ignore[no-untyped-def]
    """Count a sample in a slot, or no longer."""
    for phase in range(state.loads.shape[1]):
        state.loads[slot, phase] += sign * problem.costs[sample, phase]
    for size in range(state.used.shape[1]):
        state.used[slot, size] += sign * problem.sizes[sample, size]
    state.counts[slot] += sign
    source, target = problem.sources[sample], slot % problem.num_ranks
    if source != target:
        moved = sign * max(float(problem.num_bytes[sample]), ANY_MOVE)
        state.moves[0, source] += moved
        state.moves[1, target] += moved


@inner
def _measure(problem, state, number):  # type: ignore[no-untyped-def]
    """Set the distances of a micro-batch's slots from their mean."""
    start = number * problem.num_ranks
    for phase in range(state.loads.shape[1]):
        mean = 0.0
        for slot in range(start, start + problem.num_ranks):
            mean += state.loads[slot, phase]
        mean /= problem.num_ranks
        for slot in range(start, start + problem.num_ranks):
            state.distances[slot, phase] = state.loads[slot, phase] - mean


@inner
def _over(used, max_sizes):  # type: ignore[no-untyped-def]
    """Squared shares of the caps by which a slot is over them."""
    over = 0.0
    for size in range(len(max_sizes)):
        over += (max(0.0, used[size] - max_sizes[size]) / max_sizes[size]) ** 2
    return over


@inner
def _time(problem, state):  # type: ignore[no-untyped-def]
    """Time of the step and its move; what is over a cap costs more than any plan within."""
    time = 0.0
    for number in range(problem.num_rounds):
        start = number * problem.num_ranks
        for phase in range(state.loads.shape[1]):
            slowest = 0.0
            for slot in range(start, start + problem.num_ranks):
                slowest = max(slowest, state.loads[slot, phase])
            time += slowest
    max_bytes = 0.0
    for way in range(2):
        for rank in range(problem.num_ranks):
            max_bytes = max(max_bytes, state.moves[way, rank])
    if max_bytes > ANY_MOVE / 2:
        time += problem.latency_ms + max_bytes / problem.bytes_per_ms
    for slot in range(len(state.used)):
        for size in range(len(problem.max_sizes)):
            over = max(0.0, state.used[slot, size] - problem.max_sizes[size])
            time += OVER * over * problem.mean_cost
    return time
