"""Which actions each rank runs in which order: schedules as data. Pure.

A pipeline of `num_stages` stages, of which rank r runs the stages r, r + num_ranks, ... Forward
passes go from stage to stage, backward passes the other way; an order says nothing about times,
which `engine.simulator.simulate` finds out.

- `gpipe`: all forward passes, then all backward passes (GPipe, arXiv 1811.06965);
- `one_f_one_b`: stage s has at most num_stages - s micro-batches under way (PipeDream-flush, arXiv 2006.09503);
- `interleaved`: several stages per rank (Megatron-LM, arXiv 2104.04473);
- `zero_bubble`: 1F1B, but gradients of weights wait and fill the bubbles (ZB-H1, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from balance.errors import ConfigError
from balance.types import IntArray


class PassKind(IntEnum):
    """What an action computes."""

    FORWARD = 0
    BACKWARD = 1
    """The gradients of input and weights."""
    INPUT_GRAD = 2
    """Of the input only; recomputation included."""
    WEIGHT_GRAD = 3
    ENCODE = 4
    """The vision encoder's forward pass, ahead of the first stage's: PipeTune's pre-computation."""


class Action(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: PassKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """What each rank runs, in order. The actions of all ranks stand in one list, rank by rank:
    int64 arrays.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    kinds: IntArray
    stages: IntArray
    micro_batches: IntArray
    rank_offsets: IntArray
    """(ranks + 1,): rank r runs the actions `rank_offsets[r]:rank_offsets[r + 1]`."""

    @classmethod
    def of(
        cls, name: str, num_stages: int, num_micro_batches: int, actions: Iterable[Iterable[Action]]
    ) -> Schedule:
        """The schedule of these actions of each rank."""
        ranks = [list(own) for own in actions]
        table = np.array([action for own in ranks for action in own], np.int64).reshape(-1, 3)
        return cls(
            name=name,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            kinds=table[:, 0].copy(),
            stages=table[:, 1].copy(),
            micro_batches=table[:, 2].copy(),
            rank_offsets=np.cumsum([0, *map(len, ranks)]),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rank_offsets) - 1

    @property
    def ranks(self) -> IntArray:
        """The rank of each action, (actions,)."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.rank_offsets))

    def action(self, place: int) -> Action:
        """The action at a place of the list."""
        return Action(
            PassKind(self.kinds[place]), int(self.stages[place]), int(self.micro_batches[place])
        )

    def of_rank(self, rank: int) -> list[Action]:
        """What a rank runs, in order."""
        return [
            self.action(place)
            for place in range(self.rank_offsets[rank], self.rank_offsets[rank + 1])
        ]


@lru_cache(maxsize=64)
def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe. The last forward pass is the first to go back, so that its activations live
    shortest.
    """
    _check(num_stages, num_micro_batches)
    numbers = range(num_micro_batches)
    actions = [
        [Action(PassKind.FORWARD, stage, number) for number in numbers]
        + [Action(PassKind.BACKWARD, stage, number) for number in reversed(numbers)]
        for stage in range(num_stages)
    ]
    return Schedule.of("gpipe", num_stages, num_micro_batches, actions)


@lru_cache(maxsize=64)
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: stage s runs min(num_stages - s, micro-batches) forward passes, then one backward and
    one forward in turn.

    >>> "".join(action.kind.name[0] + str(action.micro_batch) for action in one_f_one_b(2, 3).of_rank(0))
    'F0F1B0F2B1B2'
    """
    _check(num_stages, num_micro_batches)
    actions = [
        _alternate(stage, num_stages - stage, num_micro_batches) for stage in range(num_stages)
    ]
    return Schedule.of("1f1b", num_stages, num_micro_batches, actions)


def _alternate(stage: int, ahead: int, num_micro_batches: int) -> Iterator[Action]:
    for number in range(num_micro_batches + ahead):
        if number >= ahead:
            yield Action(PassKind.BACKWARD, stage, number - ahead)
        if number < num_micro_batches:
            yield Action(PassKind.FORWARD, stage, number)


@lru_cache(maxsize=64)
def interleaved(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> Schedule:
    """Megatron-LM's interleaved 1F1B, for any number of micro-batches.

    Micro-batches go in rounds of `num_ranks`: each passes the rank's first stage for the whole
    round, then its second, and so on; backward passes go from its last stage to its first. Of a
    last round that is not full, what is lacking is left out of the order of a full one: to close
    ranks instead would have passes wait for each other in a circle.
    """
    _check(num_ranks * stages_per_rank, num_micro_batches)
    forwards, backwards = _rounds(num_ranks, stages_per_rank, num_micro_batches)
    actions: list[list[Action]] = []
    for rank in range(num_ranks):
        ahead = min(
            len(forwards), 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1
        )
        own: list[Action] = []
        for number in range(len(forwards) + ahead):
            if number >= ahead:
                chunk, micro_batch = backwards[number - ahead]
                own.append(Action(PassKind.BACKWARD, chunk * num_ranks + rank, micro_batch))
            if number < len(forwards):
                chunk, micro_batch = forwards[number]
                own.append(Action(PassKind.FORWARD, chunk * num_ranks + rank, micro_batch))
        actions.append([action for action in own if action.micro_batch < num_micro_batches])
    return Schedule.of("interleaved", num_ranks * stages_per_rank, num_micro_batches, actions)


def _rounds(
    num_ranks: int, chunks: int, count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(chunk, micro-batch) in the order of the forward and of the backward passes of every rank,
    all rounds full.
    """
    rounds = [range(first, first + num_ranks) for first in range(0, count, num_ranks)]
    forwards = [(chunk, number) for turn in rounds for chunk in range(chunks) for number in turn]
    backwards = [
        (chunk, number) for turn in rounds for chunk in reversed(range(chunks)) for number in turn
    ]
    return forwards, backwards


@lru_cache(maxsize=64)
def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: as many micro-batches under way as in 1F1B, but stage s leaves its first s weight
    gradients for later.

    So a gradient reaches the stage before without waiting for this stage's own weights; what was
    left fills the time in which 1F1B would wait for the last micro-batches.

    >>> "".join(action.kind.name[0] + str(action.micro_batch) for action in zero_bubble(2, 3).of_rank(1))
    'F0I0F1I1W0F2I2W1W2'
    """
    _check(num_stages, num_micro_batches)
    actions = [
        _split(_alternate(stage, num_stages - stage, num_micro_batches), stage)
        for stage in range(num_stages)
    ]
    return Schedule.of("zero_bubble", num_stages, num_micro_batches, actions)


def _split(actions: Iterator[Action], most_waiting: int) -> Iterator[Action]:
    """Backward passes as two; weight gradients of at most `most_waiting` micro-batches wait."""
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is PassKind.FORWARD:
            yield action
            continue
        yield action._replace(kind=PassKind.INPUT_GRAD)
        waiting.append(action._replace(kind=PassKind.WEIGHT_GRAD))
        if len(waiting) > most_waiting:
            yield waiting.popleft()
    yield from waiting


def make_schedule(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1
) -> Schedule:
    """A schedule by its name, one of SCHEDULES. ConfigError for another, or for stages that it
    cannot run.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; use one of {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(num_ranks, stages_per_rank, num_micro_batches)
    if stages_per_rank != 1:
        raise ConfigError(
            f"{name} runs one stage per rank, not {stages_per_rank}; use schedule 'interleaved'"
        )
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}[name](
        num_ranks, num_micro_batches
    )


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")


def _check(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise ConfigError(
            f"{num_stages} stages and {num_micro_batches} micro-batches; there must be at least 1 of each"
        )
