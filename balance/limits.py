"""Caps of a group: `choose_limits` searches the vision cap, `choose_limits_omnibal` is the paper's rule. Pure.

Packed without padding, every grouping does the same work. Caps change the number of micro-batches (each has an
overhead), how unequal these are, and what the largest needs of memory. In the stored order (`balance.order`) ranks run
neighbours, so unequal groups cost next to nothing and the number of micro-batches decides. Hence two rules:

1. Q_t is as large as the caller allows: the longest sample, the model's context or the given cap, whichever is least.
2. Q_v is the smallest cap that costs no groups: no larger one saves micro-batches, no smaller one is as fast.

AI2D + ChartQA at 4,096 tokens: 15 patches; 14 need 16 % more groups and 12 need 35 %, because samples of 5 patches
leave room that none fills. A ratio of means, as in the paper (here 14.9), does not see such steps. The search groups
50,000 drawn samples at about eight caps: a fifth of a second for 1.2 million samples.

In random order unequal groups do cost: by benchmarks/caps.py 4 % at 15 patches, 15 % at 14, 43 % at 9.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from balance.cost import CostModel, epoch_ms
from balance.fit import group_fit
from balance.path import sort_along_path
from balance.records import VISION_UNITS, Counts, Groups, IntArray, Limits

FILTER_SLACK_TOKENS = 128
"""Q_t - Q'_t: OmniBal, Table 6."""
SEARCH_SAMPLES = 50_000
TRIAL_ROUNDS = 6
"""Effort of the trial groupings: enough to tell caps apart, a tenth of a second each."""
SEARCH_CAPS = 64
"""Caps that the search decides between, at most: where ViT tokens are counted, 1.6 % of the range apart."""
FREE = 0.005
"""A cap costs no groups up to .5 % more than without it; two seeds of a grouping differ by .2 %."""
DP = 8
"""Ranks that predicted times are for; in the stored order it hardly matters how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Caps that the search tried."""

    limits: Limits
    num_samples: int
    """Samples that the search drew and that fit the caps."""
    num_groups: int
    """Groups that they make."""
    ms_per_sample: float | None
    """Predicted time of forward and backward pass on one GPU, in the stored order; None without a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChoice:
    """The chosen caps, and why."""

    limits: Limits
    reason: str
    """The caps and the rule behind each, one line."""
    prediction: str = ""
    """Predicted time with these caps and with others, one line; empty without a cost model."""
    candidates: tuple[Candidate, ...] = ()
    """All that was tried, smallest vision cap first; empty for samples without images."""

    @property
    def lines(self) -> list[str]:
        """The explanation as a report prints it."""
        return [line for line in (self.reason, self.prediction) if line]


def choose_limits(
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
    cost: CostModel | None = None,
    seed: int = 0,
) -> LimitChoice:
    """Caps and filter targets for `counts`: the largest Q_t allowed, then the smallest Q_v that costs no groups.

    A given cap is taken as it is, and the explanation says what it costs. A cap from the data never rejects a sample
    that fits Q_t. Depends on the arguments alone. Raises ValueError when there is no sample.
    """
    paper = choose_limits_omnibal(
        counts, vision_unit=vision_unit, context_len=context_len, max_seq_len=max_seq_len, max_vision=max_vision
    )
    rule = "your max_seq_len" if paper.max_seq_len == max_seq_len else "the model's context"
    if max_seq_len is None and paper.max_seq_len == counts.seq_len.max():
        rule = "the longest sample"
    begin = f"caps: {paper.max_seq_len:,} tokens ({rule}), "
    fitting = np.flatnonzero(counts.seq_len <= paper.max_seq_len)
    search = _make_search(counts, fitting, paper, cost, seed)
    if search.never_binds == 0:
        return LimitChoice(limits=paper, reason=f"{begin}no images")
    search.at(paper.max_vision)
    chosen = _smallest_free(search) if max_vision is None else max_vision
    return LimitChoice(
        limits=search.at(chosen).limits,
        reason=f"{begin}{chosen:,} {paper.unit}{_why(search, chosen, given=max_vision is not None)}",
        prediction=_prediction(search, chosen),
        candidates=tuple(search.tried[cap] for cap in sorted(search.tried)),
    )


def choose_limits_omnibal(
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
) -> Limits:
    """Caps and filter targets by OmniBal 5.2: an average group reaches both caps together; given caps are taken.

    Q_v is raised to the largest sample that Q_t admits where the ratio alone would shut that sample out: a cap taken
    from the data must not reject data. Raises ValueError when there is no sample.
    """
    if len(counts) == 0:
        raise ValueError("no sample to choose caps from; see the rejected samples for the reasons")
    if vision_unit not in VISION_UNITS:
        raise ValueError(f"vision_unit is {vision_unit!r}; use one of {', '.join(VISION_UNITS)}")
    longest = max(int(counts.seq_len.max()), 1)
    q_t = min(context_len, longest if max_seq_len is None else max_seq_len)
    limits = _limits(q_t, 0, vision_unit)
    if max_vision is None:
        fits = counts.seq_len <= q_t
        load, tokens = limits.vision_load(counts)[fits], int(counts.seq_len[fits].sum())
        by_ratio = round(q_t * int(load.sum()) / tokens) if tokens else 0
        max_vision = max(by_ratio, int(load.max(initial=0)))
    return _limits(q_t, max_vision, vision_unit)


def over_limits(counts: Counts, limits: Limits) -> tuple[IntArray, IntArray]:
    """Samples that no group can hold: (longer than `max_seq_len`; the others with more than `max_vision`)."""
    too_long = counts.seq_len > limits.max_seq_len
    too_much_vision = limits.vision_load(counts) > limits.max_vision
    return np.flatnonzero(too_long), np.flatnonzero(too_much_vision & ~too_long)


def _limits(q_t: int, q_v: int, vision_unit: str) -> Limits:
    slack = min(FILTER_SLACK_TOKENS, q_t // 8)
    # a group without images never reaches a vision target: with a cap of 0 the target must be out of reach, not met
    # by all
    return Limits(
        max_seq_len=q_t, max_vision=q_v, min_seq_len=q_t - slack, min_vision=max(q_v, 1), vision_unit=vision_unit
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Samples to try caps on, and the caps tried so far."""

    counts: Counts
    """Drawn from the samples that fit Q_t."""
    paper: Limits
    cost: CostModel | None
    seed: int
    largest: int
    """Vision load of the largest sample of all that fit: the least cap that rejects none."""
    never_binds: int
    """The vision load that Q_t tokens can hold at most: the least cap that is none."""
    tried: dict[int, Candidate] = field(default_factory=dict)

    def at(self, max_vision: int) -> Candidate:
        """Group the drawn samples under this vision cap; each cap is tried once."""
        if max_vision not in self.tried:
            limits = _limits(self.paper.max_seq_len, max_vision, self.paper.vision_unit)
            vision, tokens = limits.vision_load(self.counts), self.counts.seq_len
            rows = np.flatnonzero(vision <= max_vision)  # a given cap may be below the largest sample
            groups = group_fit(vision[rows], tokens[rows], limits, seed=self.seed, rounds=TRIAL_ROUNDS)
            groups = Groups(rows[groups.samples], groups.offsets)
            self.tried[max_vision] = Candidate(
                limits=limits,
                num_samples=len(rows),
                num_groups=len(groups),
                ms_per_sample=self._ms_per_sample(groups, vision),
            )
        return self.tried[max_vision]

    def extra_groups(self, max_vision: int) -> float:
        """Groups per sample that this cap costs, relative to no cap: 0.0 for none."""
        capped, free = self.at(max_vision), self.at(self.never_binds)
        return capped.num_groups * free.num_samples / max(free.num_groups * capped.num_samples, 1) - 1

    def _ms_per_sample(self, groups: Groups, vision: IntArray) -> float | None:
        if self.cost is None or not len(groups):
            return None
        path = sort_along_path(groups.sum(vision), groups.sum(self.counts.seq_len), self.seed)
        each = self.cost.micro_batch_ms(self.cost.work(self.counts).sum(groups))
        dp = min(DP, len(groups))
        return dp * epoch_ms(each[path], dp) / len(groups.samples)  # idle ranks cost time too


def _make_search(counts: Counts, fitting: IntArray, paper: Limits, cost: CostModel | None, seed: int) -> _Search:
    load, tokens = paper.vision_load(counts)[fitting], counts.seq_len[fitting]
    # sum(load) <= max(load / tokens) * sum(tokens), and a group has at most Q_t tokens
    never_binds = int((load * paper.max_seq_len // np.maximum(tokens, 1)).max(initial=0))
    if len(fitting) > SEARCH_SAMPLES:
        # raw bits: NumPy keeps these the same in all versions; with repetition: 100 M samples cost no more
        drawn = np.random.Philox(np.random.SeedSequence(seed)).random_raw(SEARCH_SAMPLES) % np.uint64(len(fitting))
        fitting = fitting[drawn.astype(np.int64)]
    largest = int(load.max(initial=0))
    return _Search(
        counts=counts.take(fitting), paper=paper, cost=cost, seed=seed, largest=largest, never_binds=never_binds
    )


def _smallest_free(search: _Search) -> int:
    """The smallest vision cap that costs no groups, by bisection: a larger cap never needs more, but for noise."""
    first, last = search.largest, search.never_binds
    caps = np.unique(np.linspace(first, last, min(last - first, SEARCH_CAPS) + 1).astype(np.int64))
    low, high = 0, len(caps) - 1
    while low < high:
        middle = (low + high) // 2
        if search.extra_groups(int(caps[middle])) <= FREE:
            high = middle
        else:
            low = middle + 1
    return int(caps[low])


def _why(search: _Search, chosen: int, *, given: bool) -> str:
    """The rule behind Q_v, and what the caps below it cost."""
    if given and chosen >= search.never_binds:
        return " (your max_vision): it never binds"
    if given:
        return f" (your max_vision): {_signed(search.extra_groups(chosen))} groups against no cap"
    if chosen == search.largest:
        return ": the largest sample's, and it costs no groups"
    smaller = sorted((cap for cap in search.tried if cap < chosen), reverse=True)
    below = [f"{cap:,}: {_signed(search.extra_groups(cap))}" for cap in smaller]
    return f": the smallest cap that costs no groups ({', '.join(below[:2])})"


def _prediction(search: _Search, chosen: int) -> str:
    best = search.at(chosen).ms_per_sample
    if search.cost is None or best is None:
        return ""
    others = [c.ms_per_sample / best - 1 for cap, c in search.tried.items() if cap != chosen and c.ms_per_sample]
    text = f"predicted for {search.cost.name} ({search.cost.hardware}): {best:,.4g} GPU-ms per sample"
    return f"{text}, {_signed(min(others))} to {_signed(max(others))} with other vision caps" if others else text


def _signed(share: float) -> str:
    """A share as a person reads it; adding zero turns -0.0 into +0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"
