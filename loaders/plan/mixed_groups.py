"""Groups of several builds in one stream, by weights.

For `loaders.plan.steps`. Each build is a part with passes of its own: stored, of chosen samples, or
grouped again in each pass. No group comes twice in a pass, and none is ever lost.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from isobatch.balance.loss_weights import LossWeights
from isobatch.balance.order.mixture import UNIT, figures_of, predicted_waiting
from isobatch.balance.rng import SHUFFLE, permutation_mask
from isobatch.common.types import BoolArray, IntArray
from isobatch.loaders.plan.epoch_groups import Epoch, EpochSource, PlannedBuild, PreparedEpochs
from isobatch.loaders.plan.selection import SampleRefs, Selection

WAITING = 0.05
"""Share of ranks' time from which on `waiting_line` says something."""
DRAWN_GROUPS = 1024
"""Groups of a build whose loads say how much builds differ."""
Piece = tuple[Epoch, BoolArray | None]
"""An epoch, and whether each of its groups is in; None for all."""
BLOCK = 1 << 16
WEIGHT_DENOMINATOR = 10**6
"""Largest denominator of a weight as a fraction, so that every machine counts the same groups."""


class MixedGroups:
    """Groups of several builds, numbered as one, so that each step mixes them.

    An epoch is one pass over the builds of the largest weight, and weight / largest of a pass over
    others, which the next epoch continues. Each build is regrouped for itself and by its own
    passes: so its caps hold, weights stay exact, and a pass over several epochs loses nothing.
    """

    def __init__(self, parts: Sequence[EpochSource], weights: Sequence[float], seed: int) -> None:
        """`parts`: one source per build."""
        self.builds: Sequence[PlannedBuild] = [build for part in parts for build in part.builds]
        self.parts, self._seed = parts, seed
        exact = [Fraction(weight).limit_denominator(WEIGHT_DENOMINATOR) for weight in weights]
        self._shares = [weight / max(exact) for weight in exact]
        self.identity = joint_identity(parts, list(map(str, self._shares)))
        numbers = [part.num_samples or 0 for part in parts]
        self.num_samples = sum(numbers) if set(self._shares) == {1} else None
        self._epochs = PreparedEpochs(self._make)

    def shares_at(self, step: int) -> list[float]:
        """Weights of the builds, relative to the largest; the same at every step."""
        return list(map(float, self._shares))

    def epoch(self, number: int) -> "MixedEpoch":
        """Each build's share of its groups."""
        return self._epochs.get(number)

    def prepare(self, number: int) -> None:
        """Start to make that epoch in a thread: parts of large builds take a second."""
        self._epochs.prepare(number)

    def _make(self, number: int) -> "MixedEpoch":
        pieces = [self._pieces(part, number) for part in range(len(self.parts))]
        builds = np.repeat(np.arange(len(pieces)), list(map(len, pieces)))
        return MixedEpoch([piece for part in pieces for piece in part], builds)

    def _pieces(self, part: int, number: int) -> list[Piece]:
        """A build's groups of an epoch, ascending: the next stretch of its passes.

        E.g. share 2/5 of 10 groups: epoch 0 has places 0 to 3 of the order, epoch 2 has 8, 9, 0, 1.
        """
        start, stop = (self._shares[part] * end for end in (number, number + 1))
        pieces: list[Piece] = []
        for turn in range(int(start), int(-(-stop // 1))):
            groups = self.parts[part].epoch(turn)
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
    parts: Sequence[EpochSource], weights: Sequence[float], shape: tuple[int, int]
) -> str:
    """How long ranks will wait since builds' groups differ, and what to do; empty if they do not.

    `shape` is (dp, micro_batches).
    """
    epochs = [part.epoch(0) for part in parts]
    vision = f"num_{parts[0].builds[0].manifest.model.vision_unit}"
    drawn = [np.arange(min(len(epoch), DRAWN_GROUPS)) for epoch in epochs]
    sizes = np.array(list(map(len, drawn)))

    def sums(*names: str) -> IntArray:
        both = zip(epochs, drawn, strict=True)
        return np.array([sum(int(e.column(n, rows).sum()) for n in names) for e, rows in both])

    loads = sums(vision), sums("num_image_tokens", "num_text_tokens", "num_audio_tokens")
    groups = np.array([w * len(epoch) for w, epoch in zip(weights, epochs, strict=True)])
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


class JointEpoch(ABC):
    """Groups out of several epochs, numbered as one; subclasses say how (`_find`)."""

    @abstractmethod
    def _find(self, groups: IntArray) -> Iterator[tuple[Epoch, IntArray, IntArray]]:
        """(epoch, places in `groups`, its own numbers) of each epoch that has some."""

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column for `groups`, int64, same shape."""
        values = np.empty(len(groups), np.int64)
        for epoch, places, rows in self._find(groups):
            values[places] = epoch.column(name, rows)
        return values

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build of each group, and its number there."""
        builds, numbers = np.empty((2, len(groups)), np.int64)
        for epoch, places, rows in self._find(groups):
            builds[places], numbers[places] = epoch.origins(rows)
        return builds, numbers

    def selections(self, groups: IntArray) -> list[Selection]:
        """What to read for each of the groups."""
        found: dict[int, Selection] = {}
        for epoch, places, rows in self._find(groups):
            found |= zip(places.tolist(), epoch.selections(rows), strict=True)
        return [found[place] for place in range(len(groups))]

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""
        found = list(self._find(groups))
        refs = [epoch.samples(rows) for epoch, _, rows in found]
        # of each sample, the place of its group in `groups`
        places = np.concatenate([np.empty(0, np.int64), *(places for _, places, _ in found)])
        order = np.argsort(
            np.repeat(places, self.column("num_samples", groups)[places]), kind="stable"
        )
        return SampleRefs(
            *(
                np.concatenate([np.empty(0, np.int64), *(getattr(each, name) for each in refs)])[
                    order
                ]
                for name in ("builds", "groups", "places")
            )
        )


class MixedEpoch(JointEpoch):
    """Groups of several epochs, numbered as one: those of the first, then those of the second, ...

    Keeps 2 bytes per group of epochs that are here in part, and nothing of those that are whole.
    """

    def __init__(self, pieces: Sequence[Piece], builds: IntArray) -> None:
        """`builds`: number of each piece's build."""
        self._builds = builds
        self._pieces = [
            (epoch, None if chosen is None else _ChosenRows(chosen)) for epoch, chosen in pieces
        ]
        sizes = [len(epoch) if rows is None else len(rows) for epoch, rows in self._pieces]
        self._firsts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels, if each build's groups here have the mean of all its groups."""
        total = 0.0
        for (epoch, _), size in zip(self._pieces, np.diff(self._firsts).tolist(), strict=True):
            total += epoch.label_weights(weights) * (size / max(1, len(epoch)))
        return total

    @property
    def build_sizes(self) -> list[int]:
        """Groups of each build."""
        sizes = np.bincount(self._builds, np.diff(self._firsts))
        return list(map(int, sizes.tolist()))

    def of_builds(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Each group's build and number of samples."""
        pieces = np.searchsorted(self._firsts, groups, side="right") - 1
        return self._builds[pieces], self.column("num_samples", groups)

    def _find(self, groups: IntArray) -> Iterator[tuple[Epoch, IntArray, IntArray]]:
        owners = np.searchsorted(self._firsts, groups, side="right") - 1
        for number, (epoch, chosen) in enumerate(self._pieces):
            places = np.flatnonzero(owners == number)
            if len(places):
                rows = groups[places] - self._firsts[number]
                yield epoch, places, rows if chosen is None else chosen.take(rows)


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
    epoch, chosen = piece
    return np.ones(len(epoch), np.bool_) if chosen is None else chosen


def joint_identity(parts: Sequence[EpochSource], shares: Sequence[str]) -> dict[str, object]:
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
