"""Samples to ranks and micro-batches so that several loads are even at once.

For `loaders.rebalance` and `rollouts`. OrchMLLM balances phase by phase, with an exchange for each;
who moves a whole sample moves its vision and its LLM tokens together, so one assignment has to be
even in all loads. Costs are times (ms) of each phase. Ranks wait for the slowest in each
phase of each micro-batch, so a step takes the sum of those maxima (`step_ms`).

A plan is a number per sample, its slot: micro-batch * num_ranks + rank. The search (`even_ranks`)
moves samples, or exchanges two, between the slot that is furthest from the mean of its micro-batch
and others, always the change that lowers the sum of squared distances most. It begins where samples
are, and keeps the prefix of its changes after which step and move together take the least time;
and from scratch, costliest sample first to the slot least loaded with what it needs, where batches
then go to ranks that hold much of them (`place_batches`). The better of both counts, or no change.
Neither fills a slot over its caps (`sizes`) where a plan within is known: what was there is one.

Pure and deterministic, ties included, on every machine: each rank computes the same plan. Times:
`benchmarks/rollouts.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.balance.dispatching._slot_search import OVER, SlotProblem, deal, search
from isobatch.balance.dispatching.node_placement import place_batches
from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray

EXACT_BITS = 48
"""Bits of the sum of costs that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What moving samples between ranks costs."""

    num_bytes: IntArray
    """Bytes that travel with each sample, (num_samples,)."""
    bytes_per_ms: float
    """Of one rank, each way."""
    latency_ms: float = 0.0
    """Of an exchange, however small."""
    ranks_per_node: int = 8
    """Moves inside a node are preferred (`place_batches`)."""

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
    """Time that no plan of these samples undercuts: the mean of ranks, or the costliest sample."""
    return float(np.maximum(costs.sum(axis=0) / num_ranks, costs.max(axis=0, initial=0)).sum())


def even_ranks(  # noqa: PLR0913 - options by name
    costs: FloatArray,
    *,
    num_ranks: int,
    num_rounds: int = 1,
    start: IntArray | None = None,
    move: MoveCosts | None = None,
    keep_sizes: bool = False,
    sizes: FloatArray | None = None,
    max_sizes: Sequence[float | None] | None = None,
) -> IntArray:
    """Slot of each sample for a step of little time, moves included; int64, (num_samples,).

    `costs`: ms of each phase, float64, (num_samples, num_phases), finite and not negative.
    `num_rounds`: micro-batches of each rank. `start`: the slots that samples are in; with `move`
    they stay there unless the step gains more than the move takes; without, moves are free.
    `keep_sizes`: slots keep the number of samples that they have in `start`, or have sizes that
    differ by one at most. `sizes`: what fills memory (patches, tokens), float64, (num_samples,
    num_sizes). Slots hold `max_sizes` of it at most, or where that is None as much as the fullest
    slot of `start`; without `start` no cap. A plan over a cap is returned only if none within was
    found.

    ConfigError for costs or a start that do not fit.

    >>> costs = np.array([[4.0, 1], [4, 1], [0, 3], [0, 3]])
    >>> start = np.array([0, 0, 1, 1])
    >>> slots = even_ranks(costs, num_ranks=2, start=start)
    >>> step_ms(costs, start, 2), step_ms(costs, slots, 2)
    (14.0, 8.0)
    """
    costs = _checked_costs(costs, num_ranks, num_rounds)
    num_samples, num_slots = len(costs), num_ranks * num_rounds
    if start is not None:
        _check_start(start, num_samples, num_slots)
    if not num_samples or num_slots == 1:
        return np.zeros(num_samples, np.int64) if start is None else start.astype(np.int64)
    nothing = np.zeros(num_samples, np.int64)
    sources = nothing if start is None else start.astype(np.int64) % num_ranks
    move = move or MoveCosts(num_bytes=nothing, bytes_per_ms=np.inf)
    sizes = _exact(np.zeros((num_samples, 0)) if sizes is None else sizes)
    caps = slot_caps(sizes, max_sizes, start, num_slots)
    none = ((0, 1), (0, 0))
    problem = SlotProblem(
        costs=np.pad(costs, none),
        mean_cost=float(costs.sum()) / num_slots,
        sizes=np.pad(sizes, none),
        max_sizes=caps,
        num_ranks=num_ranks,
        num_rounds=num_rounds,
        swaps_only=keep_sizes,
        sources=sources,
        num_bytes=np.ascontiguousarray(move.num_bytes, np.int64),
        bytes_per_ms=float(move.bytes_per_ms),
        latency_ms=float(move.latency_ms),
    )
    # from scratch
    room = np.full(num_slots, num_samples)
    if keep_sizes and start is not None:
        room = np.bincount(start, minlength=num_slots)
    elif keep_sizes:
        room = (num_samples + num_slots - 1 - np.arange(num_slots)) // num_slots
    order = np.argsort(-costs.sum(axis=1), kind="stable")
    dealt = deal(problem, order, room.astype(np.int64))
    fresh = search(problem._replace(bytes_per_ms=np.inf, latency_ms=0.0), dealt)
    if start is None:
        return np.asarray(fresh, np.int64)
    # from where samples are
    start = start.astype(np.int64)
    if not keep_sizes or np.ptp(np.bincount(start, minlength=num_slots)) == 0:
        fresh = _placed(fresh, problem, move.ranks_per_node)
    plans = start, search(problem, start), fresh

    def time(slots: IntArray) -> float:
        over = np.maximum(slot_loads(sizes, slots, num_ranks) - caps, 0).sum()
        moves = move.ms(sources, slots % num_ranks, num_ranks)
        return step_ms(costs, slots, num_ranks) + moves + OVER * problem.mean_cost * float(over)

    return min(plans, key=time)


def slot_caps(
    sizes: FloatArray,
    max_sizes: Sequence[float | None] | None,
    start: IntArray | None,
    num_slots: int,
) -> FloatArray:
    """Most that a slot holds of each size, float64, (num_sizes,); inf without a cap.

    Where `max_sizes` has none, as much as the fullest slot of `start`.
    """
    caps = np.full(sizes.shape[1], np.inf)
    if start is not None:
        caps = slot_loads(sizes, start, num_slots).max(axis=(0, 1), initial=0)
    for number, cap in enumerate(max_sizes or ()):
        if cap is not None:
            caps[number] = cap
            if not cap > 0:
                raise ConfigError(f"a slot holds {cap} at most; give more than 0, or None")
    return np.where(caps > 0, caps, 1.0)  # of what no sample has


def _check_start(start: IntArray, num_samples: int, num_slots: int) -> None:
    highest = int(start.max(initial=0))
    if len(start) != num_samples or start.min(initial=0) < 0 or highest >= num_slots:
        raise ConfigError(
            f"start has {len(start)} slots up to {highest} for {num_samples} samples; give one from"
            f" 0 to {num_slots - 1} for each"
        )


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
    return _exact(costs)


def _exact(values: FloatArray) -> FloatArray:
    """Whole multiples of a power of 2, so that sums are exact, and equal on all machines."""
    exponent = np.frexp(values.max(initial=0))[1] + len(values).bit_length() - EXACT_BITS
    return np.ascontiguousarray(np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent))


def _placed(slots: IntArray, problem: SlotProblem, ranks_per_node: int) -> IntArray:
    """The same batches on ranks that hold much of them, micro-batch by micro-batch."""
    num_ranks, placed = problem.num_ranks, slots.copy()
    for number in range(problem.num_rounds):
        rows = np.flatnonzero(slots // num_ranks == number)
        rows = rows[np.argsort(problem.sources[rows], kind="stable")]
        offsets = np.searchsorted(problem.sources[rows], np.arange(num_ranks + 1))
        batches, num_bytes = slots[rows] % num_ranks, problem.num_bytes[rows]
        ranks = place_batches(num_bytes, batches, offsets, ranks_per_node=ranks_per_node)
        placed[rows] = number * num_ranks + ranks[batches]
    return placed
