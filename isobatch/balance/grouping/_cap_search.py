"""The search for caps by trial groupings, for `balance.grouping.caps`. Pure.

Coarse to fine: a memory budget's split, the vision cap, the filter's targets. Some thirty trials at
most on a drawn part of the samples (.05 s each); the best few are compared on all samples, 1.2
million at most (.5 s). Deterministic; nothing is tried twice.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

import numpy as np

from isobatch.balance.grouping.activation_budget import ActivationBudget
from isobatch.balance.metrics import epoch_ms
from isobatch.balance.rng import STORED, random_permutation
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, FloatArray, Groups, IntArray, Limits

FILTER_SLACK_TOKENS = 128
"""Q_t - Q'_t: OmniBal, Table 6."""
SEARCH_CAPS = 64
"""Caps that the search decides between, at most: for ViT tokens 1.6 % of the range apart."""
SPLITS = (16, 8)
"""Ways to share out a memory budget: tried all over the range, then around the best."""
FREE = 0.005
"""A cap costs no groups up to .5 % more than without it; two seeds of a grouping differ by .2 %."""
CHANCE = 0.003
"""Predicted times that differ less are equal: waiting on a drawn part varies by so much."""
WORTHWHILE = 0.002
"""Share of groups that other filter targets than OmniBal's must save: two seeds differ as much."""
SEARCH_SAMPLES, CONFIRM_SAMPLES = 50_000, 1_200_000
"""Samples of a trial at most; larger sets are drawn from, so 100 M samples cost no more."""
TRIAL_DP = 8
"""Ranks that predicted times are for."""
TIGHT = (1.0, 1.005, 1.01, 1.02, 1.04)
"""Vision caps that are tried, times what the mean group needs: full groups cost the same."""


Group = Callable[[IntArray, IntArray, Limits], Groups]
"""(vision loads, tokens, caps) -> groups."""


def caps_of(q_t: int, q_v: int, vision_unit: str) -> Limits:
    """These caps with the filter targets of OmniBal, Table 6: Q_v, and 128 tokens below Q_t."""
    return Limits(
        max_seq_len=q_t,
        max_vision=q_v,
        min_seq_len=q_t - min(FILTER_SLACK_TOKENS, q_t // 8),
        min_vision=max(q_v, 1),  # with a cap of 0, out of reach instead of met by all
        vision_unit=vision_unit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapTrial:
    """Caps that the search tried, and the groups that they gave."""

    limits: Limits
    num_samples: int
    """Samples that were drawn and that fit the caps."""
    num_groups: int
    token_fill: float
    """Share of the groups' capacity of LLM tokens that is used."""
    vision_fill: float
    """The same of vision; 0.0 for a cap of 0."""
    ms_per_sample: float | None
    """Predicted time of both passes on one GPU, in random order; None without dimensions."""
    waiting: float | None
    """Share of that time in which a rank waits for the step's slowest."""

    @property
    def groups_per_sample(self) -> float:
        """Groups per sample: the fewer, the better the caps."""
        return self.num_groups / max(self.num_samples, 1)

    def extra_groups(self, other: "CapTrial") -> float:
        """Groups per sample beyond those of `other`, relative: 0.0 for as many."""
        return self.num_groups * other.num_samples / max(other.num_groups * self.num_samples, 1) - 1


def best_trial(tried: Iterable[CapTrial]) -> CapTrial:
    """The best caps: least predicted time (to `CHANCE`), fewest groups (to `FREE`), smallest."""
    trials = list(tried)
    times = [trial.ms_per_sample for trial in trials if trial.ms_per_sample is not None]
    if len(times) == len(trials):
        bound = min(times) * (1 + CHANCE)
        trials = [trial for trial, ms in zip(trials, times, strict=True) if ms <= bound]
    fewest = min(trials, key=_by_groups)
    close = [trial for trial in trials if trial.extra_groups(fewest) <= FREE]
    return min(close, key=lambda trial: (trial.limits.max_vision, trial.limits.max_seq_len))


class Predictor(Protocol):
    """Predicts how long groups take; as text it says for which model and GPU."""

    def groups_ms(self, counts: Counts, groups: Groups) -> FloatArray:
        """Time of each group of these samples as one micro-batch, float64, shape (groups,)."""


class Trials:
    """Trials of caps by `group`, the build's grouping, on the samples at `rows`."""

    def __init__(
        self,
        counts: Counts,
        rows: IntArray,
        group: Group,
        *,
        predictor: Predictor | None,
        seed: int,
    ) -> None:
        self._group = group
        self._predictor = predictor
        self._seed = seed
        self._part = self._whole = counts.take(_draw(rows, CONFIRM_SAMPLES, seed))
        if len(rows) > SEARCH_SAMPLES:
            self._part = counts.take(_draw(rows, SEARCH_SAMPLES, seed))
        self._tried: dict[tuple[Limits, bool], CapTrial] = {}

    def at(self, limits: Limits, *, on_all: bool = False) -> CapTrial:
        """Group the drawn part, or all samples, under these caps."""
        key = limits, on_all or self._part is self._whole
        if key in self._tried:
            return self._tried[key]
        counts = self._whole if on_all else self._part
        vision, tokens = limits.vision_load(counts), counts.seq_len
        rows = np.flatnonzero(vision <= limits.max_vision)  # a given cap may be below the largest
        loads = vision[rows], tokens[rows]
        groups = self._group(*loads, limits)
        groups = Groups(rows[groups.samples], groups.offsets)
        ms_per_sample, waiting = self._times(groups, counts, limits)
        self._tried[key] = CapTrial(
            limits=limits,
            num_samples=len(rows),
            num_groups=len(groups),
            token_fill=int(loads[1].sum()) / max(len(groups) * limits.max_seq_len, 1),
            vision_fill=int(loads[0].sum()) / max(len(groups) * limits.max_vision, 1),
            ms_per_sample=ms_per_sample,
            waiting=waiting,
        )
        return self._tried[key]

    def results(self, *, on_all: bool) -> tuple[CapTrial, ...]:
        """Trials on the drawn part, or on all samples, smallest caps first."""
        on_all = on_all or self._part is self._whole
        trials = [trial for (_, on), trial in self._tried.items() if on == on_all]
        return tuple(sorted(trials, key=_size))

    def _times(
        self, groups: Groups, counts: Counts, limits: Limits
    ) -> tuple[float, float] | tuple[None, None]:
        """(GPU-ms per sample, share of waiting): in random order, a group per rank and step."""
        if self._predictor is None or not len(groups):
            return None, None
        times = self._predictor.groups_ms(counts, groups)
        dp = min(TRIAL_DP, len(groups))
        # idle ranks cost time too
        total = dp * epoch_ms(times[random_permutation(len(groups), self._seed, STORED)], dp)
        return total / len(groups.samples), 1 - float(times.sum()) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class CapSearch:
    """The space of caps: what the samples need, what the caller allows, and trials in it."""

    trials: Trials
    vision: IntArray
    tokens: IntArray
    """Loads of all samples that fit Q_t."""
    vision_unit: str
    memory: ActivationBudget | None
    most_tokens: int
    """The most that Q_t may be."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample: the least Q_t that rejects none."""
        return max(int(self.tokens.max(initial=0)), 1)

    @property
    def largest(self) -> int:
        """Vision load of the largest sample: the least Q_v that rejects none."""
        return int(self.vision.max(initial=0))

    def caps(self, q_t: int, q_v: int) -> Limits:
        """Caps with OmniBal's filter targets, in this search's unit."""
        return caps_of(q_t, q_v, self.vision_unit)

    def never_binds(self, q_t: int) -> int:
        """Least vision cap that never binds: the most vision that Q_t tokens can have.

        sum(vision) <= max(vision / tokens) * sum(tokens), and a group has at most Q_t tokens.
        """
        return int((self.vision * q_t // np.maximum(self.tokens, 1)).max(initial=0))

    def under(self, q_t: int, max_vision: int | None) -> CapTrial:
        """The trial of Q_t with this vision cap; None: one that never binds."""
        free = max(self.never_binds(q_t), self.largest)
        return self.trials.at(self.caps(q_t, free if max_vision is None else max_vision))

    def splits(self, max_vision: int | None) -> list[Limits]:
        """Largest caps to choose between, best first: one pair unless a memory budget is shared.

        Coarse to fine along the vision cap, each with all the tokens that the budget then leaves.
        """
        never = self.never_binds(self.most_tokens)
        if self.memory is None:
            q_v = max(never, self.largest) if max_vision is None else max_vision
            return [self.caps(self.most_tokens, q_v)]
        least_vision = self.largest if max_vision is None else max_vision
        most_tokens = self.memory.most_tokens(least_vision)
        if most_tokens < self.longest:
            raise ConfigError(
                f"the memory budget holds {max(most_tokens, 0):,} tokens next to {least_vision:,}"
                f" {self.caps(1, 0).unit}, but the longest sample has {self.longest:,};"
                " give more memory, or a max_seq_len that rejects the longest samples"
            )
        limit = self.memory.most_vision(self.longest)
        never = max(never, least_vision)
        low, high = least_vision, never if limit is None else min(limit, never)
        if max_vision is not None or high <= low:
            return [self._split(low)]
        trials: dict[int, CapTrial] = {}
        for most_tries in SPLITS:
            tries = _spread(low, high, most_tries)
            trials |= {q_v: self.trials.at(self._split(q_v)) for q_v in tries}
            best = tries.index(min(tries, key=lambda q_v: trials[q_v].groups_per_sample))
            low, high = tries[max(best - 1, 0)], tries[min(best + 1, len(tries) - 1)]
        return [trial.limits for trial in sorted(trials.values(), key=_by_groups)]

    def _split(self, q_v: int) -> Limits:
        by_memory = self.most_tokens if self.memory is None else self.memory.most_tokens(q_v)
        return self.caps(min(by_memory, self.most_tokens), q_v)

    def best(self, splits: Sequence[Limits], max_vision: int | None) -> CapTrial:
        """The best of the smallest free cap, its neighbours, and the next split, on all samples."""
        q_t, max_q_v = splits[0].max_seq_len, splits[0].max_vision
        q_v = self._smallest_free(q_t, max_q_v) if max_vision is None else max_vision
        step = max(1, (max_q_v - self.largest) // SEARCH_CAPS)
        low, high = min(self.largest, q_v), max(max_q_v, q_v)
        mean = int(self.vision.sum()) * q_t / max(1, int(self.tokens.sum()))
        near = {q_v - step, q_v, q_v + step, *(math.ceil(mean * factor) for factor in TIGHT)}
        caps = [self.caps(q_t, q) for q in sorted(near) if low <= q <= high]
        tried = [self.trials.at(limits, on_all=True) for limits in [*caps, *splits[1:2]]]
        if max_vision is not None:
            return self.trials.at(self.caps(q_t, max_vision), on_all=True)
        return best_trial(tried)

    def _smallest_free(self, q_t: int, max_q_v: int) -> int:
        """The smallest vision cap that costs no groups, by bisection: larger caps need no more."""
        free = self.trials.at(self.caps(q_t, max_q_v))
        caps = _spread(self.largest, max_q_v, SEARCH_CAPS)
        first, last = 0, len(caps) - 1
        while first < last:
            middle = (first + last) // 2
            if self.trials.at(self.caps(q_t, caps[middle])).extra_groups(free) <= FREE:
                last = middle
            else:
                first = middle + 1
        return caps[first]


def best_targets(trials: Trials, start: CapTrial) -> CapTrial:
    """The best targets of ISF's filter for these caps: powers of two, then around the best."""
    q_t, q_v = start.limits.max_seq_len, start.limits.max_vision
    # a target above the cap is out of reach: only tokens count then
    visions = sorted({max(q_v, 1), q_v + 1, max(q_v - max(q_v // 16, 1), 1)})
    slacks = [1 << power for power in range(4, 12) if 1 << power <= q_t // 4]
    pairs = [(slack, vision) for slack in slacks for vision in visions]
    tried = [trials.at(_targets(start.limits, slack, vision)) for slack, vision in pairs]
    if not tried:
        return start
    best = min(tried, key=_by_groups).limits
    finer = [(q_t - best.min_seq_len) * eighths // 8 for eighths in (5, 6, 7, 10, 12, 14)]
    tried += [trials.at(_targets(best, slack, best.min_vision)) for slack in finer]
    best_few = sorted(tried, key=_by_groups)[:3]
    chosen = min((trials.at(t.limits, on_all=True) for t in best_few), key=_by_groups)
    return chosen if chosen.extra_groups(start) < -WORTHWHILE else start


def _targets(limits: Limits, slack: int, min_vision: int) -> Limits:
    return replace(limits, min_seq_len=limits.max_seq_len - slack, min_vision=min_vision)


_by_groups = attrgetter("groups_per_sample")
_size = attrgetter(
    "limits.max_vision", "limits.max_seq_len", "limits.min_seq_len", "limits.min_vision"
)


def _spread(low: int, high: int, count: int) -> list[int]:
    """Whole numbers from `low` to `high`, evenly spread; all if at most `count` + 1.

    >>> _spread(3, 6, 16), _spread(0, 100, 4)
    ([3, 4, 5, 6], [0, 25, 50, 75, 100])
    """
    numbers = np.linspace(low, high, min(high - low, count) + 1).astype(np.int64)
    return [int(number) for number in np.unique(numbers)]


def _draw(rows: IntArray, count: int, seed: int) -> IntArray:
    """Draw so many rows at most; with repetition, so that the cost does not grow with them."""
    if len(rows) <= count:
        return rows
    # raw bits: NumPy keeps these the same in all versions
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(count)
    return rows[(bits % np.uint64(len(rows))).astype(np.int64)]
