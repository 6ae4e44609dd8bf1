"""Counts -> caps -> sorted groups, and the samples that no group can hold. Pure."""

from dataclasses import dataclass

import numpy as np

from balance.flops import FlopsModel
from balance.grouping.best_fit import group_best_fit
from balance.grouping.caps import GroupOptions, choose_limits, over_limits
from balance.grouping.isf import group_isf
from balance.order.block_shuffle import OrderConfig, choose_order
from balance.order.sort_groups import arrange_sources, sort_groups, source_shares
from balance.types import Counts, Groups, IntArray, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups of rows of the counts table, in stored order: sorted by vision load."""

    groups: Groups
    limits: Limits
    order: OrderConfig
    over: list[tuple[int, str, str]]
    """Rejected samples: (row of the counts table, reason, detail)."""
    limits_explained: list[str]
    """Lines on how the caps were chosen."""


def group_counts(
    counts: Counts,
    options: GroupOptions,
    *,
    vision_unit: str,
    context_len: int,
    flops: FlopsModel | None = None,
    sources: IntArray | None = None,
) -> Grouping:
    """Choose caps, reject what exceeds them, group the rest, sort; `sources` mix neighbours."""
    choice = choose_limits(
        counts, options, vision_unit=vision_unit, context_len=context_len, flops=flops
    )
    limits = choice.limits
    too_long, too_much_vision = over_limits(counts, limits)
    seq_len, vision = counts.seq_len, limits.vision_load(counts)
    long = f"tokens, cap {limits.max_seq_len}"
    large = f"{limits.unit}, cap {limits.max_vision}"
    over = [(int(i), "longer_than_max_seq_len", f"{seq_len[i]} {long}") for i in too_long]
    over += [(int(i), "more_than_max_vision", f"{vision[i]} {large}") for i in too_much_vision]
    fits = np.ones(len(counts), dtype=bool)
    fits[too_long] = fits[too_much_vision] = False
    rows = np.flatnonzero(fits)
    loads, seed = (vision[rows], seq_len[rows]), options.seed
    if options.grouping == "isf":
        grouped = group_isf(*loads, limits, seed=seed, iterations=options.isf_iterations)
    else:
        grouped = group_best_fit(*loads, limits, seed=seed)
    groups = Groups(rows[grouped.samples], grouped.offsets)
    order = choose_order(len(groups))
    positions = sort_groups(groups.sum(vision), groups.sum(seq_len), seed)
    if sources is not None:
        positions = arrange_sources(positions, source_shares(groups, sources), order.window_size)
    return Grouping(
        groups=groups.take(positions),
        limits=limits,
        order=order,
        over=over,
        limits_explained=choice.lines,
    )
