"""The search behind `choose_limits`: a memory budget's split, the vision cap, the filter's targets.
Pure.

Coarse to fine, by trial groupings of a drawn part (`balance.grouping._cap_trials`), some thirty at
most; the best few are compared on all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from balance.errors import ConfigError
from balance.grouping._cap_trials import Candidate, Trials
from balance.grouping.activation_memory import MemoryBudget
from balance.types import Counts, IntArray, Limits

FILTER_SLACK_TOKENS = 128
"""Q_t - Q'_t: OmniBal, Table 6."""
SEARCH_CAPS = 64
"""Caps that the search decides between, at most: where ViT tokens are counted, 1.6 % of the range
apart.
"""
SPLITS = (16, 8)
"""Ways to share out a memory budget: tried all over the range, then around the best."""
FREE = 0.005
"""A cap costs no groups up to .5 % more than without it; two seeds of a grouping differ by .2 %."""
CHANCE = 0.003
"""Predicted times that differ less are equal: by so much the waiting of unequal orders of a drawn
part differs.
"""
WORTHWHILE = 0.002
"""Other targets of ISF's filter than OmniBal's must save so many groups: two seeds differ by as
much.
"""


def caps_of(q_t: int, q_v: int, vision_unit: str) -> Limits:
    """These caps with the filter targets of OmniBal, Table 6: Q_v, and 128 tokens below Q_t."""
    slack = min(FILTER_SLACK_TOKENS, q_t // 8)
    # a group without images never reaches a vision target: with a cap of 0 the target must be out
    # of reach, not met by all
    return Limits(
        max_seq_len=q_t,
        max_vision=q_v,
        min_seq_len=q_t - slack,
        min_vision=max(q_v, 1),
        vision_unit=vision_unit,
    )


def least(found: Iterable[Candidate]) -> Candidate:
    """The caps to take: by predicted time but for chance, then by groups but for `FREE`, then the
    smallest caps.
    """
    candidates = list(found)
    times = [c.ms_per_sample for c in candidates if c.ms_per_sample is not None]
    if len(times) == len(candidates):
        candidates = [
            c for c in candidates if (c.ms_per_sample or 0.0) <= min(times) * (1 + CHANCE)
        ]
    fewest = min(candidates, key=_groups_per_sample)
    close = [c for c in candidates if c.extra_groups(fewest) <= FREE]
    return min(close, key=lambda c: (c.limits.max_vision, c.limits.max_seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapSearch:
    """The space of caps: what the samples need, what the caller allows, and trials in it."""

    trials: Trials
    vision: IntArray
    tokens: IntArray
    """Loads of all samples that fit Q_t."""
    vision_unit: str
    memory: MemoryBudget | None
    longest: int
    largest: int
    """Tokens of the longest and vision load of the largest of them: the least caps that reject
    none.
    """
    most_tokens: int

    @classmethod
    def of(
        cls,
        counts: Counts,
        fitting: IntArray,
        trials: Trials,
        vision_unit: str,
        memory: MemoryBudget | None,
        most_tokens: int,
    ) -> CapSearch:
        """The search over the samples at `fitting`; `most_tokens` is the most that Q_t may be."""
        tokens = counts.seq_len[fitting]
        vision = caps_of(1, 0, vision_unit).vision_load(counts)[fitting]
        return cls(
            trials=trials,
            vision=vision,
            tokens=tokens,
            vision_unit=vision_unit,
            memory=memory,
            longest=max(int(tokens.max(initial=0)), 1),
            largest=int(vision.max(initial=0)),
            most_tokens=most_tokens,
        )

    def caps(self, q_t: int, q_v: int) -> Limits:
        """`caps_of` in this search's unit."""
        return caps_of(q_t, q_v, self.vision_unit)

    def never_binds(self, q_t: int) -> int:
        """The vision load that Q_t tokens can hold at most: the least cap that is none.

        sum(vision) <= max(vision / tokens) * sum(tokens), and a group has at most Q_t tokens.
        """
        return int((self.vision * q_t // np.maximum(self.tokens, 1)).max(initial=0))

    def without_cap(self, q_t: int) -> Candidate:
        """The trial that shows what a vision cap costs."""
        return self.trials.at(self.caps(q_t, max(self.never_binds(q_t), self.largest)))

    def splits(self, max_vision: int | None) -> list[Limits]:
        """Largest caps to choose between, best first; one pair unless a memory budget is to be
        shared out.

        Coarse to fine along the vision cap, each with all the tokens that the budget then leaves.
        """
        if self.memory is None:
            q_v = (
                max(self.never_binds(self.most_tokens), self.largest)
                if max_vision is None
                else max_vision
            )
            return [self.caps(self.most_tokens, q_v)]
        least_vision = self.largest if max_vision is None else max_vision
        room = self.memory.most_tokens(least_vision)
        if room < self.longest:
            raise ConfigError(
                f"the memory budget holds {max(room, 0):,} tokens beside {least_vision:,}"
                f" {self.caps(1, 0).unit}, but the longest sample has {self.longest:,};"
                " give more memory, or a max_seq_len that rejects the longest samples"
            )
        most = self.memory.most_vision(self.longest)
        never = max(self.never_binds(self.most_tokens), least_vision)
        low, high = least_vision, never if most is None else min(most, never)
        if max_vision is not None or high <= low:
            return [self._split(low)]
        found: dict[int, Candidate] = {}
        for most_tries in SPLITS:
            tries = _spread(low, high, most_tries)
            found |= {q_v: self.trials.at(self._split(q_v)) for q_v in tries}
            best = tries.index(min(tries, key=lambda q_v: _groups_per_sample(found[q_v])))
            low, high = tries[max(best - 1, 0)], tries[min(best + 1, len(tries) - 1)]
        return [c.limits for c in sorted(found.values(), key=_groups_per_sample)]

    def _split(self, q_v: int) -> Limits:
        tokens = (
            self.most_tokens
            if self.memory is None
            else min(self.memory.most_tokens(q_v), self.most_tokens)
        )
        return self.caps(tokens, q_v)

    def best(self, splits: Sequence[Limits], max_vision: int | None) -> Candidate:
        """The best of the smallest free cap, its neighbours, and the next best split, on all
        samples.
        """
        q_t, most = splits[0].max_seq_len, splits[0].max_vision
        q_v = self._smallest_free(q_t, most) if max_vision is None else max_vision
        step = max(1, (most - self.largest) // SEARCH_CAPS)
        first = min(self.largest, q_v)
        near = [
            self.caps(q_t, cap)
            for cap in (q_v - step, q_v, q_v + step)
            if first <= cap <= max(most, q_v)
        ]
        tried = [self.trials.confirm(limits) for limits in [*near, *splits[1:2]]]
        if max_vision is not None:
            return self.trials.confirm(self.caps(q_t, max_vision))
        # the neighbour below costs groups, and is there to be compared
        return least(c for c in tried if c.limits.max_vision >= q_v or c.limits.max_seq_len != q_t)

    def _smallest_free(self, q_t: int, most: int) -> int:
        """The smallest vision cap that costs no groups, by bisection: a larger cap never needs
        more, but for noise.
        """
        free, caps = self.trials.at(self.caps(q_t, most)), _spread(self.largest, most, SEARCH_CAPS)
        first, last = 0, len(caps) - 1
        while first < last:
            middle = (first + last) // 2
            if self.trials.at(self.caps(q_t, caps[middle])).extra_groups(free) <= FREE:
                last = middle
            else:
                first = middle + 1
        return caps[first]


def best_targets(trials: Trials, found: Candidate) -> Candidate:
    """The best targets of ISF's filter for these caps: powers of two first, then around the best of
    them.
    """
    q_t, q_v = found.limits.max_seq_len, found.limits.max_vision
    # a target above the cap is out of reach: only tokens count then
    visions = sorted({max(q_v, 1), q_v + 1, max(q_v - max(q_v // 16, 1), 1)})
    slacks = [1 << power for power in range(4, 12) if 1 << power <= q_t // 4]
    tried = [
        trials.at(_targets(found.limits, slack, vision)) for slack in slacks for vision in visions
    ]
    if not tried:
        return found
    best = min(tried, key=_groups_per_sample).limits
    slack = q_t - best.min_seq_len
    tried += [
        trials.at(_targets(best, slack * eighths // 8, best.min_vision))
        for eighths in (5, 6, 7, 10, 12, 14)
    ]
    finalists = [trials.confirm(c.limits) for c in sorted(tried, key=_groups_per_sample)[:3]]
    chosen = min(finalists, key=_groups_per_sample)
    return chosen if chosen.extra_groups(found) < -WORTHWHILE else found


def _targets(limits: Limits, slack: int, min_vision: int) -> Limits:
    return replace(limits, min_seq_len=limits.max_seq_len - slack, min_vision=min_vision)


def _spread(low: int, high: int, most: int) -> list[int]:
    """Whole numbers from `low` to `high`, evenly spread; all if there are not more than `most` + 1.

    >>> _spread(3, 6, 16), _spread(0, 100, 4)
    ([3, 4, 5, 6], [0, 25, 50, 75, 100])
    """
    return [
        int(number)
        for number in np.unique(np.linspace(low, high, min(high - low, most) + 1).astype(np.int64))
    ]


def _groups_per_sample(candidate: Candidate) -> float:
    return candidate.num_groups / max(candidate.num_samples, 1)
