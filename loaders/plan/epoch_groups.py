"""Which groups an epoch has: those of a build as stored, of several builds as one stream, or made
anew.

For `loaders.plan.steps`. All three number an epoch's groups along a path
(`balance.order.sort_groups`), so that the same streams (`balance.order.block_shuffle`,
`balance.order.global_shuffle`) give them out, and all depend on builds, seed and epoch alone. Reads
no shard.

Several builds: their groups are sorted along one path, so each micro-batch mixes them and is as
balanced as one build's. Weights are relative; an epoch is one pass over the builds of the largest
weight, and weight / largest of a pass over the others, which the next epoch continues. So no group
comes twice in an epoch, and none is ever lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from balance.order.block_shuffle import OrderConfig, choose_order
from balance.rng import SHUFFLE, random_permutation
from balance.types import COUNT_COLUMNS, Counts, Groups, IntArray
from loaders.plan._background import Background
from loaders.plan.selection import GroupSlice, SampleRefs, Selection, whole_groups
from loaders.read.builds import Build
from loaders.read.sample_table import SampleTable

WEIGHT_DENOMINATOR = 10**6
"""Weights are taken as fractions with at most this denominator, so that every machine counts the
same groups.
"""


class Epoch(Protocol):
    """The groups of one epoch, numbered from 0 along a path."""

    @property
    def order(self) -> OrderConfig:
        """How the path is cut for a `GroupStream`."""

    def __len__(self) -> int: ...

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the index for `groups`, int64, same shape."""

    def item(self, group: int) -> Selection:
        """What to read for one group."""

    def members(self, groups: IntArray) -> SampleRefs:
        """The samples of `groups`, one group behind the other."""


class EpochSource(Protocol):
    """Gives each epoch's groups."""

    @property
    def identity(self) -> dict[str, object]:
        """What a state must agree with, plain JSON."""

    def epoch(self, number: int) -> Epoch:
        """The groups of epoch `number`."""

    def prepare(self, number: int) -> None:
        """Begin to make that epoch's groups, if they take long, so that a later `epoch(number)`
        need not wait.
        """

    def counts(self, members: SampleRefs) -> Counts:
        """What the samples cost."""


class StoredGroups:
    """The groups of one build as they are stored; every epoch, and its source."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self.order = build.manifest.order
        self.identity: dict[str, object] = {"manifest_hash": build.manifest.hash, "regroup": None}

    def __len__(self) -> int:
        return self._build.manifest.num_groups

    def epoch(self, number: int) -> Epoch:
        """The same in every epoch."""
        return self

    def prepare(self, number: int) -> None:
        """There is nothing to do."""

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the index."""
        return self._build.index.column(name, groups)

    def item(self, group: int) -> Selection:
        """The group as it is."""
        return (GroupSlice(0, group, None),)

    def members(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups."""
        return whole_groups(np.zeros_like(groups), groups, self.column("num_samples", groups))

    def counts(self, members: SampleRefs) -> Counts:
        """What the samples cost."""
        return _counts([self._build.samples], members)


class MixedGroups:
    """Groups of several builds, by weight."""

    def __init__(self, builds: Sequence[Build], weights: Sequence[float], seed: int) -> None:
        self._builds, self._seed = builds, seed
        exact = [Fraction(weight).limit_denominator(WEIGHT_DENOMINATOR) for weight in weights]
        self._shares = [weight / max(exact) for weight in exact]
        parts = [
            f"{build.manifest.hash} {share}"
            for build, share in zip(builds, self._shares, strict=True)
        ]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self.identity: dict[str, object] = {"manifest_hash": digest, "regroup": None}
        self._made: tuple[int, Epoch] | None = None

    def epoch(self, number: int) -> Epoch:
        """Each build's share of its groups, all along one path."""
        if self._made is None or self._made[0] != number:
            chosen = [self._chosen(place, number) for place in range(len(self._builds))]
            self._made = number, MixedEpoch(self._builds, chosen, self._seed)
        return self._made[1]

    def prepare(self, number: int) -> None:
        """Sorting takes .1 s per million groups: not worth a thread."""

    def counts(self, members: SampleRefs) -> Counts:
        """What the samples cost."""
        return _counts([build.samples for build in self._builds], members)

    def _chosen(self, place: int, number: int) -> IntArray:
        """A build's groups of an epoch, ascending: the next stretch of an order that is gone round
        and round.

        E.g. share 2/5 of 10 groups: epoch 0 has places 0 to 3 of the order, epoch 2 places 8, 9, 0,
        1.
        """
        num_groups = self._builds[place].manifest.num_groups
        start, stop = (
            int(self._shares[place] * num_groups * turn) for turn in (number, number + 1)
        )
        # place 0 of this purpose is the order in which an epoch's groups are given out
        order = random_permutation(num_groups, self._seed, SHUFFLE, place=place + 1)
        return np.sort(order[np.arange(start, stop) % num_groups])


class MixedEpoch:
    """Groups of several builds along one path; `chosen` are rows of each build's index."""

    def __init__(self, builds: Sequence[Build], chosen: Sequence[IntArray], seed: int) -> None:
        self._builds = builds
        owners = np.repeat(np.arange(len(builds)), [len(groups) for groups in chosen])
        self._owners, self._rows = owners, np.concatenate(chosen)
        everyone = np.arange(len(owners))
        vision = self.column(f"num_{builds[0].manifest.model.vision_unit}", everyone)
        tokens = sum(
            self.column(f"num_{kind}_tokens", everyone) for kind in ("image", "text", "audio")
        )
        from balance.order.sort_groups import sort_groups  # noqa: PLC0415  (see `loaders`)

        path = sort_groups(vision, np.asarray(tokens, np.int64), seed)
        self._owners, self._rows = owners[path].astype(np.int16), self._rows[path]
        self.order = choose_order(len(path))

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column of the builds' indices."""
        values, owners, rows = (
            np.empty(len(groups), np.int64),
            self._owners[groups],
            self._rows[groups],
        )
        for place, build in enumerate(self._builds):
            values[owners == place] = build.index.column(name, rows[owners == place])
        return values

    def item(self, group: int) -> Selection:
        """The group as it is."""
        return (GroupSlice(int(self._owners[group]), int(self._rows[group]), None),)

    def members(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups."""
        owners = self._owners[groups].astype(np.int64)
        return whole_groups(owners, self._rows[groups], self.column("num_samples", groups))


class Regrouped:
    """Groups made anew in every epoch (`balance.order.regroup`): 1.3 s per 1.2 million samples, in
    a thread if prepared.
    """

    def __init__(self, build: Build, seed: int, window_groups: int) -> None:
        self._build, self._seed, self._window_groups = build, seed, window_groups
        self.identity: dict[str, object] = {
            "manifest_hash": build.manifest.hash,
            "regroup": {"window_groups": window_groups},
        }
        self._made: tuple[int, Epoch] | None = None
        self._background: Background[Epoch] = Background(self._make)

    def epoch(self, number: int) -> Epoch:
        """That epoch's groups, which `prepare` has begun, or made now."""
        if self._made is None or self._made[0] != number:
            self._made = number, self._background.get(number)
        return self._made[1]

    def prepare(self, number: int) -> None:
        """Begin to make that epoch's groups."""
        self._background.start(number)

    def counts(self, members: SampleRefs) -> Counts:
        """What the samples cost."""
        return _counts([self._build.samples], members)

    def _make(self, number: int) -> Epoch:
        table, unit = self._build.samples, self._build.manifest.model.vision_unit
        stored = table.groups
        from balance.order.regroup import regroup  # noqa: PLC0415  (see `loaders`)

        groups, order = regroup(
            table.column(f"num_{unit}", stored.samples),
            table.seq_len(stored.samples),
            stored,
            table.limits,
            window_groups=self._window_groups,
            seed=self._seed,
            epoch=number,
        )
        return RegroupedEpoch(table, groups, order)


class RegroupedEpoch:
    """Groups made anew; `groups` holds numbers of samples in stored order."""

    def __init__(self, table: SampleTable, groups: Groups, order: OrderConfig) -> None:
        self.order, self._groups, self._offsets = order, groups, table.offsets
        self._sums = {name: groups.sum(table.all(name)) for name in COUNT_COLUMNS} | {
            "num_samples": groups.sizes
        }

    def __len__(self) -> int:
        return len(self._groups)

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums over the groups."""
        return self._sums[name][groups]

    def item(self, group: int) -> Selection:
        """Samples out of several stored groups."""
        members = self.members(np.array([group]))
        return members.item(np.arange(len(members.places)))

    def members(self, groups: IntArray) -> SampleRefs:
        """The samples of the groups, in stored order inside each, so that neighbours are read
        together.
        """
        chosen = self._groups.take(groups)
        owners = np.repeat(np.arange(len(chosen)), chosen.sizes)
        samples = chosen.samples[np.lexsort((chosen.samples, owners))]
        rows = np.searchsorted(self._offsets, samples, side="right") - 1
        return SampleRefs(np.zeros_like(rows), rows, samples - self._offsets[rows])


def _counts(tables: Sequence[SampleTable], members: SampleRefs) -> Counts:
    columns = {name: np.empty(len(members.places), np.int64) for name in COUNT_COLUMNS}
    for place, table in enumerate(tables):
        chosen = members.builds == place
        samples = table.offsets[members.groups[chosen]] + members.places[chosen]
        for name, values in columns.items():
            values[chosen] = table.column(name, samples)
    return Counts(**columns)
