"""Groups of an epoch: stored, of chosen samples, or grouped again.

For `loaders.plan.steps`. A source's `epoch(number)` depends on builds, seed and number alone, and
reads no shard. Several builds are mixed by `loaders.plan.mixed_groups`.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.common.types import COUNT_COLUMNS, BoolArray, Counts, Groups, IntArray
from isobatch.loaders.plan.selection import GroupSlice, SampleRefs, Selection, whole_groups
from isobatch.shards.index import GroupIndex
from isobatch.shards.manifest import Manifest
from isobatch.shards.tables import SampleTable

KEPT_LOAD = 0.9
"""Share of its tokens and vision load with which a group stays as it is stored. Groups that lose
more are packed again: together they would cost as many micro-batches as before.
"""

MadeEpoch = TypeVar("MadeEpoch")


class PlannedBuild(Protocol):
    """What planning needs of an opened build."""

    manifest: Manifest
    index: GroupIndex

    @property
    def samples(self) -> SampleTable:
        """Counts of each sample."""


def sample_counts(builds: Sequence[PlannedBuild], refs: SampleRefs) -> Counts:
    """What the samples cost."""
    return Counts(**{name: sample_column(builds, refs, name) for name in COUNT_COLUMNS})


def sample_column(builds: Sequence[PlannedBuild], refs: SampleRefs, name: str) -> IntArray:
    """One column of what the samples cost, int64."""
    values = np.empty(len(refs.places), np.int64)
    for number, build in enumerate(builds):
        chosen = refs.builds == number
        samples = build.samples.offsets[refs.groups[chosen]] + refs.places[chosen]
        values[chosen] = build.samples.column(name, samples)
    return values


class Epoch(Protocol):
    """The groups of an epoch."""

    def __len__(self) -> int:
        """Number of groups."""

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums of `num_samples` or a column of `Counts` over `groups`, int64, same shape."""

    def selections(self, groups: IntArray) -> list[Selection]:
        """What to read for each of the groups."""

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build of each group, and a number that it keeps there over epochs; int64, same shape."""

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the epoch."""


class EpochSource(Protocol):
    """The epochs of a run."""

    builds: Sequence[PlannedBuild]
    identity: dict[str, object]
    """What a state must agree with when a run resumes; plain JSON."""
    num_samples: int | None
    """Samples of a whole epoch, if each comes once in it."""

    def epoch(self, number: int) -> Epoch:
        """The groups of an epoch."""

    def prepare(self, number: int) -> None:
        """Start in the background what that epoch needs, if it takes long."""


class StoredGroups:
    """The groups of one build as they are stored; the source and every epoch in one."""

    def __init__(self, build: PlannedBuild, place: int = 0) -> None:
        """`place`: the build's place among the loader's builds, as of all classes here."""
        self.builds: Sequence[PlannedBuild] = [build]
        self.identity: dict[str, object] = {"manifest_hash": build.manifest.hash, "regroup": None}
        self.num_samples: int | None = build.manifest.num_packed
        self._place = place

    def __len__(self) -> int:
        return self.builds[0].manifest.num_groups

    def epoch(self, number: int) -> "StoredGroups":
        """The same in every epoch."""
        return self

    def prepare(self, number: int) -> None:
        """Nothing."""

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the index for `groups`, int64, same shape."""
        return self.builds[0].index.column(name, groups)

    def selections(self, groups: IntArray) -> list[Selection]:
        """The whole groups."""
        return [(GroupSlice(self._place, group, None),) for group in groups.tolist()]

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        sizes = self.column("num_samples", groups)
        return whole_groups(np.full_like(groups, self._place), groups, sizes)

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """This build, and rows of its index."""
        return np.full_like(groups, self._place), groups

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the build."""
        if weights == "token":
            totals, name = self.builds[0].manifest.values["totals"], "num_loss_tokens"
            return float(
                totals[name] if name in totals else self.builds[0].index.column(name).sum()
            )
        return _sum_weights(self.builds[0].samples.column("num_loss_tokens"), weights)


class SampleGroups:
    """Any groups of builds' samples, which are numbered in stored order, build after build."""

    def __init__(self, tables: Sequence[SampleTable], groups: Groups, place: int = 0) -> None:
        """`place` is that of the first build."""
        self._tables, self._groups, self._place = tables, groups, place
        self._firsts = np.cumsum([0, *(int(table.offsets[-1]) for table in tables)])
        # int32, as in an index
        self._sums = {
            name: groups.sum(self._values(name)).astype(np.int32) for name in COUNT_COLUMNS
        }
        self._sums["num_samples"] = groups.sizes.astype(np.int32)

    def __len__(self) -> int:
        return len(self._groups)

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums over the groups' samples, int64, same shape as `groups`."""
        return self._sums[name][groups].astype(np.int64)

    def selections(self, groups: IntArray) -> list[Selection]:
        """Of each group, a slice of every stored group that has samples in it."""
        refs, ends = self.samples(groups), np.cumsum(self.column("num_samples", groups)).tolist()
        each_group = (refs.select(np.arange(*borders)) for borders in pairwise([0, *ends]))
        return [tuple(map(self._whole, slices)) for slices in each_group]

    def samples(self, groups: IntArray) -> SampleRefs:
        """In stored order in each group, so that neighbours are read together."""
        chosen = self._groups.take(groups)
        owners = np.repeat(np.arange(len(chosen)), chosen.sizes)
        samples = chosen.samples[np.lexsort((chosen.samples, owners))].astype(np.int64)
        builds = np.searchsorted(self._firsts, samples, side="right") - 1
        rows, places = np.empty_like(samples), np.empty_like(samples)
        for build, table in enumerate(self._tables):
            own = builds == build
            inside = samples[own] - self._firsts[build]
            rows[own] = np.searchsorted(table.offsets, inside, side="right") - 1
            places[own] = inside - table.offsets[rows[own]]
        return SampleRefs(builds + self._place, rows, places)

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build and number of each group's first sample: groups may be others in each epoch."""
        firsts = self._groups.samples[self._groups.offsets[groups]].astype(np.int64)
        builds = np.searchsorted(self._firsts, firsts, side="right") - 1
        return builds + self._place, firsts

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the samples in groups."""
        labels = self._values("num_loss_tokens")
        return _sum_weights(labels[self._groups.samples].astype(np.int64), weights)

    def _values(self, name: str) -> NDArray[np.int32]:
        """A column of all samples."""
        parts = [table.columns[name] for table in self._tables]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _whole(self, part: GroupSlice) -> GroupSlice:
        """Without places where all of a stored group is meant: it is then read as it is."""
        offsets = self._tables[part.build - self._place].offsets
        size = int(offsets[part.group + 1] - offsets[part.group])
        is_whole = part.places is not None and len(part.places) == size
        return GroupSlice(part.build, part.group, None) if is_whole else part


class ChosenGroups:
    """One build's groups of chosen samples only, the same in every epoch."""

    def __init__(self, build: PlannedBuild, chosen: BoolArray, place: int = 0) -> None:
        """`chosen`: whether each sample is, in stored order."""
        self.builds: Sequence[PlannedBuild] = [build]
        self.identity: dict[str, object] = {
            "manifest_hash": build.manifest.hash,
            "regroup": None,
            "samples": choice_digest(chosen),
        }
        self.num_samples: int | None = int(np.count_nonzero(chosen))
        groups = pack_chosen(build, chosen)
        self._groups = SampleGroups([build.samples], groups, place)

    def epoch(self, number: int) -> SampleGroups:
        """The same in every epoch."""
        return self._groups

    def prepare(self, number: int) -> None:
        """Nothing."""


class PreparedEpochs(Generic[MadeEpoch]):
    """Epochs that `make` makes, one of them in advance in a thread."""

    def __init__(self, make: Callable[[int], MadeEpoch]) -> None:
        self._make = make
        # the last epoch that was asked for, which a mixture may want again
        self._made: tuple[int, MadeEpoch] | None = None
        # the epoch that is being made, the process that makes it, and the result
        self._pending: tuple[tuple[int, int], Future[MadeEpoch]] | None = None

    def get(self, number: int) -> MadeEpoch:
        """An epoch, from `prepare` or made now."""
        made, pending = self._made, self._pending
        if made is not None and made[0] == number:
            return made[1]
        self._pending = None
        # a forked process does not have its parent's thread
        is_ready = pending is not None and pending[0] == (number, os.getpid())
        epoch = pending[1].result() if pending and is_ready else self._make(number)
        self._made = number, epoch
        return epoch

    def prepare(self, number: int) -> None:
        """Start to make an epoch in a thread, unless that has been started."""
        key, made, pending = (number, os.getpid()), self._made, self._pending
        if (made is None or made[0] != number) and (pending is None or pending[0] != key):
            pool = ThreadPoolExecutor(1, thread_name_prefix=f"isobatch-epoch-{number}")
            self._pending = key, pool.submit(self._make, number)
            pool.shutdown(wait=False)


class Regrouped:
    """One build whose samples change groups in every epoch: .3 s of CPU per million, in advance."""

    def __init__(
        self,
        build: PlannedBuild,
        seed: int,
        window_groups: int,
        chosen: BoolArray | None = None,
        place: int = 0,
    ) -> None:
        self.builds: Sequence[PlannedBuild] = [build]
        self._seed, self._window_groups, self._place = seed, window_groups, place
        self.identity: dict[str, object] = {
            "manifest_hash": build.manifest.hash,
            "regroup": {"window_groups": window_groups},
        }
        self._stored = pack_chosen(build, chosen)
        self.num_samples: int | None = build.manifest.num_packed
        if chosen is not None:
            self.identity["samples"] = choice_digest(chosen)
            self.num_samples = int(np.count_nonzero(chosen))
        self._epochs = PreparedEpochs(self._make)

    def epoch(self, number: int) -> SampleGroups:
        """That epoch's groups, from `prepare` or made now."""
        return self._epochs.get(number)

    def prepare(self, number: int) -> None:
        """Start to make that epoch's groups in a thread, unless that has been started."""
        self._epochs.prepare(number)

    def _make(self, number: int) -> SampleGroups:
        build = self.builds[0]
        from isobatch.balance.order.regroup import regroup  # noqa: PLC0415  (see `loaders`)

        groups = regroup(
            _loads(build),
            self._stored,
            build.manifest.limits,
            window_groups=self._window_groups,
            seed=self._seed,
            epoch=number,
        )
        return SampleGroups([build.samples], groups, self._place)


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
    kept = _restrict(stored, chosen & staying)
    return join_groups([kept, Groups(rest[again.samples], again.offsets)])


def join_groups(parts: Sequence[Groups]) -> Groups:
    """The groups of all parts, one part after the other."""
    sizes = np.concatenate([np.empty(0, np.int64), *(part.sizes for part in parts)])
    samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
    return Groups(samples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _restrict(groups: Groups, chosen: BoolArray) -> Groups:
    """Stored groups without the samples left out; none is empty."""
    ends = np.concatenate([[0], np.cumsum(chosen)])[groups.offsets]
    return Groups(np.flatnonzero(chosen), np.unique(np.concatenate([[0], ends])))


def _loads(build: PlannedBuild) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Vision loads and tokens of all samples."""
    columns = build.samples.columns
    tokens = sum(columns[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
    return columns[f"num_{build.manifest.model.vision_unit}"], np.asarray(tokens)
