"""Messages of a schedule: which rank sends what to whom, in which order.

Derived from the same `Program` whose edges the simulator runs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.communication.process_groups import Pair
from isobatch.engine.simulator.program import Program
from isobatch.engine.simulator.schedule import PassKind, Schedule
from isobatch.engine.simulator.simulate import Timeline, equal_passes


class Message(NamedTuple):
    """A result, named by the operation that makes it and the one that waits for it."""

    source: int
    target: int


_MessagesByOperation = dict[int, list[tuple[Message, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PSchedule:
    """Messages of a schedule as one rank needs them."""

    program: Program
    """Its edges; all passes take equally long, and sends no time."""
    incoming: _MessagesByOperation
    """Inputs from other stages by operation of this rank, each with its sender."""
    outgoing: _MessagesByOperation
    """Results for other stages by operation of this rank, each with its receiver."""
    ahead: _MessagesByOperation
    """Inputs of the next operation that can be received from before an operation of this rank on,
    even if that operation waits for whatever was posted."""
    messages: dict[Pair, list[Message]]
    """All messages from rank to rank, in the order in which they are made."""


@lru_cache(maxsize=64)
def make_p2p_schedule(schedule: Schedule, sends_grad: tuple[bool, ...], rank: int) -> P2PSchedule:
    """Messages of a schedule in which gradients return to the stages with `sends_grad`.

    ConfigError if an action is missing or not on its stage's rank; Deadlock if they cannot all run.
    """
    _check(schedule)
    timeline = equal_passes(schedule, sends_grad)
    program = timeline.program
    # what a stage keeps from its own forward pass is no message; features encoded ahead are
    sources = program.edge_sources
    between = schedule.stages[sources] != schedule.stages[program.edge_targets]
    between |= schedule.kinds[sources] == PassKind.ENCODE
    p2p = P2PSchedule(program=program, incoming={}, outgoing={}, ahead={}, messages={})
    edges = sources[between].tolist(), program.edge_targets[between].tolist()
    ranks = schedule.ranks.tolist()
    for source, target in zip(*edges, strict=True):
        message = Message(source, target)
        sender = ranks[source]
        receiver = ranks[target]
        if receiver == rank:
            p2p.incoming.setdefault(target, []).append((message, sender))
        if sender == rank:
            p2p.outgoing.setdefault(source, []).append((message, receiver))
        if sender != receiver:
            p2p.messages.setdefault((sender, receiver), []).append(message)
    _find_ahead(p2p, timeline, rank)
    return p2p


def _find_ahead(p2p: P2PSchedule, timeline: Timeline, rank: int) -> None:
    """Fill `ahead` of a rank.

    Operations have an order in which each comes after all that it needs: by their end if all passes
    take equally long, then forward passes down the ranks, then the others up. A receive is posted
    before an operation only if its source is earlier in this order. So if every operation waited
    for all receives posted until then, each would still wait for earlier ones alone: no circle.
    """
    schedule = p2p.program.schedule
    is_back = (schedule.kinds != PassKind.FORWARD).astype(np.int64)
    by = np.where(is_back, -schedule.ranks, schedule.ranks), is_back, timeline.end_ns
    places = np.empty(len(schedule), np.int64)
    places[np.lexsort(by)] = np.arange(len(schedule))
    first, last = schedule.rank_offsets[rank : rank + 2].tolist()
    for operation in range(first, last - 1):
        p2p.ahead[operation] = [
            (message, sender)
            for message, sender in p2p.incoming.get(operation + 1, ())
            if sender != rank and places[message.source] < places[operation]
        ]


def forward_only(schedule: Schedule) -> Schedule:
    """A schedule's forward passes in their order, for evaluation."""
    ranks = [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]
    return Schedule.of(
        f"{schedule.name}, forward",
        schedule.num_stages,
        schedule.num_micro_batches,
        [[action for action in actions if action.kind == PassKind.FORWARD] for actions in ranks],
    )


def _check(schedule: Schedule) -> None:
    """ConfigError unless every stage's own rank runs each micro-batch forward and backward once.

    Or all of them forward only.
    """
    shape = len(PassKind), schedule.num_stages, schedule.num_micro_batches
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (schedule.kinds, schedule.stages, schedule.micro_batches), 1)
    halves = counts[PassKind.INPUT_GRAD], counts[PassKind.WEIGHT_GRAD]
    num_backward = int((schedule.kinds != PassKind.FORWARD).any())
    once = (
        (counts[PassKind.FORWARD] == 1)
        & (counts[PassKind.BACKWARD] + halves[0] == num_backward)
        & (halves[0] == halves[1])
        & (counts[PassKind.ENCODE] <= 1)
    )
    if not once.all():
        stage, number = np.argwhere(~once)[0].tolist()
        raise ConfigError(
            f"schedule {schedule.name} does not run micro-batch {number} once forward and once"
            f" backward through stage {stage}"
        )
    elsewhere = schedule.ranks != schedule.stages % schedule.num_ranks
    elsewhere &= schedule.kinds != PassKind.ENCODE
    if elsewhere.any():
        place = int(np.argmax(elsewhere))
        raise ConfigError(
            f"schedule {schedule.name} has the {schedule.action(place)} on rank"
            f" {schedule.ranks[place]}, but stage s belongs to rank s modulo {schedule.num_ranks}"
        )
