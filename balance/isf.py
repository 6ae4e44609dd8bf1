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

import numba
import numpy as np

from balance.records import Groups, IntArray, Limits

DEFAULT_ITERATIONS = 10
"""OmniBal, appendix G: stable after five iterations, ten in practice."""


def group_isf(
    vision: IntArray, tokens: IntArray, limits: Limits, *, seed: int, iterations: int = DEFAULT_ITERATIONS
) -> Groups:
    """Group samples under both caps (OmniBal, Algorithm 1).

    `vision` and `tokens` are the loads of the samples, shape (num_samples,), in the unit of `limits.max_vision` and in
    LLM tokens. Every sample ends in exactly one group. Raises ValueError for a sample that is over a cap by itself.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_isf(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 1], [2], [3]]
    """
    vision = np.ascontiguousarray(vision, dtype=np.int64)
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    _check(vision, tokens, limits, iterations)
    caps = np.array([limits.max_vision, limits.max_seq_len, limits.min_vision, limits.min_seq_len], dtype=np.int64)
    samples, offsets = _isf(vision, tokens, caps, np.uint64(seed), iterations)
    return Groups(samples, offsets)


def _check(vision: IntArray, tokens: IntArray, limits: Limits, iterations: int) -> None:
    if len(vision) != len(tokens):
        raise ValueError(f"{len(vision)} vision loads but {len(tokens)} token counts; give one of each per sample")
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; ISF needs at least 1")
    over = np.flatnonzero((vision > limits.max_vision) | (tokens > limits.max_seq_len))
    if len(over):
        first = over[0]
        raise ValueError(
            f"{len(over)} samples are by themselves over the caps of {limits.max_vision} {limits.unit} and"
            f" {limits.max_seq_len} tokens (first: sample {first} with {vision[first]} and {tokens[first]});"
            " reject them before grouping"
        )


@numba.njit(cache=True)
def _isf(vision, tokens, caps, seed, iterations):  # type: ignore[no-untyped-def]
    """All iterations; -> (samples, offsets) of the groups of the best pass to stop at."""
    remaining = np.arange(len(tokens))
    offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
    passed = np.empty(len(tokens), dtype=np.bool_)
    kept, kept_offsets = np.empty_like(remaining), np.zeros_like(offsets)
    best, best_offsets = np.empty_like(remaining), np.zeros_like(offsets)
    num_remaining, num_kept, kept_groups = len(tokens), 0, 0
    fewest = len(tokens) + 1
    for iteration in range(iterations):
        if num_remaining == 0:
            break
        _shuffle(remaining[:num_remaining], _mix(_mix(seed) + np.uint64(iteration)))
        num_groups = _fill(remaining[:num_remaining], vision, tokens, caps, offsets, passed)
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
    return best, best_offsets[: min(fewest, len(tokens)) + 1].copy()


@numba.njit(cache=True)
def _fill(order, vision, tokens, caps, offsets, passed):  # type: ignore[no-untyped-def]
    """One pass: cut `order` into groups; sets `offsets` and which groups pass the filter; -> number of groups."""
    max_vision, max_tokens, min_vision, min_tokens = caps[0], caps[1], caps[2], caps[3]
    num_groups = 0
    group_vision, group_tokens = np.int64(0), np.int64(0)
    for place in range(len(order)):
        sample_vision, sample_tokens = vision[order[place]], tokens[order[place]]
        full = group_vision + sample_vision > max_vision or group_tokens + sample_tokens > max_tokens
        if full and place > offsets[num_groups]:
            passed[num_groups] = group_vision >= min_vision or group_tokens >= min_tokens
            num_groups += 1
            offsets[num_groups] = place
            group_vision, group_tokens = np.int64(0), np.int64(0)
        group_vision += sample_vision
        group_tokens += sample_tokens
    passed[num_groups] = group_vision >= min_vision or group_tokens >= min_tokens
    offsets[num_groups + 1] = len(order)
    return num_groups + 1


@numba.njit(cache=True)
def _shuffle(values, state):  # type: ignore[no-untyped-def]
    """Fisher-Yates in place, with the random numbers of SplitMix64 (Steele, Lea, Flood 2014)."""
    for last in range(len(values) - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        # the top 53 bits as a fraction: exact in a float, on every machine
        place = np.int64(np.float64(_mix(state) >> np.uint64(11)) * 2.0**-53 * (last + 1))
        values[place], values[last] = values[last], values[place]


@numba.njit(cache=True)
def _mix(bits):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: every input bit changes every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
