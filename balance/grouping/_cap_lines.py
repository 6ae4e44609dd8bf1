"""The choice of caps in words, line by line, for reports (`balance.grouping.caps`). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from balance.flops import FlopsModel
from balance.grouping._cap_search import FREE
from balance.grouping._cap_trials import Candidate


def why_line(
    found: Candidate, free: Candidate, tried: Sequence[Candidate], largest: int, *, given: bool
) -> str:
    """The rule behind Q_v, and what the caps below it cost against `free`, which has none; all on
    the same samples.
    """
    chosen = found.limits.max_vision
    if given and chosen >= free.limits.max_vision:
        return " (your max_vision): it never binds"
    if given:
        return f" (your max_vision): {_signed(found.extra_groups(free))} groups against no cap"
    price = found.extra_groups(free)
    if price > 2 * FREE:
        return f": what the budget leaves, {_signed(price)} groups against no vision cap"
    if chosen == largest:
        return ": the largest sample's, and it costs no groups"
    below = [c for c in _same(found, tried) if c.limits.max_vision < chosen]
    prices = [f"{c.limits.max_vision:,}: {_signed(c.extra_groups(free))}" for c in reversed(below)]
    return f": the smallest cap that costs no groups ({', '.join(prices[:2])})"


def prediction_line(cost: FlopsModel | None, found: Candidate, tried: Sequence[Candidate]) -> str:
    """Predicted time with these caps, and its range with others that were tried on the same
    samples.
    """
    best = found.ms_per_sample
    if cost is None or best is None:
        return ""
    others = [
        c.ms_per_sample / best - 1 for c in _same(found, tried) if c != found and c.ms_per_sample
    ]
    text = f"predicted for {cost.name} ({cost.speed}): {best:,.4g} GPU-ms per sample"
    return (
        f"{text}, {_signed(min(others))} to {_signed(max(others))} with other vision caps"
        if others
        else text
    )


def compared_line(found: Candidate, tried: Sequence[Candidate]) -> str:
    """Groups, fill and predicted time of the chosen vision cap and of the nearest ones below and
    above.
    """
    same, cap = _same(found, tried), found.limits.max_vision
    below = [c for c in same if c.limits.max_vision < cap][-1:]
    above = [c for c in same if c.limits.max_vision > cap][:1]
    return "; ".join(_figures(c) for c in [found, *below, *above])


def targets_line(chosen: Candidate, paper: Candidate, grouping: str) -> str:
    """The filter's targets, and what they save against OmniBal's; that they do nothing but for
    ISF.
    """
    limits = chosen.limits
    if grouping != "isf":
        return f"filter: {grouping} has none; its targets are OmniBal's, for ISF alone"
    begin = f"filter: a group stays from {limits.min_seq_len:,} tokens"
    if limits.min_vision <= limits.max_vision:
        begin += f" or {limits.min_vision:,} {limits.unit}"
    if limits == paper.limits:
        return f"{begin} (OmniBal's targets; none that was tried saves groups)"
    slack = paper.limits.max_seq_len - paper.limits.min_seq_len
    return f"{begin}: {_signed(chosen.extra_groups(paper))} groups against OmniBal's (Q_t - {slack}, Q_v)"


def _same(found: Candidate, tried: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that differ from `found` in the vision cap alone, smallest first, and `found`."""
    q_t = found.limits.max_seq_len
    slack = q_t - found.limits.min_seq_len
    same = [c for c in tried if c.limits.max_seq_len == q_t and q_t - c.limits.min_seq_len == slack]
    return [c for c in same if c.limits.min_vision == max(c.limits.max_vision, 1)]


def _figures(candidate: Candidate) -> str:
    limits = candidate.limits
    text = (
        f"Q_v {limits.max_vision:,}: {candidate.num_groups:,} groups of {candidate.num_samples:,} samples, vision"
        f" {candidate.vision_fill:.1%} and tokens {candidate.token_fill:.1%} full"
    )
    if candidate.ms_per_sample is None or candidate.waiting is None:
        return text
    return f"{text}, {candidate.ms_per_sample:,.1f} GPU-ms per sample predicted, {candidate.waiting:.2%} of it waiting"


def _signed(share: float) -> str:
    """A share as a person reads it; adding zero turns -0.0 into +0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"
