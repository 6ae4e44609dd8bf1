"""Regrouping: every sample once, inside its window, others together in each epoch; as many groups,
as even as before.
"""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.even_out import group_balanced
from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.metrics import dist_ratio
from isobatch.balance.order import regroup as module
from isobatch.balance.order.regroup import regroup, window_borders
from isobatch.common.types import Groups, Limits
from support.oracles.regroup_oracle import regroup_oracle
from support.sample_pairs import repeated_pairs

LIMITS = Limits(max_seq_len=4_096, max_vision=15, min_seq_len=3_968, min_vision=15)


def in_random_order(groups):
    return groups.take(np.random.default_rng(1).permutation(len(groups)))


@pytest.fixture(scope="module")
def stored():
    """(vision, tokens, even groups in random order) of 20,000 samples with InternVL's tiles."""
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5], 20_000, p=[0.05, 0.25, 0.2, 0.5])
    tokens = vision * 256 + rng.integers(40, 500, 20_000)
    return vision, tokens, in_random_order(group_balanced(vision, tokens, LIMITS, seed=0))


@settings(deadline=None)
@given(
    num_groups=st.integers(0, 500),
    window=st.integers(1, 80),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_windows_cover_all_groups_and_are_no_larger_than_asked(num_groups, window, seed, epoch):
    borders = window_borders(num_groups, window, seed=seed, epoch=epoch)
    assert (borders[0], borders[-1]) == (0, num_groups)
    assert num_groups == 0 or 1 <= np.diff(borders).min() <= np.diff(borders).max() <= window


@settings(deadline=None, max_examples=40)
@given(
    loads=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 10)), min_size=1, max_size=80),
    window=st.integers(1, 12),
    epoch=st.integers(0, 5),
)
def test_every_sample_once_within_the_caps_and_the_window(loads, window, epoch):
    vision, tokens = np.array(loads, dtype=np.int64).T
    limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=10, min_vision=4)
    stored = group_isf(vision, tokens, limits, seed=0)
    groups = regroup((vision, tokens), stored, limits, window_groups=window, seed=0, epoch=epoch)
    assert sorted(groups.samples.tolist()) == list(range(len(loads)))
    assert groups.sum(vision).max() <= 4
    assert groups.sum(tokens).max() <= 10
    borders = stored.offsets[window_borders(len(stored), window, seed=0, epoch=epoch)]
    place = np.empty(len(loads), np.int64)
    place[stored.samples] = np.arange(len(loads))
    window_of = np.searchsorted(borders, place, side="right")
    assert all(len(set(window_of[groups[g]].tolist())) == 1 for g in range(len(groups)))
    again = regroup((vision, tokens), stored, limits, window_groups=window, seed=0, epoch=epoch)
    assert np.array_equal(groups.samples, again.samples)


@settings(deadline=None, max_examples=30)
@given(
    loads=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), min_size=1, max_size=40),
    window=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_groups_equal_those_of_plain_python(loads, window, seed):
    vision, tokens = np.array(loads, dtype=np.int32).T
    limits = Limits(max_seq_len=100, max_vision=150, min_seq_len=10, min_vision=4)
    stored = group_isf(vision, tokens, limits, seed=seed)
    made = regroup((vision, tokens), stored, limits, window_groups=window, seed=seed, epoch=1)
    lists = [stored[g].tolist() for g in range(len(stored))]
    expected = regroup_oracle(
        vision, tokens, lists, limits, window_groups=window, seed=seed, epoch=1
    )
    assert [set(made[g].tolist()) for g in range(len(made))] == expected


def epochs_of(loads, stored, limits, window_groups=512):
    return [
        regroup(loads, stored, limits, window_groups=window_groups, seed=0, epoch=epoch)
        for epoch in (0, 1)
    ]


def test_epochs_bring_other_samples_together_in_groups_as_even_as_before(stored):
    vision, tokens, groups = stored
    first, second = epochs_of((vision, tokens), groups, LIMITS)
    assert repeated_pairs(first, second) < 0.01
    assert repeated_pairs(groups, first) < 0.01
    for made in (first, second):
        assert np.array_equal(made.offsets, groups.offsets)
        for load, spare in ((vision, 1e-4), (tokens, 1e-3)):
            assert dist_ratio(made.sum(load), 8) < dist_ratio(groups.sum(load), 8) + spare


@pytest.mark.thorough
def test_samples_of_many_different_sizes_change_groups_too():
    rng = np.random.default_rng(0)
    vision = 4 * rng.integers(4, 3_000, 20_000) * (rng.random(20_000) > 0.3)
    tokens = vision // 4 + rng.integers(10, 2_000, 20_000)
    limits = Limits(
        max_seq_len=16_384, max_vision=36_000, min_seq_len=0, min_vision=0, vision_unit="vit_tokens"
    )
    groups = in_random_order(group_balanced(vision, tokens, limits, seed=0))
    first, second = epochs_of((vision, tokens), groups, limits, window_groups=4_096)
    assert repeated_pairs(first, second) < 0.03
    assert repeated_pairs(groups, first) < 0.03
    for load in (vision, tokens):
        assert dist_ratio(first.sum(load), 8) < dist_ratio(groups.sum(load), 8) + 1e-3


def test_groups_that_are_full_to_the_last_token_change_members():
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5, 7], 30_000)
    tokens = vision * 256 + rng.integers(40, 500, 30_000)
    limits = Limits(max_seq_len=4_096, max_vision=9, min_seq_len=3_968, min_vision=9)
    stored = in_random_order(group_best_fit(vision, tokens, limits, seed=0))
    first, second = epochs_of((vision, tokens), stored, limits, window_groups=2_048)
    assert repeated_pairs(first, second) < 0.02
    assert repeated_pairs(stored, first) < 0.02
    assert first.sum(vision).max() <= 9
    assert first.sum(tokens).max() <= 4_096


def test_any_number_of_threads_makes_the_same_groups(stored, monkeypatch):
    vision, tokens, groups = stored
    made = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(module, "MOST_THREADS", threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
        made.append(epochs_of((vision, tokens), groups, LIMITS)[0].samples)
    narrow = vision.astype(np.uint8), tokens.astype(np.int32)
    made.append(epochs_of(narrow, groups, LIMITS)[0].samples)
    assert all(np.array_equal(made[0], other) for other in made)


def test_memory_is_that_of_the_result_and_of_a_few_windows(stored):
    vision, tokens, groups = stored
    vision, tokens = np.tile(vision, 20), np.tile(tokens, 20)
    shifts = np.repeat(np.arange(20) * len(groups.samples), len(groups.samples))
    ends = np.add.outer(np.arange(20) * groups.offsets[-1], groups.offsets[1:]).ravel()
    many = Groups(np.tile(groups.samples, 20) + shifts, np.concatenate([[0], ends]))
    tracemalloc.start()
    made = regroup((vision, tokens), many, LIMITS, window_groups=512, seed=0, epoch=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    window_bytes = 512 * 4 * 200
    assert made.samples.dtype == np.int32
    assert peak < made.samples.nbytes + 8 * window_bytes


def test_repeated_pairs_equal_their_definition():
    rng = np.random.default_rng(0)

    def random_groups():
        borders = np.sort(rng.choice(np.arange(1, 40), 12, replace=False))
        return Groups(rng.permutation(40), np.r_[0, borders, 40])

    def pairs(groups):
        return {
            (a, b)
            for g in range(len(groups))
            for a in groups[g].tolist()
            for b in groups[g].tolist()
            if a < b
        }

    one, other = random_groups(), random_groups()
    assert repeated_pairs(one, other) == pytest.approx(
        len(pairs(one) & pairs(other)) / len(pairs(one))
    )
    assert repeated_pairs(one, one) == 1.0
    assert (
        repeated_pairs(Groups(np.arange(3), np.arange(4)), Groups(np.arange(3), np.arange(4)))
        == 0.0
    )


def test_a_window_without_groups_is_refused():
    with pytest.raises(ValueError, match="window_groups is 0"):
        window_borders(10, 0, seed=0, epoch=0)
