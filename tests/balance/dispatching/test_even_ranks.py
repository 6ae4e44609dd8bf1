"""Several loads even at once: next to all plans there are, with prices, caps and sizes kept."""

from itertools import product

import numpy as np
import pytest

from isobatch.balance.dispatching.even_ranks import (
    MoveCosts,
    bound_ms,
    even_ranks,
    slot_loads,
    step_ms,
)
from isobatch.common.errors import ConfigError


def draw(rng, num_samples, num_phases=2):
    vision = np.where(rng.random(num_samples) < 0.3, 0, rng.lognormal(3, 1, num_samples))
    llm = vision / 4 + rng.lognormal(3, 0.8, num_samples)
    return np.stack([vision, llm, llm**2 / 200][:num_phases], axis=1)


@pytest.mark.thorough
def test_plans_of_few_samples_are_near_the_best_of_all_plans():
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(40):
        num_ranks, num_rounds = [(2, 1), (3, 1), (2, 2)][rng.integers(3)]
        costs = draw(rng, 7)
        found = step_ms(
            costs, even_ranks(costs, num_ranks=num_ranks, num_rounds=num_rounds), num_ranks
        )
        slots = range(num_ranks * num_rounds)
        best = min(step_ms(costs, np.array(plan), num_ranks) for plan in product(slots, repeat=7))
        assert bound_ms(costs, num_ranks) <= best * (1 + 1e-9) <= found * (1 + 1e-8)
        gaps.append(found / best)
    assert np.mean(gaps) < 1.03
    assert max(gaps) < 1.2


def test_plans_of_many_samples_are_near_the_bound():
    for seed, (num_ranks, each) in enumerate([(8, 16), (8, 64), (64, 16)]):
        costs = draw(np.random.default_rng(seed), num_ranks * each, 3)
        start = np.repeat(np.arange(num_ranks), each)
        for options in ({}, {"start": start}, {"start": start, "keep_sizes": True}):
            slots = even_ranks(costs, num_ranks=num_ranks, **options)
            found = step_ms(costs, slots, num_ranks) / bound_ms(costs, num_ranks)
            assert found < (1.06 if options.get("keep_sizes") else 1.04)
            if options.get("keep_sizes"):
                assert (np.bincount(slots, minlength=num_ranks) == each).all()
        assert step_ms(costs, start, num_ranks) > 1.15 * bound_ms(costs, num_ranks)


def test_moves_are_made_only_while_they_pay():
    rng = np.random.default_rng(3)
    costs = draw(rng, 64)
    start = np.repeat(np.arange(8), 8)
    num_bytes = (costs[:, 0] * 1e4).astype(int) + 100
    before, moved = step_ms(costs, start, 8), []
    free = even_ranks(costs, num_ranks=8, start=start)
    for rate in (1e9, 1e5, 3e4, 1e4, 1e2):
        move = MoveCosts(num_bytes=num_bytes, bytes_per_ms=rate, latency_ms=0.1)
        slots = even_ranks(costs, num_ranks=8, start=start, move=move)
        total = step_ms(costs, slots, 8) + move.ms(start, slots, 8)
        assert total <= min(before, step_ms(costs, free, 8) + move.ms(start, free, 8))
        moved.append(int(num_bytes[slots != start].sum()))
    assert moved[0] > moved[-1] == 0
    dear = MoveCosts(num_bytes=num_bytes, bytes_per_ms=1e9, latency_ms=before)
    assert (even_ranks(costs, num_ranks=8, start=start, move=dear) == start).all()


def sums(sizes, slots, num_slots):
    return slot_loads(sizes.astype(float), np.asarray(slots), num_slots).max(axis=(0, 1))


def test_plans_within_caps_are_near_the_best_of_all_plans_within():
    rng = np.random.default_rng(4)
    gaps, bound_by_caps = [], 0
    for _ in range(60):
        num_ranks, num_rounds = [(2, 1), (3, 1), (2, 2)][rng.integers(3)]
        num_slots = num_ranks * num_rounds
        costs = draw(rng, 7)
        # what fills memory goes another way than times
        sizes = np.stack([rng.integers(1, 100, 7), 1 + rng.integers(0, 9, 7) ** 2], axis=1)
        start = rng.integers(0, num_slots, 7)
        caps = sums(sizes, start, num_slots)
        slots = even_ranks(
            costs, num_ranks=num_ranks, num_rounds=num_rounds, start=start, sizes=sizes
        )
        assert (sums(sizes, slots, num_slots) <= caps).all()
        plans = [np.array(plan) for plan in product(range(num_slots), repeat=7)]
        times = [step_ms(costs, plan, num_ranks) for plan in plans]
        within = [(sums(sizes, plan, num_slots) <= caps).all() for plan in plans]
        best = min(time for time, fits in zip(times, within, strict=True) if fits)
        measured = step_ms(costs, slots, num_ranks)
        assert best * (1 - 1e-9) <= measured <= step_ms(costs, start, num_ranks)
        bound_by_caps += best > min(times) * (1 + 1e-9)
        gaps.append(measured / best)
    assert bound_by_caps > 20  # else caps were not tested
    assert np.mean(gaps) < 1.02
    assert max(gaps) < 1.15


def test_slots_keep_their_caps_where_a_plan_within_exists():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(10, 100, 60)
        vision = rng.integers(1, 400, 60)
        costs = np.stack([vision / 100.0, tokens / 100.0], axis=1)
        sizes = np.stack([vision, tokens], axis=1)
        caps = [int(1.05 * column.sum() / 6) for column in (vision, tokens)]
        for max_sizes in (caps, [None, caps[1]]):
            allowed = [np.inf if cap is None else cap for cap in max_sizes]
            slots = even_ranks(costs, num_ranks=6, sizes=sizes, max_sizes=max_sizes)
            assert (sums(sizes, slots, 6) <= allowed).all()
            # as much vision as the fullest slot, which is all of it
            start = np.zeros(60, int)
            options = {"start": start, "sizes": sizes, "max_sizes": max_sizes}
            slots = even_ranks(costs, num_ranks=3, num_rounds=2, **options)
            assert (sums(sizes, slots, 6) <= allowed).all()
        # sizes of slots and their caps, both kept
        start = rng.permutation(np.repeat(np.arange(6), 10))
        slots = even_ranks(costs, num_ranks=6, start=start, sizes=sizes, keep_sizes=True)
        assert (sums(sizes, slots, 6) <= sums(sizes, start, 6)).all()
        assert set(np.bincount(slots).tolist()) == {10}
        assert step_ms(costs, slots, 6) < step_ms(costs, start, 6)


def test_a_cap_that_no_plan_keeps_is_passed_by_little():
    costs = np.ones((9, 1))
    tokens = np.full((9, 1), 10)
    slots = even_ranks(costs, num_ranks=4, sizes=tokens, max_sizes=[20])
    assert sorted(np.bincount(slots)) == [2, 2, 2, 3]
    with pytest.raises(ConfigError, match="give more than 0"):
        even_ranks(costs, num_ranks=4, sizes=tokens, max_sizes=[0])


def test_plans_do_not_depend_on_the_unit_and_repeat():
    costs = draw(np.random.default_rng(5), 40)
    slots = even_ranks(costs, num_ranks=4, num_rounds=2)
    assert (even_ranks(costs, num_ranks=4, num_rounds=2) == slots).all()
    assert (even_ranks(costs * 1024, num_ranks=4, num_rounds=2) == slots).all()


def test_edges_and_wrong_values():
    assert len(even_ranks(np.zeros((0, 2)), num_ranks=4)) == 0
    assert even_ranks(np.ones((3, 1)), num_ranks=1).tolist() == [0, 0, 0]
    assert sorted(even_ranks(np.zeros((2, 1)), num_ranks=4).tolist())[0] >= 0
    assert step_ms(np.ones((1, 2)), even_ranks(np.ones((1, 2)), num_ranks=3), 3) == 2
    for costs, start, message in (
        (np.ones(3), None, "give"),
        (np.array([[1.0], [np.nan]]), None, "costs of sample 1"),
        (np.array([[-1.0]]), None, "from 0 on"),
        (np.ones((2, 1)), np.array([0, 9]), "start has 2 slots"),
    ):
        with pytest.raises(ConfigError, match=message):
            even_ranks(costs, num_ranks=2, start=start)
    with pytest.raises(ConfigError, match="0 ranks"):
        even_ranks(np.ones((2, 1)), num_ranks=0)
