"""Programs: operations with the times of their passes, and edges that mean what schedules do."""

import numpy as np
import pytest

from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.schedule import make_schedule
from support.cases import draws, for_each
from support.costs.random_steps import (
    NAMES,
    as_oracle,
    constant_stages,
    permuted,
    random_encodings,
    random_schedule,
    random_stages,
)
from support.oracles.simulation_oracle import Pipeline


@pytest.mark.thorough
@for_each("seed", draws(40))
def test_operations_wait_for_what_their_passes_need_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    ahead = np.flatnonzero(rng.random(schedule.num_micro_batches) < 0.3)
    schedule = permuted(schedule, rng, ahead)
    stages = random_stages(rng, schedule.num_stages, schedule.num_micro_batches)
    encodings = random_encodings(rng, schedule.num_micro_batches)
    program = make_program(schedule, stages, encodings)

    orders, durations, travel, wants_grad = as_oracle(schedule, stages, encodings)
    pipeline = Pipeline(orders, durations, travel, wants_grad)
    actions = [action for order in orders for action in order]
    made_by = {thing: action for action in actions for thing, _ in pipeline.makes(action)}
    wanted = {
        (
            made_by[thing],
            action,
            0
            if pipeline.rank_of[made_by[thing]] == pipeline.rank_of[action]
            else travel[made_by[thing]],
        )
        for action in actions
        for thing in pipeline.needs(action)
    }

    def named(place):
        kind, stage, number = schedule.action(int(place))
        return NAMES[kind], stage, number

    sources = np.repeat(np.arange(len(schedule)), np.diff(program.edge_offsets))
    edges = [
        (named(source), named(target), int(takes))
        for source, target, takes in zip(
            sources, program.edge_targets, program.edge_ns, strict=True
        )
    ]
    assert len(edges) == len(set(edges))
    assert set(edges) == wanted
    assert program.duration_ns.tolist() == [durations[action] for action in actions]


def test_costs_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match="the schedule has 2 stages and 3 micro-batches, the costs 2 and 4"
    ):
        make_program(make_schedule("1f1b", 2, 3), constant_stages(2, 4))


def test_encoding_ahead_needs_its_times():
    schedule = permuted(make_schedule("1f1b", 2, 3), np.random.default_rng(0), ahead=[1])
    with pytest.raises(ValueError, match="the schedule encodes ahead, but no encodings are given"):
        make_program(schedule, constant_stages(2, 3))
