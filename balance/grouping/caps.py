"""Caps of a group: `choose_limits` searches for them, `choose_limits_omnibal` is the paper's rule.
Pure.

Packed without padding, every grouping does the same work. Caps change the number of micro-batches
(each has an overhead), how unequal these are, and what the largest needs of memory. In the stored
order (`balance.order.block_shuffle`) ranks run neighbours, so unequal groups cost next to nothing
and the number of micro-batches decides. Hence these rules:

1. Q_t is as large as the caller allows: the longest sample, the model's context or the given cap, whichever is least.
   A memory budget (`balance.grouping.activation_memory`) is shared out between both caps where it
   gives the fewest groups.
2. Q_v is the smallest cap that costs no groups: no larger one saves micro-batches, no smaller one is as fast.
3. Q'_t and Q'_v matter to ISF alone: the targets that give the fewest groups, OmniBal's unless others are better.

The best few caps are grouped again with all samples, beside their neighbours, and one that is
predicted to be slower than another by more than chance does not win. AI2D + ChartQA at 4,096
tokens: 15 patches; 14 need 19 % more groups and 12 need 36 %, because samples of 5 patches leave
room that none fills. A ratio of means, as in the paper (here 14.9), does not see such steps. 1.2
million samples take 1.5 s, with a memory budget 2 to 4 s.

In random order unequal groups do cost: by benchmarks/caps.py 1 % at 15 patches, 15 % at 14, 36 % at
9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balance.flops import FlopsModel
from balance.grouping._cap_lines import compared_line, prediction_line, targets_line, why_line
from balance.grouping._cap_search import CapSearch, best_targets, caps_of
from balance.grouping._cap_trials import Candidate, Trials
from balance.grouping.activation_memory import MemoryBudget
from balance.grouping.isf import DEFAULT_ITERATIONS
from balance.types import VISION_UNITS, Counts, IntArray, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChoice:
    """The chosen caps, and why."""

    limits: Limits
    reason: str
    """The caps and the rule behind each, one line."""
    prediction: str = ""
    """Predicted time with these caps and with others, one line; empty without a cost model."""
    compared: str = ""
    """Fill and predicted time of these caps and of the nearest that were tried, one line."""
    targets: str = ""
    """The filter's targets, and what they save, one line; says so where the grouping uses none."""
    candidates: tuple[Candidate, ...] = ()
    """All that was tried on a drawn part, or on all samples of a small set, smallest caps first;
    empty if no images.
    """

    @property
    def lines(self) -> list[str]:
        """The explanation as a report prints it."""
        return [
            line for line in (self.reason, self.prediction, self.compared, self.targets) if line
        ]


def choose_limits(  # noqa: PLR0913 - the caps that a caller may give, and what to try others with
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
    memory: MemoryBudget | None = None,
    cost: FlopsModel | None = None,
    grouping: str = "fit",
    isf_iterations: int = DEFAULT_ITERATIONS,
    seed: int = 0,
) -> LimitChoice:
    """Caps and filter targets for `counts`: the fewest groups that the given caps and the memory
    budget allow.

    A given cap is taken as it is, and the explanation says what it costs; beside a memory budget
    `max_seq_len` is only the most that Q_t may be. A cap from the data or the budget never rejects
    a sample that `max_seq_len` and the context admit. `grouping` is what groups will be made with,
    `fit` or `isf`. Depends on the arguments alone. Raises ValueError when there is no sample,
    ConfigError when the budget cannot hold the longest or the largest one.
    """
    paper = choose_limits_omnibal(
        counts,
        vision_unit=vision_unit,
        context_len=context_len,
        max_seq_len=max_seq_len,
        max_vision=max_vision,
    )
    rule = "your max_seq_len" if paper.max_seq_len == max_seq_len else "the model's context"
    if max_seq_len is None and memory is None and paper.max_seq_len == counts.seq_len.max():
        rule = "the longest sample"
    fitting = np.flatnonzero(counts.seq_len <= paper.max_seq_len)
    trials = Trials.of(
        counts, fitting, cost=cost, seed=seed, grouping=grouping, isf_iterations=isf_iterations
    )
    # a packed group may be longer than any sample, so the budget may go beyond the longest
    most_tokens = min(context_len, max_seq_len or context_len) if memory else paper.max_seq_len
    search = CapSearch.of(counts, fitting, trials, vision_unit, memory, most_tokens)
    splits = search.splits(max_vision)
    if memory is not None and splits[0].max_seq_len < most_tokens:
        rule = "your memory budget"
    if search.largest == 0 and not max_vision:
        limits = splits[0] if memory else paper
        return LimitChoice(
            limits=limits, reason=f"caps: {limits.max_seq_len:,} tokens ({rule}), no images"
        )
    found = search.best(splits, max_vision)
    free = search.without_cap(found.limits.max_seq_len)  # before the candidates are listed
    chosen = best_targets(trials, found) if grouping == "isf" else found
    limits = chosen.limits
    reason = f"caps: {limits.max_seq_len:,} tokens ({rule}), {limits.max_vision:,} {limits.unit}"
    on_part, on_all = trials.candidates(on_all=False), trials.candidates(on_all=True)
    return LimitChoice(
        limits=limits,
        reason=reason
        + why_line(
            trials.at(found.limits), free, on_part, search.largest, given=max_vision is not None
        ),
        prediction=prediction_line(cost, trials.at(found.limits), on_part),
        compared=compared_line(found, on_all),
        targets=targets_line(chosen, found, grouping),
        candidates=on_part,
    )


def choose_limits_omnibal(
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
) -> Limits:
    """Caps and filter targets by OmniBal 5.2: an average group reaches both caps together; given
    caps are taken.

    Q_v is raised to the largest sample that Q_t admits where the ratio alone would shut that sample
    out: a cap taken from the data must not reject data. Raises ValueError when there is no sample.
    """
    if len(counts) == 0:
        raise ValueError("no sample to choose caps from; see the rejected samples for the reasons")
    if vision_unit not in VISION_UNITS:
        raise ValueError(f"vision_unit is {vision_unit!r}; use one of {', '.join(VISION_UNITS)}")
    longest = max(int(counts.seq_len.max()), 1)
    q_t = min(context_len, longest if max_seq_len is None else max_seq_len)
    limits = caps_of(q_t, 0, vision_unit)
    if max_vision is None:
        fits = counts.seq_len <= q_t
        load, tokens = limits.vision_load(counts)[fits], int(counts.seq_len[fits].sum())
        by_ratio = round(q_t * int(load.sum()) / tokens) if tokens else 0
        max_vision = max(by_ratio, int(load.max(initial=0)))
    return caps_of(q_t, max_vision, vision_unit)


def over_limits(counts: Counts, limits: Limits) -> tuple[IntArray, IntArray]:
    """Samples that no group can hold: (longer than `max_seq_len`; the others with more than
    `max_vision`).
    """
    too_long = counts.seq_len > limits.max_seq_len
    too_much_vision = limits.vision_load(counts) > limits.max_vision
    return np.flatnonzero(too_long), np.flatnonzero(too_much_vision & ~too_long)
