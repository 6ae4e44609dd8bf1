"""Regrouping: every sample once, inside its window, others together in each epoch, at no loss of
fill.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance.grouping.best_fit import choose_varied_strategy, group_best_fit, group_by_strategy
from balance.grouping.isf import group_isf
from balance.order.regroup import regroup, window_borders
from balance.types import Groups, Limits
from support.sample_pairs import repeated_pairs

LIMITS = Limits(max_seq_len=4_096, max_vision=15, min_seq_len=3_968, min_vision=15)


@pytest.fixture(scope="module")
def stored():
    """(vision, tokens, groups in random order) of 20,000 samples with InternVL's tiles."""
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5], 20_000, p=[0.05, 0.25, 0.2, 0.5])
    tokens = vision * 256 + rng.integers(40, 500, 20_000)
    groups = group_isf(vision, tokens, LIMITS, seed=0)
    return vision, tokens, groups.take(np.random.default_rng(1).permutation(len(groups)))


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


def test_epochs_bring_other_samples_together_at_no_loss_of_fill(stored):
    vision, tokens, groups = stored
    first, second = (
        regroup((vision, tokens), groups, LIMITS, window_groups=512, seed=0, epoch=epoch)
        for epoch in (0, 1)
    )
    assert repeated_pairs(first, second) < 0.01
    assert repeated_pairs(groups, first) < 0.01
    assert max(len(first), len(second)) < 1.01 * len(groups)


def test_a_given_strategy_groups_as_if_it_had_been_chosen(stored):
    vision, tokens, _ = stored
    strategy = choose_varied_strategy(vision, tokens, LIMITS, seed=4, rounds=9)
    given = group_by_strategy(vision, tokens, LIMITS, strategy, seed=4, rounds=9)
    chosen = group_best_fit(vision, tokens, LIMITS, seed=4, rounds=9)
    assert np.array_equal(given.samples, chosen.samples)
    assert np.array_equal(given.offsets, chosen.offsets)
    by_vision = choose_varied_strategy(vision, tokens // 100, LIMITS, seed=4, rounds=9)
    assert by_vision != strategy
    other = group_by_strategy(vision, tokens, LIMITS, by_vision, seed=4, rounds=9)
    assert len(other) > len(chosen)


def test_pairs_are_new_also_where_beginning_with_the_largest_samples_would_fill_groups_best():
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5, 7], 30_000)
    tokens = vision * 256 + rng.integers(40, 500, 30_000)
    limits = Limits(max_seq_len=4_096, max_vision=9, min_seq_len=3_968, min_vision=9)
    stored = group_best_fit(vision, tokens, limits, seed=0)
    stored = stored.take(rng.permutation(len(stored)))
    first, second = (
        regroup((vision, tokens), stored, limits, window_groups=512, seed=0, epoch=epoch)
        for epoch in (0, 1)
    )
    assert repeated_pairs(first, second) < 0.02
    assert len(first) <= 1.01 * len(stored)


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
