"""Groups on context-parallel groups of their own size: run step by step, and by brute force."""

import itertools

import numpy as np
import pytest

from isobatch.balance.steps.context_groups import plan_context_groups
from isobatch.common.errors import ConfigError


def drawn_step(seed, num_groups):
    rng = np.random.default_rng(seed)
    num_tokens = np.minimum(rng.lognormal(7, 1.2, num_groups).astype(np.int64) + 1, 16_000)
    return num_tokens + num_tokens**2 / 40_000, num_tokens


def run(plan, loads):
    """Time of a step whose ranks begin a group when all of them are free, in their own order."""
    num_ranks = len(plan.rank_loads)
    queues = [plan.groups_of(rank).tolist() for rank in range(num_ranks)]
    free_at = np.zeros(num_ranks)
    while any(queues):
        fronts = {queue[0] for queue in queues if queue}
        for group in fronts:
            ranks = [rank for rank in range(num_ranks) if group in queues[rank]]
            assert len(ranks) == plan.sizes[group]
            if all(queues[rank][0] == group for rank in ranks):
                free_at[ranks] = free_at[ranks].max() + loads[group] / len(ranks)
                for rank in ranks:
                    queues[rank].pop(0)
                break
        else:
            raise AssertionError("ranks wait for each other")
    return free_at


def fastest(loads, needed, num_ranks):
    """Over all sizes and places."""
    best = np.inf
    options = []
    for size in needed.tolist():
        sizes = [s for s in (1, 2, 4, 8) if size <= s <= num_ranks]
        options.append([(s, first) for s in sizes for first in range(0, num_ranks, s)])
    for places in itertools.product(*options):
        times = np.zeros(num_ranks)
        for load, (size, first) in zip(loads, places, strict=True):
            times[first : first + size] += load / size
        best = min(best, times.max())
    return best


def test_ranks_run_a_plan_without_waiting_before_its_end():
    for seed in range(30):
        num_ranks = 2 ** (seed % 4 + 1)
        loads, num_tokens = drawn_step(seed, 3 * num_ranks)
        plan = plan_context_groups(
            loads, num_tokens, num_ranks=num_ranks, tokens_per_rank=16_000 // num_ranks, sending=0
        )
        assert np.all(num_tokens <= plan.sizes * (16_000 // num_ranks))
        assert np.all(plan.first_ranks % plan.sizes == 0)
        assert run(plan, loads) == pytest.approx(plan.rank_loads)
        assert plan.rank_loads.sum() == pytest.approx(loads.sum())
        assert plan.waiting == pytest.approx(
            1 - loads.sum() / num_ranks / run(plan, loads).max(), abs=1e-12
        )


def test_plans_are_near_the_fastest_of_all():
    ratios = []
    for seed in range(40):
        loads, num_tokens = drawn_step(seed, 4)
        plan = plan_context_groups(loads, num_tokens, num_ranks=4, tokens_per_rank=4_000, sending=0)
        needed = np.maximum(1, 2 ** np.ceil(np.log2(num_tokens / 4_000)))
        ratios.append(plan.rank_loads.max() / fastest(loads, needed, 4))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.25
    assert np.mean(ratios) <= 1.05


def test_a_group_that_would_hold_up_the_step_gets_more_ranks_and_others_do_not():
    loads, num_tokens = np.array([60.0, *[10.0] * 6]), np.array([900, *[400] * 6])
    plan = plan_context_groups(loads, num_tokens, num_ranks=4, tokens_per_rank=1_000, sending=0)
    assert plan.sizes.tolist() == [2, 1, 1, 1, 1, 1, 1]
    assert plan.rank_loads.tolist() == [30.0] * 4
    alike = plan_context_groups(np.ones(8), np.full(8, 900), num_ranks=4, tokens_per_rank=1_000)
    assert alike.sizes.tolist() == [1] * 8


def test_small_groups_fill_the_last_round():
    # five equal groups on four ranks: a second round of one group on all of them
    plan = plan_context_groups(
        np.ones(5), np.full(5, 9), num_ranks=4, tokens_per_rank=10, sending=0.04
    )
    assert sorted(plan.sizes.tolist()) == [1, 1, 1, 1, 4]
    assert plan.rank_loads.tolist() == pytest.approx([1 + (1 + 0.04 * 3) / 4] * 4)
    # where sending costs more than it saves, nothing grows
    dear = plan_context_groups(
        np.ones(5), np.full(5, 9), num_ranks=4, tokens_per_rank=10, sending=2
    )
    assert dear.sizes.tolist() == [1] * 5


def test_an_empty_step_and_groups_that_do_not_fit():
    empty = plan_context_groups(np.zeros(0), np.zeros(0, int), num_ranks=4, tokens_per_rank=10)
    assert empty.waiting == 0
    assert empty.rank_loads.tolist() == [0.0] * 4
    with pytest.raises(ConfigError, match="41 tokens needs 8 ranks of 10 tokens, of which 4 is"):
        plan_context_groups(np.ones(1), np.array([41]), num_ranks=4, tokens_per_rank=10)
    with pytest.raises(ConfigError, match="at least 1, 1 and 0"):
        plan_context_groups(np.ones(1), np.array([41]), num_ranks=4, tokens_per_rank=0)
