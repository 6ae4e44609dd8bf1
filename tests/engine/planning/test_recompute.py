"""Recomputed layers: what the search finds is what trying every subset finds."""

import itertools

import numpy as np
import pytest

from isobatch.engine.planning.rank_memory import (
    layer_memory,
    peak_bytes,
    rank_order,
)
from isobatch.engine.planning.recompute import (
    InfeasiblePlan,
    choose_recompute,
)
from isobatch.engine.simulator.evaluate import evaluate, memory_of
from isobatch.engine.simulator.stages import stage_costs
from support.cases import draws, for_each
from support.costs.random_costs import SHAPES, random_model, schedule_for, vlm


def instance(seed, *, most_layers=9):
    """Costs, borders, schedule, and memory between what is needed at least and at most, or a little
    less.
    """
    rng = np.random.default_rng(seed)
    name, chunks = SHAPES[seed % len(SHAPES)]
    num_stages = int(rng.integers(1, 4)) * chunks
    costs = random_model(
        rng,
        int(rng.integers(num_stages, max(num_stages, most_layers) + 1)),
        int(rng.integers(1, 6)),
    )
    inner = rng.choice(np.arange(1, costs.num_layers), num_stages - 1, replace=False)
    borders = np.array([0, *sorted(inner.tolist()), costs.num_layers])
    schedule = schedule_for(name, borders, costs.num_micro_batches, chunks)
    most = peaks(costs, borders, schedule, np.zeros(costs.num_layers, bool)).max()
    least = peaks(costs, borders, schedule, np.ones(costs.num_layers, bool)).max()
    return costs, borders, schedule, int(rng.integers(least - (most - least) // 8, most + 2))


def peaks(costs, borders, schedule, recompute):
    return memory_of(schedule, stage_costs(costs, borders, recompute)).peak_bytes


def subsets(num_layers):
    return (np.array(bits) for bits in itertools.product([False, True], repeat=num_layers))


@for_each("seed", draws(80))
def test_the_kernel_s_peak_is_that_of_the_memory_model(seed):
    costs, borders, schedule, _ = instance(seed, most_layers=15)
    recompute = np.random.default_rng(seed).random(costs.num_layers) < 0.5
    layers = layer_memory(costs, schedule.num_ranks)
    for rank, peak in enumerate(peaks(costs, borders, schedule, recompute)):
        own = slice(rank, None, schedule.num_ranks)
        order = rank_order(schedule, rank)
        assert peak_bytes(layers, order, borders[:-1][own], borders[1:][own], recompute) == peak


@for_each("seed", draws(50))
def test_the_choice_takes_as_little_time_as_the_best_of_all_subsets(seed):
    costs, borders, schedule, memory = instance(seed)
    extra = costs.recompute_ns.sum(axis=1)
    fitting = [
        s for s in subsets(costs.num_layers) if (peaks(costs, borders, schedule, s) <= memory).all()
    ]
    if not fitting:
        with pytest.raises(InfeasiblePlan):
            choose_recompute(costs, borders, schedule, memory)
        return
    chosen = choose_recompute(costs, borders, schedule, memory)
    assert (peaks(costs, borders, schedule, chosen) <= memory).all()
    assert extra[chosen].sum() == min(extra[s].sum() for s in fitting)


@for_each("seed", draws(40))
def test_of_equal_layers_of_a_stage_the_first_ones_need_least_memory(seed):
    costs, borders, schedule, _ = instance(seed)
    for stage in range(len(borders) - 1):
        layers = range(borders[stage], borders[stage + 1])
        for kind in {costs.kinds[layer] for layer in layers}:
            alike = [layer for layer in layers if costs.kinds[layer] == kind]
            base = np.random.default_rng(seed).random(costs.num_layers) < 0.5
            for count in range(len(alike) + 1):
                needs = {}
                for chosen in itertools.combinations(alike, count):
                    recompute = base.copy()
                    recompute[alike] = False
                    recompute[list(chosen)] = True
                    needs[chosen] = peaks(costs, borders, schedule, recompute)
                assert all((needs[tuple(alike[:count])] <= other).all() for other in needs.values())


@for_each("seed", draws(40))
def test_one_more_recomputed_layer_never_needs_more_memory(seed):
    costs, borders, schedule, _ = instance(seed, most_layers=12)
    rng = np.random.default_rng(seed)
    recompute = np.zeros(costs.num_layers, bool)
    before = peaks(costs, borders, schedule, recompute)
    for layer in rng.permutation(costs.num_layers):
        recompute[layer] = True
        after = peaks(costs, borders, schedule, recompute)
        assert (after <= before).all()
        before = after


def test_later_stages_of_1f1b_recompute_less():
    costs = vlm(np.random.default_rng(0), 20, 20, 16, spread=0.0)
    borders = np.array([0, 11, 22, 33, costs.num_layers])
    schedule = schedule_for("1f1b", borders, 16)
    need = peaks(costs, borders, schedule, np.zeros(costs.num_layers, bool))
    chosen = choose_recompute(costs, borders, schedule, int(need.max() * 0.85))
    per_stage = np.add.reduceat(chosen, borders[:-1])
    assert per_stage[0] > per_stage[1] > 0 == per_stage[3]


def test_nothing_is_recomputed_where_all_fits():
    costs = vlm(np.random.default_rng(0), 10, 10, 8)
    borders = np.array([0, 12, costs.num_layers])
    assert not choose_recompute(costs, borders, schedule_for("1f1b", borders, 8), 10**15).any()


def test_a_layer_whose_input_is_larger_than_its_activations_is_never_recomputed():
    costs = random_model(np.random.default_rng(1), 6, 3)
    costs.saved_bytes[:] = costs.kept_bytes - (costs.kept_bytes > 0)
    assert (layer_memory(costs, 1).kind < 0).all()


def test_many_kinds_end_early_with_a_choice_that_fits():
    rng = np.random.default_rng(5)
    costs = random_model(rng, 40, 4, kinds=40)
    borders = np.array([0, 40])
    schedule = schedule_for("gpipe", borders, 4)
    most = peaks(costs, borders, schedule, np.zeros(40, bool)).max()
    least = peaks(costs, borders, schedule, np.ones(40, bool)).max()
    memory = int(most + least) // 2
    assert (
        peaks(costs, borders, schedule, choose_recompute(costs, borders, schedule, memory)).max()
        <= memory
    )


def test_an_infeasible_plan_says_which_share_of_the_micro_batch_would_fit():
    costs = vlm(np.random.default_rng(0), 8, 8, 8, spread=0.0)
    borders = np.array([0, 10, costs.num_layers])
    schedule = schedule_for("1f1b", borders, 8)
    full = memory_of(schedule, stage_costs(costs, borders, np.ones(costs.num_layers, bool)))
    rank = int(full.peak_bytes.argmax())
    state, peak = int(full.state_bytes[rank]), int(full.peak_bytes[rank])
    memory = state + (peak - state) // 2
    with pytest.raises(
        InfeasiblePlan, match=rf"^rank {rank} needs .* at most 50 % of this size, or split .*$"
    ):
        choose_recompute(costs, borders, schedule, memory)
    with pytest.raises(
        InfeasiblePlan, match=r"optimizer state; split the model over 3 times as many"
    ):
        choose_recompute(costs, borders, schedule, peak * 2 // 5)


def test_a_step_that_fits_recomputes_and_is_slower():
    costs = vlm(np.random.default_rng(0), 10, 10, 8)
    borders = np.array([0, 12, costs.num_layers])
    schedule = schedule_for("1f1b", borders, 8)
    need = int(peaks(costs, borders, schedule, np.zeros(costs.num_layers, bool)).max())
    steps = [
        evaluate(costs, borders, choose_recompute(costs, borders, schedule, memory), schedule)
        for memory in (need, need - 1)
    ]
    assert steps[0].step_ns < steps[1].step_ns
