"""Searches over orders of micro-batches, against all orders."""

from itertools import permutations

import numpy as np
import pytest

from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning._order_search import lower_bound, search_clusters, search_swaps
from isobatch.engine.tuning.order_times import NEVER, order_problem, times_of_orders
from isobatch.engine.tuning.precompute import frozen_encoder, where_to_encode
from support.cases import for_each
from support.costs.linear_costs import LinearModel, even_borders, mixed_samples
from support.costs.random_steps import random_stages

MODEL = LinearModel(layers=8, vit_token_ns=8_000)


def problem_of(seed, count, name="1f1b", where="never", stages=3):
    costs = MODEL(mixed_samples(np.random.default_rng(seed), count))
    borders = even_borders(MODEL, stages)
    made = stage_costs(costs, borders, np.zeros(costs.num_layers, bool))
    schedule = make_schedule(name, stages, count)
    ahead = where_to_encode(frozen_encoder(costs, borders), schedule, made, where=where)
    return order_problem(schedule, made, None, ahead)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble"])
@for_each("where", ["never", "own", "any"])
def test_exchanges_find_the_best_of_all_orders_on_nearly_all_small_steps(name, where):
    found = 0
    for seed in range(20):
        problem = problem_of(seed, 6, name, where)
        best = int(times_of_orders(problem, np.array(list(permutations(range(6))))).min())
        ordered = search_swaps(problem, search_clusters(problem).order, trials=500)
        assert lower_bound(problem) <= best <= ordered.step_ns <= 1.02 * best
        found += ordered.step_ns == best
    assert found >= 18


@for_each("seed", range(30))
def test_the_bound_holds_for_random_stages_and_schedules(seed):
    rng = np.random.default_rng(seed)
    name = ("1f1b", "gpipe", "zero_bubble", "interleaved")[seed % 4]
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, 3, 5, chunks)
    problem = order_problem(schedule, random_stages(rng, 3 * chunks, 5))
    times = times_of_orders(problem, np.array(list(permutations(range(5)))))
    assert 0 < lower_bound(problem) <= times.min()


@for_each("seed", range(10))
def test_no_search_is_worse_than_the_one_before_it_and_answers_are_stable(seed):
    problem = problem_of(seed, 14, where="own", stages=4)
    came = np.arange(14)
    clusters = search_clusters(problem)
    swaps = search_swaps(problem, clusters.order, trials=300)
    assert swaps.step_ns <= clusters.step_ns <= times_of_orders(problem, came[np.newaxis])[0]
    for ordered in (clusters, swaps):
        assert sorted(ordered.order.tolist()) == came.tolist()
        assert times_of_orders(problem, ordered.order[np.newaxis])[0] == ordered.step_ns
    again = search_swaps(problem, clusters.order, trials=300)
    np.testing.assert_array_equal(again.order, swaps.order)
    assert clusters.num_simulated <= 121


def test_exchanges_find_an_order_that_fits_where_the_first_one_does_not():
    # two large micro-batches beside each other do not fit
    rng = np.random.default_rng(0)
    stages = random_stages(rng, 2, 6)
    large = np.array([1, 1, 1, 40, 40, 1])
    for name in ("live_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        getattr(stages, name)[:] = large
    schedule = make_schedule("1f1b", 2, 6)
    constant = stages.state_bytes + stages.message_bytes.max(axis=1)
    problem = order_problem(schedule, stages, int(constant.max()) + 42)
    came = np.arange(6)
    assert times_of_orders(problem, came[np.newaxis])[0] == NEVER
    found = search_swaps(problem, came, trials=500).order.tolist()
    assert abs(found.index(3) - found.index(4)) > 1


def test_one_micro_batch_has_one_order():
    problem = problem_of(0, 1)
    assert search_swaps(problem, search_clusters(problem).order, trials=10).order.tolist() == [0]
