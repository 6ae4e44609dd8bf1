"""PipeTune's encoder pre-computation: a frozen encoder's forward passes run ahead, where a rank
would only wait.

What a frozen encoder makes of an image never changes, so it may be made at any time before the
first stage takes it up (PipeTune, 3.3). PipeTune does not say where; here in idle time of the first
stage's own rank (`"own"`), or of any rank that has memory for a copy of the encoder, whose features
then travel (`"any"`). `engine.tuning.order_times` finds the gaps while it simulates an order; here
the answer becomes a schedule with ENCODE actions, which is simulated exactly, and its memory is
counted: features wait on the first rank until their micro-batch enters, and a copy takes its
weights. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.simulator.memory import memory_of
from engine.simulator.program import Encodings, make_program
from engine.simulator.schedule import PassKind, Schedule
from engine.simulator.simulate import Timeline, simulate, transfers
from engine.simulator.stages import StageCosts
from engine.tuning.order_times import EncodeAhead, OrderProblem, nothing_ahead, run_order

EncodeRanks = Literal["never", "own", "any"]
"""Ranks whose idle time may be used for encoding: none, the first stage's, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The frozen layers in front, which can run ahead; int64, (micro_batches,)."""

    num_layers: int
    forward_ns: IntArray
    send_ns: IntArray
    """Of the features, to another rank."""
    feature_bytes: IntArray
    working_bytes: IntArray
    """While an encoding runs, besides the features."""
    state_bytes: int
    """Of the weights, which a rank needs a copy of."""

    @classmethod
    def nothing(cls, num_micro_batches: int) -> Encoder:
        """Of a step in which nothing runs ahead."""
        none = np.zeros(num_micro_batches, np.int64)
        return cls(
            num_layers=0,
            forward_ns=none,
            send_ns=none,
            feature_bytes=none,
            working_bytes=none,
            state_bytes=0,
        )

    def take(self, places: IntArray) -> Encoder:
        """For some of the micro-batches, in the order of `places`."""
        names = ("forward_ns", "send_ns", "feature_bytes", "working_bytes")
        return replace(self, **{name: getattr(self, name)[places] for name in names})


def frozen_encoder(costs: Costs, borders: IntArray) -> Encoder:
    """The frozen layers in front of everything that is trained.

    ConfigError where nothing can run ahead: the encoder is trained (then what it makes changes with
    its weights, and its backward pass needs what the forward pass saved), or it does not lie in the
    first stage alone.
    """
    frozen = costs.num_layers if not costs.sends_grad.any() else int(np.argmax(costs.sends_grad))
    if frozen == 0:
        raise ConfigError(
            f"encoder pre-computation needs a frozen encoder, but the first layer ({costs.names[0]}) is trained; "
            "freeze the encoder, or use where='never'"
        )
    if frozen > borders[1]:
        raise ConfigError(
            f"encoder pre-computation needs the encoder in the first stage, which ends behind layer {borders[1] - 1}, "
            f"but layers up to {frozen - 1} ({costs.names[frozen - 1]}) are frozen; move the border, or use "
            "where='never'"
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
    """Which ranks may encode ahead, and for how many micro-batches features may wait, within
    `memory_bytes` per rank.

    By the peaks of the micro-batches in the order given; orders that leave less free for it do not
    fit.
    """
    if where == "never":
        return nothing_ahead(schedule)
    allowed = np.full(schedule.num_ranks, where == "any")
    allowed[0] = True
    window, reserved = stages.num_micro_batches, np.zeros(schedule.num_ranks, np.int64)
    if memory_bytes is not None:
        free = memory_bytes - memory_of(schedule, stages).peak_bytes
        most = int(encoder.feature_bytes.max(initial=0))
        window = min(window, max(0, int(free[0]) // max(most, 1)))
        copy = encoder.state_bytes + most + int(encoder.working_bytes.max(initial=0))
        allowed[1:] &= free[1:] >= copy
        reserved[1:] = np.where(allowed[1:], copy, 0)
        reserved[0] = window * most
    return EncodeAhead(encoder.forward_ns, encoder.send_ns, allowed, window, reserved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedStep:
    """A step, simulated exactly, with micro-batches encoded ahead; in entering order."""

    timeline: Timeline
    encodings: Encodings
    stages: StageCosts
    """Without the encoding of those that are encoded ahead."""
    encoding_ranks: dict[int, int]
    """By micro-batch that is encoded ahead, the rank that does it."""
    peak_bytes: IntArray
    """(ranks,): waiting features and copies of the encoder included."""

    @property
    def schedule(self) -> Schedule:
        """With ENCODE actions."""
        return self.timeline.program.schedule


def encode_ahead(problem: OrderProblem, encoder: Encoder, order: IntArray) -> EncodedStep:
    """An order with its encodings in the gaps that `order_times` finds."""
    scratch = problem.scratch()
    run_order(
        problem.actions, problem.work, problem.ahead, np.ascontiguousarray(order, np.int64), scratch
    )
    is_ahead = scratch.gap_before[order] >= 0
    ahead = np.flatnonzero(is_ahead)
    before = problem.actions.own_places[scratch.gap_before[order[ahead]]]
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
    """The schedule with each micro-batch of `ahead` encoded in front of an action; and the rank
    that encodes it.

    In front of the same action by the time at which they begin.
    """
    count, more = len(schedule), len(ahead)
    places, times = (
        np.concatenate([2 * np.arange(count), 2 * before - 1]),
        np.concatenate([np.zeros(count), begins]),
    )
    order = np.lexsort((times, places))
    ranks = schedule.ranks[before]
    more_per_rank = np.bincount(ranks, minlength=schedule.num_ranks)
    if not more:
        return schedule, ranks
    made = replace(
        schedule,
        name=f"{schedule.name}+encode",
        kinds=np.concatenate([schedule.kinds, np.full(more, PassKind.ENCODE)])[order],
        stages=np.concatenate([schedule.stages, np.zeros(more, np.int64)])[order],
        micro_batches=np.concatenate([schedule.micro_batches, ahead])[order],
        rank_offsets=schedule.rank_offsets + np.concatenate([[0], np.cumsum(more_per_rank)]),
    )
    return made, ranks


def _peaks(timeline: Timeline, stages: StageCosts, encoder: Encoder) -> IntArray:
    """Each rank's peak: the plain one's operations, and what encodings hold while these run.

    Features lie on the rank that makes them from the beginning of their encoding until they have
    arrived, and on the first rank from the end of their encoding until the first stage is through
    with them.
    """
    program = timeline.program
    schedule = program.schedule
    during = memory_of(schedule, stages).during_bytes
    ranks, numbers = schedule.ranks, schedule.micro_batches
    is_encoding = schedule.kinds == PassKind.ENCODE
    entered = np.zeros(schedule.num_micro_batches, np.int64)
    is_first = (schedule.kinds == PassKind.FORWARD) & (schedule.stages == 0)
    entered[numbers[is_first]] = timeline.end_ns[is_first]
    moved = transfers(timeline)
    arrived = timeline.end_ns.copy()
    np.maximum.at(arrived, moved.sources, moved.end_ns)
    during = during + np.where(is_encoding, encoder.working_bytes[numbers], 0)
    during += np.where((ranks > 0) & np.isin(ranks, ranks[is_encoding]), encoder.state_bytes, 0)
    for place in np.flatnonzero(is_encoding):
        rank, number = ranks[place], numbers[place]
        size, begin, end = (
            encoder.feature_bytes[number],
            timeline.start_ns[place],
            timeline.end_ns[place],
        )
        if rank:
            during[_overlap(timeline, ranks == rank, begin, arrived[place])] += size
            begin = end
        during[_overlap(timeline, ranks == 0, begin, entered[number])] += size
    return np.asarray(np.maximum.reduceat(during, schedule.rank_offsets[:-1]))


def _overlap(
    timeline: Timeline, on_rank: NDArray[np.bool_], begin: int, end: int
) -> NDArray[np.bool_]:
    """A rank's operations that run while something lies in its memory."""
    return on_rank & (timeline.start_ns < end) & (timeline.end_ns > begin)
