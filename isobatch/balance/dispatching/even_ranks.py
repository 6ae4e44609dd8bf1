"""Samples to ranks and micro-batches so that several loads are even at once.

For `loaders.rebalance` and `rollouts`. OrchMLLM balances phase by phase, which needs an exchange per
phase; who moves a whole sample moves its vision and its LLM tokens together, so one assignment has
to be even in all loads. Costs are times (ms) of each phase. Ranks wait for the slowest in each
phase of each micro-batch, so a step takes the sum of those maxima (`step_ms`).

A plan is a number per sample, its slot: micro-batch * num_ranks + rank. The search (`even_ranks`)
moves samples, or exchanges two, between the slot that is furthest from the mean of its micro-batch
and others, always the change that lowers the sum of squared distances most. It begins where samples
are, and keeps the prefix of its changes after which step and move together take the least time;
and from scratch, costliest sample first to the slot least loaded with what it needs, where batches
then go to ranks that hold much of them (`place_batches`). The better of both counts, or no change.

8 ranks of 8 samples: 1 ms; 64 of 64: .4 s; within 1 to 2 % of `bound_ms` from some 8 samples per
slot on. Pure and deterministic, ties included: each rank computes the same plan.
"""

from dataclasses import dataclass

import numba
import numpy as np

from isobatch.balance.dispatching.node_placement import place_batches
from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray

MAX_PARTNERS = 16
"""Slots with which one exchanges samples: those whose loads lie most to the other side."""
CHANGES = 8
"""Changes per sample at most, to bound the time."""
EXACT_BITS = 48
"""Bits of the sum of costs that are kept."""
NO_GAIN = 1e-6
"""Share of the squares that a change must bring."""
OVER = 1e6
"""Cost of a token over the cap, in mean slots: no plan over it is better than one within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What moving samples between ranks costs."""

    num_bytes: IntArray
    """Bytes that travel with each sample, (num_samples,)."""
    bytes_per_ms: float
    """Of one rank, each way."""
    latency_ms: float = 0.0
    """Of an exchange, however small."""

    def ms(self, from_ranks: IntArray, to_ranks: IntArray, num_ranks: int) -> float:
        """Time of an exchange: of the rank that sends or receives most; 0 without any move."""
        moved = from_ranks != to_ranks
        if not moved.any():
            return 0.0
        sums = [
            np.bincount(ranks[moved], self.num_bytes[moved], num_ranks)
            for ranks in (from_ranks, to_ranks)
        ]
        return self.latency_ms + float(np.max(sums)) / self.bytes_per_ms


def step_ms(costs: FloatArray, slots: IntArray, num_ranks: int) -> float:
    """Time of a step: per micro-batch and phase, that of the slowest rank.

    `costs`: float64, (num_samples, num_phases); `slots`: int64, (num_samples,).

    >>> step_ms(np.array([[1.0, 0], [0, 3]]), np.array([0, 1]), 2)
    4.0
    """
    loads = slot_loads(costs, slots, num_ranks)
    return float(loads.max(axis=1).sum()) if len(loads) else 0.0


def slot_loads(costs: FloatArray, slots: IntArray, num_ranks: int) -> FloatArray:
    """Sums of each phase, (micro_batches, num_ranks, num_phases)."""
    num_rounds = int(slots.max(initial=-1)) // num_ranks + 1
    loads = np.zeros((num_rounds * num_ranks, costs.shape[1]))
    np.add.at(loads, slots, costs)
    return loads.reshape(num_rounds, num_ranks, costs.shape[1])


def bound_ms(costs: FloatArray, num_ranks: int) -> float:
    """Time that no plan of these samples undercuts: the mean of ranks, or the costliest sample.

    >>> bound_ms(np.array([[1.0, 2], [1, 9]]), 2)
    10.0
    """
    return float(np.maximum(costs.sum(axis=0) / num_ranks, costs.max(axis=0, initial=0)).sum())


def even_ranks(
    costs: FloatArray,
    *,
    num_ranks: int,
    num_rounds: int = 1,
    start: IntArray | None = None,
    move: MoveCosts | None = None,
    keep_sizes: bool = False,
    tokens: IntArray | None = None,
    max_tokens: int | None = None,
    ranks_per_node: int = 8,
) -> IntArray:
    """Slot of each sample for a step of little time, moves included; int64, (num_samples,).

    `costs`: ms of each phase, float64, (num_samples, num_phases), finite and not negative.
    `num_rounds`: micro-batches of each rank. `start`: the slots that samples are in; with `move`
    they stay there unless the step gains more than the move takes, and without `start` moves are
    free. `keep_sizes`: slots keep the number of samples that they have in `start`, or are of sizes
    that differ by one at most. `tokens` and `max_tokens`: cap of a slot; plans over it are
    returned only if none within was found. `ranks_per_node`: of `place_batches`.

    ConfigError for costs or a start that do not fit.

    >>> costs = np.array([[4.0, 1], [4, 1], [0, 3], [0, 3]])
    >>> start = np.array([0, 0, 1, 1])
    >>> slots = even_ranks(costs, num_ranks=2, start=start)
    >>> step_ms(costs, start, 2), step_ms(costs, slots, 2)
    (14.0, 8.0)
    """
    costs = _checked_costs(costs, num_ranks, num_rounds)
    num_samples, num_slots = len(costs), num_ranks * num_rounds
    if start is not None and (
        len(start) != num_samples or start.min(initial=0) < 0 or start.max(initial=0) >= num_slots
    ):
        raise ConfigError(
            f"start has {len(start)} slots up to {start.max(initial=0)} for {num_samples} samples;"
            f" give one below {num_slots} for each"
        )
    if not num_samples or num_slots == 1:
        return np.zeros(num_samples, np.int64) if start is None else start.astype(np.int64)
    caps = np.zeros(num_samples, np.int64), np.int64(0)
    if tokens is not None and max_tokens is not None:
        caps = np.ascontiguousarray(tokens, np.int64), np.int64(max_tokens)
    free = MoveCosts(num_bytes=np.zeros(num_samples, np.int64), bytes_per_ms=1.0)
    move = move or free
    num_bytes = np.ascontiguousarray(move.num_bytes, np.int64)
    rates = move.bytes_per_ms, move.latency_ms

    def searched(slots: IntArray, ranks: IntArray, prices: tuple[float, float]) -> IntArray:
        best = slots.copy()
        shape = num_ranks, num_rounds, keep_sizes
        _search(costs, *caps, slots.copy(), shape, num_bytes, ranks, *prices, best)
        return best

    sizes = np.full(num_slots, num_samples)
    if keep_sizes:
        sizes = np.full(num_slots, num_samples // num_slots)
        sizes[: num_samples % num_slots] += 1
        if start is not None:
            sizes = np.bincount(start, minlength=num_slots)
    order = np.argsort(-costs.sum(axis=1), kind="stable")
    dealt = _deal(costs, order, *caps, sizes.astype(np.int64))
    sources = np.zeros(num_samples, np.int64) if start is None else start % num_ranks
    fresh = searched(dealt, sources, (np.inf, 0.0))
    if start is None:
        return fresh
    start = start.astype(np.int64)
    if not keep_sizes or len(set(sizes.tolist())) == 1:
        fresh = _placed(fresh, sources, num_bytes, num_ranks, ranks_per_node)
    plans = start, searched(start, sources, rates), fresh

    def total(slots: IntArray) -> float:
        used = np.bincount(slots, caps[0], num_slots)
        over = np.maximum(used - caps[1], 0).sum() if caps[1] else 0.0
        moves = move.ms(sources, slots % num_ranks, num_ranks)
        return step_ms(costs, slots, num_ranks) + moves + over * OVER

    return min(plans, key=total)


def _checked_costs(costs: FloatArray, num_ranks: int, num_rounds: int) -> FloatArray:
    if num_ranks < 1 or num_rounds < 1:
        raise ConfigError(f"{num_ranks} ranks, {num_rounds} micro-batches; give at least 1 of each")
    costs = np.ascontiguousarray(costs, np.float64)
    if costs.ndim != 2:
        raise ConfigError(f"costs have shape {costs.shape}; give (num_samples, num_phases)")
    wrong = np.flatnonzero(~((costs >= 0) & np.isfinite(costs)).all(axis=1))
    if len(wrong):
        raise ConfigError(
            f"costs of sample {wrong[0]} are {costs[wrong[0]].tolist()}; give finite ones from 0 on"
        )
    # whole multiples of a power of 2, so that sums are exact, and equal on all machines
    exponent = np.frexp(costs.max(initial=0))[1] + len(costs).bit_length() - EXACT_BITS
    return np.asarray(np.ldexp(np.rint(np.ldexp(costs, -exponent)), exponent))


def _placed(
    slots: IntArray, sources: IntArray, num_bytes: IntArray, num_ranks: int, ranks_per_node: int
) -> IntArray:
    """The same batches on ranks that hold much of them, micro-batch by micro-batch."""
    placed = slots.copy()
    for number in range(int(slots.max()) // num_ranks + 1):
        rows = np.flatnonzero(slots // num_ranks == number)
        rows = rows[np.argsort(sources[rows], kind="stable")]
        offsets = np.searchsorted(sources[rows], np.arange(num_ranks + 1))
        batches = slots[rows] % num_ranks
        ranks = place_batches(num_bytes[rows], batches, offsets, ranks_per_node=ranks_per_node)
        placed[rows] = number * num_ranks + ranks[batches]
    return placed


@numba.njit(cache=True)
def _deal(costs, order, tokens, max_tokens, sizes):  # type: ignore[no-untyped-def]
    """Samples in `order`, each to the slot that has least of what it needs; -> slots.

    A slot takes `sizes` samples at most, and no more than `max_tokens` while others have room.
    """
    num_samples, num_phases = costs.shape
    loads = np.zeros((len(sizes), num_phases))
    used = np.zeros(len(sizes), np.int64)
    room = sizes.copy()
    slots = np.empty(num_samples, np.int64)
    for sample in order:
        best, min_load, is_over = -1, np.inf, True
        for slot in range(len(sizes)):
            if room[slot] == 0:
                continue
            over = max_tokens > 0 and used[slot] + tokens[sample] > max_tokens
            load = 0.0
            for phase in range(num_phases):
                load += costs[sample, phase] * (loads[slot, phase] + costs[sample, phase])
            if best < 0 or over < is_over or (over == is_over and load < min_load):
                best, min_load, is_over = slot, load, over
        slots[sample] = best
        room[best] -= 1
        used[best] += tokens[sample]
        for phase in range(num_phases):
            loads[best, phase] += costs[sample, phase]
    return slots


@numba.njit(cache=True)
def _search(  # type: ignore[no-untyped-def]
    costs, tokens, max_tokens, slots, shape, num_bytes, sources, bytes_per_ms, latency_ms, best
):
    """Change `slots` while squares fall; sets `best` to the plan of least time on the way.

    A change of sample i from slot a to b, or an exchange with j: the squared distances from the
    micro-batch's mean change by 2 c (q c + Db - Da) per phase, where c is what moves, D a slot's
    distance, and q = 1, or 1 - 1 / ranks between micro-batches, whose means move.
    """
    num_ranks, num_rounds, swaps_only = shape
    num_samples, num_phases = costs.shape
    num_slots = num_ranks * num_rounds
    # loads of slots, and their distances from the mean of the micro-batch
    loads, used = np.zeros((num_slots, num_phases)), np.zeros(num_slots, np.int64)
    first, after = np.full(num_slots, -1), np.full(num_samples, -1)
    for sample in range(num_samples - 1, -1, -1):
        slot = slots[sample]
        after[sample], first[slot] = first[slot], sample
        used[slot] += tokens[sample]
        for phase in range(num_phases):
            loads[slot, phase] += costs[sample, phase]
    distances = np.empty((num_slots, num_phases))
    for number in range(num_rounds):
        _measure(loads, distances, number, num_ranks)
    total = costs.sum()
    penalty = (total / num_slots) ** 2 * OVER
    min_gain = NO_GAIN * (total / num_slots) ** 2
    moves = np.zeros((2, num_ranks))
    for sample in range(num_samples):
        _count_move(moves, num_bytes[sample], sources[sample], slots[sample] % num_ranks, 1.0)
    min_time = _time(loads, used, max_tokens, moves, num_ranks, bytes_per_ms, latency_ms, total)
    stuck, changed = np.zeros(num_slots, np.bool_), False
    dots = np.empty(num_slots)
    for _ in range(CHANGES * num_samples + num_slots):
        # the slot furthest from its mean that may still change
        slot, furthest = -1, -1.0
        for other in range(num_slots):
            if not stuck[other]:
                distance = _over(used[other], max_tokens) * penalty
                for phase in range(num_phases):
                    distance += distances[other, phase] ** 2
                if distance > furthest:
                    slot, furthest = other, distance
        if slot < 0:
            if not changed:
                break
            stuck[:], changed = False, False
            continue
        # the slots that lie most to the other side
        for other in range(num_slots):
            dots[other] = 0.0
            for phase in range(num_phases):
                dots[other] += distances[slot, phase] * distances[other, phase]
        dots[slot] = np.inf
        best_gain, one, two, partner = min_gain, -1, -1, -1
        members = _members(first, after, slot, swaps_only)
        for other in np.argsort(dots)[:MAX_PARTNERS]:
            if other == slot:
                continue
            same = slot // num_ranks == other // num_ranks
            scale = 1.0 if same else 1.0 - 1.0 / num_ranks
            before = _over(used[slot], max_tokens) + _over(used[other], max_tokens)
            others = _members(first, after, other, swaps_only)
            for i in members:
                for j in others:
                    gain = 0.0
                    for phase in range(num_phases):
                        c = 0.0
                        if i >= 0:
                            c += costs[i, phase]
                        if j >= 0:
                            c -= costs[j, phase]
                        apart = distances[other, phase] - distances[slot, phase]
                        gain -= 2.0 * c * (scale * c + apart)
                    if max_tokens > 0:
                        shift = (tokens[i] if i >= 0 else 0) - (tokens[j] if j >= 0 else 0)
                        over = _over(used[slot] - shift, max_tokens)
                        over += _over(used[other] + shift, max_tokens)
                        gain += (before - over) * penalty
                    if gain > best_gain:
                        best_gain, one, two, partner = gain, i, j, other
        if partner < 0:
            stuck[slot] = True
            continue
        changed = True
        stuck[slot] = stuck[partner] = False
        for sample, source, target in ((one, slot, partner), (two, partner, slot)):
            if sample < 0:
                continue
            _relink(first, after, sample, source, target)
            slots[sample] = target
            used[source] -= tokens[sample]
            used[target] += tokens[sample]
            for phase in range(num_phases):
                loads[source, phase] -= costs[sample, phase]
                loads[target, phase] += costs[sample, phase]
            origin = sources[sample]
            _count_move(moves, num_bytes[sample], origin, source % num_ranks, -1.0)
            _count_move(moves, num_bytes[sample], origin, target % num_ranks, 1.0)
        for changed_slot in (slot, partner):
            _measure(loads, distances, changed_slot // num_ranks, num_ranks)
        time = _time(loads, used, max_tokens, moves, num_ranks, bytes_per_ms, latency_ms, total)
        if time < min_time:
            min_time = time
            for sample in range(num_samples):
                best[sample] = slots[sample]


@numba.njit(cache=True)
def _members(first, after, slot, swaps_only):  # type: ignore[no-untyped-def]
    """Samples of a slot, after -1 for none if not only exchanges are wanted."""
    members = [np.int64(-1) for _ in range(0 if swaps_only else 1)]
    sample = first[slot]
    while sample >= 0:
        members.append(sample)
        sample = after[sample]
    return members


@numba.njit(cache=True)
def _over(used, max_tokens):  # type: ignore[no-untyped-def]
    """Squared share of the cap by which a slot is over it."""
    if max_tokens == 0 or used <= max_tokens:
        return 0.0
    return ((used - max_tokens) / max_tokens) ** 2


@numba.njit(cache=True)
def _measure(loads, distances, number, num_ranks):  # type: ignore[no-untyped-def]
    """Set the distances of a micro-batch's slots from their mean."""
    for phase in range(loads.shape[1]):
        mean = 0.0
        for slot in range(number * num_ranks, (number + 1) * num_ranks):
            mean += loads[slot, phase]
        mean /= num_ranks
        for slot in range(number * num_ranks, (number + 1) * num_ranks):
            distances[slot, phase] = loads[slot, phase] - mean


@numba.njit(cache=True)
def _count_move(moves, num_bytes, source, target, sign):  # type: ignore[no-untyped-def]
    """Add a sample's bytes to what its ranks send and receive; a sample counts as 1e-6 at least."""
    if source != target:
        moves[0, source] += sign * max(num_bytes, 1e-6)
        moves[1, target] += sign * max(num_bytes, 1e-6)


@numba.njit(cache=True)
def _time(  # type: ignore[no-untyped-def]
    loads, used, max_tokens, moves, num_ranks, bytes_per_ms, latency_ms, total
):
    """Time of the step and its move; tokens over the cap cost more than any plan within."""
    time = 0.0
    for number in range(len(loads) // num_ranks):
        for phase in range(loads.shape[1]):
            slowest = 0.0
            for slot in range(number * num_ranks, (number + 1) * num_ranks):
                slowest = max(slowest, loads[slot, phase])
            time += slowest
    most = moves.max()
    if most > 1e-7:
        time += latency_ms + most / bytes_per_ms
    if max_tokens > 0:
        for slot in range(len(used)):
            time += OVER * total * max(0, used[slot] - max_tokens)
    return time


@numba.njit(cache=True)
def _relink(first, after, sample, source, target):  # type: ignore[no-untyped-def]
    """Take a sample from one slot's list into another's."""
    if first[source] == sample:
        first[source] = after[sample]
    else:
        before = first[source]
        while after[before] != sample:
            before = after[before]
        after[before] = after[sample]
    after[sample], first[target] = first[target], sample
