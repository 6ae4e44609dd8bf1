"""Groups that are planned while training runs, window by window: `WindowGroups`.

For `loaders.steps.windows`. The samples of an epoch come in random order. A window is measured,
grouped by itself, and its groups join those that wait; the next window is prepared in a thread
meanwhile. Groups depend on lengths, seed and epoch alone, not on the number of ranks, so every rank
makes the same ones, and a state continues on any number of ranks. Only where ranks train on what
they load to measure it, each group is of one rank's samples (`Owners`).
"""

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.balance.metrics import longest
from isobatch.balance.order.rank_rounds import make_rounds
from isobatch.balance.order.step_order import GlobalShuffle
from isobatch.balance.rng import PLANNED, random_permutation
from isobatch.common.background import in_background
from isobatch.common.errors import Cancelled, DataError, IsobatchError
from isobatch.common.types import (
    COUNT_COLUMNS,
    BoolArray,
    Groups,
    IntArray,
    Limits,
    padded_lengths,
)
from isobatch.loaders.steps.in_order import cut_groups, group_in_order
from isobatch.loaders.steps.selection import SampleRefs, Selection
from isobatch.loaders.steps.source import GroupTable
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset

LLM_KINDS = ("image", "text", "audio")
LABEL_UNITS = 256
"""The labels of a mean group are rounded to 1 / this, so that products with it are exact."""

SPARE_PER_RANK = 4
"""Samples per rank that the last window of an evaluation has at least, to be parted so that all
ranks have as many groups.
"""
Loads = tuple[IntArray, IntArray]
"""Vision loads and LLM tokens."""
IsCancelled = Callable[[], bool]
InOrder = Callable[[int], IntArray]
"""Number of samples -> the next ones in the epoch's order."""


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
    pad_each_to: int = 1
    """Multiple of tokens that each packed sample counts as."""
    ranks: int = 1
    """Data-parallel ranks; without shuffling, the groups of an epoch are a multiple of them."""


class Lengths(Protocol):
    """What the samples of a dataset cost, as far as that is known."""

    @property
    def model(self) -> ModelPreset:
        """Whose samples they are."""

    def __len__(self) -> int:
        """Samples of the dataset."""

    def measure(self, samples: IntArray, is_cancelled: IsCancelled, epoch: str) -> BoolArray:
        """Learn what samples cost, together with all ranks; -> which of them can be used.

        `epoch` tells one pass over the same samples from another.
        """

    def column(self, name: str, samples: IntArray) -> IntArray:
        """A column of `Counts` of samples that were measured, int64, same shape."""

    def sorted_sources(self, samples: IntArray) -> IntArray:
        """Number of each sample's source; two sources are in the same order on all ranks."""

    def choose_limits(self, samples: IntArray) -> Limits:
        """Caps, chosen by these samples as far as they are not given."""

    def with_images(self, samples: IntArray, limits: Limits) -> Limits:
        """Caps that were chosen without images, with one for the images of these samples."""

    def within(self, samples: IntArray) -> IntArray:
        """Samples without those that are over a given cap, which are rejected."""


class Owners(Protocol):
    """Which rank loads each sample, where ranks train on what they load to measure it."""

    @property
    def are_reading(self) -> BoolArray:
        """Whether each rank may have more samples than it has been asked for, (ranks,)."""

    def of(self, samples: IntArray) -> IntArray:
        """The rank that loads each sample, int64, same shape."""

    def deal(self, size: int, carried: IntArray, in_order: InOrder) -> IntArray:
        """About `size` new samples, each for a rank: those with many `carried` get few.

        `in_order` gives the next samples of the epoch's random order, where there is one.
        """

    def restart(self, epoch: int, state: dict[str, Any]) -> dict[str, Any]:
        """Begin an epoch; -> the state, for the ranks there are now.

        ConfigError if it cannot be continued on these.
        """

    def state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """For a state: what each rank is to load again."""

    def drop(self, samples: IntArray, consumed: int, live: IntArray) -> None:
        """Forget samples that were used; those `live` of the first `consumed` are needed still."""


@dataclass(slots=True)
class WindowFigures:
    """What planning has done so far in this process."""

    num_groups: int = 0
    num_tokens: int = 0
    """LLM tokens of all groups, padding included."""
    num_padding: int = 0
    room: int = 0
    """LLM tokens that groups may have, together."""
    first_window_s: float = 0.0
    """Time until the groups of the first window were there."""
    measuring_s: float = 0.0
    """Time in which samples were measured, waiting for other ranks included."""
    grouping_s: float = 0.0

    @property
    def token_fill(self) -> float:
        """Share of `max_seq_len` that groups fill, on average."""
        return self.num_tokens / max(1, self.room)

    @property
    def padding(self) -> float:
        """Share of groups' tokens that is padding."""
        return self.num_padding / max(1, self.num_tokens)

    def add(
        self, sums: dict[str, IntArray], max_seq_len: int, measuring_s: float, grouping_s: float
    ) -> None:
        """Count a window, by the sums of its groups."""
        self.num_groups += len(sums["num_samples"])
        self.num_tokens += sum(int(sums[f"num_{kind}_tokens"].sum()) for kind in LLM_KINDS)
        self.num_padding += int(sums["num_padding"].sum())
        self.room += len(sums["num_samples"]) * max_seq_len
        self.measuring_s += measuring_s
        self.grouping_s += grouping_s
        self.first_window_s = self.first_window_s or measuring_s + grouping_s


@dataclass(slots=True)
class WindowRun:
    """What all epochs of a run share."""

    lengths: Lengths
    settings: WindowSettings
    owners: Owners | None
    """None where ranks measure together, and each sample may be trained on by any."""
    flops: FlopsModel | None
    limits: Limits | None = None
    """Caps at the position of the last step that was given; None before it."""
    mean_labels: float | None = None
    """Weight of the labels of a mean group of the run's first window."""
    figures: WindowFigures = field(default_factory=WindowFigures)
    num_begun: int = 0
    """Epochs begun, and states: what ranks tell one another is new in each."""

    @property
    def is_mixed(self) -> bool:
        """Whether a step's groups are chosen by their sources as well."""
        return self.settings.packing and self.settings.shuffle and self.owners is None


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """What one window adds."""

    numbers: IntArray
    """Numbers of its groups in the epoch, in random order."""
    carried: IntArray
    """Samples that wait for the next window."""
    consumed: int
    """Samples of the random order that are read after it."""
    limits: Limits | None
    """Caps of its groups."""
    num_rejected: int
    """Samples that cannot be used, or of a stream are not there."""


@dataclass(frozen=True, slots=True)
class PlannedGroups:
    """Groups that are planned and still in use; replaced, never changed."""

    first: int
    """Number of the first of them in the epoch."""
    groups: Groups
    """Of samples of the dataset."""
    sums: dict[str, IntArray]
    """Sums of `num_samples` and the columns of `Counts`; empty until they are measured."""

    def with_groups(self, groups: Groups, sums: dict[str, IntArray]) -> "PlannedGroups":
        """With more groups after these."""
        joined = Groups.joined([self.groups, groups])
        added = {name: np.concatenate([self.sums[name], sums[name]]) for name in sums}
        return PlannedGroups(self.first, joined, added)

    def without(self, count: int) -> "PlannedGroups":
        """Without the first groups."""
        rest = self.groups.take(np.arange(count, len(self.groups)))
        sums = {name: values[count:] for name, values in self.sums.items()}
        return PlannedGroups(self.first + count, rest, sums)

    def members(self, numbers: IntArray) -> Groups:
        """The groups of these numbers."""
        return self.groups.take(numbers - self.first)


class WindowGroups(GroupTable):
    """The groups of an epoch, numbered as they are made; those that are past are forgotten."""

    def __init__(self, run: WindowRun, number: int, num_taken: int, waiting: Groups) -> None:
        """After `num_taken` groups; those in `waiting` are planned but not measured here."""
        self.run, self.number, self._key = run, number, f"{run.num_begun}/{number}"
        self.first_limits = self.limits = run.limits
        """Caps at the beginning, and of the last window that is planned."""
        self.is_planned = False
        """Whether the last window is planned."""
        self._num_taken = self._num_forgotten = num_taken
        sums = {} if len(waiting) else self._sums(waiting)
        self._planned = PlannedGroups(num_taken, waiting, sums)
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
        remaining = len(self.run.lengths) - self._num_read
        # before the first window is made, at least one
        return known + round(max(1.0, remaining * self._num_made / max(1, self._num_placed)))

    @property
    def max_seq_len(self) -> IntArray:
        """Cap of the LLM tokens of a group: there is one build."""
        return np.array([self.limits.max_seq_len if self.limits else 0])

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
            self.run.lengths.sorted_sources(members.samples), return_inverse=True
        )
        count = max(1, len(names))
        cells = np.repeat(np.arange(len(groups)), members.sizes) * count + numbers
        return np.bincount(cells, minlength=len(groups) * count).reshape(-1, count)

    def sample_column(self, name: str, refs: SampleRefs) -> IntArray:
        """A column of `Counts` of samples, int64; padding is text."""
        values = self.run.lengths.column(name, refs.groups)
        if name != "num_text_tokens" or self.run.settings.pad_each_to == 1:
            return values
        raw, padded = self._llm_tokens(refs.groups)
        return values + padded - raw

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if all groups had those of the run's mean group.

        That is the same in all steps, so a label counts the same in whichever step it comes.
        """
        return (self.run.mean_labels or 1.0) * len(self)

    def members(self, groups: IntArray) -> list[list[int]]:
        """The samples of each group."""
        members = self._planned.members(groups)
        samples = members.samples.tolist()
        return [samples[start:end] for start, end in pairwise(members.offsets.tolist())]

    def window(self, consumed: int, carried: IntArray) -> PlannedWindow:
        """The window after `consumed` samples of the order, with those `carried` into it."""
        with self._lock:
            window, pending = self._windows.get(consumed), self._pending.get(consumed)
        if window is None:
            try:
                window = pending.result() if pending else self._make(consumed, carried)
            finally:  # only now: a second maker would wait for the one of the next window
                self._pending.pop(consumed, None)  # an error is told once, then it is tried again
        self.prepare(window.consumed, window.carried)
        return window

    def prepare(self, consumed: int, carried: IntArray) -> None:
        """Start to make a window in a thread, unless that has been started or there is none."""
        with self._lock:
            is_known = consumed < self._num_read or consumed in self._pending
            if is_known or self._closed or consumed >= len(self.run.lengths):
                return
            self._pending[consumed] = in_background(
                f"isobatch-window-{consumed}", partial(self._make, consumed, carried)
            )

    def forget(self, before: int, consumed: int, live: IntArray) -> None:
        """Drop the groups before that number; `live` are needed of the samples `consumed`."""
        if self.run.owners is not None:
            numbers = np.arange(self._num_forgotten, before)
            self.run.owners.drop(self._planned.members(numbers).samples, consumed, live)
        self._num_forgotten = before
        with self._lock:
            planned, count = self._planned, before - self._planned.first
            if planned.sums and 2 * count > len(planned.groups):
                self._planned = planned.without(count)
            for windows in (self._windows, self._pending):
                for key in [key for key in windows if key < consumed]:
                    del windows[key]

    def close(self) -> None:
        """End what is under way; if ranks load what they measure, wait until it has ended."""
        self._closed = True
        if self.run.owners is not None:  # a stream has one reader
            with self._making:
                pass

    def _make(self, consumed: int, carried: IntArray) -> PlannedWindow:
        """Measure and group a window."""
        with self._making:
            if consumed < self._num_read:
                return self._windows[consumed]
            self._measured()
            settings, lengths = self.run.settings, self.run.lengths
            planned_before = self._planned.first + len(self._planned.groups)
            samples = np.concatenate([carried, self._next_samples(consumed, carried)])
            num_asked = len(samples)
            num_read = consumed + num_asked - len(carried)
            begun = time.perf_counter()
            samples = samples[lengths.measure(samples, self._is_closed, self._key)]
            measured = time.perf_counter()
            num_usable = len(samples)
            groups, rest, num_over = self._group(
                samples, consumed, is_last=num_read == len(lengths)
            )
            if len(groups.samples) + len(rest) + num_over != num_usable:
                raise IsobatchError(
                    f"of {num_usable:,} samples of a window {len(groups.samples):,} are in groups, "
                    f"{len(rest):,} wait and {num_over:,} are over a cap: that is an error of "
                    "Isobatch's; please report it"
                )
            if num_read == len(lengths) and not settings.shuffle:
                groups = cut_groups(groups, settings.ranks, planned_before - self._num_taken)
            if num_read == len(lengths) and not len(groups) + planned_before:
                raise DataError(
                    "no sample can be used; `rejected` says why, and is empty if the dataset is"
                )
            sums = self._sums(groups)
            times = measured - begun, time.perf_counter() - measured
            cap = self.limits.max_seq_len if self.limits else 0
            self.run.figures.add(sums, cap, *times)
            with self._lock:
                planned = self._planned
                first = planned.first + len(planned.groups)
                numbers = np.arange(first, first + len(groups))
                rejected = num_asked - num_usable + num_over
                window = PlannedWindow(numbers, rest, num_read, self.limits, rejected)
                self._planned = planned.with_groups(groups, sums)
                self._num_made += len(groups)
                self._num_placed += len(groups.samples)
                self._windows[consumed], self._num_read = window, num_read
                self.is_planned = num_read == len(lengths)
        return window

    def _next_samples(self, consumed: int, carried: IntArray) -> IntArray:
        """The new samples of a window, after `consumed` of the epoch."""
        settings = self.run.settings
        size = min(settings.window, max(settings.first_window, consumed))
        if self.run.owners is None:
            return self._ordered(consumed, size)
        if self._closed:  # what ranks are to load is another epoch's now
            raise Cancelled
        return self.run.owners.deal(size, carried, lambda size: self._ordered(consumed, size))

    def _ordered(self, consumed: int, size: int) -> IntArray:
        """The next samples in the epoch's order, by number."""
        settings, total = self.run.settings, len(self.run.lengths)
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
        run, settings, lengths = self.run, self.run.settings, self.run.lengths
        if not len(samples):
            return Groups(samples, np.zeros(1, np.int64)), samples, 0
        limits = self.limits or lengths.choose_limits(samples)
        num_usable, samples = len(samples), lengths.within(samples)
        if not limits.max_vision:
            limits = lengths.with_images(samples, limits)
        self.limits = limits
        _, tokens = self._llm_tokens(samples)
        loads = lengths.column(f"num_{limits.vision_unit}", samples), tokens
        pack = self._pack if run.owners is None else self._pack_by_owner
        rows, rest = pack(samples, loads, limits, consumed, is_last=is_last)
        groups = Groups(samples[rows.samples], rows.offsets)
        if run.mean_labels is None and len(groups):
            labels = lengths.column("num_loss_tokens", groups.samples)
            mean = float(sample_weights(labels, settings.loss_weights).sum()) / len(groups)
            if not mean:
                warnings.warn("no sample of the first window has a label to learn", stacklevel=2)
            run.mean_labels = max(1, round(mean * LABEL_UNITS)) / LABEL_UNITS
        return groups, samples[rest], num_usable - len(samples)

    def _pack(
        self, samples: IntArray, loads: Loads, limits: Limits, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray]:
        """Groups of rows of `samples`, and the rows that wait."""
        from isobatch.balance.grouping.padded import group_padded  # noqa: PLC0415  (see `loaders`)
        from isobatch.balance.grouping.window import group_window  # noqa: PLC0415

        settings, packing = self.run.settings, self.run.settings.packing
        if not settings.shuffle:
            return group_in_order(*loads, limits, packing=packing, is_last=is_last)
        group, place = group_window if packing else group_padded, (self.number, consumed)
        return group(*loads, limits, seed=settings.seed, place=place, is_last=is_last)

    def _pack_by_owner(
        self, samples: IntArray, loads: Loads, limits: Limits, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray]:
        """Groups that each rank has of its samples, in rounds of one of each rank; others wait."""
        owners, settings = cast("Owners", self.run.owners), self.run.settings
        owner_of = owners.of(samples)
        by_rank: list[Groups] = []
        for rank in range(settings.ranks):
            rows = np.flatnonzero(owner_of == rank)
            rank_loads = loads[0][rows], loads[1][rows]
            groups, _ = self._pack(samples[rows], rank_loads, limits, consumed, is_last=is_last)
            by_rank.append(Groups(rows[groups.samples], groups.offsets))
        # as many rounds as any rank has groups for at the end, before that as all that still read
        sizes = np.array(list(map(len, by_rank)))
        count = int(sizes.max() if is_last else sizes[owners.are_reading].min())
        order = random_permutation(count, settings.seed, PLANNED, self.number, consumed)
        rounds = make_rounds(by_rank, loads, count, order)
        return rounds, np.setdiff1d(np.arange(len(samples)), rounds.samples)

    def _measured(self) -> PlannedGroups:
        """What is planned, after the groups of a state are measured too."""
        if not self._planned.sums:
            with self._making:
                planned, lengths = self._planned, self.run.lengths
                if not planned.sums:
                    # one that is rejected by now costs nothing, and is left out when it is read
                    lengths.measure(planned.groups.samples, self._is_closed, self._key)
                    self._planned = replace(planned, sums=self._sums(planned.groups))
        return self._planned

    def _llm_tokens(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """LLM tokens of samples, and the same with padding to `pad_each_to`."""
        columns = [self.run.lengths.column(f"num_{kind}_tokens", samples) for kind in LLM_KINDS]
        tokens = columns[0] + columns[1] + columns[2]
        return tokens, padded_lengths(tokens, self.run.settings.pad_each_to)

    def _sums(self, groups: Groups) -> dict[str, IntArray]:
        column = self.run.lengths.column
        rows = Groups(np.arange(len(groups.samples)), groups.offsets)
        counts = {name: column(name, groups.samples) for name in COUNT_COLUMNS}
        sums = {name: rows.sum(values) for name, values in counts.items()}
        tokens, padded = self._llm_tokens(groups.samples)
        sizes, padding = groups.sizes.astype(np.int64), rows.sum(padded - tokens)
        flops = self.run.flops
        attention: IntArray = np.zeros((2, len(groups)), np.int64)
        if not self.run.settings.packing:
            length = longest(rows, tokens)
            padding = sizes * length - rows.sum(tokens)
            if flops is not None:
                costs = flops.attention_tokens(length), flops.attention(length)
                attention = sizes * np.stack(costs)
        elif flops is not None:
            costs = flops.attention_tokens(padded), flops.attention(padded)
            attention = np.stack([rows.sum(cost) for cost in costs])
        sums["num_text_tokens"] += padding  # it costs as much as text
        sizes_and_padding = {"num_samples": sizes, "num_padding": padding}
        both = dict(zip(("attention_tokens", "llm_squares"), attention, strict=True))
        return sums | sizes_and_padding | both

    def _is_closed(self) -> bool:
        return self._closed
