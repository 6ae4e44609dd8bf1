"""Groups of windows, planned while training runs: `WindowGroups`.

For `loaders.plan.steps`. The samples of an epoch come in random order, a window of them at a time.
A window is measured, grouped by itself, and its groups join those that wait; the next window is
prepared in a thread meanwhile. Groups depend on lengths, seed and epoch alone, not on the number of
ranks, so every rank makes the same ones, and a state continues on any number of ranks.
"""

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.balance.metrics import longest
from isobatch.balance.order.global_shuffle import GlobalShuffle, unfit_state
from isobatch.common.errors import DataError, IsobatchError
from isobatch.common.types import COUNT_COLUMNS, Groups, IntArray, Limits
from isobatch.loaders.plan.epoch_groups import Epoch, EpochSource, PlannedBuild
from isobatch.loaders.plan.in_order import cut_groups, group_in_order
from isobatch.loaders.plan.selection import SampleRefs, Selection
from isobatch.loaders.plan.window_order import (
    LLM_KINDS,
    Lengths,
    PlannedGroups,
    PlannedWindow,
    WindowFigures,
    WindowOrder,
)
from isobatch.models.flops import FlopsModel

LABEL_UNITS = 256
"""The labels of a mean group are rounded to 1 / this, so that products with it are exact."""

SPARE_PER_RANK = 4
"""Samples per rank that the last window of an evaluation has at least, to be parted so that all
ranks have as many groups.
"""
Loads = tuple[IntArray, IntArray]
"""Vision loads and LLM tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    """How windows are made."""

    window: int
    """Samples of a window."""
    first_window: int
    """Samples of an epoch's first window, so that the first step comes soon; the next double."""
    seed: int
    balance: float
    step_groups: int
    """Groups of a step, over all ranks."""
    loss_weights: LossWeights
    packing: bool = True
    """Whether a group's samples are packed, and not padded to the longest."""
    shuffle: bool = True
    """False: groups are of neighbours in the dataset's order, and come in that order."""
    are_rounds: bool = False
    """Whether groups come in rounds, one of each rank, and not as `balance` says."""
    ranks: int = 1
    """Data-parallel ranks; without shuffling, the groups of an epoch are a multiple of them."""

    @property
    def is_mixed(self) -> bool:
        """Whether a step's groups are chosen by their sources as well."""
        return self.packing and self.shuffle and not self.are_rounds


class WindowGroups(EpochSource):
    """The epochs of a dataset that is measured while training runs."""

    epoch_type: "type[WindowEpoch]"

    def __init__(
        self,
        build: PlannedBuild,
        lengths: Lengths,
        settings: WindowSettings,
        identity: dict[str, object],
    ) -> None:
        """`build` has the model and the samples, each as a stored group of its own."""
        self.builds: Sequence[PlannedBuild] = [build]
        self.identity, self.num_samples = identity, None
        self.lengths, self.settings = lengths, settings
        model = build.manifest.model
        self.flops = FlopsModel.of(model) if model.has_dimensions else None
        self.limits: Limits | None = None
        """Caps at the position of the last step that was given; None before it."""
        self.mean_labels: float | None = None
        """Weight of the labels of a mean group of the run's first window."""
        self.figures = WindowFigures()
        self.num_begun = 0
        """Epochs begun, and states: what ranks tell one another is new in each."""
        self._epoch: WindowEpoch | None = None
        self._next: WindowEpoch | None = None

    def epoch(self, number: int) -> "WindowEpoch":
        """The groups of an epoch, none of them planned."""
        return self.begin(number, {})[0]

    def prepare(self, number: int) -> None:
        """Start to plan that epoch's first window, if all of the one before it are planned.

        Not of an evaluation: its samples are known then, and the other ranks may come much later.
        """
        last, prepared = self._epoch, self._next
        if (
            not self.settings.shuffle
            or last is None
            or not last.is_planned
            or (prepared and prepared.number == number)
        ):
            return
        self._next = self.epoch_type(self, number, 0, _as_groups([]))
        self._next.first_limits = self._next.limits = last.limits
        self._next.prepare(0, np.zeros(0, np.int64))

    def begin(self, number: int, state: dict[str, Any]) -> "tuple[WindowEpoch, WindowOrder]":
        """An epoch, and its order after the position `state`. ValueError for one that is none."""
        given, passed = int(state.get("given", 0)), int(state.get("passed", 0))
        waiting = _as_groups(state.get("waiting", []))
        carried = np.array(state.get("carried", []), np.int64)
        consumed, total = int(state.get("consumed", 0)), len(self.lengths)
        samples = [*waiting.samples.tolist(), *carried.tolist()]
        most = total * (self.settings.ranks if self.settings.are_rounds else 1)  # as streams have
        known = all(0 <= sample < most for sample in samples)
        if given < 0 or not len(samples) <= consumed <= total or not known:
            raise unfit_state(f"{consumed} of {total} samples, {len(samples)} of them waiting")
        if state:
            self.limits = Limits(**state["limits"]) if state.get("limits") else None
        if state.get("mean_labels"):
            self.mean_labels = float(state["mean_labels"])
        if consumed == total and not self.settings.shuffle:  # planned for other ranks, maybe
            waiting = cut_groups(waiting, self.settings.ranks)
        epoch, self._next = self._next, None
        is_fit = epoch is not None and (epoch.number, epoch.first_limits) == (number, self.limits)
        if epoch is not None and (state or not is_fit):
            epoch.close()
            epoch = None
        self.num_begun += bool(state)  # other than what was prepared, on some ranks only
        epoch = epoch or self.epoch_type(self, number, given, waiting)
        self.num_begun += 1
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = epoch
        numbers = np.arange(given, given + len(waiting))
        order = WindowOrder(epoch, numbers, carried, consumed=consumed, given=given, passed=passed)
        return epoch, order

    def close(self) -> None:
        """End the threads."""
        for epoch in (self._epoch, self._next):
            if epoch is not None:
                epoch.close()


class WindowEpoch(Epoch):
    """The groups of an epoch, numbered as they are made; those that are past are forgotten."""

    def __init__(self, source: WindowGroups, number: int, given: int, waiting: Groups) -> None:
        """After `given` groups; those in `waiting` are planned but not measured here."""
        self.source, self.number, self._key = source, number, f"{source.num_begun}/{number}"
        self.first_limits = self.limits = source.limits
        """Caps at the beginning, and of the last window that is planned."""
        self.is_planned = False
        """Whether the last window is planned."""
        self._given = given
        sums = {} if len(waiting) else self._sums(waiting)
        self._planned = PlannedGroups(given, waiting, sums)
        self._closed = False
        # the first is held while a window is made, the second while attributes change
        self._making, self._lock = threading.RLock(), threading.Lock()
        self._windows: dict[int, PlannedWindow] = {}
        self._pending: dict[int, Future[PlannedWindow]] = {}
        self._num_read = 0  # samples of the random order, up to the last window
        self._num_made, self._num_placed = 0, 0  # groups, and samples in them

    def __len__(self) -> int:
        """Number of groups; an estimate until the last window is planned."""
        planned = self._planned
        known = planned.first + len(planned.groups)
        if self.is_planned:
            return known
        left = len(self.source.lengths) - self._num_read
        # before the first window is made, at least one
        return known + round(max(1.0, left * self._num_made / max(1, self._num_placed)))

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums over the groups' samples, int64, same shape as `groups`."""
        planned = self._measured()
        return planned.sums[name][groups - planned.first]

    def selections(self, groups: IntArray) -> list[Selection]:
        """Each sample as a stored group of its own."""
        refs, members = self.samples(groups), self._planned.members(groups)
        return [refs.select(np.arange(*borders)) for borders in pairwise(members.offsets.tolist())]

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        samples = self._planned.members(groups).samples
        zeros = np.zeros_like(samples)
        return SampleRefs(zeros, samples, zeros)

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """One build, and each group's first sample: groups are others in each epoch."""
        members = self._planned.members(groups)
        return np.zeros_like(groups), np.append(members.samples, 0)[members.offsets[:-1]]

    def sources(self, groups: IntArray) -> IntArray:
        """Samples of each source in the groups, int64, (groups, sources)."""
        members = self._planned.members(groups)
        names, numbers = np.unique(
            self.source.lengths.sorted_sources(members.samples), return_inverse=True
        )
        count = max(1, len(names))
        cells = np.repeat(np.arange(len(groups)), members.sizes) * count + numbers
        return np.bincount(cells, minlength=len(groups) * count).reshape(-1, count)

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if all groups had those of the run's mean group.

        That is the same in all steps, so a label counts the same in whichever step it comes.
        """
        return (self.source.mean_labels or 1.0) * len(self)

    def members(self, groups: IntArray) -> list[list[int]]:
        """The samples of each group."""
        members = self._planned.members(groups)
        samples = members.samples.tolist()
        return [samples[start:end] for start, end in pairwise(members.offsets.tolist())]

    def window(self, consumed: int, carried: IntArray) -> PlannedWindow:
        """The window after `consumed` samples of the order, with those `carried` into it."""
        with self._lock:
            made, pending = self._windows.get(consumed), self._pending.get(consumed)
        if made is None:
            try:
                made = pending.result() if pending else self._make(consumed, carried)
            finally:  # only now: a second maker would wait for the one of the next window
                self._pending.pop(consumed, None)  # an error is told once, then it is tried again
        self.prepare(made.consumed, made.carried)
        return made

    def prepare(self, consumed: int, carried: IntArray) -> None:
        """Start to make a window in a thread, unless that has been started or there is none."""
        with self._lock:
            is_known = consumed < self._num_read or consumed in self._pending
            if is_known or self._closed or consumed >= len(self.source.lengths):
                return
            future = self._pending[consumed] = Future[PlannedWindow]()

        def run() -> None:
            try:
                future.set_result(self._make(consumed, carried))
            except BaseException as error:
                future.set_exception(error)

        # a daemon: for others the interpreter would wait, and one may wait for another rank
        threading.Thread(target=run, name=f"isobatch-window-{consumed}", daemon=True).start()

    def forget(self, before: int, consumed: int, live: IntArray) -> None:
        """Drop the groups before that number; `live` are needed of the samples `consumed`."""
        with self._lock:
            planned, count = self._planned, before - self._planned.first
            if planned.sums and 2 * count > len(planned.groups):
                self._planned = planned.without(count)
            for made in (self._windows, self._pending):
                for key in [key for key in made if key < consumed]:
                    del made[key]

    def close(self) -> None:
        """End what is under way."""
        self._closed = True

    def own_state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """What a state has besides, after so many samples, of which some are not given yet."""
        return {}

    def _make(self, consumed: int, carried: IntArray) -> PlannedWindow:
        """Measure and group a window."""
        with self._making:
            if consumed < self._num_read:
                return self._windows[consumed]
            self._measured()
            settings, lengths = self.source.settings, self.source.lengths
            planned_before = self._planned.first + len(self._planned.groups)
            samples = np.concatenate([carried, self._order(consumed, carried)])
            num_asked = len(samples)
            num_read = consumed + num_asked - len(carried)
            begun = time.perf_counter()
            samples = samples[lengths.measure(samples, self._is_closed, self._key)]
            measured = time.perf_counter()
            num_usable = len(samples)
            groups, left, num_over = self._group(
                samples, consumed, is_last=num_read == len(lengths)
            )
            if len(groups.samples) + len(left) + num_over != num_usable:
                raise IsobatchError(
                    f"of {num_usable:,} samples of a window {len(groups.samples):,} are in groups, "
                    f"{len(left):,} wait and {num_over:,} are over a cap: that is an error of "
                    "Isobatch's; please report it"
                )
            if num_read == len(lengths) and not settings.shuffle:
                groups = cut_groups(groups, settings.ranks, planned_before - self._given)
            if num_read == len(lengths) and not len(groups) + planned_before:
                raise DataError(f"none of the {num_read} samples can be used; see `rejected`")
            sums = self._sums(groups)
            times = measured - begun, time.perf_counter() - measured
            cap = self.limits.max_seq_len if self.limits else 0
            self.source.figures.add(sums, cap, *times)
            with self._lock:
                planned = self._planned
                first = planned.first + len(planned.groups)
                numbers = np.arange(first, first + len(groups))
                rejected = num_asked - num_usable + num_over
                made = PlannedWindow(numbers, left, num_read, self.limits, rejected)
                self._planned = planned.with_groups(groups, sums)
                self._num_made += len(groups)
                self._num_placed += len(groups.samples)
                self._windows[consumed], self._num_read = made, num_read
                self.is_planned = num_read == len(lengths)
        return made

    def _order(self, consumed: int, carried: IntArray) -> IntArray:
        """The new samples of a window, after `consumed` of the epoch."""
        settings, total = self.source.settings, len(self.source.lengths)
        size = min(settings.window, max(settings.first_window, consumed))
        if settings.shuffle:
            return GlobalShuffle(
                num_groups=total, seed=settings.seed, epoch=self.number, consumed=consumed
            ).take(size)
        if total - consumed - size < SPARE_PER_RANK * settings.ranks:
            size = total
        return np.arange(consumed, min(consumed + size, total))

    def _group(
        self, samples: IntArray, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray, int]:
        """Groups of samples, those that wait for the next window, and how many are over a cap."""
        source, settings, lengths = self.source, self.source.settings, self.source.lengths
        if not len(samples):
            return Groups(samples, np.zeros(1, np.int64)), samples, 0
        limits = self.limits or lengths.choose_limits(samples)
        num_usable, samples = len(samples), lengths.within(samples)
        if not limits.max_vision:
            limits = lengths.with_images(samples, limits)
        self.limits = limits
        image, text, audio = (lengths.column(f"num_{kind}_tokens", samples) for kind in LLM_KINDS)
        loads = lengths.column(f"num_{limits.vision_unit}", samples), image + text + audio
        made, left = self._pack(samples, loads, limits, consumed, is_last=is_last)
        groups = Groups(samples[made.samples], made.offsets)
        if source.mean_labels is None and len(groups):
            labels = lengths.column("num_loss_tokens", groups.samples)
            mean = float(sample_weights(labels, settings.loss_weights).sum()) / len(groups)
            if not mean:
                warnings.warn("no sample of the first window has a label to learn", stacklevel=2)
            source.mean_labels = max(1, round(mean * LABEL_UNITS)) / LABEL_UNITS
        return groups, samples[left], num_usable - len(samples)

    def _pack(
        self, samples: IntArray, loads: Loads, limits: Limits, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray]:
        """Groups of rows of `samples`, and the rows that wait."""
        from isobatch.balance.grouping.padded import group_padded  # noqa: PLC0415  (see `loaders`)
        from isobatch.balance.grouping.window import group_window  # noqa: PLC0415

        settings, packing = self.source.settings, self.source.settings.packing
        if not settings.shuffle:
            return group_in_order(*loads, limits, packing=packing, is_last=is_last)
        group, place = group_window if packing else group_padded, (self.number, consumed)
        return group(*loads, limits, seed=settings.seed, place=place, is_last=is_last)

    def _measured(self) -> PlannedGroups:
        """What is planned, after the groups of a state are measured too."""
        if not self._planned.sums:
            with self._making:
                planned, lengths = self._planned, self.source.lengths
                if not planned.sums:
                    # one that is rejected by now costs nothing, and is left out when it is read
                    lengths.measure(planned.groups.samples, self._is_closed, self._key)
                    self._planned = replace(planned, sums=self._sums(planned.groups))
        return self._planned

    def _sums(self, groups: Groups) -> dict[str, IntArray]:
        column, ordered = self.source.lengths.column, np.arange(len(groups.samples))
        own = Groups(ordered, groups.offsets)
        each = {name: column(name, groups.samples) for name in COUNT_COLUMNS}
        sums = {name: own.sum(values) for name, values in each.items()}
        tokens = np.sum([each[f"num_{kind}_tokens"] for kind in LLM_KINDS], axis=0)
        sizes, padding = groups.sizes.astype(np.int64), np.zeros(len(groups), np.int64)
        attention = padding.copy()
        if not self.source.settings.packing:
            length = longest(own, tokens)
            padding = sizes * length - own.sum(tokens)
            if (flops := self.source.flops) is not None:
                attention = sizes * flops.attention_tokens(length)
        sums["num_text_tokens"] += padding  # it costs as much as text
        own_sums = {"num_samples": sizes, "num_padding": padding, "attention_tokens": attention}
        return sums | own_sums

    def _is_closed(self) -> bool:
        return self._closed


WindowGroups.epoch_type = WindowEpoch


def _as_groups(members: Sequence[Sequence[int]]) -> Groups:
    sizes = [len(group) for group in members]
    samples = np.array([int(each) for group in members for each in group], np.int64)
    return Groups(samples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
