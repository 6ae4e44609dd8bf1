"""`WindowSource`: epochs of a dataset that is measured while training runs."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from isobatch.balance.order.mixture import most_alike_mixed
from isobatch.balance.order.step_order import (
    CENTRES,
    MOST_PASSED,
    LoadLookup,
    assign_ranks,
    most_alike,
    unfit_state,
)
from isobatch.common.errors import IsobatchError
from isobatch.common.types import Groups, IntArray, Limits
from isobatch.loaders.steps.in_order import cut_groups, dealt
from isobatch.loaders.steps.source import GroupSource, GroupTable
from isobatch.loaders.steps.window_groups import (
    Lengths,
    Owners,
    WindowGroups,
    WindowRun,
    WindowSettings,
)
from isobatch.models.flops import FlopsModel

LEAST_WIDTH = 4
"""Times a step's groups that wait at least, if `balance` asks for as many: more come by windows."""

PADDED_TOLERANCE = 2.0
"""Times `EQUAL` by which padded batches may differ: those of one length, often of one source, are
so much nearer to each other that steps would else be of one kind. AI2D + ChartQA at 4,096 tokens:
entropy of sources .62 of random's instead of .43, while ranks wait 1.4 % instead of 1.2 %.
"""


class WindowSource(GroupSource["WindowOrder"]):
    """The epochs of a dataset that is measured while training runs."""

    def __init__(
        self,
        lengths: Lengths,
        settings: WindowSettings,
        identity: dict[str, object],
        owners: Owners | None = None,
    ) -> None:
        """`owners`: which rank loads what, if ranks train on what they load to measure it."""
        self.model, self.identity = lengths.model, identity
        flops = FlopsModel.of(self.model) if self.model.has_dimensions else None
        self.run = WindowRun(lengths=lengths, settings=settings, owners=owners, flops=flops)
        self.order = "windows by source" if self.run.is_mixed else "windows"
        self._epoch: WindowGroups | None = None
        self._next: WindowGroups | None = None

    def prepare(self, epoch: int) -> None:
        """Start to plan that epoch's first window, if all of the one before it are planned.

        Not of an evaluation: its samples are known then, and the other ranks may come much later.
        Nor where ranks load what they measure: it is kept until the epoch ends.
        """
        last, prepared = self._epoch, self._next
        if not self.run.settings.shuffle or self.run.owners is not None:
            return
        if last is None or not last.is_planned or (prepared and prepared.number == epoch):
            return
        self._next = WindowGroups(self.run, epoch, 0, _as_groups([]))
        self._next.first_limits = self._next.limits = last.limits
        self._next.prepare(0, np.zeros(0, np.int64))

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> "tuple[WindowGroups, WindowOrder]":
        """An epoch, and its order after the position `state`. ValueError for one that is none."""
        run, settings = self.run, self.run.settings
        if run.owners is not None:
            if self._epoch is not None:
                self._epoch.close()
            state = run.owners.restart(epoch, state)
        num_taken, passed = int(state.get("given", 0)), int(state.get("passed", 0))
        waiting = _as_groups(state.get("waiting", []))
        carried = np.array(state.get("carried", []), np.int64)
        consumed, total = int(state.get("consumed", 0)), len(run.lengths)
        samples = [*waiting.samples.tolist(), *carried.tolist()]
        # of streams, every n-th number is one of n ranks'
        end = total * (settings.ranks if run.owners is not None else 1)
        known = all(0 <= sample < end for sample in samples)
        if num_taken < 0 or not len(samples) <= consumed <= total or not known:
            raise unfit_state(f"{consumed} of {total} samples, {len(samples)} of them waiting")
        if state:
            run.limits = Limits(**state["limits"]) if state.get("limits") else None
        if state.get("mean_labels"):
            run.mean_labels = float(state["mean_labels"])
        if consumed == total and not settings.shuffle:  # planned for other ranks, maybe
            waiting = cut_groups(waiting, settings.ranks)
        table = self._prepared(epoch) if not state else self._prepared(None)
        run.num_begun += bool(state)  # other than what was prepared, on some ranks only
        table = table or WindowGroups(run, epoch, num_taken, waiting)
        run.num_begun += 1
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = table
        numbers = np.arange(num_taken, num_taken + len(waiting))
        order = WindowOrder(
            table, numbers, carried, consumed=consumed, num_taken=num_taken, passed=passed
        )
        return table, order

    def samples_between(self, table: GroupTable, first: "WindowOrder", last: "WindowOrder") -> int:
        """Samples that were read, and not rejected, from the first position to the last."""
        return first.samples_until(last)

    def forget(self, position: "WindowOrder") -> None:
        """Drop the groups that neither this nor a later position needs."""
        position.forget_past()

    def _prepared(self, epoch: int | None) -> WindowGroups | None:
        """What was prepared, if it is that epoch's under the caps of now; else it is ended."""
        table, self._next = self._next, None
        if table is None or (table.number, table.first_limits) == (epoch, self.run.limits):
            return table
        table.close()
        return None

    def close(self) -> None:
        """End the threads."""
        for table in (self._epoch, self._next):
            if table is not None:
                table.close()


def _as_groups(members: Sequence[Sequence[int]]) -> Groups:
    sizes = [len(group) for group in members]
    samples = np.array([int(sample) for group in members for sample in group], np.int64)
    return Groups(samples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


class WindowOrder:
    """A step's groups are most like one of those that have waited longest, as `balance` says.

    Its state lists the samples that were read and not used yet, so it depends on no plan.
    """

    def __init__(
        self,
        table: WindowGroups,
        waiting: IntArray,
        carried: IntArray,
        *,
        consumed: int,
        num_taken: int,
        passed: int,
    ) -> None:
        """`waiting` groups, samples `carried` into the next window, and how much is past.

        `num_taken` is the number of groups that were taken, `consumed` that of samples that were
        read, `passed` that of steps in a row that did not take the first of the waiting groups.
        """
        self._table, self._run = table, table.run
        self._waiting, self._carried = waiting, carried
        self._consumed, self.num_taken, self._passed = consumed, num_taken, passed
        self._limits = table.first_limits
        # what it began with, and samples that were read since and cannot be used
        self._num_begun, self._num_rejected = consumed - len(self._live()), 0

    @property
    def remaining(self) -> int:
        """Groups still to come: at least those of a step, exact where there are fewer."""
        ahead = self.copy()
        ahead._fill(self._run.settings.step_groups)
        return len(ahead._waiting)

    @property
    def expected(self) -> int:
        """Groups of the whole epoch by those that are read: by the first ones, if none are.

        By the position alone, and not by how far windows are planned ahead, so equal on all ranks.
        """
        read = self.copy()
        read._fill(0 if self._consumed else 1)
        placed = read._consumed - len(read._carried)
        planned, rest = read.num_taken + len(read._waiting), len(self._run.lengths) - placed
        return planned + round(rest * planned / max(1, placed)) if placed else rest

    @property
    def is_read(self) -> bool:
        """Whether the epoch's last window is read, so that its groups are known."""
        return self._consumed == len(self._run.lengths)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64, those that waited first; fewer at the epoch's end."""
        self._fill(count)
        return self._taken(np.arange(min(count, len(self._waiting))))

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where the epoch has ended."""
        count, settings = dp * micro_batches, self._run.settings
        balance = settings.balance
        if self._run.owners is not None or not settings.shuffle:
            return dealt(self.take(count), dp, micro_batches)
        width = 1 / (1 - balance)
        # some to choose from, however large a step is
        self._fill(int(count * min(width, LEAST_WIDTH)))
        candidates = self._waiting[: int(count * width)]
        vision, tokens = loads(candidates)
        # of packed groups the tokens are even already: what differs is attention
        tokens = tokens + self._table.column("attention_tokens", candidates)
        centres = CENTRES if self._passed < MOST_PASSED else 1
        tolerance = min(1.0, 2 * (1 - balance))
        if not settings.packing:
            tolerance = min(PADDED_TOLERANCE, 10 * tolerance)
        sources = self._table.sources(candidates)
        if self._run.is_mixed and sources.shape[1] > 1:
            chosen = most_alike_mixed((vision, tokens), sources, count, tolerance, centres)
        else:
            chosen = most_alike(vision, tokens, count, tolerance, centres)
        self._passed = 0 if 0 in chosen else self._passed + 1
        places = assign_ranks(vision[chosen], tokens[chosen], dp, micro_batches)
        return np.append(self._taken(chosen), -1)[places]

    def state(self) -> dict[str, Any]:
        """This position, with the samples that wait: plain JSON, the same on every rank."""
        owners = self._run.owners
        return {
            "consumed": self._consumed,
            "given": self.num_taken,
            "passed": self._passed,
            "carried": self._carried.tolist(),
            "waiting": self._table.members(self._waiting),
            "limits": None if self._limits is None else self._limits.to_json(),
            "mean_labels": self._run.mean_labels,
            **(owners.state(self._consumed, self._live(), self._carried) if owners else {}),
        }

    def copy(self) -> "WindowOrder":
        """An order in the same state that moves independently."""
        return copy(self)  # arrays are replaced, never changed

    def samples_until(self, later: "WindowOrder") -> int:
        """Samples that were read, and given from where this order began until the epoch's end.

        IsobatchError if samples were never read.
        """
        last = later.copy()  # steps do not read the windows after their last group, which add none
        last._fill(self._run.settings.step_groups)
        if not last.is_read:
            raise IsobatchError(
                f"an epoch ends after {last._consumed:,} of {len(self._run.lengths):,} "
                "samples: that is an error of Isobatch's; please report it"
            )
        used = last._consumed - len(last._live()) - self._num_begun
        return used - last._num_rejected

    def forget_past(self) -> None:
        """Let the epoch drop the groups that neither this nor a later position needs."""
        self._run.limits = self._limits
        before = int(self._waiting.min(initial=self.num_taken))  # if none waits all were taken
        self._table.forget(before, self._consumed, self._live())

    def _fill(self, count: int) -> None:
        """Read windows until so many groups wait, or the epoch ends."""
        while len(self._waiting) < count and self._consumed < len(self._run.lengths):
            window = self._table.window(self._consumed, self._carried)
            self._waiting = np.concatenate([self._waiting, window.numbers])
            self._consumed, self._carried = window.consumed, window.carried
            self._limits = window.limits
            self._num_rejected += window.num_rejected

    def _live(self) -> IntArray:
        """Samples that were read and are not given yet."""
        return np.concatenate([self._table.samples(self._waiting).groups, self._carried])

    def _taken(self, places: IntArray) -> IntArray:
        """The waiting groups at these places, which wait no longer."""
        groups = self._waiting[places]
        self._waiting = np.delete(self._waiting, places)
        self.num_taken += len(groups)
        return groups
