"""Groups of several builds, by weights that change by step: `ScheduledSource`.

For `loaders.steps.steps`. Each build is read in an endless random order of its own, pass after
pass, and each step takes as many groups of it as its weight of that step asks for, those most alike
as `balance` says. So a change of weights moves no build's position: nothing is lost, no group comes
twice in a pass, and a state continues on any ranks, also with another schedule.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from isobatch.balance.loss_weights import LossWeights
from isobatch.balance.order.mixture import UNIT as GROUP_UNIT
from isobatch.balance.order.mixture import figures_of, step_counts, whole_counts
from isobatch.balance.order.step_order import (
    GlobalShuffle,
    LoadLookup,
    assign_ranks,
    nearest,
    unfit_state,
)
from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.loaders.steps.build_groups import BuildSource, samples_left
from isobatch.loaders.steps.mixture import (
    WEIGHT_DENOMINATOR,
    JointGroups,
    builds_of,
    joint_identity,
    waiting_line,
)
from isobatch.loaders.steps.source import GroupSource, GroupTable

MixingWeights = Mapping[str, float]
"""Weight of each build, by its URL or the last part of that; 0 for builds that are not named."""
WeightSchedule = Sequence[tuple[int, MixingWeights]] | Callable[[int], MixingWeights]
"""(first step, weights) in ascending order from step 0 on, or a function of the step alone."""

ROW_BITS = 40
"""Bits of a group's number for its row; those above say which pass of which build it is in."""
UNIT = 1 << 32
"""A group, in what is owed to builds: whole numbers, so that all machines agree."""
_NONE = np.empty(0, np.int64)
_ROW = (1 << ROW_BITS) - 1
KEPT_PASSES = 3
"""Passes of a build that are kept: the prefetching threads are in a later one than the trainer."""


class MixingSchedule:
    """The builds' weights at each step. ConfigError, in one line, for weights that are none."""

    def __init__(self, schedule: WeightSchedule, urls: Sequence[str]) -> None:
        self._urls = list(map(str, urls))
        names = [url.rstrip("/").rpartition("/")[2] for url in self._urls]
        short = {name: place for place, name in enumerate(names) if names.count(name) == 1}
        self._places = short | {url: place for place, url in enumerate(self._urls)}
        self._function = schedule if callable(schedule) else None
        self._parts: list[tuple[int, list[Fraction]]] = []
        if not callable(schedule):
            try:
                self._parts = [
                    (int(step), self._shares(weights, step)) for step, weights in schedule
                ]
            except (TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"mixing_weights are {schedule!r:.100}; give [(step, {{build: weight}}), ...]"
                ) from None
            starts = [start for start, _ in self._parts]
            if starts[:1] != [0] or sorted(set(starts)) != starts:
                raise ConfigError(
                    f"mixing_weights change at the steps {starts}; begin with 0, in ascending order"
                )

    def shares(self, step: int) -> list[Fraction]:
        """Weights at a step, relative to the largest."""
        if self._function is not None:
            return self._shares(self._function(step), step)
        return next(shares for start, shares in reversed(self._parts) if start <= step)

    def _shares(self, weights: MixingWeights, step: int) -> list[Fraction]:
        if not isinstance(weights, Mapping):
            raise ConfigError(f"mixing_weights of step {step} are {weights!r}; give a dict")
        of_builds = [0.0] * len(self._urls)
        for name, weight in weights.items():
            if str(name) not in self._places:
                known = ", ".join(self._urls)
                raise ConfigError(f"mixing_weights of step {step} name {name!r}; builds: {known}")
            is_number = isinstance(weight, Real) and not isinstance(weight, bool)
            if not is_number or not 0 <= float(weight) < float("inf"):
                raise ConfigError(
                    f"mixing_weights of step {step} are {weight!r} for {name!r}; give 0 or more"
                )
            of_builds[self._places[str(name)]] = float(weight)
        if not any(of_builds):
            raise ConfigError(f"mixing_weights of step {step} are all 0; give one above 0")
        largest = max(of_builds)
        return [
            Fraction(weight / largest).limit_denominator(WEIGHT_DENOMINATOR) for weight in of_builds
        ]


class ScheduledSource(GroupSource["WeightedOrder"]):
    """Builds, and what each step takes of them.

    An epoch has as many groups as one pass over the builds of the largest weight at its beginning,
    and weight / largest of a pass over others. Its last step is full: it takes what it lacks from
    the builds' next groups, with which the next epoch then continues.
    """

    order = "mixed"

    def __init__(
        self,
        parts: Sequence[BuildSource],
        schedule: MixingSchedule,
        seed: int,
        balance: float = 0.0,
    ) -> None:
        """`parts`: one source per build."""
        self.model, self.parts, self.schedule = parts[0].model, parts, schedule
        self.identity = joint_identity(parts, ["by step"] * len(parts))
        self.seed, self.balance = seed, balance
        self._passes: dict[tuple[int, int], GroupTable] = {}
        self._lock = threading.Lock()

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> "tuple[ScheduledGroups, WeightedOrder]":
        """An epoch, and the order of its groups after the position `state`."""
        order = WeightedOrder(self, **(state or WeightedOrder(self).next_state()))
        return ScheduledGroups(self, order), order

    def samples_between(
        self, table: GroupTable, first: "WeightedOrder", last: "WeightedOrder"
    ) -> int:
        """Samples of the groups between two positions, by the builds' passes."""
        return first.samples_until(last)

    def next_state(self, position: "WeightedOrder") -> dict[str, Any]:
        """The next epoch begins where the last step has ended."""
        return position.next_state()

    def require_start(self, epoch: int) -> None:
        """ConfigError: a position is reached by steps alone."""
        raise ConfigError(
            f"with mixing_weights an epoch follows from the steps of the one before; load a state "
            f"instead of setting epoch {epoch}"
        )

    def waiting_line(self, shape: tuple[int, int]) -> str:
        """How long ranks will wait at the first step's weights, and what to do."""
        return waiting_line(self.parts, list(map(float, self.schedule.shares(0))), shape)

    def group_pass(self, part: int, number: int) -> GroupTable:
        """The groups of a build in one of its passes. In any thread."""
        with self._lock:
            if (part, number) not in self._passes:
                self._passes.pop((part, number - KEPT_PASSES), None)
                self._passes[part, number] = self.parts[part].table(number)
            return self._passes[part, number]

    def prepare_pass(self, part: int, number: int) -> None:
        """Start in the background what that pass needs."""
        with self._lock:
            self.parts[part].prepare(number)


class ScheduledGroups(JointGroups):
    """Groups of all passes of all builds, by number."""

    def __init__(self, source: ScheduledSource, order: "WeightedOrder") -> None:
        super().__init__(builds_of(source.parts))
        self._source, self._length, self._began = source, order.length, order.began
        self._passes = order.open_passes()

    def __len__(self) -> int:
        return self._length

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if the epoch keeps the weights that it began with."""
        parts = zip(self._passes, self._source.schedule.shares(self._began), strict=True)
        return float(sum(groups.label_weights(weights) * share for groups, share in parts))

    def _find(self, groups: IntArray) -> Iterator[tuple[GroupTable, IntArray, IntArray]]:
        keys, rows = groups >> ROW_BITS, groups & _ROW
        for key in np.unique(keys).tolist():
            number, part = divmod(key, len(self._source.parts))
            places = np.flatnonzero(keys == key)
            yield self._source.group_pass(part, number), places, rows[places]


class WeightedOrder:
    """Position in all builds; what is owed to a build is at most about a group."""

    def __init__(
        self,
        source: ScheduledSource,
        *,
        step: int = 0,
        began: int = 0,
        length: int = 0,
        given: int = 0,
        builds: Sequence[Sequence[int]] = (),
    ) -> None:
        """`began`: step with which the epoch began; `given` of its `length` groups are past.

        `builds`: passes before the current one, groups read of that, what is owed, and the groups
        that are read and not given yet, for each.
        """
        self._source, self.step, self.began = source, step, began
        self.length, self._given = length, given
        builds = builds or [(0, 0, 0)] * len(source.parts)
        self._passes, taken, self._owed = (
            list(column) for column in zip(*[row[:3] for row in builds], strict=True)
        )
        is_fit = len(builds) == len(source.parts) and not sum(self._owed)
        if not is_fit or min(step, began, length, given, *self._passes, *taken) < 0:
            raise unfit_state(f"{taken} groups of passes {self._passes}")
        self._orders = [
            self._order_of(part, number, consumed, spare)
            for part, (number, consumed, _, *spare) in enumerate(builds)
        ]

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""
        return max(0, self.length - self._given)

    def take(self, count: int) -> IntArray:
        """The next `count` groups by the weights of this step, build after build, int64."""
        counts = self._share(count)
        taken = [_NONE, *(self._take(part, number) for part, number in enumerate(counts))]
        self._given += count
        return np.concatenate(taken)

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches), shared evenly among ranks."""
        count = dp * micro_batches
        if count == 1 or not self._source.balance:
            groups = self.take(count)
        else:
            groups = self._balanced(dp, micro_batches, loads)
        self.step += 1
        return groups[assign_ranks(*loads(groups), dp, micro_batches)]

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""
        return {
            "step": self.step,
            "began": self.began,
            "length": self.length,
            "given": self._given,
            "builds": [
                [number, order.consumed, owed, *order.state()["spare"]]
                for number, order, owed in zip(self._passes, self._orders, self._owed, strict=True)
            ],
        }

    def next_state(self) -> dict[str, Any]:
        """State at the beginning of the next epoch."""
        length = sum(map(int, self._loads()))
        return {**self.state(), "began": self.step, "length": length, "given": 0}

    def copy(self) -> "WeightedOrder":
        """An order in the same state that moves independently."""
        twin = copy(self)
        twin._passes, twin._owed = [*self._passes], [*self._owed]
        twin._orders = [order.copy() for order in self._orders]
        return twin

    def samples_until(self, later: "WeightedOrder") -> int:
        """Samples of the groups between this position and a later one, by the builds' passes."""
        between = 0
        for part, source in enumerate(self._source.parts):
            passes = later._passes[part] - self._passes[part]
            between += passes * (source.num_samples or 0)
            between += self._samples_left(part) - later._samples_left(part)
        return between

    def open_passes(self) -> list[GroupTable]:
        """The pass of each build that its next group is in."""
        return [self._source.group_pass(part, number) for part, number in enumerate(self._passes)]

    def _order_of(
        self, part: int, number: int, consumed: int, spare: Sequence[int] = ()
    ) -> GlobalShuffle:
        """The order of a pass."""
        return GlobalShuffle(
            num_groups=len(self._source.group_pass(part, number)),
            seed=self._source.seed,
            epoch=number * len(self._source.parts) + part,
            balance=self._source.balance,
            consumed=consumed,
            spare=spare,
        )

    def _samples_left(self, part: int) -> int:
        """Samples that are still to come of a build's pass."""
        return samples_left(self._source.group_pass(part, self._passes[part]), self._orders[part])

    def _loads(self) -> list[Fraction]:
        """Groups of each build in an epoch of this step's weights; one at least in all."""
        parts = zip(self._source.schedule.shares(self.step), self.open_passes(), strict=True)
        loads = [share * len(groups) for share, groups in parts]
        if sum(loads) < 1:
            raise ConfigError(
                f"mixing_weights of step {self.step} are above 0 only for builds without groups"
            )
        return loads

    def _share(self, count: int) -> list[int]:
        """How many of the next `count` groups are each build's; moves what is owed.

        Weights times groups, so that a build of twice the weight has twice the passes. What a step
        cannot give in whole groups is owed to the next ones, so shares hold over any few steps.
        """
        owed, expected = self._owed_with(count)
        available = np.where(np.array(expected) > 0, count, 0)
        counts: list[int] = whole_counts(np.array(owed), available, count, UNIT).tolist()
        self._owed = [debt - UNIT * taken for debt, taken in zip(owed, counts, strict=True)]
        return counts

    def _owed_with(self, count: int) -> tuple[list[int], list[int]]:
        """What is owed to builds with the next `count` groups, and what these add, in UNITs."""
        loads = self._loads()
        total = sum(loads)
        # at least one, so that it is known which builds have a weight
        expected = [max(1, int(count * UNIT * load / total)) if load else 0 for load in loads]
        owed = [self._owed[part] + share if share else 0 for part, share in enumerate(expected)]
        # what was owed to builds that have no weight now, and what rounding lost
        owed[max(range(len(loads)), key=lambda part: loads[part])] += count * UNIT - sum(owed)
        return owed, expected

    def _balanced(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """A step's groups, int64: of each build as many as `step_counts` says, the most alike."""
        count = dp * micro_batches
        owed, expected = self._owed_with(count)
        pools = [
            self._candidates(part, max(-(-owed[part] // UNIT), min(dp, count))) if share else _NONE
            for part, share in enumerate(expected)
        ]
        sizes = np.array(list(map(len, pools)))
        costs = list(map(loads, pools))
        samples = [
            self._source.group_pass(part, self._passes[part]).column("num_samples", pool & _ROW)
            for part, pool in enumerate(pools)
        ]
        sums = [np.array([int(load[kind].sum()) for load in costs]) for kind in (0, 1)]
        shares = np.array(expected) // (UNIT // GROUP_UNIT)
        figures = figures_of(shares, sums, sizes, np.array([numbers.sum() for numbers in samples]))
        debt = np.array(owed) // (UNIT // GROUP_UNIT) - shares
        # a pass that ends continues with the next
        available = np.where(np.array(expected) > 0, count, 0)
        counts = step_counts(figures, debt, available, (dp, micro_batches)).tolist()
        taken = [_NONE]
        for part, number in enumerate(counts):
            order = self._orders[part]
            if number >= order.remaining or number > len(pools[part]):
                taken.append(self._take(part, number))
            elif number:
                chosen = nearest(*costs[part], number, order.tolerance)
                taken.append(pools[part][chosen])
                order.remove(chosen)
        self._owed = [owing - UNIT * number for owing, number in zip(owed, counts, strict=True)]
        self._given += count
        return np.concatenate(taken)

    def _candidates(self, part: int, count: int) -> IntArray:
        """Groups of a build's pass out of which `count` are chosen, the longest waiting first."""
        if not self._orders[part].consumed:
            self._source.prepare_pass(part, self._passes[part] + 1)
        return self._numbered(part, self._orders[part].candidates(count))

    def _numbered(self, part: int, rows: IntArray) -> IntArray:
        """Groups of a build's pass as numbers of `ScheduledGroups`."""
        first = (self._passes[part] * len(self._passes) + part) << ROW_BITS
        return np.asarray(rows + first, np.int64)

    def _take(self, part: int, count: int) -> IntArray:
        """The next groups of a build, across its passes, as numbers of `ScheduledGroups`."""
        parts = [np.empty(0, np.int64)]
        while count:
            number, order = self._passes[part], self._orders[part]
            if not order.consumed:
                self._source.prepare_pass(part, number + 1)
            rows = order.take(count)
            parts.append(self._numbered(part, rows))
            count -= len(rows)
            if not order.remaining:
                self._passes[part] += 1
                self._orders[part] = self._order_of(part, number + 1, 0)
        return np.concatenate(parts)
