"""Groups of an epoch: stored, of several builds, or grouped again.

For `loaders.plan.steps`. Each source has `builds`, the `identity` that a state must agree with when
a run resumes, and `epoch(number)`, which depends on builds, seed and number alone, and reads no
shard. An epoch numbers its groups in sorted order (`balance.order.sort_groups`), so shuffles are
the same for all. Its `order` is for `BlockShuffle`, `selection` is what to read for a group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Protocol

import numpy as np

from balance.order.block_shuffle import OrderConfig, choose_order
from balance.rng import SHUFFLE, random_permutation
from balance.types import COUNT_COLUMNS, Counts, Groups, IntArray
from loaders.plan.selection import GroupSlice, SampleRefs, Selection, whole_groups
from shards.index import GroupIndex
from shards.manifest import Manifest
from shards.tables import SampleTable

WEIGHT_DENOMINATOR = 10**6
"""Largest denominator of a weight as a fraction, so that every machine counts the same groups."""


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


class StoredGroups:
    """The groups of one build as they are stored; the source and every epoch in one."""

    def __init__(self, build: PlannedBuild) -> None:
        self.builds = [build]
        self.order = build.manifest.order
        self.identity: dict[str, object] = {"manifest_hash": build.manifest.hash, "regroup": None}

    def __len__(self) -> int:
        return self.builds[0].manifest.num_groups

    def epoch(self, number: int) -> StoredGroups:
        """The same in every epoch."""
        return self

    @property
    def groups_of_builds(self) -> list[int]:
        """How many stored groups of each build the epoch has the samples of."""
        return [len(self)]

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the index for `groups`, int64, same shape."""
        return self.builds[0].index.column(name, groups)

    def selection(self, group: int) -> Selection:
        """The whole group."""
        return (GroupSlice(0, group, None),)

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        return whole_groups(np.zeros_like(groups), groups, self.column("num_samples", groups))


class MixedGroups:
    """Groups of several builds, sorted together, so that each micro-batch mixes them.

    An epoch is one pass over the builds of the largest weight, and weight / largest of a pass over
    others, which the next epoch continues: no group comes twice in an epoch, and none is ever lost.
    """

    def __init__(self, builds: Sequence[PlannedBuild], weights: Sequence[float], seed: int) -> None:
        self.builds, self._seed = builds, seed
        exact = [Fraction(weight).limit_denominator(WEIGHT_DENOMINATOR) for weight in weights]
        self._shares = [weight / max(exact) for weight in exact]
        parts = [
            f"{build.manifest.hash} {share}"
            for build, share in zip(builds, self._shares, strict=True)
        ]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self.identity: dict[str, object] = {"manifest_hash": digest, "regroup": None}

    def epoch(self, number: int) -> _MixedEpoch:
        """Each build's share of its groups."""
        chosen = [self._chosen(build, number) for build in range(len(self.builds))]
        return _MixedEpoch(self.builds, chosen, self._seed)

    def _chosen(self, build: int, number: int) -> IntArray:
        """A build's groups of an epoch, ascending: the next stretch of an endlessly repeated order.

        E.g. share 2/5 of 10 groups: epoch 0 has places 0 to 3 of the order, epoch 2 has 8, 9, 0, 1.
        """
        num_groups = self.builds[build].manifest.num_groups
        start, stop = (int(self._shares[build] * num_groups * end) for end in (number, number + 1))
        # place 0 of this purpose is the order of an epoch's groups
        order = random_permutation(num_groups, self._seed, SHUFFLE, place=build + 1)
        return np.sort(order[np.arange(start, stop) % num_groups])


class _MixedEpoch:
    """Groups of several builds in one sorted order; `chosen` are rows of each build's index."""

    def __init__(
        self, builds: Sequence[PlannedBuild], chosen: Sequence[IntArray], seed: int
    ) -> None:
        self._builds = builds
        owners = np.repeat(np.arange(len(builds)), [len(groups) for groups in chosen])
        self._owners, self._rows = owners, np.concatenate(chosen)
        self.groups_of_builds = list(map(len, chosen))
        everyone = np.arange(len(owners))
        vision = self.column(f"num_{builds[0].manifest.model.vision_unit}", everyone)
        tokens = sum(
            self.column(f"num_{kind}_tokens", everyone) for kind in ("image", "text", "audio")
        )
        from balance.order.sort_groups import sort_groups  # noqa: PLC0415  (see `loaders`)

        order = sort_groups(vision, np.asarray(tokens, np.int64), seed)
        self._owners, self._rows = owners[order].astype(np.int16), self._rows[order]
        self.order = choose_order(len(order))

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str, groups: IntArray) -> IntArray:
        owners, rows = self._owners[groups], self._rows[groups]
        values = np.empty(len(groups), np.int64)
        for number, build in enumerate(self._builds):
            values[owners == number] = build.index.column(name, rows[owners == number])
        return values

    def selection(self, group: int) -> Selection:
        return (GroupSlice(int(self._owners[group]), int(self._rows[group]), None),)

    def samples(self, groups: IntArray) -> SampleRefs:
        owners = self._owners[groups].astype(np.int64)
        return whole_groups(owners, self._rows[groups], self.column("num_samples", groups))


class Regrouped:
    """One build, regrouped in every epoch: 1.3 s per 1.2 million samples, or in advance."""

    def __init__(self, build: PlannedBuild, seed: int, window_groups: int) -> None:
        self.builds, self._seed, self._window_groups = [build], seed, window_groups
        self.identity: dict[str, object] = {
            "manifest_hash": build.manifest.hash,
            "regroup": {"window_groups": window_groups},
        }
        # the epoch that is being made, the process that makes it, and the result
        self._pending: tuple[tuple[int, int], Future[_RegroupedEpoch]] | None = None

    def epoch(self, number: int) -> _RegroupedEpoch:
        """That epoch's groups, from `prepare` or made now."""
        pending, self._pending = self._pending, None
        # a forked process does not have its parent's thread
        if pending is not None and pending[0] == (number, os.getpid()):
            return pending[1].result()
        return self._make(number)

    def prepare(self, number: int) -> None:
        """Start to make that epoch's groups in a thread, unless that has been started."""
        key = number, os.getpid()
        if self._pending is None or self._pending[0] != key:
            pool = ThreadPoolExecutor(1, thread_name_prefix=f"isobatch-epoch-{number}")
            self._pending = key, pool.submit(self._make, number)
            pool.shutdown(wait=False)

    def _make(self, number: int) -> _RegroupedEpoch:
        table, unit = self.builds[0].samples, self.builds[0].manifest.model.vision_unit
        stored = table.groups
        from balance.order.regroup import regroup  # noqa: PLC0415  (see `loaders`)

        groups, order = regroup(
            (table.column(f"num_{unit}", stored.samples), table.seq_len(stored.samples)),
            stored,
            self.builds[0].manifest.limits,
            window_groups=self._window_groups,
            seed=self._seed,
            epoch=number,
        )
        return _RegroupedEpoch(table, groups, order)


class _RegroupedEpoch:
    """One epoch's new groups; `groups` holds sample numbers in stored order."""

    def __init__(self, table: SampleTable, groups: Groups, order: OrderConfig) -> None:
        self.order, self._groups, self._offsets = order, groups, table.offsets
        self.groups_of_builds = [len(table.offsets) - 1]
        self._sums = {name: groups.sum(table.column(name)) for name in COUNT_COLUMNS}
        self._sums["num_samples"] = groups.sizes

    def __len__(self) -> int:
        return len(self._groups)

    def column(self, name: str, groups: IntArray) -> IntArray:
        return self._sums[name][groups]

    def selection(self, group: int) -> Selection:
        refs = self.samples(np.array([group]))
        return refs.select(np.arange(len(refs.places)))

    def samples(self, groups: IntArray) -> SampleRefs:
        # in stored order in each group, so that neighbours are read together
        chosen = self._groups.take(groups)
        owners = np.repeat(np.arange(len(chosen)), chosen.sizes)
        samples = chosen.samples[np.lexsort((chosen.samples, owners))]
        rows = np.searchsorted(self._offsets, samples, side="right") - 1
        return SampleRefs(np.zeros_like(rows), rows, samples - self._offsets[rows])


Epoch = StoredGroups | _MixedEpoch | _RegroupedEpoch
EpochSource = StoredGroups | MixedGroups | Regrouped
