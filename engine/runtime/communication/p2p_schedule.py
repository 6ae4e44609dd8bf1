"""Who waits for whom in a schedule: `make_routes`, from the same `Program` that the simulator runs.
No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from balance.errors import ConfigError
from balance.types import IntArray
from engine.runtime.communication.process_groups import Pair
from engine.simulator.program import Encodings, Program, make_program
from engine.simulator.schedule import PassKind, Schedule
from engine.simulator.simulate import simulate
from engine.simulator.stages import StageCosts


class Message(NamedTuple):
    """A result that travels, by the operations that make it and that wait for it."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """What one rank needs of a schedule."""

    program: Program
    """Edges only; its times are 0."""
    incoming: dict[int, list[tuple[Message, int]]]
    """By this rank's operations: what comes to each from elsewhere, and from which rank."""
    outgoing: dict[int, list[tuple[Message, int]]]
    """What goes, and to which rank."""
    messages: dict[Pair, list[Message]]
    """What goes from rank to rank, in the order in which it is made."""


@lru_cache(maxsize=64)
def make_routes(schedule: Schedule, sends_grad: tuple[bool, ...], rank: int) -> Routes:
    """The routes of a schedule in which gradients come back to the stages with `sends_grad`.

    ConfigError if an action is missing or on another rank than its stage, Deadlock if actions wait
    for each other.
    """
    _check(schedule)
    program = waits(schedule, sends_grad)
    simulate(program)
    incoming, outgoing = _own(program, rank)
    return Routes(
        program=program, incoming=incoming, outgoing=outgoing, messages=messages_of(program)
    )


def reordered(schedule: Schedule, order: IntArray) -> Schedule:
    """The schedule with micro-batch `order[i]` wherever it had i. ConfigError if that is no order
    of them.

    >>> from engine.simulator.schedule import one_f_one_b
    >>> [action.micro_batch for action in reordered(one_f_one_b(1, 3), np.array([2, 0, 1])).of_rank(0)]
    [2, 2, 0, 0, 1, 1]
    """
    if not np.array_equal(np.sort(order), np.arange(schedule.num_micro_batches)):
        raise ConfigError(
            f"order is {order.tolist()}; it must name each of {schedule.num_micro_batches} micro-batches"
        )
    return replace(schedule, micro_batches=order[schedule.micro_batches])


def waits(schedule: Schedule, sends_grad: tuple[bool, ...]) -> Program:
    """The edges of a schedule; its times are not known here."""
    nothing = np.zeros((schedule.num_stages, schedule.num_micro_batches), np.int64)
    stages = StageCosts.of_times(nothing, nothing, nothing, np.array(sends_grad))
    return make_program(schedule, stages, Encodings(forward_ns=nothing[0], send_ns=nothing[0]))


def messages_of(program: Program) -> dict[Pair, list[Message]]:
    """What goes from rank to rank in a step, in the order in which it is made."""
    ranks = program.schedule.ranks.tolist()
    offsets, targets = program.edge_offsets.tolist(), program.edge_targets.tolist()
    found: dict[Pair, list[Message]] = {}
    for source, rank in enumerate(ranks):
        for target in targets[offsets[source] : offsets[source + 1]]:
            if ranks[target] != rank:
                found.setdefault((rank, ranks[target]), []).append(Message(source, target))
    return found


def _own(
    program: Program, rank: int
) -> tuple[dict[int, list[tuple[Message, int]]], dict[int, list[tuple[Message, int]]]]:
    schedule, ranks = program.schedule, program.schedule.ranks.tolist()
    sources = np.repeat(np.arange(len(schedule)), np.diff(program.edge_offsets))
    # what a stage keeps from its forward pass is no message; features that were encoded ahead are
    # one
    between = schedule.stages[sources] != schedule.stages[program.edge_targets]
    between |= schedule.kinds[sources] == PassKind.ENCODE
    incoming: dict[int, list[tuple[Message, int]]] = {}
    outgoing: dict[int, list[tuple[Message, int]]] = {}
    for source, target in zip(
        sources[between].tolist(), program.edge_targets[between].tolist(), strict=True
    ):
        message = Message(source, target)
        if ranks[target] == rank:
            incoming.setdefault(target, []).append((message, ranks[source]))
        if ranks[source] == rank:
            outgoing.setdefault(source, []).append((message, ranks[target]))
    return incoming, outgoing


def _check(schedule: Schedule) -> None:
    """ConfigError unless every stage's own rank passes each micro-batch forward and back once."""
    shape = len(PassKind), schedule.num_stages, schedule.num_micro_batches
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (schedule.kinds, schedule.stages, schedule.micro_batches), 1)
    parts = counts[PassKind.INPUT_GRAD], counts[PassKind.WEIGHT_GRAD]
    once = (
        (counts[PassKind.FORWARD] == 1)
        & (counts[PassKind.BACKWARD] + parts[0] == 1)
        & (parts[0] == parts[1])
        & (counts[PassKind.ENCODE] <= 1)
    )
    if not once.all():
        stage, number = np.argwhere(~once)[0].tolist()
        raise ConfigError(
            f"schedule {schedule.name} does not pass micro-batch {number} once forward and once back through stage "
            f"{stage}"
        )
    elsewhere = (schedule.ranks != schedule.stages % schedule.num_ranks) & (
        schedule.kinds != PassKind.ENCODE
    )
    if elsewhere.any():
        place = int(np.argmax(elsewhere))
        raise ConfigError(
            f"schedule {schedule.name} has the {schedule.action(place)} on rank {schedule.ranks[place]}, but stage s "
            f"belongs to rank s modulo {schedule.num_ranks}"
        )
