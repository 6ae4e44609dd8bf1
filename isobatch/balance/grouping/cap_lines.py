"""Sentences on how caps were chosen, for whoever prints them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from isobatch.balance.grouping._cap_search import FREE, CapTrial
from isobatch.balance.grouping.caps import LimitChoice, PaddedChoice, VisionChoice

GROUPS_LINE = "groups: "
"""Beginning of the line that says how many samples groups hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapNames:
    """What the caller's users call the caps."""

    given_tokens: str = "your max_seq_len"
    """The rule of a Q_t that was given."""
    larger_tokens: str = "--max-seq-len {}"
    """How to ask for another one."""


def cap_lines(choice: LimitChoice, names: CapNames | None = None) -> list[str]:
    """The explanation of a choice; next to others' groups, fill and predicted time."""
    names = names or CapNames()
    rule = {
        "given": names.given_tokens,
        "memory": "your memory budget",
        "longest": "the longest sample",
        "filling": f"fills groups, {choice.multiple:.3g} x the longest sample",
        "context": "the model's context",
    }[choice.token_rule]
    limits, vision = choice.limits, choice.vision
    tokens = f"caps: {limits.max_seq_len:,} tokens ({rule})"
    groups = _groups_line(choice, names)
    padding = padding_line(limits.pad_each_to, choice.padding)
    if vision is None:
        return [line for line in (f"{tokens}, no images", padding, groups) if line]
    lines = [
        f"{tokens}, {limits.max_vision:,} {limits.unit}{_why_line(vision)}",
        padding,
        _prediction_line(vision),
        groups,
        _compared_line(choice.best, vision.confirmed),
        _targets_line(choice.best, vision) if vision.grouping == "isf" else "",
    ]
    return [line for line in lines if line]


def padding_line(pad_each_to: int, share: float) -> str:
    """How samples are padded, and the share of tokens that this adds; empty without padding."""
    if pad_each_to == 1:
        return ""
    return (
        f"padding: each sample counts as a multiple of {pad_each_to:,} tokens (your pad_each_to), "
        f"{share:.1%} of all tokens"
    )


def padded_lines(choice: PaddedChoice, names: CapNames) -> list[str]:
    """The same of caps for padded batches."""
    limits = choice.limits
    rule = f"{choice.multiple:.3g} x the longest sample"
    if choice.tokens_given:
        rule = names.given_tokens
    vision_rule = "your max_vision" if choice.vision_given else "the least that costs no batches"
    vision = f"{limits.max_vision} {limits.unit} ({vision_rule})"
    size = f"{choice.samples_per_batch:,.1f} samples each on average"
    return [
        f"caps: {limits.max_seq_len} tokens with padding ({rule}), "
        f"{vision if limits.max_vision else 'no images'}",
        f"padded batches: {size}, {choice.fill:.1%} full of samples",
    ]


def _groups_line(choice: LimitChoice, names: CapNames) -> str:
    """How many samples groups hold and how full they are, and under a Q_t of twice that."""
    text = f"{GROUPS_LINE}{_size_figures(choice.best)}"
    if choice.larger is not None:
        larger = names.larger_tokens.format(choice.larger.limits.max_seq_len)
        return f"{text}; with {larger}: {_size_figures(choice.larger)}"
    if choice.memory is not None:
        return f"{text}; larger caps need more memory"
    return f"{text}; no cap is above the model's context"


def _size_figures(trial: CapTrial) -> str:
    mean = trial.num_samples / max(trial.num_groups, 1)
    return f"{mean:,.1f} samples each on average, tokens {trial.token_fill:.1%} full"


def _why_line(vision: VisionChoice) -> str:
    """The rule of Q_v, and what smaller caps cost against none."""
    free = vision.free
    chosen = vision.part.limits.max_vision
    if vision.is_given and chosen >= free.limits.max_vision:
        return " (your max_vision): it never binds"
    price = vision.part.extra_groups(free)
    if vision.is_given:
        return f" (your max_vision): {_signed(price)} groups against no cap"
    if price > FREE:
        fastest = "predicted to be the fastest that is allowed"
        return f": {fastest}, {_signed(price)} groups against no vision cap"
    if chosen == vision.largest:
        return ": the largest sample's, and it costs no groups"
    below = [c for c in _same(vision.part, vision.trials) if c.limits.max_vision < chosen]
    if any(c.extra_groups(free) <= FREE for c in below):
        return ": predicted to be the fastest of those that cost no groups"
    prices = [f"{c.limits.max_vision:,}: {_signed(c.extra_groups(free))}" for c in reversed(below)]
    listed = f" ({', '.join(prices[:2])})" if prices else ""
    return f": the smallest cap that was tried and costs no groups{listed}"


def _prediction_line(vision: VisionChoice) -> str:
    """Predicted time with these caps, and its range with others on the same samples."""
    best = vision.part.ms_per_sample
    if vision.predictor is None or best is None:
        return ""
    same = [c.ms_per_sample for c in _same(vision.part, vision.trials) if c != vision.part]
    others = [ms / best - 1 for ms in same if ms]
    text = f"predicted for {vision.predictor}: {best:,.4g} GPU-ms per sample"
    ends = [_signed(of(others)) for of in (min, max)] if others else []
    if len(set(ends)) < 2:
        return f"{text}, {ends[0]} with other vision caps" if ends else text
    return f"{text}, {ends[0]} to {ends[1]} with other vision caps"


def _compared_line(best: CapTrial, tried: Sequence[CapTrial]) -> str:
    """Groups, fill and predicted time of the chosen vision cap and of its nearest neighbours."""
    same = _same(best, tried)
    cap = best.limits.max_vision
    below = [c for c in same if c.limits.max_vision < cap][-1:]
    above = [c for c in same if c.limits.max_vision > cap][:1]
    return "; ".join(map(_figures, [best, *below, *above]))


def _targets_line(best: CapTrial, vision: VisionChoice) -> str:
    """ISF's filter: its targets, and what they save against OmniBal's."""
    limits = vision.targets.limits
    begin = f"filter: a group stays from {limits.min_seq_len:,} tokens"
    if limits.min_vision <= limits.max_vision:
        begin += f" or {limits.min_vision:,} {limits.unit}"
    if limits == best.limits:
        return f"{begin} (OmniBal's targets; none that was tried saves groups)"
    slack = best.limits.max_seq_len - best.limits.min_seq_len
    saved = _signed(vision.targets.extra_groups(best))
    return f"{begin}: {saved} groups against OmniBal's (Q_t - {slack}, Q_v)"


def _same(trial: CapTrial, tried: Sequence[CapTrial]) -> list[CapTrial]:
    """Trials that differ from `trial` in the vision cap alone, smallest first, and `trial`."""
    tokens = trial.limits.max_seq_len, trial.limits.min_seq_len
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
