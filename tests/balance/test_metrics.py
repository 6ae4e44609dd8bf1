"""The metrics against plain-Python readings of OmniBal's equations 1 and 2, one micro-batch and one
step at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.metrics import (
    autocorrelation,
    dist_ratio,
    fill,
    gradient_shares,
    pad_ratio,
    padded_loads,
    repeated_pairs,
    source_autocorrelation,
    source_entropy,
)
from isobatch.common.types import Groups, IntArray

micro_batches_st = st.lists(st.lists(st.integers(0, 4_096), max_size=5), max_size=40)


def flatten(micro_batches: list[list[int]]) -> tuple[Groups, IntArray]:
    """Groups of samples numbered backwards (so that sample order and group order differ), and the
    samples' lengths.
    """
    flat = [length for batch in micro_batches for length in batch]
    samples = np.arange(len(flat))[::-1].astype(np.int64)
    offsets = np.cumsum([0] + [len(batch) for batch in micro_batches]).astype(np.int64)
    return Groups(samples, offsets), np.array(flat[::-1], np.int64)


def eq1_over_epoch(micro_batches: list[list[int]]) -> float:
    """Eq. 1's numerator and denominator of each micro-batch, both summed over the epoch, then
    divided.
    """
    padding = sum(max(batch) - length for batch in micro_batches for length in batch)
    padded = sum(max(batch) * len(batch) for batch in micro_batches if batch)
    return float(Fraction(padding, padded)) if padded else 0.0


def eq2_mean(steps: list[list[int]]) -> float:
    """Eq. 2 of each step, T_max = 0 read as balanced, then the mean."""
    ratios = [
        Fraction(sum(max(step) - load for load in step), max(step) * len(step))
        if max(step)
        else Fraction(0)
        for step in steps
    ]
    return float(sum(ratios) / len(ratios)) if ratios else 0.0


@settings(deadline=None)
@given(micro_batches_st)
def test_pad_ratio_is_equation_1_as_a_ratio_of_sums(micro_batches: list[list[int]]) -> None:
    groups, lengths = flatten(micro_batches)
    assert pad_ratio(groups, lengths) == pytest.approx(eq1_over_epoch(micro_batches), abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20_000), max_size=60), st.integers(1, 9))
def test_dist_ratio_is_the_mean_of_equation_2_over_complete_steps(
    loads: list[int], dp: int
) -> None:
    steps = [loads[start : start + dp] for start in range(0, len(loads) - dp + 1, dp)]
    if loads and not steps:  # less than one step: the missing ranks are idle
        steps = [loads + [0] * (dp - len(loads))]
    assert dist_ratio(np.array(loads, np.int64), dp) == pytest.approx(eq2_mean(steps), abs=1e-12)


@settings(deadline=None)
@given(micro_batches_st)
def test_padded_load_is_samples_times_the_longest(micro_batches: list[list[int]]) -> None:
    groups, lengths = flatten(micro_batches)
    assert padded_loads(groups, lengths).tolist() == [
        len(batch) * max(batch, default=0) for batch in micro_batches
    ]


def test_a_step_without_any_load_counts_as_balanced() -> None:
    assert dist_ratio(np.zeros(16, np.int64), 8) == 0.0
    assert dist_ratio(np.array([0, 0, 4, 0]), 2) == 0.25


def test_an_incomplete_last_step_does_not_change_the_ratio() -> None:
    loads = np.array([4, 2, 3, 3])
    assert dist_ratio(np.append(loads, 1), 2) == dist_ratio(loads, 2)


def test_fill_counts_the_room_of_every_group() -> None:
    groups, lengths = flatten([[6, 2], [1], []])
    assert fill(groups, lengths, 8) == pytest.approx(9 / 24)


def test_a_stream_without_groups_has_ratios_of_zero() -> None:
    groups, lengths = flatten([])
    assert (pad_ratio(groups, lengths), dist_ratio(lengths, 8), fill(groups, lengths, 8)) == (
        0.0,
        0.0,
        0.0,
    )


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="dp is 0"):
        dist_ratio(np.array([1]), 0)


def test_autocorrelation_tells_a_sorted_stream_from_a_shuffled_one() -> None:
    loads = np.sort(np.random.default_rng(0).integers(0, 4_096, 8_000))
    assert autocorrelation(loads, 8) > 0.99
    assert abs(autocorrelation(np.random.default_rng(1).permutation(loads), 8)) < 0.1
    assert autocorrelation(np.full(80, 7), 8) == 0.0


def test_source_autocorrelation_tells_steps_that_share_sources_with_the_next() -> None:
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 3, 4_800)
    groups = Groups(np.arange(4_800), np.arange(0, 4_801, 2))
    assert abs(source_autocorrelation(groups, sources, 8)) < 3 / math.sqrt(300)
    in_turn = groups.take(np.argsort(sources[::2], kind="stable"))
    assert source_autocorrelation(in_turn, sources, 8) > 0.8
    assert source_autocorrelation(groups, np.zeros_like(sources), 8) == 0.0
    assert source_autocorrelation(groups.take(np.arange(16)), sources, 8) == 0.0, (
        "two steps tell nothing"
    )


def test_source_autocorrelation_of_two_sources_is_that_of_ones_share() -> None:
    sources = np.random.default_rng(4).integers(0, 2, 60)
    groups = Groups(np.arange(60), np.arange(61))
    share = sources.reshape(-1, 5).mean(axis=1)
    expected = autocorrelation((share * 5).round().astype(np.int64), 1)
    assert source_autocorrelation(groups, sources, 5) == pytest.approx(expected)


def test_source_entropy_is_one_when_mixed_and_zero_when_steps_have_one_source() -> None:
    rng = np.random.default_rng(0)
    sources = np.repeat([0, 1, 2], 800)
    groups = Groups(np.arange(2_400), np.arange(0, 2_401, 2))
    assert source_entropy(groups, sources, 8) < 0.03, "sources come one after the other"
    assert source_entropy(groups.take(rng.permutation(1_200)), sources, 8) == pytest.approx(
        1, abs=0.03
    )
    assert source_entropy(groups, np.zeros_like(sources), 8) == 1.0


def test_source_entropy_equals_its_definition() -> None:
    rng = np.random.default_rng(3)
    sources = rng.integers(0, 4, 96)
    groups = Groups(rng.permutation(96), np.arange(0, 97, 3))

    def mean_entropy(order: IntArray) -> float:
        steps = [
            np.concatenate([groups[g] for g in order[start : start + 4]])
            for start in range(0, 32, 4)
        ]
        entropies = []
        for step in steps:
            shares = [count / len(step) for count in Counter(sources[step].tolist()).values()]
            entropies.append(-sum(share * math.log(share) for share in shares))
        return sum(entropies) / len(entropies)

    random_order = np.random.default_rng(9).permutation(32)
    expected = mean_entropy(np.arange(32)) / mean_entropy(random_order)
    assert source_entropy(groups, sources, 4, seed=9) == pytest.approx(expected)


def test_gradient_shares_are_means_over_steps_of_shares_of_weights() -> None:
    rng = np.random.default_rng(5)
    sizes = rng.integers(0, 4, 41)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    groups = Groups(rng.permutation(offsets[-1]), offsets)
    sources, weights = rng.integers(0, 3, offsets[-1]), rng.integers(0, 50, offsets[-1])
    for step_groups in (1, 4, 41, 100):
        steps = []
        for start in range(0, 41, step_groups):
            own = [s for g in range(start, min(41, start + step_groups)) for s in groups[g]]
            total = sum(int(weights[s]) for s in own)
            if total:
                steps.append(
                    [sum(int(weights[s]) for s in own if sources[s] == k) / total for k in range(3)]
                )
        found = gradient_shares(groups, sources, weights, step_groups)
        np.testing.assert_allclose(found, np.mean(steps, axis=0))
    assert gradient_shares(groups, sources, 0 * weights, 4).tolist() == [0, 0, 0]


def test_repeated_pairs_are_1_by_chance_and_most_when_steps_come_again() -> None:
    rng = np.random.default_rng(0)
    first = rng.permutation(4_000)
    assert repeated_pairs(first, rng.permutation(4_000), 8) == pytest.approx(1, abs=0.3)
    again = first.reshape(-1, 8)[rng.permutation(500)].ravel()
    assert repeated_pairs(first, again, 8) == pytest.approx(3_999 / 7)
    halves = first.reshape(-1, 2, 4)
    mixed = np.concatenate([halves[:, 0], halves[rng.permutation(500), 1]], axis=1).ravel()
    assert repeated_pairs(first, mixed, 8) == pytest.approx(12 / 28 * 3_999 / 7, rel=0.05)
    # groups of one epoch only do not count, and there may be no pair at all
    assert repeated_pairs(np.array([5, 6, 0, 1]), np.array([1, 0, 2, 3]), 2) == 1.0
    assert repeated_pairs(first, again, 1) == repeated_pairs(first[:0], first[:0], 8) == 1.0
