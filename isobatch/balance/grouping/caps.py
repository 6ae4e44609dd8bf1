"""Choice of a group's caps, by search or by OmniBal's rule, and what decided.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

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
from isobatch.common.types import Counts, Groups, IntArray, Limits, require_multiple

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
    """Name of the grouping: `fit` (fewest groups) or `isf` (OmniBal, Algorithm 1)."""
    isf_iterations: int = DEFAULT_ITERATIONS
    """ISF iterations at most; `fit` has none."""
    pad_each_to: int = 1
    """Multiple of LLM tokens that each sample counts as, since the trainer pads it; 1: none."""

    def __post_init__(self) -> None:
        if self.grouping not in GROUPINGS:
            raise ConfigError(f"grouping is {self.grouping!r}: use one of {', '.join(GROUPINGS)}")
        require_multiple(self.pad_each_to, self.max_seq_len, "max_seq_len")


TokenRule = Literal["given", "memory", "longest", "filling", "context"]
"""What Q_t is: the given cap, what a memory budget leaves, the longest sample, the least multiple
of it that fills groups, the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChoice:
    """The chosen caps and what decided for them; `cap_lines` makes sentences of it."""

    limits: Limits
    token_rule: TokenRule
    multiple: float
    """Q_t over the longest sample that fits."""
    best: CapTrial
    """The trial of the chosen caps on all samples, with OmniBal's targets."""
    larger: CapTrial | None
    """The trial of twice the Q_t; None where the context or a memory budget forbids it."""
    memory: ActivationBudget | None
    """The budget of the options."""
    padding: float
    """Share of padding in all samples' tokens, by the `pad_each_to` of the limits."""
    vision: "VisionChoice | None" = None
    """Choice of the vision cap; None where neither images nor a cap of them are there."""

    @property
    def trials(self) -> tuple[CapTrial, ...]:
        """Trials on a drawn part, or all of a small set, smallest caps first."""
        return () if self.vision is None else self.vision.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedChoice:
    """Caps of padded batches (`balance.grouping.padded`), and what decided for them."""

    limits: Limits
    tokens_given: bool
    vision_given: bool
    multiple: float
    """Q_t over the longest sample."""
    samples_per_batch: float
    fill: float
    """Share of the batches' capacity of tokens that samples use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChoice:
    """What decided for a vision cap."""

    is_given: bool
    largest: int
    """The largest sample."""
    part: CapTrial
    """The trial of the chosen caps on the drawn part."""
    free: CapTrial
    """The one without a vision cap."""
    targets: CapTrial
    """The trial of the chosen targets on all samples."""
    trials: tuple[CapTrial, ...]
    """Trials on the drawn part, smallest caps first."""
    confirmed: tuple[CapTrial, ...]
    """Trials on all samples."""
    grouping: str
    predictor: str | None
    """The model and GPU that times are predicted for."""


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
    admit, all with their padding (`pad_each_to`). `predictor` predicts times. Depends on the
    arguments alone. Raises ValueError when there is no sample, ConfigError when the budget cannot
    hold the longest or the largest one.
    """
    max_vision = options.max_vision
    memory = options.memory
    unpadded, counts = counts, counts.padded(options.pad_each_to)
    padding = 1 - float(unpadded.seq_len.sum()) / max(1, int(counts.seq_len.sum()))
    omnibal = partial(
        choose_limits_omnibal,
        counts,
        vision_unit=vision_unit,
        context_len=context_len,
        max_vision=max_vision,
    )
    paper = omnibal(max_seq_len=options.max_seq_len)
    search = _make_search(counts, options, paper, context_len, predictor)
    if options.max_seq_len is None and memory is None:
        search = replace(search, most_tokens=_filling(search, context_len, max_vision))
        paper = omnibal(max_seq_len=search.most_tokens)
    splits = search.splits(max_vision)
    rule = _token_rule(search, options, paper, context_len)
    if memory is not None and splits[0].max_seq_len < search.most_tokens:
        rule = "memory"
    multiple = paper.max_seq_len / search.longest
    trials, vision = search.trials, None
    if search.largest == 0 and not max_vision:
        best = targets = trials.at(splits[0] if memory else paper, on_all=True)
    else:
        best = search.best(splits, max_vision)
        # what the cap costs; before the trials are listed
        free = search.under(best.limits.max_seq_len, None)
        targets = best_targets(trials, best) if options.grouping == "isf" else best
        on_part = trials.results(on_all=False)
        vision = VisionChoice(
            is_given=max_vision is not None,
            largest=search.largest,
            part=trials.at(best.limits),
            free=free,
            targets=targets,
            trials=on_part,
            confirmed=trials.results(on_all=True),
            grouping=options.grouping,
            predictor=None if predictor is None else str(predictor),
        )
    return LimitChoice(
        limits=replace(targets.limits, pad_each_to=options.pad_each_to),
        token_rule=rule,
        multiple=multiple,
        best=best,
        larger=_larger(search, best.limits.max_seq_len, context_len),
        memory=memory,
        padding=padding,
        vision=vision,
    )


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
    too_long = limits.llm_load(counts) > limits.max_seq_len
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
    sizes = [*(shortest * factor for factor in MULTIPLES), *(mean * factor for factor in MEANS)]
    trials: list[CapTrial] = []
    for q_t in sorted({int(size) for size in sizes if shortest <= size <= context_len}):
        trial = search.under(q_t, max_vision)
        if trials and trial.groups_per_sample * len(search.tokens) < LEAST_GROUPS:
            break
        trials.append(trial)
        if trial.token_fill >= FULL and trial.groups_per_sample * SEVERAL <= 1:
            return q_t
    enough = min(max(trial.token_fill for trial in trials) - FREE, FULL)
    return next(t.limits.max_seq_len for t in trials if t.token_fill >= enough)


def _token_rule(
    search: CapSearch, options: GroupOptions, paper: Limits, context_len: int
) -> TokenRule:
    """The rule of Q_t, but for a memory budget that is less."""
    if paper.max_seq_len == options.max_seq_len:
        return "given"
    if options.max_seq_len is None and options.memory is None and paper.max_seq_len < context_len:
        return "longest" if paper.max_seq_len == search.longest else "filling"
    return "context"


def _larger(search: CapSearch, q_t: int, context_len: int) -> CapTrial | None:
    """The trial of twice that Q_t, at most the context."""
    if search.memory is not None or q_t >= context_len:
        return None
    return search.under(min(2 * q_t, context_len), None)
