"""Random order: every group once in steps of any shape, exact resume, and as balanced as asked."""

import json
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.metrics import autocorrelation, dist_ratio, source_entropy
from isobatch.balance.order.step_order import (
    GlobalShuffle,
    assign_ranks,
    cut_sorted,
    epoch_steps,
    most_alike,
    nearest,
)
from isobatch.common.types import Groups
from support.group_loads import KINDS, loads_of

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=12)
balances = st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 0.999])


def order_of(num_groups, epoch=0, seed=0, balance=0.5, **state):
    return GlobalShuffle(num_groups=num_groups, seed=seed, epoch=epoch, balance=balance, **state)


def packed_loads(num_groups):
    """Loads as grouping leaves them where it cannot make groups alike."""
    rng = np.random.default_rng(1)
    tokens = np.minimum(4_096, 4_096 - rng.exponential(400, num_groups).astype(int)).clip(500)
    shares = [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]
    return rng.choice([14, 13, 12, 9, 5, 1], size=num_groups, p=shares), tokens


@settings(deadline=None)
@given(
    num_groups=st.integers(0, 200),
    runs=shapes,
    kind=st.sampled_from(KINDS),
    balance=balances,
    seed=st.integers(0, 2**40),
)
def test_every_group_once_in_steps_of_changing_ranks_and_balance(
    num_groups, runs, kind, balance, seed
):
    loads, seen = loads_of(num_groups, kind), []
    order = order_of(num_groups, seed=seed)
    for dp, micro_batches in [*runs, *[(8, 8)] * (num_groups // 64 + 1)]:
        before, twin = order.remaining, order.copy()
        step = order.take_step(dp, micro_batches, loads)
        assert step.shape == (dp, micro_batches)
        assert (step >= 0).sum() == min(dp * micro_batches, before)
        np.testing.assert_array_equal(twin.take_step(dp, micro_batches, loads), step)
        seen += step[step >= 0].tolist()
        # a new process, which knows the state alone
        state = json.loads(json.dumps(order.state()))
        order = order_of(num_groups, seed=seed, balance=balance, **state)
    assert order.remaining == 0
    assert sorted(seen) == list(range(num_groups))


@settings(deadline=None)
@given(num_groups=st.integers(1, 9_000), seed=st.integers(0, 2**40))
def test_the_random_order_is_a_permutation_and_another_in_each_epoch(num_groups, seed):
    first, second = (order_of(num_groups, epoch, seed).take(num_groups) for epoch in (0, 1))
    assert sorted(first.tolist()) == list(range(num_groups))
    assert num_groups < 20 or not np.array_equal(first, second)


def test_the_random_order_looks_random_and_costs_nothing_to_enter():
    order = order_of(100_000).take(100_000).astype(float)
    corner = np.histogram2d(np.arange(100_000), order, bins=10)[0]
    assert 40 < ((corner - 1_000) ** 2 / 1_000).sum() < 140  # 81 degrees of freedom
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    late = order_of(250_000_000, consumed=123_456_789).take(1_000)
    assert len(np.unique(late)) == 1_000


def test_orders_are_the_same_everywhere_and_for_ever():
    """A run may resume on another machine and with another version of NumPy."""
    assert order_of(50, seed=7).take(6).tolist() == [42, 33, 37, 20, 9, 22]
    vision, tokens = packed_loads(400)
    steps = epoch_steps((vision, tokens), (2, 2), seed=3, balance=0.5, max_steps=2)
    assert steps.tolist() == [[[333, 294], [214, 196]], [[377, 152], [172, 183]]]


@pytest.mark.parametrize(
    "state",
    [
        {"consumed": 21},
        {"consumed": -1},
        {"consumed": 1, "spare": [1, 2]},
        {"consumed": 3, "spare": [20]},
    ],
)
def test_a_state_that_does_not_fit_is_refused(state):
    with pytest.raises(ValueError, match="does not fit"):
        order_of(20, **state)


def test_a_balance_out_of_range_is_refused():
    for balance in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"give 0 \(random\) to 0.999"):
            order_of(20, balance=balance)


@pytest.mark.thorough
def test_more_balance_costs_pairs_and_no_more_than_promised():
    num_groups = 12_000
    vision, tokens = packed_loads(num_groups)
    for dp, micro_batches in ((8, 1), (64, 1), (8, 8)):
        found = []
        for balance in (0, 0.5, 0.75, 0.95):
            steps, again = (
                epoch_steps((vision, tokens), (dp, micro_batches), balance=balance, epoch=epoch)
                for epoch in (0, 1)
            )
            by_round = steps[:-1].transpose(0, 2, 1).ravel()
            found.append((dist_ratio(vision[by_round], dp), dist_ratio(tokens[by_round], dp)))
            repeated = repeated_over_chance(steps[:-1], again[:-1], num_groups)
            assert repeated < 1.35 / (1 - balance), (dp, micro_batches, balance)
        # every step of balance brings both nearer
        assert all(a > b for load in zip(*found, strict=True) for a, b in pairwise(load))
        assert found[3][0] < found[0][0] / 4


def repeated_over_chance(steps, again, num_groups):
    """Pairs of groups of one step that are in one step again, over what chance would give."""
    step_of = np.full((2, num_groups), -1)
    for number, each in enumerate((steps, again)):
        step_of[number, each.ravel()] = np.repeat(np.arange(len(each)), each[0].size)
    both = (step_of >= 0).all(axis=0)
    _, counts = np.unique(step_of[:, both], axis=1, return_counts=True)
    size = steps[0].size
    pairs = len(steps) * size * (size - 1) / 2
    return (counts * (counts - 1) / 2).sum() / (pairs * (size - 1) / num_groups)


def test_sources_stay_mixed_and_no_group_waits_for_long():
    num_groups, dp = 16_000, 8
    vision, tokens = packed_loads(num_groups)
    steps = epoch_steps((vision, tokens), (dp, 1), balance=0.5)
    groups = Groups(steps.ravel(), np.arange(num_groups + 1))
    sources = np.random.default_rng(0).integers(0, 4, num_groups)
    assert source_entropy(groups, sources, dp) > 0.99
    place = np.empty(num_groups, np.int64)
    place[order_of(num_groups).take(num_groups)] = np.arange(num_groups)
    waits = np.arange(len(steps))[:, None] - place[steps[:, :, 0]] // dp
    assert waits.max() <= 8
    # a heavy step leaves lighter groups to the next one
    assert -0.35 < autocorrelation(vision[steps].ravel(), dp) < 0.05


def test_the_nearest_are_those_of_least_squared_distance():
    rng = np.random.default_rng(0)
    for case in range(50):
        vision, tokens = rng.integers(0, 30, 40), rng.integers(1, 4_096, 40)
        count = int(rng.integers(1, 45))
        chosen = nearest(vision, tokens, count).tolist()
        units = [load * 4_096 / max(1, load.sum() // 40) for load in (vision, tokens)]
        distance = sum((unit - unit[0]) ** 2 for unit in units)
        assert chosen[0] == 0
        assert len(chosen) == min(count, 40), case
        left_out = np.delete(distance, chosen)
        assert distance[chosen].max() <= left_out.min(initial=np.inf) * 1.01 + 1e5, case


def test_of_several_centres_that_is_taken_around_which_ranks_wait_least():
    for case in range(50):
        rng = np.random.default_rng(case)
        vision, tokens = rng.integers(0, 30, 40), rng.integers(1, 4_096, 40)
        count, centres = int(rng.integers(2, 9)), int(rng.integers(1, 9))

        def waits(chosen, loads=(vision, tokens)):
            return sum(np.mean(load[chosen].max() - load[chosen]) / load.mean() for load in loads)

        order = np.arange(40)
        sets = []
        for centre in range(centres):
            moved = np.append(centre, np.delete(order, centre))  # the centre as the first
            sets.append(moved[nearest(vision[moved], tokens[moved], count)])
        chosen = most_alike(vision, tokens, count, 0.0, centres)
        assert len(set(chosen.tolist())) == count
        # within what rounding and ties are worth
        assert waits(chosen) <= min(map(waits, sets)) + 0.01, case
        assert np.array_equal(most_alike(vision, tokens, 40, 0.0, centres), order)


def test_groups_that_differ_by_little_are_taken_as_they_come():
    vision, tokens = (
        np.array([60, 59, 61, 60, 64]),
        np.array([16_000, 16_100, 15_900, 16_050, 16_000]),
    )
    assert nearest(vision, tokens, 3, tolerance=1.0).tolist() == [0, 1, 2]
    assert nearest(vision, tokens, 2, tolerance=0.0).tolist() == [0, 3]
    assert nearest(vision, tokens, 4, tolerance=1.0).tolist() == [0, 1, 2, 3]


def test_where_all_are_chosen_from_the_last_steps_are_as_balanced_as_the_first():
    """Steps of the nearest groups leave the odd ones to the end: .030 / .017 at 64 ranks."""
    vision, tokens = packed_loads(12_000)
    for dp, most in ((8, (0.003, 0.006)), (64, (0.001, 0.008))):
        steps = epoch_steps((vision, tokens), (dp, 1), balance=0.999)[:-1]
        last = steps[-len(steps) // 4 :].ravel()
        found = dist_ratio(vision[last], dp), dist_ratio(tokens[last], dp)
        assert found[0] <= most[0], (dp, found)
        assert found[1] <= most[1], (dp, found)


def test_steps_cut_one_by_one_are_those_of_all_groups_sorted_once():
    rng = np.random.default_rng(0)
    for case in range(20):
        vision, tokens = rng.integers(3, 5, 200), rng.integers(1_000, 4_096, 200)
        # sorted by vision, and by tokens from where the ones of the vision before end
        by_both, end = [], 0
        for load in sorted(set(vision.tolist())):
            part = sorted(np.flatnonzero(vision == load).tolist(), key=lambda at: (tokens[at], at))
            if abs(tokens[part[-1]] - end) < abs(tokens[part[0]] - end):
                part.reverse()
            by_both += part
            end = tokens[part[-1]]
        left = np.arange(200)
        while len(left):
            chosen = left[cut_sorted(vision[left], tokens[left], 50)]
            assert left[0] in chosen
            starts = range(0, 200, 50)
            assert set(chosen.tolist()) in [set(by_both[at : at + 50]) for at in starts], case
            left = np.setdiff1d(left, chosen)


def test_ranks_share_a_step_about_as_well_as_any_order_within_micro_batches():
    rng = np.random.default_rng(0)
    for case in range(30):
        vision, tokens = rng.integers(1, 16, 6), rng.integers(3_000, 4_096, 6)
        places = assign_ranks(vision, tokens, 3, 2)
        assert sorted(places.ravel().tolist()) == list(range(6)), case
        size = vision / vision.mean() + tokens / tokens.mean()
        # micro-batches hold neighbours
        assert size[places[:, 0]].min() >= size[places[:, 1]].max() - 0.01, case
        worst = size[places].sum(axis=1).max()
        best = min(
            (size[places[:, 0]] + size[list(order)]).max() for order in permutations(places[:, 1])
        )
        assert worst <= best * 1.001, case
    few = assign_ranks(np.array([5, 9]), np.array([10, 10]), 2, 2)
    assert few.tolist() == [[1, -1], [0, -1]]


@pytest.mark.parametrize("balance", [0.0, 0.5, 0.99])
def test_a_single_rank_with_single_groups_takes_them_in_random_order(balance):
    loads = np.arange(300) % 16, np.arange(300) * 31 % 4_096
    steps = epoch_steps(loads, (1, 1), balance=balance)
    assert steps.shape == (300, 1, 1)
    assert steps.ravel().tolist() == order_of(300, balance=0).take(300).tolist()
    assert order_of(0).take_step(1, 1, lambda groups: (groups, groups)).tolist() == [[-1]]
