"""ISF, Iterative Sampling and Filtering: OmniBal, Algorithm 1, in numba.

Shuffle the samples, fill groups one after the other up to the caps, keep the groups that come near a cap, dissolve the
others, and repeat with what is left. Linear in the number of samples: 30,730 samples, 10 iterations in 2 ms,
where plain Python needs 0.3 s. Pure: the same counts and seed give the same groups on every machine.

Where the paper leaves a gap or its reference code loses samples, the rule here is:
a group closes when the next sample would *exceed* a cap; the group still open at the end of a pass counts like any
other; a sample over a cap is an error, so the caller rejects it first and nothing disappears; and the pass that ends
the search is not the last one but the one that gives the fewest groups, because more iterations can make the result
worse when one cap binds (what is left then consists of the samples that fit nowhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from balance.grouping import Load, Packing, Resource, resources_of
from balance.records import Groups, Limits

DEFAULT_ITERATIONS = 10
"""OmniBal, appendix G: stable after five iterations, ten in practice."""


def group_isf(
    vision: Load,
    tokens: Load,
    limits: Limits,
    *,
    seed: int,
    iterations: int = DEFAULT_ITERATIONS,
    also: Sequence[Resource] = (),
) -> Groups:
    """Group samples under both caps, and those of `also` (OmniBal, Algorithm 1).

    `vision` and `tokens` are the loads of the samples, shape (num_samples,), in the unit of `limits.max_vision` and in
    LLM tokens. Every sample ends in exactly one group. Raises ValueError for a sample that is over a cap by itself.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_isf(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 1], [2], [3]]
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; ISF needs at least 1")
    packing = Packing.of(resources_of(vision, tokens, limits, also))
    samples, offsets = _isf(packing.pack(), _filter_of(packing), np.uint64(seed), iterations)
    return Groups(samples, offsets)


class _Filter(NamedTuple):
    """Caps and targets, packed."""

    cap: np.uint64
    guard: np.uint64
    near: np.uint64
    """Room that a group may have left to pass, and the guard bits."""
    reachable: np.uint64
    """Guard bits of the resources whose target a group can reach."""


def _filter_of(packing: Packing) -> _Filter:
    room = [-1 if r.target is None else min(r.cap, r.cap - r.target) for r in packing.resources]
    near = packing.guard | packing.packed([max(left, 0) for left in room])
    reachable = sum(guard for guard, left in zip(packing.guards, room, strict=True) if left >= 0)
    return _Filter(np.uint64(packing.cap), np.uint64(packing.guard), np.uint64(near), np.uint64(reachable))


@numba.njit(cache=True)
def _isf(packed, limits, seed, iterations):  # type: ignore[no-untyped-def]
    """All iterations; -> (samples, offsets) of the groups of the best pass to stop at."""
    remaining = np.arange(len(packed))
    offsets = np.zeros(len(packed) + 1, dtype=np.int64)
    passed = np.empty(len(packed), dtype=np.bool_)
    kept, kept_offsets = np.empty_like(remaining), np.zeros_like(offsets)
    best, best_offsets = np.empty_like(remaining), np.zeros_like(offsets)
    num_remaining, num_kept, kept_groups = len(packed), 0, 0
    fewest = len(packed) + 1
    for iteration in range(iterations):
        if num_remaining == 0:
            break
        shuffle(remaining[:num_remaining], mix(mix(seed) + np.uint64(iteration)))
        num_groups = _fill(remaining[:num_remaining], packed, limits, offsets, passed)
        if kept_groups + num_groups < fewest:
            fewest = kept_groups + num_groups
            best[:num_kept], best[num_kept:] = kept[:num_kept], remaining[:num_remaining]
            best_offsets[: kept_groups + 1] = kept_offsets[: kept_groups + 1]
            best_offsets[kept_groups + 1 : fewest + 1] = offsets[1 : num_groups + 1] + num_kept
        num_remaining = 0
        for group in range(num_groups):
            members = remaining[offsets[group] : offsets[group + 1]]
            if passed[group]:
                for sample in members:
                    kept[num_kept] = sample
                    num_kept += 1
                kept_groups += 1
                kept_offsets[kept_groups] = num_kept
            else:
                for sample in members:  # moves to the front, never past a member that is still to be read
                    remaining[num_remaining] = sample
                    num_remaining += 1
    return best, best_offsets[: min(fewest, len(packed)) + 1].copy()


@numba.njit(cache=True)
def _fill(order, packed, limits, offsets, passed):  # type: ignore[no-untyped-def]
    """One pass: cut `order` into groups; sets `offsets` and which groups pass the filter; -> number of groups."""
    num_groups = 0
    room = limits.cap
    for place in range(len(order)):
        rest = room - packed[order[place]]
        if rest & limits.guard != limits.guard:
            passed[num_groups] = (limits.near - (room ^ limits.guard)) & limits.reachable != 0
            num_groups += 1
            offsets[num_groups] = place
            rest = limits.cap - packed[order[place]]
        room = rest
    passed[num_groups] = (limits.near - (room ^ limits.guard)) & limits.reachable != 0
    offsets[num_groups + 1] = len(order)
    return num_groups + 1


@numba.njit(cache=True)
def shuffle(values, state):  # type: ignore[no-untyped-def]
    """Fisher-Yates in place, with the random numbers of SplitMix64 (Steele, Lea, Flood 2014)."""
    for last in range(len(values) - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        # the top 53 bits as a fraction: exact in a float, on every machine
        place = np.int64(np.float64(mix(state) >> np.uint64(11)) * 2.0**-53 * (last + 1))
        values[place], values[last] = values[last], values[place]


@numba.njit(cache=True)
def mix(bits):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: every input bit changes every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
