"""Stages: sums of their layers, recomputed or not, and what lies between them."""

from itertools import pairwise

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.simulator.stages import stage_costs
from support.cases import for_each
from support.costs.random_steps import random_costs


def random_partition(rng):
    """(costs, borders, recompute)."""
    layers = int(rng.integers(1, 12))
    costs = random_costs(rng, layers, int(rng.integers(1, 6)))
    cuts = np.flatnonzero(rng.random(layers - 1) < 0.4) + 1
    return costs, np.array([0, *cuts, layers]), rng.random(layers) < 0.5


@for_each("seed", range(100))
def test_times_are_those_of_the_layers_and_recomputation_belongs_to_the_input_gradient(seed):
    costs, borders, recompute = random_partition(np.random.default_rng(seed))
    stages = stage_costs(costs, borders, recompute)
    for stage, (first, end) in enumerate(pairwise(borders)):
        for number in range(costs.num_micro_batches):
            layers = range(first, end)
            again = sum(costs.recompute_ns[layer, number] for layer in layers if recompute[layer])
            forward = sum(costs.forward_ns[layer, number] for layer in layers)
            towards_input = sum(costs.input_grad_ns[layer, number] for layer in layers) + again
            of_weights = sum(costs.weight_grad_ns[layer, number] for layer in layers)
            assert stages.forward_ns[stage, number] == forward
            assert stages.input_grad_ns[stage, number] == towards_input
            assert stages.weight_grad_ns[stage, number] == of_weights
            assert stages.backward_ns[stage, number] == towards_input + of_weights
        assert stages.state_bytes[stage] == sum(costs.state_bytes[first:end])


@for_each("seed", range(100))
def test_outputs_and_gradients_travel_at_each_border_once(seed):
    costs, borders, recompute = random_partition(np.random.default_rng(seed))
    stages = stage_costs(costs, borders, recompute)
    for stage in range(stages.num_stages):
        last = borders[stage + 1] - 1
        is_last = stage == stages.num_stages - 1
        np.testing.assert_array_equal(stages.send_ns[stage], 0 if is_last else costs.send_ns[last])
        assert stages.sends_grad[stage] == (not is_last and costs.sends_grad[last])
        back = stages.send_back_ns[stage + 1] if not is_last else stages.send_back_ns[0]
        np.testing.assert_array_equal(back, costs.send_ns[last] if stages.sends_grad[stage] else 0)


@for_each("seed", range(20))
def test_one_stage_sends_nothing(seed):
    costs, _, recompute = random_partition(np.random.default_rng(seed))
    stages = stage_costs(costs, np.array([0, costs.num_layers]), recompute)
    assert not stages.send_ns.any()
    assert not stages.send_back_ns.any()


@for_each("borders", [[0], [0, 3], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4], [0, 5]])
def test_a_wrong_partition_is_named(borders):
    costs = random_costs(np.random.default_rng(0), 4, 2)
    with pytest.raises(ConfigError) as error:
        stage_costs(costs, np.array(borders), np.zeros(4, bool))
    assert str(error.value) == f"partition {borders} of 4 layers; borders must rise from 0 to 4"


def test_recompute_must_name_every_layer():
    costs = random_costs(np.random.default_rng(0), 4, 2)
    with pytest.raises(ConfigError, match="recompute names 3 layers; the model has 4"):
        stage_costs(costs, np.array([0, 4]), np.zeros(3, bool))
