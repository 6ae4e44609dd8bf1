"""Groups of equal cost: the same samples within the same caps, and as even as can be."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.grouping import even_out as module
from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.even_out import even_out, group_balanced
from isobatch.balance.metrics import dist_ratio
from isobatch.common.types import Groups, Limits


def limits_of(tokens, vision):
    return Limits(max_seq_len=tokens, max_vision=vision, min_seq_len=tokens, min_vision=vision)


def mixed(num_samples, seed=0):
    """(vision, tokens): a third without images, a few with many."""
    rng = np.random.default_rng(seed)
    vision = rng.choice([0, 1, 3, 5, 12], num_samples, p=[0.3, 0.2, 0.2, 0.25, 0.05])
    return vision, vision * 256 + np.exp(rng.normal(5.5, 0.9, num_samples)).astype(np.int64) + 8


@pytest.mark.thorough
@settings(deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=90),
    room=st.integers(0, 60),
    seed=st.integers(0, 2**40),
)
def test_the_same_samples_in_as_many_groups_within_the_caps(loads, room, seed):
    vision, tokens = np.array(loads, np.int64).T
    limits = limits_of(99 + room, 9 + room // 4)
    given_groups = group_best_fit(vision, tokens, limits, seed=seed)
    for groups in (
        even_out(given_groups, vision, tokens, limits, seed=seed),
        group_balanced(vision, tokens, limits, seed=seed),
    ):
        assert sorted(groups.samples.tolist()) == list(range(len(loads)))
        assert groups.sizes.min() > 0
        assert groups.sum(tokens).max() <= limits.max_seq_len
        assert groups.sum(vision).max() <= limits.max_vision
    assert len(even_out(given_groups, vision, tokens, limits, seed=seed)) == len(given_groups)


def test_a_mixture_in_random_order_is_balanced_after_it_and_was_not_before():
    vision, tokens = mixed(12_000)
    mean = vision.sum() / (tokens.sum() / 16_384)
    limits = limits_of(16_384, int(1.1 * mean))
    before = group_best_fit(vision, tokens, limits, seed=0)
    after = group_balanced(vision, tokens, limits, seed=0)
    order = np.random.default_rng(0).permutation(len(before))
    assert dist_ratio(before.sum(vision)[order], 8) > 0.03
    order = np.random.default_rng(0).permutation(len(after))
    # patches are whole: some groups have the next number above the mean
    mean = float(after.sum(vision).mean())
    assert dist_ratio(after.sum(vision)[order], 8) < 1 - mean / np.ceil(mean) + 0.003
    assert dist_ratio(after.sum(tokens)[order], 8) < 0.005
    squares = tokens**2
    assert after.sum(squares).std() < before.sum(squares).std() / 2
    assert len(after) < 1.004 * len(before)


@pytest.mark.thorough
def test_a_pair_is_divided_about_as_well_as_any_division_could():
    near = 0
    for seed in range(60):
        vision, tokens = mixed(9, seed)
        groups = Groups(np.arange(9), np.array([0, 4, 9]))
        limits = limits_of(int(tokens.sum()), int(vision.sum()) + 1)
        cost = division_cost(groups, vision, tokens, limits)
        found = cost(even_out(groups, vision, tokens, limits, seed=seed))
        best = min(
            cost(Groups(np.argsort(sides, kind="stable"), np.array([0, 9 - sum(sides), 9])))
            for sides in product((0, 1), repeat=9)
            if 0 < sum(sides) < 9
        )
        assert best <= found <= cost(groups), f"seed {seed}"
        near += found <= max(1.1 * best, 4 * module.NEAR**2)
    assert near >= 50


def division_cost(groups, vision, tokens, limits):
    """What `even_out` lessens, of any groups of the same samples: `groups` give the mean."""
    state = module._state(groups, vision, tokens, limits)
    means = np.stack([groups.sum(load) for load in state.loads.T], axis=1) - state.above

    def cost(made):
        above = np.stack([made.sum(load) for load in state.loads.T], axis=1) - means[0]
        return int(module._distances(above, state.scale, state.near).sum())

    return cost


def test_the_same_groups_with_any_number_of_threads(monkeypatch):
    vision, tokens = mixed(3_000)
    limits = limits_of(8_192, 40)
    made = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(module.os, "cpu_count", lambda threads=threads: threads)
        made.append(group_balanced(vision, tokens, limits, seed=3))
    for other in made[1:]:
        np.testing.assert_array_equal(other.samples, made[0].samples)
        np.testing.assert_array_equal(other.offsets, made[0].offsets)
    assert not np.array_equal(
        group_balanced(vision, tokens, limits, seed=4).samples, made[0].samples
    )


@pytest.mark.parametrize("vision", [np.zeros(40, np.int64), np.full(40, 2**20)])
def test_without_images_and_with_loads_of_any_size(vision):
    tokens = np.arange(1, 41) * 10_000
    limits = limits_of(1_000_000, int(vision.max()) * 40)
    groups = group_balanced(vision, tokens, limits, seed=0)
    assert sorted(groups.samples.tolist()) == list(range(40))
    assert groups.sum(tokens).max() <= 1_000_000
