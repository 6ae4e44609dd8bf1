"""Choice of a group's caps, by search or by OmniBal's rule, with its reasons.

Pure. Packed without padding, every grouping does the same work. Caps change the number of
micro-batches (each has an overhead), how unequal these are, and what the largest needs of memory.
In a random order the largest of a step is what all wait for, and a vision cap just above what the
mean group needs makes groups equal. Hence these rules:

1. Q_t is the given cap, at most the model's context; else the least that was tried under which
   groups are full and hold several samples, from the longest sample on. A memory budget
   (`models.activation_memory`) is shared by both caps where it gives the fewest groups.
2. Q_v is the fastest in a random order, by prediction, of the smallest cap that costs no groups and
   those just above the mean group's need; without a model's dimensions the smallest that costs no
   groups.
3. Q'_t and Q'_v matter to ISF alone: OmniBal's targets, unless others give fewer groups.

The best few caps are grouped again with all samples. AI2D + ChartQA at 4,096 tokens: 15 patches;
14 need 19 % more groups and 12 need 36 %, because samples of 5 patches leave patches that no sample
fills. A ratio of means, as in the paper (here 14.9), does not see such steps. 1.2 million samples
take 1.5 s, with a memory budget 2 to 4 s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from isobatch.balance.grouping._cap_search import (
    FREE,
    CapSearch,
    CapTrial,
    Predictor,
    Trials,
    best_targets,
    caps_of,
)
from isobatch.balance.grouping.activation_budget import ActivationBudget
from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.isf import DEFAULT_ITERATIONS, group_isf
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, IntArray, Limits

GROUPINGS = ("fit", "isf")
TRIAL_ROUNDS = 6
"""Effort of the trial groupings: enough to tell caps apart, a tenth of a second each."""
MULTIPLES, MEANS, ABOVE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32), range(2, 17), 1.01
"""Q_t without a given one: multiples of the longest sample, and just above multiples of the mean,
where groups of samples of about one length are full.
"""
FULL = 0.985
"""Fill of Q_t that is enough: 98 % after the .5 % that a vision cap may cost."""
SEVERAL = 2.0
"""Samples per group on average, at least: else nothing is packed, however full groups are."""
GROUPS_LINE = "groups: "
"""Beginning of the line that says how many samples groups hold."""
LEAST_GROUPS = 100
"""A longer Q_t must leave so many groups: fewer give no step to many ranks, and a last group that
is half full counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How samples become groups."""

    seed: int = 0
    max_seq_len: int | None = None
    """Q_t; None: such that groups are full."""
    max_vision: int | None = None
    """Q_v in the model's vision unit; None: from the data."""
    memory: ActivationBudget | None = None
    """Memory of a group's activations, shared between both caps; None: no bound."""
    grouping: str = "fit"
    """`fit` (fewest groups) or `isf` (OmniBal, Algorithm 1)."""
    isf_iterations: int = DEFAULT_ITERATIONS
    """ISF iterations at most; `fit` has none."""

    def __post_init__(self) -> None:
        if self.grouping not in GROUPINGS:
            raise ConfigError(f"grouping is {self.grouping!r}: use one of {', '.join(GROUPINGS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChoice:
    """The chosen caps, and why."""

    limits: Limits
    lines: list[str]
    """The explanation as a report prints it; next to others' groups, fill and predicted time."""
    trials: tuple[CapTrial, ...] = ()
    """Trials on a drawn part, or all of a small set, smallest caps first; none without images."""


def choose_limits(
    counts: Counts,
    options: GroupOptions,
    *,
    vision_unit: str,
    context_len: int,
    predictor: Predictor | None = None,
) -> LimitChoice:
    """Caps and filter targets for `counts`: the fewest groups that caps and memory budget allow.

    A given cap is taken as it is; with a memory budget `max_seq_len` is only the most that Q_t may
    be. A cap from the data or the budget never rejects a sample that `max_seq_len` and the context
    admit. `predictor` predicts times. Depends on the arguments alone. Raises ValueError when there
    is no sample, ConfigError when the budget cannot hold the longest or the largest one.
    """
    max_vision, memory = options.max_vision, options.memory
    paper = choose_limits_omnibal(
        counts,
        vision_unit=vision_unit,
        context_len=context_len,
        max_seq_len=options.max_seq_len,
        max_vision=max_vision,
    )
    search = _make_search(counts, options, paper, context_len, predictor)
    if options.max_seq_len is None and memory is None:
        search = replace(search, most_tokens=_filling(search, context_len, max_vision))
        paper = choose_limits_omnibal(
            counts,
            vision_unit=vision_unit,
            context_len=context_len,
            max_seq_len=search.most_tokens,
            max_vision=max_vision,
        )
    splits = search.splits(max_vision)
    rule = _token_rule(search, options, paper, context_len)
    if memory is not None and splits[0].max_seq_len < search.most_tokens:
        rule = "your memory budget"
    if search.largest == 0 and not max_vision:
        limits = splits[0] if memory else paper
        reason = f"caps: {limits.max_seq_len:,} tokens ({rule}), no images"
        alone = search.trials.at(limits, on_all=True)
        return LimitChoice(limits=limits, lines=[reason, _groups_line(search, alone, context_len)])
    found = search.best(splits, max_vision)
    free = search.without_cap(found.limits.max_seq_len)  # before the trials are listed
    trials = search.trials
    chosen = best_targets(trials, found) if options.grouping == "isf" else found
    limits, on_part = chosen.limits, trials.results(on_all=False)
    part = trials.at(found.limits)
    why = _why_line(part, free, on_part, search.largest, given=max_vision is not None)
    lines = [
        f"caps: {limits.max_seq_len:,} tokens ({rule}), {limits.max_vision:,} {limits.unit}{why}",
        _prediction_line(predictor, part, on_part),
        _groups_line(search, found, context_len),
        _compared_line(found, trials.results(on_all=True)),
        _targets_line(chosen, found, options.grouping),
    ]
    return LimitChoice(limits=limits, lines=[line for line in lines if line], trials=on_part)


def choose_limits_omnibal(
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
) -> Limits:
    """Caps and targets by OmniBal 5.2: an average group reaches both caps; given caps are taken.

    Q_v is raised to the largest sample that Q_t admits: a cap taken from the data must not reject
    data. Raises ValueError when there is no sample.
    """
    if len(counts) == 0:
        raise ValueError("no sample to choose caps from; see the rejected samples for the reasons")
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
    """Samples over `max_seq_len`, and others over `max_vision`: no group can hold them."""
    too_long = counts.seq_len > limits.max_seq_len
    too_much_vision = limits.vision_load(counts) > limits.max_vision
    return np.flatnonzero(too_long), np.flatnonzero(too_much_vision & ~too_long)


def _make_search(
    counts: Counts,
    options: GroupOptions,
    paper: Limits,
    context_len: int,
    predictor: Predictor | None,
) -> CapSearch:
    """The search among the samples that fit `paper`'s Q_t."""
    fitting = np.flatnonzero(counts.seq_len <= paper.max_seq_len)
    group: Callable[..., Groups] = partial(group_best_fit, seed=options.seed, rounds=TRIAL_ROUNDS)
    if options.grouping == "isf":
        group = partial(group_isf, seed=options.seed, iterations=options.isf_iterations)
    most_tokens = paper.max_seq_len
    if options.memory is not None:
        # a packed group may be longer than any sample, so the budget may go beyond the longest
        most_tokens = min(context_len, options.max_seq_len or context_len)
    return CapSearch(
        trials=Trials(counts, fitting, group, predictor=predictor, seed=options.seed),
        vision=paper.vision_load(counts)[fitting],
        tokens=counts.seq_len[fitting],
        vision_unit=paper.vision_unit,
        memory=options.memory,
        most_tokens=most_tokens,
    )


def _filling(search: CapSearch, context_len: int, max_vision: int | None) -> int:
    """The Q_t of a user who gives none: see `MULTIPLES`, `FULL`, `SEVERAL` and `LEAST_GROUPS`.

    If none of them fills the groups, the one that fills them most.
    """
    shortest = search.most_tokens
    mean = ABOVE * float(search.tokens.mean()) if len(search.tokens) else 0.0
    sizes = [*(shortest * each for each in MULTIPLES), *(mean * each for each in MEANS)]
    found: list[CapTrial] = []
    for q_t in sorted({int(size) for size in sizes if shortest <= size <= context_len}):
        trial = search.under(q_t, max_vision)
        if found and trial.groups_per_sample * len(search.tokens) < LEAST_GROUPS:
            break
        found.append(trial)
        if trial.token_fill >= FULL and trial.groups_per_sample * SEVERAL <= 1:
            return q_t
    enough = min(max(trial.token_fill for trial in found) - FREE, FULL)
    return next(t.limits.max_seq_len for t in found if t.token_fill >= enough)


def _token_rule(search: CapSearch, options: GroupOptions, paper: Limits, context_len: int) -> str:
    """The rule of Q_t, in words."""
    if paper.max_seq_len == options.max_seq_len:
        return "your max_seq_len"
    multiple = paper.max_seq_len / search.longest
    if options.max_seq_len is None and options.memory is None and paper.max_seq_len < context_len:
        filling = f"fills groups, {multiple:.3g} x the longest sample"
        return "the longest sample" if multiple == 1 else filling
    return "the model's context"


def _groups_line(search: CapSearch, found: CapTrial, context_len: int) -> str:
    """How many samples groups hold and how full they are, and under a Q_t of twice that."""
    text = f"{GROUPS_LINE}{_size_figures(found)}"
    q_t = found.limits.max_seq_len
    if search.memory is not None:
        return f"{text}; larger caps need more memory"
    if q_t >= context_len:
        return f"{text}; no cap is above the model's context"
    larger = search.under(min(2 * q_t, context_len), None)
    return f"{text}; with --max-seq-len {larger.limits.max_seq_len}: {_size_figures(larger)}"


def _size_figures(trial: CapTrial) -> str:
    each = trial.num_samples / max(trial.num_groups, 1)
    return f"{each:,.1f} samples each on average, tokens {trial.token_fill:.1%} full"


def _why_line(
    found: CapTrial, free: CapTrial, tried: Sequence[CapTrial], largest: int, *, given: bool
) -> str:
    """The rule of Q_v, and what smaller caps cost against `free`, which has none."""
    chosen = found.limits.max_vision
    if given and chosen >= free.limits.max_vision:
        return " (your max_vision): it never binds"
    price = found.extra_groups(free)
    if given:
        return f" (your max_vision): {_signed(price)} groups against no cap"
    if price > FREE:
        fastest = "predicted to be the fastest that is allowed"
        return f": {fastest}, {_signed(price)} groups against no vision cap"
    if chosen == largest:
        return ": the largest sample's, and it costs no groups"
    below = [c for c in _same(found, tried) if c.limits.max_vision < chosen]
    if any(c.extra_groups(free) <= FREE for c in below):
        return ": predicted to be the fastest of those that cost no groups"
    prices = [f"{c.limits.max_vision:,}: {_signed(c.extra_groups(free))}" for c in reversed(below)]
    listed = f" ({', '.join(prices[:2])})" if prices else ""
    return f": the smallest cap that was tried and costs no groups{listed}"


def _prediction_line(
    predictor: Predictor | None, found: CapTrial, tried: Sequence[CapTrial]
) -> str:
    """Predicted time with these caps, and its range with others on the same samples."""
    best = found.ms_per_sample
    if predictor is None or best is None:
        return ""
    same = [c.ms_per_sample for c in _same(found, tried) if c != found]
    others = [ms / best - 1 for ms in same if ms]
    text = f"predicted for {predictor}: {best:,.4g} GPU-ms per sample"
    if not others:
        return text
    return f"{text}, {_signed(min(others))} to {_signed(max(others))} with other vision caps"


def _compared_line(found: CapTrial, tried: Sequence[CapTrial]) -> str:
    """Groups, fill and predicted time of the chosen vision cap and of its nearest neighbours."""
    same, cap = _same(found, tried), found.limits.max_vision
    below = [c for c in same if c.limits.max_vision < cap][-1:]
    above = [c for c in same if c.limits.max_vision > cap][:1]
    return "; ".join(map(_figures, [found, *below, *above]))


def _targets_line(chosen: CapTrial, paper: CapTrial, grouping: str) -> str:
    """The filter's targets, and what they save against OmniBal's; without ISF they do nothing."""
    limits = chosen.limits
    if grouping != "isf":
        return f"filter: {grouping} has none; its targets are OmniBal's, for ISF alone"
    begin = f"filter: a group stays from {limits.min_seq_len:,} tokens"
    if limits.min_vision <= limits.max_vision:
        begin += f" or {limits.min_vision:,} {limits.unit}"
    if limits == paper.limits:
        return f"{begin} (OmniBal's targets; none that was tried saves groups)"
    slack = paper.limits.max_seq_len - paper.limits.min_seq_len
    saved = _signed(chosen.extra_groups(paper))
    return f"{begin}: {saved} groups against OmniBal's (Q_t - {slack}, Q_v)"


def _same(found: CapTrial, tried: Sequence[CapTrial]) -> list[CapTrial]:
    """Trials that differ from `found` in the vision cap alone, smallest first, and `found`."""
    tokens = found.limits.max_seq_len, found.limits.min_seq_len
    same = [c for c in tried if (c.limits.max_seq_len, c.limits.min_seq_len) == tokens]
    return [c for c in same if c.limits.min_vision == max(c.limits.max_vision, 1)]


def _figures(trial: CapTrial) -> str:
    groups = f"{trial.num_groups:,} groups of {trial.num_samples:,} samples"
    full = f"vision {trial.vision_fill:.1%} and tokens {trial.token_fill:.1%} full"
    text = f"Q_v {trial.limits.max_vision:,}: {groups}, {full}"
    if trial.ms_per_sample is None or trial.waiting is None:
        return text
    ms = f"{trial.ms_per_sample:,.1f} GPU-ms per sample predicted"
    return f"{text}, {ms}, {trial.waiting:.2%} of it waiting"


def _signed(share: float) -> str:
    """A share as a person reads it; adding zero turns -0.0 into +0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"
