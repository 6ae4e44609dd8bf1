"""ISF, Iterative Sampling and Filtering: OmniBal, Algorithm 1, in numba.

Shuffle the samples, fill groups one after the other up to the caps, keep the groups that come near
a cap, dissolve the others, and repeat with what is left. Linear: 30,730 samples, 10 iterations in
2 ms, where plain Python needs .3 s; 100 million, held as uint8 and uint16, take 1.9 GB in all.
Pure: the same counts and seed give the same groups on every machine.

Where the paper leaves a gap or its reference code loses samples, the rule here is:

- a group closes when the next sample would *exceed* a cap;
- the group still open at the end of a pass counts like any other;
- a sample over a cap is an error, so the caller rejects it first and nothing disappears;
- the pass with the fewest groups is kept, not the last: more iterations can make the result worse
  when one cap binds, because the samples left are those that fit nowhere.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from isobatch.balance.grouping.resources import Load, PackedLoads, Resource, resources_of
from isobatch.balance.kernels import inner, kernel
from isobatch.common.types import Groups, Limits, index_dtype

DEFAULT_ITERATIONS = 10
"""OmniBal, appendix G: stable after five iterations, ten in practice."""
CHUNK = 1 << 20
"""Samples that are packed at a time."""


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

    `vision` and `tokens` are the loads of the samples, shape (num_samples,), in the unit of
    `limits.max_vision` and in LLM tokens. Every sample ends in exactly one group. Raises ValueError
    for a sample that is over a cap by itself.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_isf(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 1], [2], [3]]
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; ISF needs at least 1")
    packing = PackedLoads.of(resources_of(vision, tokens, limits, also))
    samples = np.arange(len(tokens), dtype=index_dtype(len(tokens)))
    # the loads of all samples, one number each, as narrow as the caps allow
    dtype: type[np.unsignedinteger[Any]] = np.uint32 if packing.cap < 1 << 32 else np.uint64
    packed = np.empty(len(tokens), dtype)
    for start in range(0, len(tokens), CHUNK):
        packed[start : start + CHUNK] = packing.pack(slice(start, start + CHUNK))
    offsets = _isf(packed, samples, _filter_of(packing), np.uint64(seed), iterations)
    return Groups(samples, offsets.astype(np.int64))


class _Filter(NamedTuple):
    """Caps and targets, packed."""

    cap: np.uint64
    guard: np.uint64
    near: np.uint64
    """What a group may lack and still pass, and the guard bits."""
    reachable: np.uint64
    """Guard bits of the resources whose target a group can reach."""


def _filter_of(packing: PackedLoads) -> _Filter:
    slack = [-1 if r.target is None else min(r.cap, r.cap - r.target) for r in packing.resources]
    near = packing.guard | packing.packed([max(lack, 0) for lack in slack])
    reachable = sum(guard for guard, lack in zip(packing.guards, slack, strict=True) if lack >= 0)
    return _Filter(*map(np.uint64, (packing.cap, packing.guard, near, reachable)))


@kernel
def _isf(packed, samples, limits, seed, iterations):  # type: ignore[no-untyped-def]
    """Run all iterations; sorts `samples` into the groups of the best pass; -> their offsets.

    The groups that passed the filter come first, and only grow; what remains comes after them. So
    of the best pass only the remaining samples are copied.
    """
    # space for as many groups as samples; what is never written takes no memory
    kept_offsets = np.empty(len(samples) + 1, samples.dtype)
    offsets = np.empty_like(kept_offsets)
    passed = np.empty(len(samples), np.bool_)
    rest, rest_offsets = np.empty_like(samples), np.empty_like(kept_offsets)
    kept_offsets[0], offsets[0] = 0, 0
    num_kept, kept_groups, best_kept, best_kept_groups, best_rest_groups = 0, 0, 0, 0, 0
    fewest = len(samples) + 1
    for iteration in range(iterations):
        remaining = samples[num_kept:]
        if len(remaining) == 0:
            break
        # group what remains; remember it if that makes the fewest groups so far
        shuffle(remaining, mix(mix(seed) + np.uint64(iteration)))
        num_groups = _fill(remaining, packed, limits, offsets, passed)
        if kept_groups + num_groups < fewest:
            fewest = kept_groups + num_groups
            best_kept, best_kept_groups, best_rest_groups = num_kept, kept_groups, num_groups
            rest[: len(remaining)] = remaining
            rest_offsets[: num_groups + 1] = offsets[: num_groups + 1]
        # keep the groups that passed
        num_kept += _passed_first(remaining, offsets[: num_groups + 1], passed)
        for group in range(num_groups):
            if passed[group]:
                size = offsets[group + 1] - offsets[group]
                kept_offsets[kept_groups + 1] = kept_offsets[kept_groups] + size
                kept_groups += 1
    # back to the best pass
    samples[best_kept:] = rest[: len(samples) - best_kept]
    for group in range(1, best_rest_groups + 1):
        kept_offsets[best_kept_groups + group] = best_kept + rest_offsets[group]
    return kept_offsets[: best_kept_groups + best_rest_groups + 1]


@inner
def _passed_first(remaining, offsets, passed):  # type: ignore[no-untyped-def]
    """Put the members of groups that passed first, both parts in their order; -> how many."""
    num_passed = 0
    for group in range(len(offsets) - 1):
        if passed[group]:
            num_passed += offsets[group + 1] - offsets[group]
    front = np.empty(num_passed, remaining.dtype)
    num_left = num_passed
    write = len(remaining)
    for group in range(len(offsets) - 2, -1, -1):
        for place in range(offsets[group + 1] - 1, offsets[group] - 1, -1):
            if passed[group]:
                num_left -= 1
                front[num_left] = remaining[place]
            else:
                write -= 1  # never before a member that is still to be read
                remaining[write] = remaining[place]
    remaining[:num_passed] = front
    return num_passed


@inner
def _fill(order, packed, limits, offsets, passed):  # type: ignore[no-untyped-def]
    """One pass: cut `order` into groups; sets `offsets` and `passed`; -> number of groups."""
    num_groups = 0
    free = limits.cap
    for place in range(len(order)):
        rest = free - packed[order[place]]
        if rest & limits.guard != limits.guard:
            passed[num_groups] = (limits.near - (free ^ limits.guard)) & limits.reachable != 0
            num_groups += 1
            offsets[num_groups] = place
            rest = limits.cap - packed[order[place]]
        free = rest
    passed[num_groups] = (limits.near - (free ^ limits.guard)) & limits.reachable != 0
    offsets[num_groups + 1] = len(order)
    return num_groups + 1


@inner
def shuffle(values, state):  # type: ignore[no-untyped-def]
    """Fisher-Yates in place, with the random numbers of SplitMix64 (Steele, Lea, Flood 2014)."""
    for last in range(len(values) - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        # the top 53 bits as a fraction: exact in a float, on every machine
        place = np.int64(np.float64(mix(state) >> np.uint64(11)) * 2.0**-53 * (last + 1))
        values[place], values[last] = values[last], values[place]


@inner
def mix(bits):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: every input bit changes every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
