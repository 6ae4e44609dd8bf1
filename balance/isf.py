"""ISF, Iterative Sampling and Filtering: OmniBal, Algorithm 1, in numba.

Shuffle the samples, fill groups one after the other up to the caps, keep the groups that come near a cap, dissolve the
others, and repeat with what is left. Linear in the number of samples: 30,730 samples, 10 iterations in about 5 ms,
where plain Python needs half a second. Pure: the same counts and seed give the same groups on every machine.

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
    remaining = np.arange(len(tokens), dtype=np.int64)
    kept: list[Groups] = []
    num_kept = 0
    best: list[Groups] = []
    fewest = len(tokens) + 1
    for iteration in range(iterations):
        if len(remaining) == 0:
            break
        # a generator per iteration: the shuffle of a pass does not depend on how many draws came before it
        order = remaining[np.random.default_rng([seed, iteration]).permutation(len(remaining))]
        offsets, passed = _fill(order, vision, tokens, _caps(limits))
        if num_kept + len(passed) < fewest:
            fewest = num_kept + len(passed)
            best = [*kept, Groups(order, offsets)]
        everything = Groups(order, offsets)
        kept.append(everything.take(np.flatnonzero(passed)))
        num_kept += int(passed.sum())
        remaining = everything.take(np.flatnonzero(~passed)).samples
    return _join(best)


def _check(vision: IntArray, tokens: IntArray, limits: Limits, iterations: int) -> None:
    if len(vision) != len(tokens):
        raise ValueError(f"{len(vision)} vision loads but {len(tokens)} token counts; give one of each per sample")
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; ISF needs at least 1")
    over = np.flatnonzero((vision > limits.max_vision) | (tokens > limits.max_seq_len))
    if len(over):
        first = over[0]
        raise ValueError(
            f"{len(over)} samples are over the caps ({limits.max_vision} {limits.unit}, {limits.max_seq_len} tokens) alone"
            f" (first: sample {first} with {vision[first]} and {tokens[first]}); reject them before grouping"
        )


def _caps(limits: Limits) -> IntArray:
    return np.array([limits.max_vision, limits.max_seq_len, limits.min_vision, limits.min_seq_len], dtype=np.int64)


def _join(parts: list[Groups]) -> Groups:
    if not parts:
        return Groups(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    sizes = np.concatenate([part.sizes for part in parts])
    return Groups(np.concatenate([part.samples for part in parts]), np.concatenate([[0], np.cumsum(sizes)]))


@numba.njit(cache=True)
def _fill(order, vision, tokens, caps):  # type: ignore[no-untyped-def]
    """One pass: -> (offsets of the groups in `order`, shape (groups + 1,); which groups pass the filter)."""
    max_vision, max_tokens, min_vision, min_tokens = caps[0], caps[1], caps[2], caps[3]
    offsets = np.empty(len(order) + 1, dtype=np.int64)
    passed = np.empty(len(order), dtype=np.bool_)
    offsets[0] = 0
    num_groups = 0
    group_vision = np.int64(0)
    group_tokens = np.int64(0)
    for place in range(len(order)):
        sample = order[place]
        if place > offsets[num_groups] and (
            group_vision + vision[sample] > max_vision or group_tokens + tokens[sample] > max_tokens
        ):
            passed[num_groups] = group_vision >= min_vision or group_tokens >= min_tokens
            num_groups += 1
            offsets[num_groups] = place
            group_vision = np.int64(0)
            group_tokens = np.int64(0)
        group_vision += vision[sample]
        group_tokens += tokens[sample]
    if len(order) > 0:
        passed[num_groups] = group_vision >= min_vision or group_tokens >= min_tokens
        num_groups += 1
        offsets[num_groups] = len(order)
    return offsets[: num_groups + 1].copy(), passed[:num_groups].copy()
