"""The samplers that trainers use today, with which the report compares ours.

A fixed number of samples per micro-batch: four rows of OmniBal's Table 3. No paper defines them, so
each is a sampler that is really in use:

- `random`: a permutation, cut (Megatron's random sampler);
- `length_group`: a permutation, cut into windows of 50 micro-batches, each sorted by length,
  longest first (transformers' `group_by_length`): little padding, a step's ranks are similar;
- `device_group`: a permutation, cut into steps, each assigned by descending length, always to the
  lightest rank that is not full (LLaVA's length-grouped sampler): even ranks, much padding;
- `sorted`: the epoch sorted, micro-batches shuffled (OmniBal's first): no padding, uneven ranks.

All return int64 sample indices of shape (steps, dp, batch_size), -1 where there is no sample.
Seeded. Every sample comes at most once; those that do not fill the last step (fewer than dp *
batch_size, drawn at random) are left out, as trainers' `drop_last` does. When there is not even one
step of samples, all are kept and -1 fills the step.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from isobatch.common.types import Groups, IntArray

BATCH_SIZE = 4
"""Samples per micro-batch in OmniBal's Table 3."""

LENGTH_WINDOW = 50
"""Micro-batches per sorted window of `length_group`: the default of transformers' sampler."""

Sampler = Callable[[IntArray, int, int, int], IntArray]
"""(lengths, dp, batch_size, seed) -> batches; the signature of every sampler below."""


def random_batches(lengths: IntArray, dp: int, batch_size: int, seed: int) -> IntArray:
    """Micro-batches of a random permutation; of `lengths` only the number of samples matters.

    >>> batches = random_batches(np.array([5, 9, 7, 3, 6, 8, 2]), dp=3, batch_size=2, seed=0)
    >>> batches.shape, len(set(batches.ravel().tolist()))  # one of the seven does not fill a step
    ((1, 3, 2), 6)
    """
    return _whole_steps(lengths, dp, batch_size, seed).reshape(-1, dp, batch_size)


def length_grouped_batches(lengths: IntArray, dp: int, batch_size: int, seed: int) -> IntArray:
    """Micro-batches of like lengths, within random windows of `LENGTH_WINDOW` micro-batches."""
    drawn = _whole_steps(lengths, dp, batch_size, seed)
    window = np.arange(len(drawn)) // (LENGTH_WINDOW * batch_size)
    order = np.lexsort((-_length_of(drawn, lengths), window))
    return drawn[order].reshape(-1, dp, batch_size)


def device_grouped_batches(lengths: IntArray, dp: int, batch_size: int, seed: int) -> IntArray:
    """Steps of random samples, assigned to ranks for even sums; O(samples * dp), vectorised."""
    steps = _whole_steps(lengths, dp, batch_size, seed).reshape(-1, dp * batch_size)
    longest_first = np.argsort(-_length_of(steps, lengths), axis=1, kind="stable")
    steps = np.take_along_axis(steps, longest_first, axis=1)
    batches = np.full((len(steps), dp, batch_size), -1, np.int64)
    load, taken = np.zeros((2, len(steps), dp), np.int64)
    step = np.arange(len(steps))
    full = np.iinfo(np.int64).max
    for sample in steps.T:
        rank = np.where(taken < batch_size, load, full).argmin(axis=1)  # the lowest rank wins a tie
        batches[step, rank, taken[step, rank]] = sample
        load[step, rank] += _length_of(sample, lengths)
        taken[step, rank] += 1
    return batches


def sorted_batches(lengths: IntArray, dp: int, batch_size: int, seed: int) -> IntArray:
    """Micro-batches of neighbours in the whole epoch sorted by length, in random order."""
    drawn = _whole_steps(lengths, dp, batch_size, seed)
    longest_first = np.argsort(-_length_of(drawn, lengths), kind="stable")
    by_length = drawn[longest_first].reshape(-1, batch_size)
    order = np.random.default_rng([seed, 1]).permutation(len(by_length))
    return by_length[order].reshape(-1, dp, batch_size)


BASELINES: dict[str, Sampler] = {
    "random": random_batches,
    "length_group": length_grouped_batches,
    "device_group": device_grouped_batches,
    "sorted": sorted_batches,
}


def packed_batches(lengths: IntArray, cap: int, seed: int) -> Groups:
    """Groups as trainers pack: a permutation, cut wherever the next sample would exceed `cap`.

    By length alone, so that vision is as uneven as it comes. A sample above the cap is alone.
    """
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int64)
    return Groups(order, pack_in_order(lengths[order], cap).offsets)


def pack_in_order(lengths: IntArray, cap: int) -> Groups:
    """Groups filled in the order of the samples. A sample above the cap is alone.

    >>> pack_in_order(np.array([3, 2, 4, 9, 1]), 6).offsets.tolist()
    [0, 2, 3, 4, 5]
    """
    ends = np.cumsum(lengths)
    offsets = [0]
    while offsets[-1] < len(lengths):
        start = offsets[-1]
        before = int(ends[start - 1]) if start else 0
        offsets.append(max(start + 1, int(np.searchsorted(ends, before + cap, side="right"))))
    return Groups(np.arange(len(lengths)), np.array(offsets, np.int64))


def best_fit_batches(lengths: IntArray, cap: int, seed: int, block: int = 1_000) -> Groups:
    """Groups as trainers pack that look for room: best-fit decreasing in blocks of a permutation.

    By length alone. The groups are shuffled. A sample above the cap is alone.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths)).astype(np.int64)
    groups: list[list[int]] = []
    for first in range(0, len(order), block):
        rows = order[first : first + block]
        free: list[tuple[int, int]] = []
        for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
            length = int(lengths[row])
            place = bisect_left(free, (length, -1))
            if place == len(free):
                insort(free, (cap - length, len(groups)))
                groups.append([row])
            else:
                room, group = free.pop(place)
                insort(free, (room - length, group))
                groups[group].append(row)
    turns = rng.permutation(len(groups)).tolist()
    sizes = [len(groups[group]) for group in turns]
    samples = [row for group in turns for row in groups[group]]
    return Groups(np.array(samples, np.int64), np.cumsum([0, *sizes], dtype=np.int64))


def as_groups(batches: IntArray) -> Groups:
    """Batches of shape (steps, dp, batch_size) as groups: step s, rank r is group s * dp + r.

    >>> groups = as_groups(np.array([[[3, 1], [2, -1]]]))
    >>> groups.samples.tolist(), groups.offsets.tolist()
    ([3, 1, 2], [0, 2, 3])
    """
    present = batches >= 0
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=2).ravel())])
    return Groups(batches[present].astype(np.int64), offsets.astype(np.int64))


def _whole_steps(lengths: IntArray, dp: int, batch_size: int, seed: int) -> IntArray:
    """A random permutation cut to whole steps; fewer samples than a step are padded with -1."""
    if dp < 1 or batch_size < 1:
        raise ValueError(f"dp is {dp} and batch_size {batch_size}; give at least 1 for both")
    num_samples = len(lengths)
    per_step = dp * batch_size
    permutation = np.random.default_rng(seed).permutation(num_samples).astype(np.int64)
    if 0 < num_samples < per_step:
        return np.pad(permutation, (0, per_step - num_samples), constant_values=-1)
    return permutation[: num_samples // per_step * per_step]


def _length_of(samples: IntArray, lengths: IntArray) -> IntArray:
    """Lengths of samples, 0 where there is none, so that -1 sorts last and weighs nothing."""
    if not len(lengths):
        return np.zeros_like(samples)
    return np.where(samples >= 0, lengths[samples], 0)
