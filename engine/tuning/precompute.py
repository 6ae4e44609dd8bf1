"""Encoder pre-computation (PipeTune): frozen encoders in idle time. Pure.

Features of a frozen encoder may be computed at any time before the first stage needs them
(PipeTune, 3.3). PipeTune does not say where; here in idle time of the first stage's rank (`"own"`),
or of any rank with memory for a copy of the encoder, which then sends the features (`"any"`). The
gaps of an order (`engine.tuning.order_times`) become a schedule with ENCODE actions, simulated
exactly, with its memory: features wait on the first rank until their micro-batch enters.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.program import Encodings, make_program
from isobatch.engine.simulator.schedule import PassKind, Schedule
from isobatch.engine.simulator.simulate import Timeline, simulate, transfers
from isobatch.engine.simulator.stages import StageCosts
from isobatch.engine.tuning.order_times import EncodeAhead, OrderProblem, nothing_ahead, run_order

EncodeRanks = Literal["never", "own", "any"]
"""Ranks whose idle time may be used for encoding: none, the first stage's, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The first layers, frozen, which can run ahead; arrays are int64, (micro_batches,)."""

    num_layers: int
    forward_ns: IntArray
    send_ns: IntArray
    """Send of the features to another rank."""
    feature_bytes: IntArray
    working_bytes: IntArray
    """Memory of a running encoding besides the features."""
    state_bytes: int
    """Weights, of which a rank that encodes needs a copy."""

    @classmethod
    def nothing(cls, num_micro_batches: int) -> "Encoder":
        """The encoder of a step in which nothing runs ahead."""
        arrays = dict.fromkeys(_BY_MICRO_BATCH, np.zeros(num_micro_batches, np.int64))
        return cls(num_layers=0, state_bytes=0, **arrays)

    def take(self, indices: IntArray) -> "Encoder":
        """The same for some of the micro-batches, in the order of `indices`."""
        taken: dict[str, Any] = {name: getattr(self, name)[indices] for name in _BY_MICRO_BATCH}
        return replace(self, **taken)


_BY_MICRO_BATCH = ("forward_ns", "send_ns", "feature_bytes", "working_bytes")


def frozen_encoder(costs: Costs, borders: IntArray) -> Encoder:
    """The frozen layers before everything that is trained.

    ConfigError if none can run ahead: the encoder is trained, or not in the first stage alone.
    """
    frozen = costs.num_layers if not costs.sends_grad.any() else int(np.argmax(costs.sends_grad))
    if frozen == 0:
        raise ConfigError(
            f"encoder pre-computation needs a frozen encoder, but the first layer "
            f"({costs.names[0]}) is trained; freeze the encoder, or use where='never'"
        )
    if frozen > borders[1]:
        raise ConfigError(
            "encoder pre-computation needs the encoder in the first stage, which ends after layer "
            f"{borders[1] - 1}, but layers up to {frozen - 1} ({costs.names[frozen - 1]}) are "
            "frozen; move the border, or use where='never'"
        )
    last = frozen - 1
    return Encoder(
        num_layers=frozen,
        forward_ns=costs.forward_ns[:frozen].sum(axis=0),
        send_ns=costs.send_ns[last],
        feature_bytes=costs.sent_bytes[last],
        working_bytes=costs.working_bytes[:frozen].max(axis=0),
        state_bytes=int(costs.state_bytes[:frozen].sum()),
    )


def where_to_encode(
    encoder: Encoder,
    schedule: Schedule,
    stages: StageCosts,
    *,
    where: EncodeRanks,
    memory_bytes: int | None = None,
) -> EncodeAhead:
    """Ranks that may encode ahead, and how many micro-batches' features may wait.

    Within `memory_bytes` by the peaks of the given order; orders with less free memory do not fit.
    """
    if where == "never":
        return nothing_ahead(schedule)
    allowed = np.full(schedule.num_ranks, where == "any")
    allowed[0] = True
    window = stages.num_micro_batches
    reserved = np.zeros(schedule.num_ranks, np.int64)
    if memory_bytes is not None:
        free = memory_bytes - memory_of(schedule, stages).peak_bytes
        feature_bytes = int(encoder.feature_bytes.max(initial=0))
        window = min(window, max(0, int(free[0]) // max(feature_bytes, 1)))
        copy = encoder.state_bytes + feature_bytes + int(encoder.working_bytes.max(initial=0))
        allowed[1:] &= free[1:] >= copy
        reserved[1:] = np.where(allowed[1:], copy, 0)
        reserved[0] = window * feature_bytes
    return EncodeAhead(encoder.forward_ns, encoder.send_ns, allowed, window, reserved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedStep:
    """A step with some micro-batches encoded ahead, simulated; in the order in which they enter."""

    timeline: Timeline
    encodings: Encodings
    stages: StageCosts
    """Costs without the encodings that run ahead."""
    encoding_ranks: dict[int, int]
    """Rank that encodes, by micro-batch that is encoded ahead."""
    peak_bytes: IntArray
    """(ranks,): with waiting features and copies of the encoder."""

    @property
    def schedule(self) -> Schedule:
        """The schedule, with ENCODE actions."""
        return self.timeline.program.schedule


def encode_ahead(problem: OrderProblem, encoder: Encoder, order: IntArray) -> EncodedStep:
    """An order with its encodings in the gaps that `problem.ahead` allows."""
    scratch = problem.scratch()
    entering = np.ascontiguousarray(order, np.int64)
    run_order(problem.actions, problem.times, problem.ahead, entering, scratch)
    is_ahead = scratch.gap_before[order] >= 0
    ahead = np.flatnonzero(is_ahead)
    before = problem.actions.indices[scratch.gap_before[order[ahead]]]
    schedule, ranks = _with_encodings(problem.schedule, ahead, before, scratch.begins[order[ahead]])
    ordered, encoder = problem.stages.take(order), encoder.take(order)
    forward = ordered.forward_ns.copy()
    forward[0, ahead] -= encoder.forward_ns[ahead]
    stages = replace(ordered, forward_ns=forward)
    encodings = Encodings(forward_ns=encoder.forward_ns, send_ns=encoder.send_ns)
    timeline = simulate(make_program(schedule, stages, encodings))
    return EncodedStep(
        timeline=timeline,
        encodings=encodings,
        stages=stages,
        encoding_ranks=dict(zip(ahead.tolist(), ranks.tolist(), strict=True)),
        peak_bytes=_peaks(timeline, stages, encoder),
    )


def _with_encodings(
    schedule: Schedule, ahead: IntArray, before: IntArray, begins: IntArray
) -> tuple[Schedule, IntArray]:
    """-> (schedule with each micro-batch of `ahead` encoded before an action, ranks that encode).

    Several encodings before one action are sorted by when they begin.
    """
    count, more = len(schedule), len(ahead)
    places = np.concatenate([2 * np.arange(count), 2 * before - 1])
    times = np.concatenate([np.zeros(count), begins])
    order = np.lexsort((times, places))
    ranks = schedule.ranks[before]
    more_per_rank = np.bincount(ranks, minlength=schedule.num_ranks)
    if not more:
        return schedule, ranks
    encoded = replace(
        schedule,
        name=f"{schedule.name}+encode",
        kinds=np.concatenate([schedule.kinds, np.full(more, PassKind.ENCODE)])[order],
        stages=np.concatenate([schedule.stages, np.zeros(more, np.int64)])[order],
        micro_batches=np.concatenate([schedule.micro_batches, ahead])[order],
        rank_offsets=schedule.rank_offsets + np.concatenate([[0], np.cumsum(more_per_rank)]),
    )
    return encoded, ranks


def _peaks(timeline: Timeline, stages: StageCosts, encoder: Encoder) -> IntArray:
    """Peak of each rank: its operations, plus the memory of encodings at the same time.

    Features are on the rank that encodes from the start of their encoding until they have arrived,
    and on the first rank from the end of their encoding until the first stage's pass has ended.
    """
    schedule = timeline.program.schedule
    during = memory_of(schedule, stages).during_bytes
    ranks, numbers = schedule.ranks, schedule.micro_batches
    is_encoding = schedule.kinds == PassKind.ENCODE
    entered = np.zeros(schedule.num_micro_batches, np.int64)
    is_first = (schedule.kinds == PassKind.FORWARD) & (schedule.stages == 0)
    entered[numbers[is_first]] = timeline.end_ns[is_first]
    sent = transfers(timeline)
    arrived = timeline.end_ns.copy()
    np.maximum.at(arrived, sent.sources, sent.end_ns)
    # working memory and copies of the encoder
    during = during + np.where(is_encoding, encoder.working_bytes[numbers], 0)
    during += np.where((ranks > 0) & np.isin(ranks, ranks[is_encoding]), encoder.state_bytes, 0)
    # features
    for index in np.flatnonzero(is_encoding):
        rank, number = ranks[index], numbers[index]
        size, begin = encoder.feature_bytes[number], timeline.start_ns[index]
        if rank:
            during[_overlap(timeline, ranks == rank, begin, arrived[index])] += size
            begin = timeline.end_ns[index]
        during[_overlap(timeline, ranks == 0, begin, entered[number])] += size
    return np.asarray(np.maximum.reduceat(during, schedule.rank_offsets[:-1]))


def _overlap(timeline: Timeline, on_rank: BoolArray, begin: int, end: int) -> BoolArray:
    """A rank's operations that run between two times."""
    return on_rank & (timeline.start_ns < end) & (timeline.end_ns > begin)
