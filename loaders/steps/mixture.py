"""Groups of several builds in one stream, by weights: `MixedSource`.

For `loaders.steps.steps`. Each build is a part with passes of its own: stored, of chosen samples,
or grouped again in each pass. No group comes twice in a pass, and none is ever lost.
"""

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from isobatch.balance.loss_weights import LossWeights
from isobatch.balance.order.mixture import UNIT, MixedShuffle, figures_of, predicted_waiting
from isobatch.balance.order.step_order import GlobalShuffle
from isobatch.balance.rng import SHUFFLE, permutation_mask
from isobatch.common.types import BoolArray, IntArray
from isobatch.loaders.steps.build_groups import (
    BuildSource,
    BuildTable,
    PlannedBuild,
    PreparedTables,
    ShuffledSource,
)
from isobatch.loaders.steps.selection import SampleRefs, Selection
from isobatch.loaders.steps.source import GroupTable

Added = Literal["next_epoch", "now"]
WAITING = 0.05
"""Share of ranks' time from which on `waiting_line` says something."""
DRAWN_GROUPS = 1024
"""Groups of a build whose loads say how much builds differ."""
Piece = tuple[GroupTable, BoolArray | None]
"""A pass over a build, and whether each of its groups is in; None for all."""
BLOCK = 1 << 16
WEIGHT_DENOMINATOR = 10**6
"""Largest denominator of a weight as a fraction, so that every machine counts the same groups."""


class MixedSource(ShuffledSource):
    """Groups of several builds, numbered as one, so that each step mixes them.

    An epoch is one pass over the builds of the largest weight, and weight / largest of a pass over
    others, which the next epoch continues. Each build is regrouped for itself and by its own
    passes: so its caps hold, weights stay exact, and a pass over several epochs loses nothing.
    """

    order = "mixed"

    def __init__(
        self, parts: Sequence[BuildSource], weights: Sequence[float], seed: int, balance: float
    ) -> None:
        """`parts`: one source per build."""
        super().__init__(seed, balance)
        self.parts, self.model = parts, parts[0].model
        exact = [Fraction(weight).limit_denominator(WEIGHT_DENOMINATOR) for weight in weights]
        self._shares = [weight / max(exact) for weight in exact]
        self.identity = joint_identity(parts, list(map(str, self._shares)))
        sizes = [part.num_samples or 0 for part in parts]
        self.num_samples = sum(sizes) if set(self._shares) == {1} else None
        self._tables = PreparedTables(self._mixed)

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> tuple[GroupTable, MixedShuffle]:
        """Each build's share of its groups, and their order after the position `state`."""
        table = self.table(epoch)
        order = MixedShuffle(
            sizes=table.build_sizes,
            build_lookup=table.of_builds,
            seed=self._seed,
            epoch=epoch,
            balance=self._balance,
            **state,
        )
        return table, order

    def table(self, epoch: int) -> "MixedGroups":
        """Each build's share of its groups."""
        return self._tables.get(epoch)

    def prepare(self, epoch: int) -> None:
        """Start to make that epoch in a thread: parts of large builds take a second."""
        self._tables.prepare(epoch)

    def waiting_line(self, shape: tuple[int, int]) -> str:
        """How long ranks will wait since builds' groups differ, and what to do."""
        return waiting_line(self.parts, list(map(float, self._shares)), shape)

    def _mixed(self, epoch: int) -> "MixedGroups":
        pieces = [self._pieces(part, epoch) for part in range(len(self.parts))]
        builds = np.repeat(np.arange(len(pieces)), list(map(len, pieces)))
        return MixedGroups(self.parts, [piece for part in pieces for piece in part], builds)

    def _pieces(self, part: int, number: int) -> list[Piece]:
        """A build's groups of an epoch, ascending: the next stretch of its passes.

        E.g. share 2/5 of 10 groups: epoch 0 has places 0 to 3 of the order, epoch 2 has 8, 9, 0, 1.
        """
        start, stop = (self._shares[part] * end for end in (number, number + 1))
        pieces: list[Piece] = []
        for turn in range(int(start), int(-(-stop // 1))):
            groups = self.parts[part].table(turn)
            size = len(groups)
            first = int(max(start - turn, Fraction(0)) * size)
            end = int(min(stop - turn, Fraction(1)) * size)
            if end - first == size:
                pieces.append((groups, None))
                continue
            # place 0 of this purpose is the order of an epoch's groups
            chosen = permutation_mask(size, first, end, self._seed, SHUFFLE, place=part + 1)
            if pieces and pieces[0][0] is groups:  # one pass ends and the next has the same groups
                chosen |= _mask(pieces.pop())
            pieces.append((groups, chosen))
        return pieces


def waiting_line(
    parts: Sequence[BuildSource], weights: Sequence[float], shape: tuple[int, int]
) -> str:
    """How long ranks will wait since builds' groups differ, and what to do; empty if they do not.

    `shape` is (dp, micro_batches).
    """
    tables = [part.table(0) for part in parts]
    vision = f"num_{parts[0].model.vision_unit}"
    drawn = [np.arange(min(len(table), DRAWN_GROUPS)) for table in tables]
    sizes = np.array(list(map(len, drawn)))

    def sums(*names: str) -> IntArray:
        both = zip(tables, drawn, strict=True)
        return np.array(
            [sum(int(table.column(name, rows).sum()) for name in names) for table, rows in both]
        )

    loads = sums(vision), sums("num_image_tokens", "num_text_tokens", "num_audio_tokens")
    groups = np.array([w * len(table) for w, table in zip(weights, tables, strict=True)])
    if not groups.sum():
        return ""

    def waiting(micro_batches: int) -> float:
        step = shape[0] * micro_batches
        expected = (groups / groups.sum() * step * UNIT).astype(np.int64)
        figures = figures_of(expected, loads, sizes, sums("num_samples"))
        return max(predicted_waiting(figures, (shape[0], micro_batches)))

    now = waiting(shape[1])
    if now < WAITING:
        return ""
    advice = "pack the builds together or to the same caps"
    if shape[1] == 1 and (later := waiting(4)) < now / 2:
        advice += f", or give micro_batches_per_step=4 (then {later:.0%})"
    tokens = ", ".join(f"{mean:,}" for mean in (loads[1] // np.maximum(1, sizes)).tolist())
    return (
        f"ranks will wait {now:.0%} of the time for others: the builds' micro-batches differ "
        f"({tokens} tokens on average, and in vision), and each step mixes them; {advice}"
    )


class GrownSource(ShuffledSource):
    """One build that has grown since a state was saved, or may have (`packer add`).

    Its groups begin with those that it had before, so an epoch in progress goes on without the new
    ones, or with them: then what is left of it and they are shuffled together.
    """

    def __init__(self, source: BuildSource, added: Added, seed: int, balance: float) -> None:
        """`source`: the build as it is now."""
        super().__init__(seed, balance)
        self.model, self.identity, self.num_samples = source.model, source.identity, None
        self._now, self._added = source, added
        build = source.build.manifest
        self._sizes: dict[object, tuple[int, int]] = {
            of["manifest_hash"]: (of["num_groups"], of["num_packed"])
            for of in build.values.get("earlier", [])
        }
        self._sizes[None] = build.num_groups, build.num_packed

    def table(self, epoch: int) -> GroupTable:
        """That epoch's groups of the build as it is now."""
        return self._now.table(epoch)

    def prepare(self, epoch: int) -> None:
        """Start to make that epoch's groups in a thread, if that takes long."""
        self._now.prepare(epoch)

    def adopted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of the build before it grew as one of the build as it is now."""
        before = state.get("manifest_hash")
        if not isinstance(before, str) or before not in self._sizes:
            return state
        source = self._at(before)
        if state.get("samples") != source.identity.get("samples"):
            return state
        stream = {"grown_from": before} | state["stream"]
        order = self.begin(state["epoch"], stream, 1)[1]
        begun = order.state()
        if not begun["consumed"] and "rest_of" not in stream:  # an epoch that has not begun
            stream = {}
        elif self._added == "now" and order.remaining:
            stream = {"rest_of": stream}
        new = self._sizes[None][1] - self._sizes[before][1]
        when = "now" if stream.keys() <= {"rest_of"} else "with the next epoch"
        warnings.warn(
            f"the build has grown by {new:,} samples since the state was saved: they come {when}"
            " (added='next_epoch' or 'now')",
            stacklevel=2,
        )
        return {**state, **self.identity, "stream": stream}

    def samples_between(self, table: GroupTable, first: GlobalShuffle, last: GlobalShuffle) -> int:
        """Samples of the groups between two positions."""
        if isinstance(first, GrownShuffle):
            return super().samples_between(table, first, last)
        return self._now.samples_between(table, first, last)

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> tuple[GroupTable, GlobalShuffle]:
        """An epoch's groups, and their order after the position `state`."""
        state = dict(state)
        mark: dict[str, Any] = {
            key: state.pop(key) for key in ("grown_from", "rest_of") if key in state
        }
        if not mark:
            return self._now.begin(epoch, state, ranks)
        source = self._at(mark.get("grown_from"))
        table = source.table(epoch)
        if "rest_of" in mark:
            table = self._rest(epoch, mark["rest_of"], source)
        order = GrownShuffle(
            num_groups=len(table), seed=self._seed, epoch=epoch, balance=self._balance, **state
        )
        order.mark = mark
        return table, order

    def _rest(self, epoch: int, before: dict[str, Any], source: BuildSource) -> GroupTable:
        """What an epoch has left at the position `before`, and what `source` has got since."""
        table, order = self.begin(epoch, before, 1)
        is_there = np.zeros(len(table), np.bool_)
        is_there[order.copy().take(order.remaining)] = True
        new = source.groups_after(*self._sizes[before["grown_from"]])
        return MixedGroups([self._now], [(table, is_there), new], np.zeros(2, np.int64))

    def _at(self, manifest_hash: object) -> BuildSource:
        """The build as it was with that manifest; None: as it is now."""
        if manifest_hash not in self._sizes:
            raise ValueError(f"a build with the manifest {manifest_hash!r}, which is not its own")
        if manifest_hash is None:
            return self._now
        return self._now.before(*self._sizes[manifest_hash])


class GrownShuffle(GlobalShuffle):
    """An order whose state also says of which groups."""

    mark: dict[str, Any]

    def state(self) -> dict[str, Any]:
        """Keywords of the order, and its groups."""
        return super().state() | self.mark


class JointGroups(BuildTable, ABC):
    """Groups out of several tables, numbered as one; subclasses say how (`_find`)."""

    @abstractmethod
    def _find(self, groups: IntArray) -> Iterator[tuple[GroupTable, IntArray, IntArray]]:
        """(table, places in `groups`, numbers in the table) of each table that has some."""

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column for `groups`, int64, same shape."""
        values = np.empty(len(groups), np.int64)
        for table, places, rows in self._find(groups):
            values[places] = table.column(name, rows)
        return values

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build of each group, and its number there."""
        builds, numbers = np.empty((2, len(groups)), np.int64)
        for table, places, rows in self._find(groups):
            builds[places], numbers[places] = table.origins(rows)
        return builds, numbers

    def selections(self, groups: IntArray) -> list[Selection]:
        """What to read for each of the groups."""
        selections: dict[int, Selection] = {}
        for table, places, rows in self._find(groups):
            selections |= zip(places.tolist(), table.selections(rows), strict=True)
        return [selections[place] for place in range(len(groups))]

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        none = np.empty(0, np.int64)
        refs, places = [SampleRefs(none, none, none)], [none]
        for table, table_places, rows in self._find(groups):
            refs.append(table.samples(rows))
            places.append(np.repeat(table_places, table.column("num_samples", rows)))
        # of each sample, the place of its group in `groups`
        order = np.argsort(np.concatenate(places), kind="stable")
        return SampleRefs(
            builds=np.concatenate([part.builds for part in refs])[order],
            groups=np.concatenate([part.groups for part in refs])[order],
            places=np.concatenate([part.places for part in refs])[order],
        )


class MixedGroups(JointGroups):
    """Groups of several passes, numbered as one: those of the first, then those of the second, ...

    Keeps 2 bytes per group of passes that are here in part, and nothing of those that are whole.
    """

    def __init__(
        self, parts: Sequence[BuildSource], pieces: Sequence[Piece], builds: IntArray
    ) -> None:
        """`builds`: number of each piece's build."""
        super().__init__(builds_of(parts))
        self._build_numbers = builds
        self._pieces = [
            (table, None if chosen is None else _ChosenRows(chosen)) for table, chosen in pieces
        ]
        sizes = [len(table) if rows is None else len(rows) for table, rows in self._pieces]
        self._firsts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if each build's groups here have the mean of all its groups."""
        total = 0.0
        for (table, _), size in zip(self._pieces, np.diff(self._firsts).tolist(), strict=True):
            total += table.label_weights(weights) * (size / max(1, len(table)))
        return total

    @property
    def build_sizes(self) -> list[int]:
        """Groups of each build."""
        sizes = np.bincount(self._build_numbers, np.diff(self._firsts))
        return list(map(int, sizes.tolist()))

    def of_builds(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Each group's build and number of samples."""
        pieces = np.searchsorted(self._firsts, groups, side="right") - 1
        return self._build_numbers[pieces], self.column("num_samples", groups)

    def _find(self, groups: IntArray) -> Iterator[tuple[GroupTable, IntArray, IntArray]]:
        owners = np.searchsorted(self._firsts, groups, side="right") - 1
        for number, (table, chosen) in enumerate(self._pieces):
            places = np.flatnonzero(owners == number)
            if len(places):
                rows = groups[places] - self._firsts[number]
                yield table, places, rows if chosen is None else chosen.take(rows)


class _ChosenRows:
    """Numbers of chosen groups, ascending, in 2 bytes each: the place within a block of 65,536.

    Every process of a machine holds millions of them, several times.
    """

    def __init__(self, chosen: BoolArray) -> None:
        blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
        # of each block, how many are chosen before it
        self._firsts = np.cumsum([0, *map(np.count_nonzero, blocks)])
        self._places = np.empty(self._firsts[-1], np.uint16)
        for first, block in zip(self._firsts.tolist(), blocks, strict=False):
            places = np.flatnonzero(block)
            self._places[first : first + len(places)] = places

    def __len__(self) -> int:
        return len(self._places)

    def take(self, rows: IntArray) -> IntArray:
        """The numbers of the chosen groups `rows`, int64, same shape."""
        blocks = np.searchsorted(self._firsts, rows, side="right") - 1
        return blocks * BLOCK + self._places[rows]


def _mask(piece: Piece) -> BoolArray:
    table, chosen = piece
    return np.ones(len(table), np.bool_) if chosen is None else chosen


def builds_of(parts: Sequence[BuildSource]) -> dict[int, PlannedBuild]:
    """The builds of a mixture by their numbers."""
    return {number: part.build for number, part in enumerate(parts)}


def joint_identity(parts: Sequence[BuildSource], shares: Sequence[str]) -> dict[str, object]:
    """Identity of several builds with what else makes their mixture, a text for each."""
    lines = [
        f"{part.identity['manifest_hash']} {share}"
        for part, share in zip(parts, shares, strict=True)
    ]
    identity: dict[str, object] = {
        "manifest_hash": _digest(lines),
        "regroup": parts[0].identity["regroup"],
    }
    if any("samples" in part.identity for part in parts):
        identity["samples"] = _digest([str(part.identity.get("samples")) for part in parts])
    return identity


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
