"""Plans that `balance.grouping.best_fit` tries: what counts as a full group, and which samples go
first. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from balance.grouping._best_fit_kernel import Rules
from balance.grouping.resources import PackedLoads
from balance.types import IntArray

ACTIVE = 0.5
"""Plans weigh the resources of which the samples need at least so much, relative to the
scarcest.
"""
SCORE_BITS, FRACTION_BITS = 22, 20
"""Of the score of a full group; of the weights that turn loads into scores."""
BUCKET_BITS = 12
"""A table of 4,096 buckets stays in the first-level cache."""
FIRST_TOLERANCE = 1 << 10
"""Score that a complete group may lack, to begin with: one token of 4,096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A way to make groups."""

    weights: tuple[int, ...]
    """Score per unit of each resource, times 2 ** FRACTION_BITS."""
    rules: Rules

    def scores(self, packing: PackedLoads, samples: IntArray) -> NDArray[np.int32]:
        """Weighted sum of each sample's loads; a group that is full in all that counts has
        `rules.cap_score`.
        """
        total = np.zeros(len(samples), np.int64)
        for resource, weight in zip(packing.resources, self.weights, strict=True):
            if weight:
                total += resource.load[samples].astype(np.int64) * weight
        return (total >> FRACTION_BITS).astype(np.int32)


def all_plans(packing: PackedLoads) -> list[Plan]:
    """Plans that weigh one scarce resource or all of them alike, each with three ways to choose
    samples.
    """
    needs = [int(r.load.sum(dtype=np.int64)) / max(r.cap, 1) for r in packing.resources]
    active = [
        field
        for field, r in enumerate(packing.resources)
        if r.cap and needs[field] >= ACTIVE * max(needs)
    ]
    shares = [{field: 1.0} for field in reversed(active)]
    if len(active) > 1:
        shares.append(dict.fromkeys(active, 1 / len(active)))
    orders = ((False, False), (False, True), (True, True))
    return [_plan(packing, share, *order) for share, order in product(shares, orders)]


def _plan(packing: PackedLoads, shares: dict[int, float], seed_largest: bool, greedy: bool) -> Plan:
    full = 1 << SCORE_BITS + FRACTION_BITS
    caps = [resource.cap for resource in packing.resources]
    weights = tuple(
        int(shares.get(field, 0) * full) // max(cap, 1) for field, cap in enumerate(caps)
    )
    cap_score = (
        sum(weight * cap for weight, cap in zip(weights, caps, strict=True)) >> FRACTION_BITS
    )
    rules = Rules(
        cap=np.uint64(packing.cap),
        guard=np.uint64(packing.guard),
        cap_score=cap_score,
        bucket_shift=max(0, cap_score.bit_length() - BUCKET_BITS),
        seed_largest=seed_largest,
        greedy=greedy,
    )
    return Plan(weights=weights, rules=rules)
