"""Measures of balance of an order of groups, and of its randomness.

Pure functions of groups in order: step s, rank r runs group `s * dp + r`. OmniBal (ICML 2025),
equations 1 and 2, with two choices of its authors' code that its text does not print: the pad ratio
is a ratio of sums over the epoch, the dist ratio a mean over steps.

What a rank computes: LLM sequences of unequal length are padded to the longest (`padded_loads`)
unless they are packed; the vision encoder's patches are batch items of one size, so they are
concatenated and never padded (`Groups.sum`). Only this reading gives the known figures: AI2D +
ChartQA in random order have a ViT dist ratio of .204, but .009 if padded.

Only complete steps count: a last one without work for every rank says more about the dataset's size
than about the sampler. When there is none, the incomplete one counts, missing ranks idle (load 0).
"""

import numpy as np

from isobatch.common.types import FloatArray, Groups, IntArray, Limits


def longest(groups: Groups, lengths: IntArray) -> IntArray:
    """Longest sample of each group, int64, shape (num_groups,); 0 for an empty group.

    >>> longest(Groups(np.array([0, 1, 2]), np.array([0, 2, 2, 3])), np.array([5, 7, 4])).tolist()
    [7, 0, 4]
    """
    result = np.zeros(len(groups), np.int64)
    filled = groups.sizes > 0
    if filled.any():
        # empty groups own no samples, so the other starts are still consecutive ranges
        result[filled] = np.maximum.reduceat(lengths[groups.samples], groups.offsets[:-1][filled])
    return result


def padded_loads(groups: Groups, lengths: IntArray) -> IntArray:
    """Tokens of each group when every sample is padded to the group's longest, int64."""
    return longest(groups, lengths) * groups.sizes


def pad_ratio(groups: Groups, lengths: IntArray) -> float:
    """Share of an epoch's tokens that is padding (OmniBal eq. 1); 0.0 without any tokens.

    Numerators and denominators are summed over the epoch, so that a long micro-batch weighs more.

    >>> pad_ratio(Groups(np.array([0, 1, 2]), np.array([0, 2, 3])), np.array([5, 7, 4]))  # 2 / 18
    0.1111111111111111
    """
    padded = int(padded_loads(groups, lengths).sum())
    return (padded - int(lengths[groups.samples].sum())) / padded if padded else 0.0


def step_loads(loads: IntArray, dp: int) -> IntArray:
    """Loads per step and rank, shape (num_steps, dp); for the last step see the module's docstring.

    >>> step_loads(np.array([1, 2, 3, 4, 5]), 2).tolist(), step_loads(np.array([1]), 2).tolist()
    ([[1, 2], [3, 4]], [[1, 0]])
    """
    if dp < 1:
        raise ValueError(f"dp is {dp}; give at least one data-parallel rank")
    num_steps = len(loads) // dp
    if num_steps == 0 and len(loads):
        loads = np.pad(loads, (0, dp - len(loads)))
        num_steps = 1
    return np.asarray(loads[: num_steps * dp], dtype=np.int64).reshape(num_steps, dp)


def dist_ratio(loads: IntArray, dp: int) -> float:
    """Share of ranks' time spent waiting for the step's slowest (OmniBal eq. 2, mean over steps).

    `loads` are what each group costs after padding, in order. A step without any load (text only,
    for the vision encoder) is balanced: 0.

    >>> dist_ratio(np.array([4, 2, 0, 0]), dp=2)  # .25 and 0
    0.125
    """
    steps = step_loads(loads, dp)
    if not len(steps):
        return 0.0
    paid = steps.max(axis=1) * dp
    return float(np.mean((paid - steps.sum(axis=1)) / np.maximum(paid, 1)))


def fill(groups: Groups, seq_len: IntArray, max_seq_len: int) -> float:
    """Share of the groups' token capacity that is used: sum(tokens) / (num_groups * max_seq_len).

    >>> fill(Groups(np.array([0, 1, 2]), np.array([0, 2, 3])), np.array([5, 3, 4]), 8)
    0.75
    """
    return int(seq_len[groups.samples].sum()) / (len(groups) * max_seq_len) if len(groups) else 0.0


def lower_bounds(vision: IntArray, seq_len: IntArray, limits: Limits) -> dict[str, int]:
    """Least number of groups by LLM tokens alone and by vision alone: sum / cap, rounded up.

    Seldom reached where both caps bind: samples that fill one leave capacity of the other unused.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> lower_bounds(np.array([3, 3]), np.array([5, 6]), limits)
    {'tokens': 2, 'vision': 2}
    """
    caps = {"tokens": (seq_len, limits.max_seq_len), "vision": (vision, limits.max_vision)}
    return {name: -(-int(loads.sum()) // cap) if cap else 0 for name, (loads, cap) in caps.items()}


def autocorrelation(loads: IntArray, dp: int) -> float:
    """Correlation of a step's total load with the next step's: 0 if random, near 1 if sorted.

    0.0 for fewer than three steps or equal ones. A random order of n strays by about 1 / sqrt(n).

    >>> autocorrelation(np.array([9, 1, 9, 1, 9, 1]), dp=1) < -0.5
    True
    """
    return _lag_one(step_loads(loads, dp).sum(axis=1, keepdims=True).astype(np.float64))


def source_autocorrelation(groups: Groups, sources: IntArray, dp: int) -> float:
    """Correlation of sources' shares of a step with the next step's: near 1 if they take turns.

    `sources` is a per-sample source number from 0; each counts by how much its share varies. 0.0
    when there are fewer than three complete steps or nothing varies.
    """
    return _lag_one(_step_shares(groups, sources, dp)[: len(groups) // dp])


def source_entropy(groups: Groups, sources: IntArray, dp: int, *, seed: int = 0) -> float:
    """Entropy of a step's sources relative to the same groups in random order: 1 = as well mixed.

    `sources`: a source number from 0 per sample. The mean entropy of a step's samples by source is
    divided by that of a seeded random permutation. 1.0 where there is nothing to mix.
    """
    if len(groups) == 0:
        return 1.0
    shuffled = groups.take(np.random.default_rng(seed).permutation(len(groups)))
    reference = _mean_step_entropy(shuffled, sources, dp)
    return _mean_step_entropy(groups, sources, dp) / reference if reference > 0 else 1.0


def gradient_shares(
    groups: Groups, sources: IntArray, weights: FloatArray | IntArray, step_groups: int
) -> FloatArray:
    """Share of the gradient of each source when every step weighs the same, (num_sources,).

    `sources` and `weights` are per sample: a number from 0, and the sum of its labels' weights
    (`balance.loss_weights.sample_weights`). With one step as long as the epoch these are the shares
    of the weights. Steps without weight do not count; zeros if no step has any.

    >>> groups = Groups(np.array([0, 1, 2]), np.array([0, 1, 3]))
    >>> gradient_shares(groups, np.array([0, 1, 1]), np.array([1, 4, 5]), 1).tolist()
    [0.5, 0.5]
    >>> gradient_shares(groups, np.array([0, 1, 1]), np.array([1, 4, 5]), 2).tolist()
    [0.1, 0.9]
    """
    sums = _step_sums(groups, sources, np.asarray(weights, np.float64), step_groups)
    totals = sums.sum(axis=1, keepdims=True)
    counted = totals[:, 0] > 0
    if not counted.any():
        return np.zeros(sums.shape[1])
    return np.asarray((sums[counted] / totals[counted]).mean(axis=0), np.float64)


def meeting_again(first: IntArray, second: IntArray, step_groups: int) -> float:
    """Share of a group's step mates that share a step with it in the next epoch too.

    `first` and `second` are epochs' groups in stream order; only groups of both count. About
    (step_groups - 1) / groups in random orders, 1 for the same steps again; 0.0 without any pair.

    >>> meeting_again(np.array([0, 1, 2, 3]), np.array([1, 0, 3, 2]), 2)
    1.0
    """
    again, before, _, _ = _pair_counts(first, second, step_groups)
    return again / before if before else 0.0


def repeated_pairs(first: IntArray, second: IntArray, step_groups: int) -> float:
    """How often groups of one step share one in the next epoch too, relative to chance.

    As `meeting_again`, but 1 for random orders, (groups - 1) / (step_groups - 1) for the same steps
    again, and 1.0 without any pair.

    >>> repeated_pairs(np.array([0, 1, 2, 3]), np.array([1, 0, 3, 2]), 2)
    3.0
    """
    again, before, after, total = _pair_counts(first, second, step_groups)
    by_chance = before * after / max(1, total)
    return again / by_chance if by_chance else 1.0


def _pair_counts(first: IntArray, second: IntArray, step_groups: int) -> tuple[int, int, int, int]:
    """Pairs of groups in one step of both epochs, of the first, of the second, and of all."""
    later = np.full(max(first.max(initial=-1), second.max(initial=-1)) + 1, -1)
    later[second] = np.arange(len(second)) // step_groups
    steps, later = np.arange(len(first)) // step_groups, later[first]
    steps, later = steps[later >= 0], later[later >= 0]
    both = steps * (int(later.max(initial=0)) + 1) + later
    again, before, after = (num_pairs(numbers) for numbers in (both, steps, later))
    return again, before, after, len(steps) * (len(steps) - 1) // 2


def num_pairs(places: IntArray) -> int:
    """Pairs of entries that are equal."""
    sizes = np.unique(places, return_counts=True)[1]
    return int((sizes * (sizes - 1)).sum()) // 2


def _mean_step_entropy(groups: Groups, sources: IntArray, dp: int) -> float:
    """Mean over steps of the entropy, in nats, of a step's samples by source."""
    share = _step_shares(groups, sources, dp)
    return float(-(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1).mean())


def _step_shares(groups: Groups, sources: IntArray, dp: int) -> FloatArray:
    """Share of each step's samples by source, (num_steps, num_sources), an incomplete step too."""
    counts = _step_sums(groups, sources, np.ones(len(sources)), dp)
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), dtype=np.float64)


def _step_sums(
    groups: Groups, sources: IntArray, weights: FloatArray, step_groups: int
) -> FloatArray:
    """Weights of each step's samples by source, (num_steps, num_sources)."""
    shape = -(-len(groups) // step_groups), int(sources.max(initial=0)) + 1
    step_of_sample = np.repeat(np.arange(len(groups)) // step_groups, groups.sizes)
    cells = step_of_sample * shape[1] + sources[groups.samples]
    sums = np.bincount(cells, weights[groups.samples], minlength=shape[0] * shape[1])
    return np.asarray(sums.reshape(shape), np.float64)


def _lag_one(steps: FloatArray) -> float:
    """Autocorrelation at lag 1 of rows (num_steps, columns), columns weighted by their variance."""
    if len(steps) < 3:
        return 0.0
    centred = steps - steps.mean(axis=0)
    variance = float((centred * centred).sum())
    if variance <= 1e-12 * len(steps):
        return 0.0
    # one pair fewer than steps; dividing by all steps is the usual, slightly cautious estimate
    return float((centred[:-1] * centred[1:]).sum()) / variance


def epoch_ms(micro_batch_ms: FloatArray, dp: int) -> float:
    """Time of an epoch in order on `dp` ranks: every step takes as long as its slowest rank.

    >>> epoch_ms(np.array([3.0, 1.0, 2.0, 2.0, 1.0]), dp=2)
    6.0
    """
    steps = np.pad(micro_batch_ms, (0, -len(micro_batch_ms) % dp)).reshape(-1, dp)
    return float(steps.max(axis=1, initial=0.0).sum())
