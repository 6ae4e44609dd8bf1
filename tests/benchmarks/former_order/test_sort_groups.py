"""The path: neighbours cost the same, and a window's sources stand so that every part of it can be
drawn from.
"""

import numpy as np
import pytest
from former_order.block_shuffle import choose_order
from former_order.rng import TIES
from former_order.shuffle_ties import MAX_BUCKET_BITS, shuffle_ties
from former_order.sort_groups import (
    COUNTED_LOADS,
    NEIGHBOURHOOD,
    arrange_sources,
    sort_groups,
    source_shares,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.rng import random_bits
from isobatch.common.types import Groups
from support.cases import draws

KEYS = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 2**64 - 1))


def path_oracle(vision, tokens, seed):
    """The path by NumPy's sorts: a bin for each group, a key from bin and tokens, and a shuffle
    before for the ties.
    """
    values, inverse, counts = np.unique(vision, return_inverse=True, return_counts=True)
    window = (choose_order(len(vision)).window_size + NEIGHBOURHOOD) / max(1, len(vision))
    best, best_cost, num_bins = np.zeros_like(values), np.inf, 1
    while num_bins < 2 * len(values):
        below = np.cumsum(counts) - counts
        bins = (
            np.arange(len(values)) if num_bins >= len(values) else below * num_bins // len(vision)
        )
        bins = np.unique(bins, return_inverse=True)[1]
        spread = 0.0
        for number in range(bins.max() + 1):
            load, count = values[bins == number], counts[bins == number]
            mean = (load * count).sum() / count.sum()
            spread += count.sum() * np.sqrt((count * (load - mean) ** 2).sum() / count.sum())
        cost = spread / max(1, vision.sum()) + tokens.std() / max(1, tokens.mean()) * min(
            1, window * (bins.max() + 1)
        )
        # far enough apart that rounding does not choose
        if cost < best_cost * (1 - 1e-12):
            best, best_cost = bins, cost
        num_bins *= 2
    place, span = best[inverse], int(tokens.max(initial=0)) + 1
    key = place * span + np.where(place % 2 == 0, tokens, span - 1 - tokens)
    shuffled = np.argsort(random_bits(len(vision), seed, TIES), kind="stable")
    return shuffled[np.argsort(key[shuffled], kind="stable")]


@settings(deadline=None, max_examples=len(draws(80)))
@given(
    size=st.integers(0, 300),
    most=st.tuples(
        st.sampled_from([0, 1, 15, 3_000, 10 * COUNTED_LOADS]),
        st.sampled_from([0, 1, 4_096, 2**40]),
    ),
    seed=st.integers(0, 1000),
)
def test_the_path_equals_the_plain_formula(size, most, seed):
    rng = np.random.default_rng(seed)
    vision, tokens = (rng.integers(0, 1 + largest, size) for largest in most)
    path = sort_groups(vision, tokens, seed)
    assert path.dtype == np.int64
    assert path.tolist() == path_oracle(vision, tokens, seed).tolist()


def test_the_path_of_many_groups_with_many_ties_equals_the_plain_formula():
    rng = np.random.default_rng(0)
    vision, tokens = (
        rng.integers(0, 16, 200_000),
        np.minimum(rng.integers(3_900, 4_400, 200_000), 4_096),
    )
    assert np.array_equal(sort_groups(vision, tokens, 5), path_oracle(vision, tokens, 5))


@settings(deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4096)), min_size=0, max_size=200),
    seed=st.integers(0, 100),
)
def test_the_path_is_a_permutation_that_depends_on_loads_and_seed_alone(loads, seed):
    vision, tokens = np.array(loads, dtype=np.int64).reshape(-1, 2).T
    path = sort_groups(vision, tokens, seed)
    assert sorted(path.tolist()) == list(range(len(loads)))
    assert np.array_equal(path, sort_groups(vision, tokens, seed))


def test_the_path_goes_through_tokens_up_and_down_in_turn():
    rng = np.random.default_rng(0)
    vision, tokens = rng.integers(0, 4, 4_000), rng.integers(1, 4_000, 4_000)
    path = sort_groups(vision, tokens, 0)
    assert np.all(np.diff(vision[path]) >= 0)
    for value in range(4):
        steps = np.diff(tokens[path][vision[path] == value])
        assert np.all(steps >= 0) if value % 2 == 0 else np.all(steps <= 0)


def test_ties_are_in_another_order_for_another_seed():
    same = np.ones(100, dtype=np.int64)
    assert not np.array_equal(sort_groups(same, same, 0), sort_groups(same, same, 1))


@settings(deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=30).filter(any),
    dtype=st.sampled_from([np.uint8, np.int64]),
)
def test_shares_count_the_samples_of_each_source(groups, dtype):
    sources = np.array([source for group in groups for source in group])
    sizes = np.bincount(sources)
    by_size = sorted(range(len(sizes)), key=lambda source: -sizes[source])
    column = {
        source: min(place, 15) if len(sizes) > 16 else source
        for place, source in enumerate(by_size)
    }
    expected = [
        [
            [column[s] for s in group].count(kind) * 255 // max(len(group), 1)
            for kind in range(min(16, len(sizes)))
        ]
        for group in groups
    ]
    order = np.random.default_rng(0).permutation(len(sources))  # samples stand anywhere
    offsets = np.cumsum([0, *map(len, groups)])
    stored = np.empty(len(sources), dtype)
    stored[order] = sources
    shares = source_shares(Groups(order.astype(np.int32), offsets), stored)
    assert shares.dtype == np.uint8
    assert shares.tolist() == expected


def test_no_groups_have_no_sources():
    nothing = np.zeros(0, np.int64)
    assert source_shares(Groups(nothing, np.zeros(1, np.int64)), nothing).shape == (0, 0)


def test_more_than_16_sources_leave_the_15_largest_a_column_of_their_own():
    sources = np.repeat(np.arange(40), np.r_[np.full(25, 1), np.full(15, 9)])
    shares = source_shares(Groups(np.arange(len(sources)), np.arange(len(sources) + 1)), sources)
    assert shares.shape == (len(sources), 16)
    assert sorted((shares == 255).sum(axis=0).tolist()) == [9] * 15 + [25]


@settings(deadline=None)
@given(
    num_groups=st.integers(1, 150), window=st.sampled_from([1, 2, 8, 32]), seed=st.integers(0, 50)
)
def test_arranging_moves_groups_inside_their_window_only(num_groups, window, seed):
    rng = np.random.default_rng(seed)
    path, shares = (
        rng.permutation(num_groups),
        rng.integers(0, 256, (num_groups, 3)).astype(np.uint8),
    )
    arranged = arrange_sources(path, shares, window)
    for start in range(0, num_groups, window):
        assert sorted(arranged[start : start + window]) == sorted(path[start : start + window])


@pytest.mark.parametrize("num_sources", [2, 3, 4])
def test_halves_of_a_window_differ_most_in_what_they_hold(num_sources):
    rng = np.random.default_rng(0)
    shares = np.zeros((256, num_sources), np.uint8)
    shares[np.arange(256), rng.integers(0, num_sources, 256)] = 255
    arranged = shares[arrange_sources(np.arange(256), shares, 256)]
    # one source at least stands in one stretch, so a quarter holds two or three kinds at most
    kinds = [len(np.unique(arranged[start : start + 32], axis=0)) for start in range(0, 256, 32)]
    assert sum(kinds) <= 8 + 2 * (num_sources - 1)


def test_one_source_leaves_the_path_as_it_is():
    path = np.array([3, 1, 2, 0])
    assert arrange_sources(path, np.full((4, 1), 255, np.uint8), 4).tolist() == path.tolist()


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), KEYS), max_size=100),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_ties_are_as_if_all_had_been_shuffled_before(rows, dtype):
    keys, bits = (np.array([row[column] for row in rows], dtype=np.uint64) for column in range(2))
    order = np.argsort(keys, kind="stable").astype(dtype)
    shuffle_ties(order, keys, bits)
    shuffled = np.argsort(bits, kind="stable")
    assert order.tolist() == shuffled[np.argsort(keys[shuffled], kind="stable")].tolist()


@pytest.mark.parametrize("size", [16, 17, 1_000, 3 << MAX_BUCKET_BITS - 1])
def test_a_long_run_of_ties_is_sorted_with_fewer_or_more_numbers_than_buckets(size):
    bits = np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)
    order = np.arange(size)
    shuffle_ties(order, np.zeros(size, np.uint32), bits)
    assert np.array_equal(order, np.argsort(bits, kind="stable"))
