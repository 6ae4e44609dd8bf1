"""Groups of one build, as they are stored or others in each epoch: `BuildSource`.

For `loaders.steps.steps`, or as a part of a mixture. Epochs are independent: any can be asked for,
at any time, without the ones before it. Planning needs the index of a build and its samples'
counts, and reads no shard.
"""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.balance.order.step_order import GlobalShuffle, GroupOrder
from isobatch.common.background import in_background
from isobatch.common.errors import ConfigError
from isobatch.common.types import COUNT_COLUMNS, BoolArray, Groups, IntArray
from isobatch.loaders.steps.selection import GroupSlice, SampleRefs, Selection, whole_groups
from isobatch.loaders.steps.source import GroupSource, GroupTable
from isobatch.models.flops import FlopsModel
from isobatch.shards.index import CHUNK, PADDING, GroupIndex
from isobatch.shards.manifest import Manifest
from isobatch.shards.tables import SampleTable

ATTENTION = "llm_squares"
"""Column of the LLM's attention (`ComputeLoad`), which is computed when it is first asked for."""
MOST_COUNTED = 1 << 24
"""Samples of a build up to which it is computed: their counts take 28 bytes each."""
KEPT_LOAD = 0.9
"""Share of its tokens and vision load with which a group stays as it is stored. Groups that lose
more are packed again: together they would cost as many micro-batches as before.
"""

Table = TypeVar("Table")


class PlannedBuild(Protocol):
    """What planning needs of an opened build."""

    manifest: Manifest
    index: GroupIndex

    @property
    def samples(self) -> SampleTable:
        """Counts of each sample."""


class EarlierBuild:
    """A build as it was before it grew: the first of its groups and samples."""

    def __init__(self, build: PlannedBuild, num_groups: int, num_samples: int) -> None:
        self._build, self._num_samples = build, num_samples
        self.index = build.index
        labels = int(build.index.column("num_loss_tokens", np.arange(num_groups)).sum())
        self.manifest = replace(
            build.manifest,
            num_groups=num_groups,
            num_packed=num_samples,
            values={**build.manifest.values, "totals": {"num_loss_tokens": labels}},
        )

    @cached_property
    def samples(self) -> SampleTable:
        """Counts of each sample."""
        table, number = self._build.samples, self._num_samples
        return SampleTable(
            columns={name: values[:number] for name, values in table.columns.items()},
            offsets=table.offsets[: self.manifest.num_groups + 1],
        )


class BuildTable:
    """Groups of builds' samples, by what the builds say of these."""

    def __init__(self, builds: Mapping[int, PlannedBuild]) -> None:
        """`builds` by their numbers among the loader's builds."""
        self._builds = builds

    @property
    def max_seq_len(self) -> IntArray:
        """Cap of the LLM tokens of a group, by the number of its build."""
        return np.array([build.manifest.limits.max_seq_len for build in self._builds.values()])

    def require_counts(self) -> None:
        """ConfigError or DataError if `column` cannot give `llm_squares`."""
        for build in self._builds.values():
            if (number := build.manifest.num_packed) > MOST_COUNTED:
                raise ConfigError(f"the build's {number:,} samples are too many to read them all")
            _ = build.samples

    def sample_column(self, name: str, refs: SampleRefs) -> IntArray:
        """A column of `Counts` of samples, int64."""
        values = np.empty(len(refs.places), np.int64)
        for number, build in self._builds.items():
            chosen = refs.builds == number
            samples = build.samples.offsets[refs.groups[chosen]] + refs.places[chosen]
            values[chosen] = _padded_column(build, name)[samples]
        return values


class StoredGroups(BuildTable):
    """The groups of one build as they are stored, the same in every epoch."""

    def __init__(self, build: PlannedBuild, number: int = 0) -> None:
        """`number`: the build's among the loader's builds, as of all classes here."""
        super().__init__({number: build})
        self._build, self._number = build, number

    def __len__(self) -> int:
        return self._build.manifest.num_groups

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the index for `groups`, int64, same shape."""
        if name == ATTENTION:
            return self._attention[groups]
        index, values = self._build.index, self._build.index.column(name, groups)
        if name == "num_text_tokens" and self._build.manifest.limits.pad_each_to > 1:
            values += index.column(PADDING, groups)
        return values

    @cached_property
    def _attention(self) -> IntArray:
        return self._build.samples.groups.sum(_padded_column(self._build, ATTENTION))

    def selections(self, groups: IntArray) -> list[Selection]:
        """The whole groups."""
        return [(GroupSlice(self._number, group, None),) for group in groups.tolist()]

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        sizes = self.column("num_samples", groups)
        return whole_groups(np.full_like(groups, self._number), groups, sizes)

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """This build, and rows of its index."""
        return np.full_like(groups, self._number), groups

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the build."""
        build = self._build
        if weights == "token":
            totals, name = build.manifest.values["totals"], "num_loss_tokens"
            return float(totals[name] if name in totals else build.index.column(name).sum())
        return _sum_weights(build.samples.column("num_loss_tokens"), weights)


class LaterGroups(StoredGroups):
    """Stored groups of a build, of which those are used that it has got since it was `before`."""

    def __init__(self, build: PlannedBuild, before: PlannedBuild, number: int) -> None:
        super().__init__(build, number)
        self._before = StoredGroups(before, number)

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if all groups were as the later ones are."""
        later = super().label_weights(weights) - self._before.label_weights(weights)
        return later * len(self) / max(1, len(self) - len(self._before))


class SampleGroups(BuildTable):
    """Any groups of builds' samples, which are numbered in stored order, build after build."""

    def __init__(self, builds: Sequence[PlannedBuild], groups: Groups, number: int = 0) -> None:
        """`number` is that of the first build."""
        super().__init__(dict(enumerate(builds, number)))
        tables = [build.samples for build in builds]
        self._tables, self._groups, self._number = tables, groups, number
        self._firsts = np.cumsum([0, *(int(table.offsets[-1]) for table in tables)])
        # int32, as in an index
        self._sums: dict[str, NDArray[np.integer[Any]]] = {
            name: groups.sum(self._values(name)).astype(np.int32) for name in COUNT_COLUMNS
        }
        self._sums["num_samples"] = groups.sizes.astype(np.int32)

    def __len__(self) -> int:
        return len(self._groups)

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums over the groups' samples, int64, same shape as `groups`."""
        if name == ATTENTION and name not in self._sums:
            self._sums[name] = self._groups.sum(self._values(name))
        return self._sums[name][groups].astype(np.int64)

    def selections(self, groups: IntArray) -> list[Selection]:
        """Of each group, a slice of every stored group that has samples in it."""
        refs, ends = self.samples(groups), np.cumsum(self.column("num_samples", groups)).tolist()
        slices_of_groups = (refs.select(np.arange(*borders)) for borders in pairwise([0, *ends]))
        return [tuple(map(self._whole, slices)) for slices in slices_of_groups]

    def samples(self, groups: IntArray) -> SampleRefs:
        """In stored order in each group, so that neighbours are read together."""
        chosen = self._groups.take(groups)
        owners = np.repeat(np.arange(len(chosen)), chosen.sizes)
        samples = chosen.samples[np.lexsort((chosen.samples, owners))].astype(np.int64)
        builds = np.searchsorted(self._firsts, samples, side="right") - 1
        rows, places = np.empty_like(samples), np.empty_like(samples)
        for build, table in enumerate(self._tables):
            is_here = builds == build
            inside = samples[is_here] - self._firsts[build]
            rows[is_here] = np.searchsorted(table.offsets, inside, side="right") - 1
            places[is_here] = inside - table.offsets[rows[is_here]]
        return SampleRefs(builds + self._number, rows, places)

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build and number of each group's first sample: groups may be others in each epoch."""
        firsts = self._groups.samples[self._groups.offsets[groups]].astype(np.int64)
        builds = np.searchsorted(self._firsts, firsts, side="right") - 1
        return builds + self._number, firsts

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the samples in groups."""
        labels = self._values("num_loss_tokens")
        return _sum_weights(labels[self._groups.samples].astype(np.int64), weights)

    def _values(self, name: str) -> NDArray[np.integer[Any]]:
        """A column of all samples."""
        parts = [_padded_column(build, name) for build in self._builds.values()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _whole(self, part: GroupSlice) -> GroupSlice:
        """Without places where all of a stored group is meant: it is then read as it is."""
        offsets = self._tables[part.build - self._number].offsets
        size = int(offsets[part.group + 1] - offsets[part.group])
        is_whole = part.places is not None and len(part.places) == size
        return GroupSlice(part.build, part.group, None) if is_whole else part


class PreparedTables(Generic[Table]):
    """Tables of epochs, made by `make`, one of them in advance in a thread."""

    def __init__(self, make: Callable[[int], Table]) -> None:
        self._make = make
        # the last epoch that was asked for, which a mixture may want again
        self._last: tuple[int, Table] | None = None
        # the epoch that is being made, the process that makes it, and the result
        self._pending: tuple[tuple[int, int], Future[Table]] | None = None

    def get(self, number: int) -> Table:
        """The table of an epoch, from `prepare` or made now."""
        last, pending = self._last, self._pending
        if last is not None and last[0] == number:
            return last[1]
        self._pending = None
        # a forked process does not have its parent's thread
        is_ready = pending is not None and pending[0] == (number, os.getpid())
        table = pending[1].result() if pending and is_ready else self._make(number)
        self._last = number, table
        return table

    def prepare(self, number: int) -> None:
        """Start to make a table in a thread, unless that has been started."""
        last, pending = self._last, self._pending
        key = number, os.getpid()
        if (last is None or last[0] != number) and (pending is None or pending[0] != key):
            future = in_background(f"isobatch-epoch-{number}", partial(self._make, number))
            self._pending = key, future


class ShuffledSource(GroupSource[GlobalShuffle]):
    """Groups in a random order of each epoch, a step's as alike as `balance` says."""

    order = "alike"
    num_samples: int | None
    """Samples of a whole epoch, if each comes once in it."""

    def __init__(self, seed: int, balance: float) -> None:
        self._seed, self._balance = seed, balance

    @abstractmethod
    def table(self, epoch: int) -> GroupTable:
        """The groups of an epoch; asked for again, they are there at once."""

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> tuple[GroupTable, GlobalShuffle]:
        """An epoch's groups, and their order after the position `state`."""
        table = self.table(epoch)
        order = GlobalShuffle(
            num_groups=len(table), seed=self._seed, epoch=epoch, balance=self._balance, **state
        )
        return table, order

    def samples_between(self, table: GroupTable, first: GlobalShuffle, last: GlobalShuffle) -> int:
        """Samples of the groups between two positions."""
        if self.num_samples is not None and first.remaining == len(table):
            return self.num_samples - samples_left(table, last)
        return samples_left(table, first) - samples_left(table, last)


class BuildSource(ShuffledSource):
    """One build's groups, of all its samples or of chosen ones, stored or others in each epoch."""

    def __init__(
        self,
        build: PlannedBuild,
        number: int = 0,
        *,
        seed: int = 0,
        balance: float = 0.0,
        chosen: BoolArray | None = None,
        window_groups: int | None = None,
    ) -> None:
        """`chosen`: whether each sample is, in stored order; None for all.

        `window_groups`: groups of a window within which samples change groups in each epoch, at
        .3 s of CPU per million, in advance; None for groups that stay.
        """
        super().__init__(seed, balance)
        self.build, self.model, self._number = build, build.manifest.model, number
        self._chosen = chosen
        self.num_samples = build.manifest.num_packed
        regroup = None if window_groups is None else {"window_groups": window_groups}
        self.identity = {"manifest_hash": build.manifest.hash, "regroup": regroup}
        if chosen is not None:
            self.identity["samples"] = choice_digest(chosen)
            self.num_samples = int(np.count_nonzero(chosen))
        self._window_groups = window_groups
        self._table: GroupTable | None = None
        if window_groups is not None:
            self._groups = pack_chosen(build, chosen)
            self._tables = PreparedTables(self._regrouped)
        elif chosen is not None:
            self._table = SampleGroups([build], pack_chosen(build, chosen), number)
        else:
            self._table = StoredGroups(build, number)

    def table(self, epoch: int) -> GroupTable:
        """That epoch's groups, from `prepare` or made now."""
        return self._tables.get(epoch) if self._table is None else self._table

    def prepare(self, epoch: int) -> None:
        """Start to make that epoch's groups in a thread, unless that has been started."""
        if self._table is None:
            self._tables.prepare(epoch)

    def before(self, num_groups: int, num_samples: int) -> "BuildSource":
        """The same of the build when it had these groups and samples alone."""
        return BuildSource(
            EarlierBuild(self.build, num_groups, num_samples),
            self._number,
            seed=self._seed,
            balance=self._balance,
            chosen=None if self._chosen is None else self._chosen[:num_samples],
            window_groups=self._window_groups,
        )

    def groups_after(
        self, num_groups: int, num_samples: int
    ) -> tuple[GroupTable, BoolArray | None]:
        """The groups that the build had not when it had these alone, and which rows of the table.

        Stored groups, also where each epoch has others.
        """
        build = self.build
        if self._chosen is None:
            before = EarlierBuild(build, num_groups, num_samples)
            is_later = np.arange(build.manifest.num_groups) >= num_groups
            return LaterGroups(build, before, self._number), is_later
        is_new = np.arange(len(self._chosen)) >= num_samples
        return SampleGroups([build], pack_chosen(build, self._chosen & is_new), self._number), None

    def _regrouped(self, epoch: int) -> SampleGroups:
        from isobatch.balance.order.regroup import regroup  # noqa: PLC0415  (see `loaders`)

        groups = regroup(
            _loads(self.build),
            self._groups,
            self.build.manifest.limits,
            window_groups=self._window_groups or 1,
            seed=self._seed,
            epoch=epoch,
        )
        return SampleGroups([self.build], groups, self._number)


def samples_left(table: GroupTable, order: GroupOrder) -> int:
    """Samples of the groups that are still to come in an order; .2 s per million groups."""
    rest, samples = order.copy(), 0
    while rest.remaining:
        samples += int(table.column("num_samples", rest.take(CHUNK)).sum())
    return samples


def _sum_weights(num_loss_tokens: IntArray, weights: LossWeights) -> float:
    return float(sample_weights(num_loss_tokens, weights).sum())


def choice_digest(chosen: BoolArray) -> str:
    """Which samples are chosen, for a state: a hash of the mask."""
    return hashlib.sha256(np.packbits(chosen).tobytes()).hexdigest()


def pack_chosen(build: PlannedBuild, chosen: BoolArray | None) -> Groups:
    """Groups of a build's chosen samples (None: all).

    A stored group that keeps KEPT_LOAD of its load stays, without the samples left out; those of
    all others are packed again. The same on every machine.
    """
    stored = build.samples.groups
    if chosen is None or chosen.all():
        return stored
    from isobatch.balance.grouping.best_fit import group_best_fit  # noqa: PLC0415  (see `loaders`)

    loads = _loads(build)
    stays = np.logical_and.reduce(
        [stored.sum(load * chosen) >= KEPT_LOAD * stored.sum(load) for load in loads]
    )
    staying = np.repeat(stays, stored.sizes)
    rest = np.flatnonzero(chosen & ~staying)
    vision, tokens = (load[rest] for load in loads)
    again = group_best_fit(vision, tokens, build.manifest.limits, seed=0)
    staying_groups = _restrict(stored, chosen & staying)
    return Groups.joined([staying_groups, Groups(rest[again.samples], again.offsets)])


def _restrict(groups: Groups, chosen: BoolArray) -> Groups:
    """Stored groups without the samples left out; none is empty."""
    ends = np.concatenate([[0], np.cumsum(chosen)])[groups.offsets]
    return Groups(np.flatnonzero(chosen), np.unique(np.concatenate([[0], ends])))


def _loads(build: PlannedBuild) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Vision loads and tokens of all samples."""
    columns = build.samples.columns
    tokens = sum(_padded_column(build, f"num_{kind}_tokens") for kind in ("image", "text", "audio"))
    return columns[f"num_{build.manifest.model.vision_unit}"], np.asarray(tokens)


def _padded_column(build: PlannedBuild, name: str) -> NDArray[np.integer[Any]]:
    """A column of `Counts` or ATTENTION of all samples; padding is counted as text."""
    if name == ATTENTION:
        return FlopsModel.of(build.manifest.model).attention(_loads(build)[1].astype(np.int64))
    table, multiple = build.samples, build.manifest.limits.pad_each_to
    if name != "num_text_tokens" or multiple == 1:
        return table.columns[name]
    return table.padded_text(multiple)
