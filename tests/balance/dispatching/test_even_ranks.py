"""Several loads even at once: next to all plans there are, with prices, caps and sizes kept."""

from itertools import product

import numpy as np
import pytest

from isobatch.balance.dispatching.even_ranks import MoveCosts, bound_ms, even_ranks, step_ms
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


def test_slots_keep_their_cap_where_a_plan_within_exists():
    rng = np.random.default_rng(4)
    tokens = rng.integers(10, 100, 60)
    costs = np.stack([rng.random(60), tokens / 100.0], axis=1)
    cap = int(1.05 * tokens.sum() / 6)
    slots = even_ranks(costs, num_ranks=6, cap=(tokens, cap))
    assert np.bincount(slots, tokens, 6).max() <= cap
    slots = even_ranks(costs, num_ranks=3, num_rounds=2, start=np.zeros(60, int), cap=(tokens, cap))
    assert np.bincount(slots, tokens, 6).max() <= cap


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
