"""Even partitions against all partitions; what the three methods make of a model."""

import itertools

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.planning.partition import (
    METHODS,
    by_forward_time,
    by_layers,
    by_params,
    by_step_time,
    even_partition,
)
from support.cases import for_each
from support.costs.random_costs import random_model, vlm


def all_borders(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield np.array([0, *inner, num_layers])


@for_each("seed", range(200))
def test_no_partition_has_a_smaller_largest_sum_nor_as_large_a_one_and_less_variance(seed):
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 11))
    num_stages = int(rng.integers(1, num_layers + 1))
    weights = rng.integers(0, int(rng.choice([2, 10, 10**6])), num_layers)

    def sums(borders):
        return np.add.reduceat(weights, borders[:-1])

    best = min(
        (sums(b).max(), int((sums(b) ** 2).sum())) for b in all_borders(num_layers, num_stages)
    )
    found = sums(even_partition(weights, num_stages))
    assert (found.max(), int((found**2).sum())) == best


def test_layers_are_dealt_evenly_the_first_stages_get_one_more():
    costs = vlm(np.random.default_rng(0), 4, 3, 2)
    assert by_layers(costs, 4).tolist() == [0, 3, 6, 8, 10]


def test_each_method_is_best_by_its_own_figure():
    costs = vlm(np.random.default_rng(0), 45, 48, 4)
    figures = {
        "parameter-based": costs.param_counts,
        "layer-based": np.ones(costs.num_layers),
        "profile-based": costs.forward_ns.sum(axis=1),
    }
    for name, figure in figures.items():
        largest = {
            other: np.add.reduceat(figure, method(costs, 4)[:-1]).max()
            for other, method in METHODS.items()
        }
        assert largest[name] == min(largest.values())


def test_a_frozen_encoder_counts_less_by_step_time_than_by_forward_time():
    costs = random_model(np.random.default_rng(3), 8, 2)
    costs.forward_ns[:], costs.input_grad_ns[:], costs.weight_grad_ns[:] = 10, 0, 0
    costs.input_grad_ns[4:], costs.weight_grad_ns[4:] = 10, 10
    assert by_forward_time(costs, 2)[1] == 4
    assert by_step_time(costs, 2)[1] == 5


def test_a_stage_without_layers_is_refused():
    costs = vlm(np.random.default_rng(0), 1, 1, 2)
    for method in (by_params, by_layers, by_forward_time):
        with pytest.raises(ConfigError, match="6 stages of 5 layers; give 1 to 5"):
            method(costs, 6)
        assert method(costs, 5).tolist() == [0, 1, 2, 3, 4, 5]
