"""Plans out of profiles: their predictions are those of the measured costs."""

from dataclasses import replace

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.layer_list import phases_of
from isobatch.engine.cost_model.loads import largest_micro_batch
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import (
    COLUMNS,
    make_profile,
    measured_costs,
    profiled_costs,
)
from isobatch.engine.planning.bmp import greedy_anchor
from isobatch.engine.planning.plan import read_plan, write_plan
from isobatch.engine.planning.planner import plan_from_profile
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model
from support.costs.plan_questions import plan_request, uneven_loads

PARALLEL = Parallelism(tp=4, pp=4, dp=2)


def profile_of(model, loads):
    return make_profile(
        layer_costs(model, load_cluster("gh200"), PARALLEL, loads), loads, phases_of(model)
    )


def test_a_plan_says_what_the_profile_says_of_its_partition(tmp_path):
    loads = uneven_loads(16, model="internvl_1_5")
    asked = plan_request(parallel=PARALLEL, num_micro_batches=4, loads=loads)
    asked = replace(asked, full=largest_micro_batch(loads))
    profile = profile_of(asked.model, loads)
    costs = profiled_costs(profile, loads)
    borders, recompute = greedy_anchor(costs, 4), np.arange(costs.num_layers) % 2 == 0
    plan = plan_from_profile(asked, profile, borders, recompute)
    assert plan.borders == tuple(borders.tolist())
    assert (plan.recompute_mask == recompute).all()
    forward = np.add.reduceat(costs.forward_ns, borders[:-1], axis=0).mean(axis=1)
    assert plan.predicted.forward_ns == pytest.approx(forward, abs=1)
    assert plan.predicted.step_ns > forward.max() * 4
    assert max(plan.predicted.peak_bytes) <= max(plan.predicted.full_peak_bytes)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").to_json() == plan.to_json()


def test_what_was_measured_is_used_as_it_is():
    loads = uneven_loads(16, model="internvl_1_5")
    places = np.array([3, 1, 1, 12])
    asked = plan_request(
        parallel=Parallelism(tp=4, pp=4), num_micro_batches=4, loads=loads.take(places)
    )
    asked = replace(asked, full=largest_micro_batch(loads))
    profile = profile_of(asked.model, loads)
    exact = layer_costs(asked.model, load_cluster("gh200"), PARALLEL, loads.take(places))
    made = measured_costs(profile, places)
    for name in (*COLUMNS, "state_bytes", "sends_grad"):
        assert (getattr(made, name) == getattr(exact, name)).all(), name
    assert (made.names, made.kinds) == (exact.names, exact.kinds)
    borders, recompute = greedy_anchor(exact, 4), np.zeros(exact.num_layers, bool)
    plan = plan_from_profile(asked, profile, borders, recompute, places)
    assert (
        plan.predicted.step_ns == evaluate(exact, borders, recompute, asked.make_schedule()).step_ns
    )


def test_a_profile_of_another_model_is_refused():
    asked = plan_request()
    profile = profile_of(load_model("tiny"), asked.loads)
    with pytest.raises(
        ConfigError, match=r"the profile has \d+ layers, the model internvl_1_5 \d+"
    ):
        plan_from_profile(
            asked,
            profile,
            np.array([0, 1, 2, 3, len(profile.names)]),
            np.zeros(len(profile.names), bool),
        )


def test_the_largest_micro_batch_has_the_most_of_everything():
    loads = uneven_loads(9)
    full = largest_micro_batch(loads)
    assert len(full) == 1
    assert full.llm.squares[0] == loads.llm.squares.max()
    assert full.vision.items[0] == loads.vision.items.max()
    assert full.audio.tokens[0] == 0
