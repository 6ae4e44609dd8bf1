"""Trial groupings for `balance.grouping.caps`: how many groups given caps need, how full these are,
what they take. Pure.

On a drawn part of the samples (`at`, about .05 s), or on all of them, 1.2 million at most
(`confirm`, about .5 s). Both are deterministic, and nothing is tried twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from balance.flops import FlopsModel, epoch_ms
from balance.grouping.best_fit import group_best_fit
from balance.grouping.isf import DEFAULT_ITERATIONS, group_isf
from balance.order.sort_groups import sort_groups
from balance.types import Counts, Groups, IntArray, Limits

SEARCH_SAMPLES = 50_000
CONFIRM_SAMPLES = 1_200_000
"""More are drawn from: 100 M samples cost no more than these."""
TRIAL_ROUNDS = 6
"""Effort of the trial groupings: enough to tell caps apart, a tenth of a second each."""
DP = 8
"""Ranks that predicted times are for; in the stored order it hardly matters how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Caps that the search tried, and what came of them."""

    limits: Limits
    num_samples: int
    """Samples that were drawn and that fit the caps."""
    num_groups: int
    """Groups that they make."""
    token_fill: float
    """Share of the groups' room for LLM tokens that is used."""
    vision_fill: float
    """The same of vision; 0.0 for a cap of 0."""
    ms_per_sample: float | None
    """Predicted time of forward and backward pass on one GPU, in the stored order; None without a
    cost model.
    """
    waiting: float | None
    """Share of that time in which a rank waits for the step's slowest."""

    def extra_groups(self, other: Candidate) -> float:
        """Groups per sample beyond those of `other`, relative: 0.0 for as many."""
        return self.num_groups * other.num_samples / max(other.num_groups * self.num_samples, 1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Samples to try caps on, and what was tried so far."""

    part: Counts
    """Drawn from those that fit Q_t."""
    whole: Counts
    cost: FlopsModel | None
    seed: int
    isf_iterations: int | None
    """None: the default grouping."""
    tried: dict[tuple[Limits, bool], Candidate] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        counts: Counts,
        rows: IntArray,
        *,
        cost: FlopsModel | None,
        seed: int,
        grouping: str,
        isf_iterations: int = DEFAULT_ITERATIONS,
    ) -> Trials:
        """Trials of the samples at `rows`, by the grouping that the build will use."""
        whole = counts.take(_draw(rows, CONFIRM_SAMPLES, seed))
        part = (
            whole if len(rows) <= SEARCH_SAMPLES else counts.take(_draw(rows, SEARCH_SAMPLES, seed))
        )
        return cls(
            part=part,
            whole=whole,
            cost=cost,
            seed=seed,
            isf_iterations=isf_iterations if grouping == "isf" else None,
        )

    def at(self, limits: Limits) -> Candidate:
        """Group the drawn part under these caps."""
        return self._try(limits, self.part is self.whole)

    def confirm(self, limits: Limits) -> Candidate:
        """Group all samples under these caps."""
        return self._try(limits, True)

    def candidates(self, *, on_all: bool) -> tuple[Candidate, ...]:
        """What was tried on the drawn part, or on all samples, smallest caps first."""
        on_all = on_all or self.part is self.whole
        found = [candidate for (_, on), candidate in self.tried.items() if on == on_all]
        return tuple(sorted(found, key=_size))

    def _try(self, limits: Limits, on_all: bool) -> Candidate:
        if (limits, on_all) not in self.tried:
            self.tried[limits, on_all] = self._measured(self.whole if on_all else self.part, limits)
        return self.tried[limits, on_all]

    def _measured(self, counts: Counts, limits: Limits) -> Candidate:
        vision, tokens = limits.vision_load(counts), counts.seq_len
        rows = np.flatnonzero(
            vision <= limits.max_vision
        )  # a given cap may be below the largest sample
        if self.isf_iterations is None:
            groups = group_best_fit(
                vision[rows], tokens[rows], limits, seed=self.seed, rounds=TRIAL_ROUNDS
            )
        else:
            groups = group_isf(
                vision[rows], tokens[rows], limits, seed=self.seed, iterations=self.isf_iterations
            )
        groups = Groups(rows[groups.samples], groups.offsets)
        loads = groups.sum(vision), groups.sum(tokens)
        ms_per_sample, waiting = self._times(groups, counts, *loads)
        return Candidate(
            limits=limits,
            num_samples=len(rows),
            num_groups=len(groups),
            token_fill=int(loads[1].sum()) / max(len(groups) * limits.max_seq_len, 1),
            vision_fill=int(loads[0].sum()) / max(len(groups) * limits.max_vision, 1),
            ms_per_sample=ms_per_sample,
            waiting=waiting,
        )

    def _times(
        self, groups: Groups, counts: Counts, vision: IntArray, tokens: IntArray
    ) -> tuple[float, float] | tuple[None, None]:
        """(GPU-ms per sample, share of it that is waiting): in path order, a micro-batch per rank
        and step.
        """
        if self.cost is None or not len(groups):
            return None, None
        each = self.cost.micro_batch_ms(self.cost.loads(counts).sum(groups))
        dp = min(DP, len(groups))
        total = dp * epoch_ms(
            each[sort_groups(vision, tokens, self.seed)], dp
        )  # idle ranks cost time too
        return total / len(groups.samples), 1 - float(each.sum()) / total


def _size(candidate: Candidate) -> tuple[int, int, int, int]:
    limits = candidate.limits
    return limits.max_vision, limits.max_seq_len, limits.min_seq_len, limits.min_vision


def _draw(rows: IntArray, most: int, seed: int) -> IntArray:
    """At most so many of the rows; with repetition, so that it costs the same however many there
    are.
    """
    if len(rows) <= most:
        return rows
    # raw bits: NumPy keeps these the same in all versions
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(most)
    return rows[(bits % np.uint64(len(rows))).astype(np.int64)]
