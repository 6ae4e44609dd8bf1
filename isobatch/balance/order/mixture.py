"""Steps of several builds: groups of each by weights, and which ones by `balance`.

For the loaders. Groups of one build cost nearly the same, so a step of the most alike groups would
be of one build. So what a step takes of each build follows from the weights, and `balance` chooses
which groups of it. Where builds' groups differ in load, ranks wait for those of the largest: then
each of the step's micro-batches is of one build as far as the step as a whole stays mixed. AI2D,
ChartQA and long documents packed to 4,096, 16,384 and 8,192 tokens, 8 ranks of 4 micro-batches:
ranks wait 5.4 % for vision instead of 13.4 % in random order, and a step's sources have .99 of its
entropy (`benchmarks/mixtures.py`).

Pure; whole numbers only, so that all machines agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobatch.balance.order.step_order import (
    PLACE_BITS,
    GlobalShuffle,
    LoadLookup,
    distances,
    least_waiting,
    nearest,
)
from isobatch.common.types import IntArray

BuildLookup = Callable[[IntArray], tuple[IntArray, IntArray]]
"""Groups -> (number of the build, number of samples)."""
UNIT = 1 << 20
"""A group, a mean load, and one bit of entropy."""
MIXING, MIXING_MORE, KEEPING = 4, 8, 60
"""What a step's entropy weighs, relative to waiting: 5 % less of it is as bad as a fifth of the
waiting of a step in proportion, or two fifths while steps so far have less than MEAN_ENTROPY; and
what a micro-batch that builds are owed weighs, in hundredths.
"""
MEAN_ENTROPY = UNIT * 97 // 100
"""Entropy of steps, of that of the weights: a random step has a little less than this."""
LEAST_WAITING = UNIT // 100
"""Waiting below which more of it would not matter."""
ROUNDS_OF_CUTS = 2
PREDICTED_STEPS = 64
LEAST_ENTROPY = 0.93
"""Entropy of a step of known sources, of that of a random one: each has at least this, and all
together .95 or more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFigures:
    """Figures of each build, int64, shape (builds,)."""

    expected: IntArray
    """Groups of a step by the weights, in UNITs."""
    vision: IntArray
    """Mean vision load of a group, in UNITs of the mean of all; LLM tokens too."""
    tokens: IntArray
    samples: IntArray
    """Mean samples of a group, in 1/16."""

    def by_load(self) -> tuple["BuildFigures", IntArray]:
        """The figures with the largest loads first, and the builds in that order."""
        order = np.argsort(-(self.vision + self.tokens), kind="stable")
        sorted_figures = {name: getattr(self, name)[order] for name in BuildFigures.__slots__}
        return BuildFigures(**sorted_figures), order


def step_counts(
    figures: BuildFigures,
    owed: IntArray,
    available: IntArray,
    shape: tuple[int, int],
    mixing: int = MIXING_MORE,
) -> IntArray:
    """How many groups of each build the next step takes, int64; at least as many are available.

    `owed`: what earlier steps took too little of each build, in UNITs. Builds come one after the
    other, the largest loads first, as `assign_ranks` has them. Where one ends and the next begins
    is moved to the end of a micro-batch, or an eighth before, if that is worth it.
    """
    dp, micro_batches = shape
    targets = figures.expected + owed
    plain = whole_counts(targets, available, dp * micro_batches)
    if micro_batches == 1 or len(plain) == 1:
        return plain
    sorted_figures, order = figures.by_load()
    costs = _StepCosts(sorted_figures, targets[order], shape, mixing)
    cuts = np.cumsum(plain[order])
    limit = available[order]
    best = costs.of(_counts(cuts[None]))[0]
    for _ in range(ROUNDS_OF_CUTS):
        before = cuts
        for place in range(len(cuts) - 1):
            floor = int(cuts[place]) // dp * dp
            part = max(1, dp // 8)
            ends = floor + part * np.arange(-8, 17)
            options = np.repeat(cuts[None], len(ends), axis=0)
            options[:, place] = ends
            counts = _counts(options)
            fits = np.flatnonzero(((counts >= 0) & (counts <= limit)).all(axis=1))
            if len(fits):
                option_costs = costs.of(counts[fits])
                if option_costs.min() < best:
                    best, cuts = option_costs.min(), options[fits[int(option_costs.argmin())]]
        if cuts is before:
            break
    counts = np.empty_like(plain)
    counts[order] = _counts(cuts[None])[0]
    return counts


def whole_counts(targets: IntArray, available: IntArray, count: int, unit: int = UNIT) -> IntArray:
    """Whole numbers of groups nearest to the targets, in units, together `count`, int64."""
    counts = np.clip(targets // unit, 0, available)
    while (lacking := count - int(counts.sum())) != 0:
        sign = 1 if lacking > 0 else -1
        is_open = counts < available if sign > 0 else counts > 0
        lead = np.where(is_open, sign * (targets - unit * counts), np.iinfo(np.int64).min)
        counts[int(lead.argmax())] += sign
    return counts


class _StepCosts:
    """What a step's counts of builds, sorted by load, cost in waiting, entropy and debt."""

    def __init__(
        self,
        figures: BuildFigures,
        targets: IntArray,
        shape: tuple[int, int],
        mixing: int = MIXING_MORE,
    ) -> None:
        self._figures = figures
        self._targets = targets
        self._shape = shape
        self._mixing = mixing
        everything = np.full(len(targets), shape[0] * shape[1])
        usual = whole_counts(figures.expected, everything, shape[0] * shape[1])[None]
        self._usual_waiting = max(LEAST_WAITING, int(self.waiting(usual).sum()))
        self._usual_entropy = max(1, int(self._entropy(figures.expected[None] >> 10)[0]))

    def of(self, counts: IntArray) -> IntArray:
        """Costs of counts (options, builds), int64, shape (options,); a usual waiting is UNIT."""
        waiting = self.waiting(counts).sum(axis=0) * UNIT // self._usual_waiting
        mixing = self._entropy(counts) * UNIT // self._usual_entropy
        # in 1/256 of a micro-batch, far below what would overflow
        debt = (counts * UNIT - self._targets) // (self._shape[0] * UNIT >> 8)
        keeping = (debt**2).sum(axis=1) * KEEPING // 100 * (UNIT >> 16)
        return np.asarray(waiting - self._mixing * mixing + keeping, np.int64)

    def waiting(self, counts: IntArray) -> IntArray:
        """Share of the time that ranks wait for vision and for tokens, in UNITs, (2, options)."""
        dp, micro_batches = self._shape
        ends = np.cumsum(counts, axis=1)[:, None]  # (options, 1, builds)
        rounds = np.arange(micro_batches)[:, None] * dp
        # groups of each build in each micro-batch, (options, micro-batches, builds)
        parts = np.minimum(ends, rounds + dp) - np.maximum(ends - counts[:, None], rounds)
        parts = np.maximum(parts, 0)
        shares = []
        for load in (self._figures.vision, self._figures.tokens):
            paid = dp * np.where(parts > 0, load, 0).max(axis=2)
            used = (parts * load).sum(axis=2)
            shares.append((paid - used).sum(axis=1) * UNIT // np.maximum(1, paid.sum(axis=1)))
        return np.array(shares)

    def _entropy(self, counts: IntArray) -> IntArray:
        return entropy(counts * self._figures.samples)


def entropy(samples: IntArray) -> IntArray:
    """Entropy of numbers of samples (steps, sources), in UNITs of a bit, int64, (steps,)."""
    total = np.maximum(1, samples.sum(axis=1))
    within = (samples * (_log2(samples) >> 4)).sum(axis=1) // total * 16
    return np.asarray(_log2(total) - within, np.int64)


def _log2(numbers: IntArray) -> IntArray:
    # rounded: the last bit of a logarithm is another one on other machines
    return np.asarray(np.rint(np.log2(np.maximum(numbers, 1)) * UNIT), np.int64)


def _counts(cuts: IntArray) -> IntArray:
    return np.asarray(np.diff(cuts, axis=1, prepend=0), np.int64)


def figures_of(
    expected: IntArray, loads: Sequence[IntArray], sizes: IntArray, samples: IntArray
) -> BuildFigures:
    """Figures by sums of vision loads, tokens and samples over `sizes` groups of each build."""
    means = []
    for load in loads:
        mean = max(1, int(load.sum()) * 256 // max(1, int(sizes.sum())))
        means.append(load * 256 // np.maximum(1, sizes) * UNIT // mean)
    per_group = np.maximum(1, samples * 16 // np.maximum(1, sizes))
    return BuildFigures(expected=expected, vision=means[0], tokens=means[1], samples=per_group)


def predicted_waiting(figures: BuildFigures, shape: tuple[int, int]) -> tuple[float, float]:
    """Share of the time that ranks wait for vision and for tokens, by builds' mean groups."""
    sorted_figures, _ = figures.by_load()
    owed = np.zeros_like(figures.expected)
    sums = np.zeros(2, np.int64)
    everything = np.full(len(owed), shape[0] * shape[1])
    costs = _StepCosts(sorted_figures, sorted_figures.expected, shape)
    for _ in range(PREDICTED_STEPS):
        counts = step_counts(sorted_figures, owed, everything, shape)
        owed += sorted_figures.expected - counts * UNIT
        sums += costs.waiting(counts[None])[:, 0]
    vision, tokens = (sums / (PREDICTED_STEPS * UNIT)).tolist()
    return vision, tokens


def choose_of_builds(
    builds: IntArray, loads: tuple[IntArray, IntArray], counts: IntArray, tolerance: float
) -> IntArray:
    """Places of a step's groups, ascending: of each build those nearest to its first one."""
    parts = [np.empty(0, np.int64)]
    for build in np.flatnonzero(counts).tolist():
        places = np.flatnonzero(builds == build)
        vision, tokens = (load[places] for load in loads)
        parts.append(places[nearest(vision, tokens, int(counts[build]), tolerance)])
    return np.sort(np.concatenate(parts))


def most_alike_mixed(
    loads: tuple[IntArray, IntArray], sources: IntArray, count: int, tolerance: float, centres: int
) -> IntArray:
    """The set of `most_alike` among those that are about as mixed as a random step.

    `sources`: samples of each source in the groups, (groups, sources). Each set has the nearest
    groups, in numbers of each source that are moved from those of the nearest of all towards those
    of all groups, an eighth at a time, until the set has LEAST_ENTROPY.
    """
    vision, tokens = loads
    if len(vision) <= count:
        return np.arange(len(vision))
    main = sources.argmax(axis=1)  # of each group, the source of most samples
    present = np.bincount(main, minlength=sources.shape[1])
    share = present * count * UNIT // len(main)
    # those that come first, in random order, a step at a time
    starts = range(0, len(main) - count + 1, count)
    steps = np.array([sources[start : start + count].sum(axis=0) for start in starts])
    min_entropy = int(entropy(steps).mean() * LEAST_ENTROPY)
    sets = []
    for centre in range(min(centres, len(main))):
        order = np.sort(distances(vision, tokens, tolerance, centre)) & ((1 << PLACE_BITS) - 1)
        chosen = order[:count]
        plain = np.bincount(main[chosen], minlength=len(present)) * UNIT
        for eighths in range(1, 9):
            if entropy(sources[chosen].sum(axis=0)[None])[0] >= min_entropy:
                break
            targets = (plain * (8 - eighths) + share * eighths) // 8
            counts = whole_counts(targets, present, count)
            if not counts[main[centre]]:  # the set is of the centre, which must not wait forever
                counts[counts.argmax()] -= 1
                counts[main[centre]] = 1
            of_source = main[order]
            sizes = counts.tolist()
            parts = [order[of_source == number][:size] for number, size in enumerate(sizes)]
            chosen = np.concatenate(parts)
        sets.append(np.sort(chosen))
    return least_waiting(sets, vision, tokens)


class MixedShuffle(GlobalShuffle):
    """A random order of several builds' groups, of which each step takes as the weights say.

    Its state is that of a `GlobalShuffle`, and how many groups of each build are `taken`.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        build_lookup: BuildLookup,
        taken: Sequence[int] = (),
        unmixed: int = 0,
        **options: Any,
    ) -> None:
        """`sizes`: groups of each build in the epoch. Without `taken` they count as by weights.

        `unmixed`: how much less than MEAN_ENTROPY steps have had, together.
        """
        super().__init__(num_groups=sum(sizes), **options)
        self._sizes = list(sizes)
        self._lookup = build_lookup
        self._unmixed = unmixed
        if not taken:
            spare = np.bincount(build_lookup(self._spare)[0], minlength=len(sizes)).tolist()
            read = [size * self.consumed // max(1, self._num_groups) for size in sizes]
            taken = [max(0, all_ - rest) for all_, rest in zip(read, spare, strict=True)]
        self._taken = list(taken)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64, those that waited first; fewer at the epoch's end."""
        return self._noted(super().take(count))

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where the epoch has ended."""
        count = dp * micro_batches
        groups = self.candidates(count)
        if count == 1 or len(groups) <= count:
            step = super().take_step(dp, micro_batches, loads)
            if count > 1:  # of one group, `take` has noted it
                self._noted(step[step >= 0])
            return step
        vision, tokens = loads(groups)
        builds, samples = self._lookup(groups)
        sums = [
            np.bincount(builds, values, len(self._sizes)).astype(np.int64)
            for values in (vision, tokens, samples)
        ]
        available = np.bincount(builds, minlength=len(self._sizes))
        total = self._num_groups
        past = sum(self._taken)
        expected = np.array([size * count * UNIT // total for size in self._sizes])
        owed = np.array(
            [
                (size * past - taken * total) * UNIT // total
                for size, taken in zip(self._sizes, self._taken, strict=True)
            ]
        )
        figures = figures_of(expected, sums[:2], available, sums[2])
        mixing = MIXING_MORE if self._unmixed > 0 else MIXING
        counts = step_counts(figures, owed, available, (dp, micro_batches), mixing)
        mixed, usual = entropy(np.array([counts, expected >> 10]) * figures.samples).tolist()
        self._unmixed += MEAN_ENTROPY - mixed * UNIT // max(1, usual)
        chosen = choose_of_builds(builds, (vision, tokens), counts, self.tolerance)
        self._taken = [taken + new for taken, new in zip(self._taken, counts.tolist(), strict=True)]
        return self.assigned(groups, chosen, (vision, tokens), (dp, micro_batches))

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""
        return {**super().state(), "taken": self._taken, "unmixed": self._unmixed}

    def _noted(self, groups: IntArray) -> IntArray:
        new = np.bincount(self._lookup(groups)[0], minlength=len(self._sizes)).tolist()
        self._taken = [taken + count for taken, count in zip(self._taken, new, strict=True)]
        return groups
