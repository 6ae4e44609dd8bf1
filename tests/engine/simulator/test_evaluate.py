"""Evaluating a partition is simulating its stages."""

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.simulator.evaluate import evaluate, memory_of
from isobatch.engine.simulator.schedule import SCHEDULES
from isobatch.engine.simulator.stages import stage_costs
from support.cases import for_each
from support.costs.random_costs import schedule_for
from support.costs.random_steps import as_oracle, random_costs
from support.oracles.simulation_oracle import Pipeline


@for_each("seed", range(20))
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_outcome_is_the_simulated_step_of_the_layers(name, seed):
    rng = np.random.default_rng(seed)
    costs = random_costs(rng, 12, int(rng.integers(1, 9)))
    per_rank = 2 if name == "interleaved" else 1
    borders = np.array([0, 2, 3, 5, 9, 11, 12])
    recompute = rng.random(12) < 0.5
    schedule = schedule_for(name, borders, costs.num_micro_batches, per_rank)
    assert (schedule.num_ranks, schedule.num_stages) == (6 // per_rank, 6)
    outcome = evaluate(costs, borders, recompute, schedule)
    stages = stage_costs(costs, borders, recompute)
    times = Pipeline(*as_oracle(schedule, stages)).run()
    assert outcome.step_ns == max(end for _, end in times.values())
    peaks = memory_of(schedule, stages).peak_bytes
    np.testing.assert_array_equal(outcome.memory.peak_bytes, peaks)
    assert outcome.fits(int(peaks.max()))
    assert not outcome.fits(int(peaks.max()) - 1)


def test_a_partition_and_a_schedule_of_different_stages_are_refused():
    costs = random_costs(np.random.default_rng(0), 4, 2)
    with pytest.raises(
        ValueError, match="the schedule has 2 stages and 2 micro-batches, the costs 4 and 2"
    ):
        evaluate(
            costs, np.arange(5), np.zeros(4, bool), schedule_for("1f1b", np.array([0, 1, 4]), 2)
        )
    with pytest.raises(ConfigError, match="borders must rise from 0 to 4"):
        evaluate(
            costs, np.array([0, 5]), np.zeros(4, bool), schedule_for("1f1b", np.array([0, 5]), 2)
        )
