"""Pipeline schedules as data: which actions each rank runs, in which order. Pure.

Rank r of a pipeline runs the stages r, r + num_ranks, ... A schedule has an order but no times:
`engine.simulator.simulate` computes those.

- `gpipe`: all forward passes, then all backward passes (GPipe, arXiv 1811.06965);
- `1f1b`: stage s has at most num_stages - s micro-batches in flight (PipeDream-flush,
  arXiv 2006.09503);
- `interleaved`: several stages per rank (Megatron-LM, arXiv 2104.04473);
- `zero_bubble`: 1F1B, but gradients of weights wait and fill the bubbles (ZB-H1, arXiv 2401.10241);
- `interleaved_zero_bubble`: the same in the interleaved order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray

_DEFERRED_PER_RANK = {"zero_bubble": 1, "interleaved_zero_bubble": 2}
"""Weight gradients that a rank holds back more than the one before it.

Interleaved, a rank's last input gradients wait for r later ones of other ranks. Those take longer
than weight gradients do (attention and recomputation are in them), so r of these would not fill the
time: with 4 ranks of 3 stages, 8 micro-batches, and passes in the ratio 1 : 1.3 : .7, ranks wait
4.0 % of the step, 6.2 % with r, and 11.1 % in the interleaved schedule.
"""
INTERLEAVED = ("interleaved", "interleaved_zero_bubble")
"""Schedules of several stages per rank."""
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", *INTERLEAVED)


class PassKind(IntEnum):
    """Kind of an action's pass."""

    FORWARD = 0
    BACKWARD = 1
    """The gradients of input and weights."""
    INPUT_GRAD = 2
    """Backward pass without the weight gradients of products; includes recomputation."""
    WEIGHT_GRAD = 3
    """The weight gradients of products."""
    ENCODE = 4
    """The vision encoder's forward pass ahead of the first stage's: PipeTune's pre-computation."""


class Action(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: PassKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The actions of all ranks in one list, rank by rank, each rank's in order; int64 arrays."""

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
    ) -> "Schedule":
        """The schedule with these actions of each rank. ConfigError without any."""
        if num_stages < 1 or num_micro_batches < 1:
            raise ConfigError(
                f"{num_stages} stages and {num_micro_batches} micro-batches; give at least 1 of "
                "each"
            )
        ranks = [list(rank_actions) for rank_actions in actions]
        table = np.array(
            [action for rank_actions in ranks for action in rank_actions], np.int64
        ).reshape(-1, 3)
        kinds, stages, micro_batches = table.T.copy()
        return cls(
            name=name,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            kinds=kinds,
            stages=stages,
            micro_batches=micro_batches,
            rank_offsets=np.cumsum([0, *map(len, ranks)]),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rank_offsets) - 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are passes of their own."""
        return bool((self.kinds == PassKind.WEIGHT_GRAD).any())

    @property
    def ranks(self) -> IntArray:
        """The rank of each action, (actions,)."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.rank_offsets))

    def sum_by_rank(self, values: IntArray) -> IntArray:
        """Values of stages, (stages,), summed over those of each rank, (ranks,)."""
        return np.asarray(values.reshape(-1, self.num_ranks).sum(axis=0))

    def action(self, index: int) -> Action:
        """The action at an index of the list."""
        kind = PassKind(self.kinds[index])
        return Action(kind, int(self.stages[index]), int(self.micro_batches[index]))

    def of_rank(self, rank: int) -> list[Action]:
        """The actions of a rank, in order."""
        return [self.action(index) for index in range(*self.rank_offsets[rank : rank + 2])]


@lru_cache(maxsize=64)
def _schedule(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int,
    deferred: tuple[int, ...],
) -> Schedule:
    if name == "gpipe":
        actions = _gpipe(num_ranks, num_micro_batches)
    elif name in INTERLEAVED:
        actions = _interleaved(num_ranks, stages_per_rank, num_micro_batches)
    else:
        actions = _one_f_one_b(num_ranks, num_micro_batches)
    num_stages = num_ranks * stages_per_rank
    return Schedule.of(name, num_stages, num_micro_batches, map(_split, actions, deferred))


def _gpipe(num_stages: int, num_micro_batches: int) -> Iterator[Iterator[Action]]:
    """The actions of each stage; the last forward pass goes back first, to live shortest."""
    for stage in range(num_stages):
        passes = [(stage, number) for number in range(num_micro_batches)]
        yield _alternate(passes, passes[::-1], num_micro_batches)


def _one_f_one_b(num_stages: int, num_micro_batches: int) -> Iterator[Iterator[Action]]:
    """The actions of each stage s, num_stages - s forward passes ahead."""
    for stage in range(num_stages):
        passes = [(stage, number) for number in range(num_micro_batches)]
        yield _alternate(passes, passes, num_stages - stage)


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> Iterator[Action]:
    """`ahead` forward passes, then one backward and one forward in turn; (stage, micro-batch)."""
    for number in range(len(forwards) + ahead):
        if number >= ahead:
            yield Action(PassKind.BACKWARD, *backwards[number - ahead])
        if number < len(forwards):
            yield Action(PassKind.FORWARD, *forwards[number])


def _interleaved(
    num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> Iterator[Iterator[Action]]:
    """The actions of each rank, for any number of micro-batches.

    Micro-batches go in rounds of `num_ranks`: a whole round passes the rank's first stage, then its
    second, and so on; backward passes go from its last stage to its first. An incomplete last round
    keeps the order of a full one with gaps: closing the gaps would make passes wait in a circle.
    """
    num_stages = num_ranks * stages_per_rank
    starts = range(0, num_micro_batches, max(num_ranks, 1))
    rounds = [range(first, first + num_ranks) for first in starts]
    for rank in range(num_ranks):
        up = range(rank, num_stages, num_ranks)
        forwards = [(stage, number) for turn in rounds for stage in up for number in turn]
        backwards = [(stage, number) for turn in rounds for stage in up[::-1] for number in turn]
        ahead = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1
        actions = _alternate(forwards, backwards, ahead)
        yield (action for action in actions if action.micro_batch < num_micro_batches)


def _split(actions: Iterator[Action], most: int) -> Iterator[Action]:
    """Split backward passes in two, so that at most so many weight gradients are held back."""
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is PassKind.FORWARD or most == 0:
            yield action
            continue
        yield action._replace(kind=PassKind.INPUT_GRAD)
        waiting.append(action._replace(kind=PassKind.WEIGHT_GRAD))
        if len(waiting) == most:
            yield waiting.popleft()
    yield from waiting


def most_deferred(name: str, num_ranks: int) -> tuple[int, ...]:
    """Weight gradients that each rank of a schedule holds back, if memory does not limit them.

    That of the last backward pass is among them: 1 is computed before the rank does anything else.

    >>> most_deferred("zero_bubble", 3), most_deferred("1f1b", 3)
    ((1, 2, 3), (0, 0, 0))
    """
    if name not in _DEFERRED_PER_RANK:
        return (0,) * num_ranks
    return tuple(1 + rank * _DEFERRED_PER_RANK[name] for rank in range(num_ranks))


def default_stages(name: str) -> int:
    """Stages per rank where none are asked for."""
    return 2 if name in INTERLEAVED else 1


def make_schedule(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    deferred: Sequence[int] | None = None,
) -> Schedule:
    """A schedule by its name. ConfigError if it is unknown or cannot run these stages.

    `deferred`: weight gradients that each rank may hold back, where memory is short: it computes
    the oldest early when one more would wait. With 0 it computes both gradients in one pass. None:
    `most_deferred`. So a gradient reaches the previous stage without waiting for weights; theirs
    fill the time in which 1F1B waits for the last micro-batches.

    >>> for name, rank in (("1f1b", 0), ("zero_bubble", 1)):
    ...     actions = make_schedule(name, 2, 3).of_rank(rank)
    ...     print("".join(f"{action.kind.name[0]}{action.micro_batch}" for action in actions))
    F0F1B0F2B1B2
    F0I0F1I1W0F2I2W1W2
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; use one of {', '.join(SCHEDULES)}")
    most = most_deferred(name, num_ranks)
    if deferred is not None:
        fits = len(deferred) == num_ranks and all(
            0 <= count <= limit for count, limit in zip(deferred, most, strict=False)
        )
        if name not in _DEFERRED_PER_RANK or not fits:
            raise ConfigError(
                f"deferred is {list(deferred)}; on {num_ranks} ranks {name} holds back at most "
                f"{list(most)} weight gradients"
            )
    if stages_per_rank != 1 and name not in INTERLEAVED:
        several = " or ".join(repr(schedule) for schedule in INTERLEAVED)
        raise ConfigError(
            f"{name} runs one stage per rank, not {stages_per_rank}; use schedule {several}"
        )
    limits = most if deferred is None else tuple(deferred)
    return _schedule(name, num_ranks, num_micro_batches, stages_per_rank, limits)
