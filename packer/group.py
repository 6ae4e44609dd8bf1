"""Counts -> caps -> groups in stream-path order, and the samples that no group can hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balance.isf import group_isf
from balance.limits import choose_limits, over_limits
from balance.order import OrderConfig, choose_order, sort_along_path
from balance.records import Counts, Groups, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How samples become groups."""

    seed: int = 0
    max_seq_len: int | None = None
    """Q_t; None: from the data."""
    max_vision: int | None = None
    """Q_v in the model's vision unit; None: from the data."""
    iterations: int = 10
    """ISF iterations at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups in path order, over rows of the counts table."""

    groups: Groups
    limits: Limits
    order: OrderConfig
    over: list[tuple[int, str, str]]
    """Rejected samples: (row of the counts table, reason, detail)."""


def group_counts(counts: Counts, options: GroupOptions, *, vision_unit: str, context_len: int) -> Grouping:
    """Choose caps (OmniBal 5.2), reject what exceeds them, group the rest (ISF) and sort the groups along the path."""
    limits = choose_limits(
        counts,
        vision_unit=vision_unit,
        context_len=context_len,
        max_seq_len=options.max_seq_len,
        max_vision=options.max_vision,
    )
    too_long, too_much_vision = over_limits(counts, limits)
    seq_len, vision = counts.seq_len, limits.vision_load(counts)
    over = [
        *((int(i), "longer_than_max_seq_len", f"{seq_len[i]} tokens, cap {limits.max_seq_len}") for i in too_long),
        *(
            (int(i), "more_than_max_vision", f"{vision[i]} {limits.unit}, cap {limits.max_vision}")
            for i in too_much_vision
        ),
    ]
    fits = np.ones(len(counts), dtype=bool)
    fits[too_long] = fits[too_much_vision] = False
    rows = np.flatnonzero(fits)
    grouped = group_isf(vision[rows], seq_len[rows], limits, seed=options.seed, iterations=options.iterations)
    groups = Groups(rows[grouped.samples], grouped.offsets)
    path = sort_along_path(groups.sum(vision), groups.sum(seq_len), options.seed)
    return Grouping(groups=groups.take(path), limits=limits, order=choose_order(len(groups)), over=over)
