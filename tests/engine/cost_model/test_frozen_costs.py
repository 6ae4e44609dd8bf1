"""Costs with parts of the model frozen, from those with all of it trained."""

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.costs import MEMORY, Costs, frozen_costs

LAYERS, COUNT = 5, 3
TIMES = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns")


def costs(first_trained=0):
    rng = np.random.default_rng(1)
    return Costs(
        names=tuple("abcde"),
        kinds=tuple("abcde"),
        **{name: rng.integers(1, 100, (LAYERS, COUNT)) for name in (*TIMES, *MEMORY)},
        state_bytes=np.ones(LAYERS, np.int64),
        param_counts=np.ones(LAYERS, np.int64),
        sends_grad=np.arange(LAYERS) >= first_trained,
    )


@pytest.mark.parametrize(
    "trained", [(1, 1, 1, 1, 1), (0, 0, 1, 0, 1), (1, 0, 0, 1, 0), (0, 0, 0, 0, 0)]
)
def test_each_layer_runs_backward_what_its_place_needs(trained):
    whole, found = costs(), frozen_costs(costs(), [bool(own) for own in trained])
    for place, own in enumerate(trained):
        any_before, any_to_here = any(trained[:place]), any(trained[: place + 1])
        expected = {
            "input_grad_ns": any_before,
            "weight_grad_ns": bool(own),
            "recompute_ns": any_to_here,
            "saved_bytes": any_to_here,
            "kept_bytes": any_to_here,
            "deferred_bytes": bool(own),
            "weight_working_bytes": bool(own),
        }
        for name in (*TIMES, *MEMORY):
            values = getattr(whole, name)[place] * expected.get(name, True)
            assert getattr(found, name)[place].tolist() == values.tolist(), (name, place)
        assert found.sends_grad[place] == any_to_here


def test_costs_without_the_gradients_that_are_needed_are_refused():
    behind = [False, False, True, True, True]
    assert frozen_costs(costs(2), behind).sends_grad.tolist() == behind
    for trained in ([False, True, True, True, True], [True] * 4):
        with pytest.raises(ConfigError, match="measure with these parts trained"):
            frozen_costs(costs(2), trained)
