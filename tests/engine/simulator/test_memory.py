"""Memory: what a rank that allocates and frees layer by layer holds at most."""

import numpy as np
import pytest

from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.schedule import SCHEDULES, make_schedule
from isobatch.engine.simulator.stages import stage_costs
from support.cases import for_each
from support.costs.random_steps import NAMES, permuted, random_costs
from support.oracles.simulation_oracle import RankMemory


def random_step(rng, name):
    """(costs, borders, recompute, schedule), with every layer in one of several stages per rank if
    interleaved.
    """
    chunks = int(rng.integers(1, 4)) if name == "interleaved" else 1
    ranks, layers, micro_batches = (
        int(rng.integers(1, 5)),
        int(rng.integers(12, 20)),
        int(rng.integers(1, 9)),
    )
    cuts = np.sort(rng.choice(np.arange(1, layers), ranks * chunks - 1, replace=False))
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    if rng.random() < 0.5:
        schedule = permuted(schedule, rng)
    borders = np.array([0, *cuts, layers])
    return (
        random_costs(rng, layers, micro_batches),
        borders,
        rng.random(layers) < rng.random(),
        schedule,
    )


@for_each("seed", range(60))
@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_those_of_allocating_and_freeing_layer_by_layer(name, seed):
    costs, borders, recompute, schedule = random_step(np.random.default_rng(seed), name)
    memory = memory_of(schedule, stage_costs(costs, borders, recompute))
    for rank in range(schedule.num_ranks):
        own = range(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1])
        stages = range(rank, schedule.num_stages, schedule.num_ranks)
        state = sum(
            int(costs.state_bytes[borders[stage] : borders[stage + 1]].sum()) for stage in stages
        )
        # on their way: an output and its gradient at both ends of a stage
        messages = [
            sum(
                costs.sent_bytes[cut - 1, number] * (1 + costs.sends_grad[cut - 1])
                for cut in borders[stage : stage + 2]
                if 0 < cut < costs.num_layers and schedule.num_ranks > 1
            )
            for stage in stages
            for number in range(costs.num_micro_batches)
        ]
        oracle = RankMemory(state + max(messages), costs, recompute)
        assert memory.state_bytes[rank] == state
        for place in own:
            kind, stage, number = schedule.action(place)
            oracle.peak, before = oracle.live, oracle.peak
            after = oracle.run(
                (NAMES[kind], stage, number), range(borders[stage], borders[stage + 1])
            )
            assert memory.during_bytes[place] == oracle.peak
            assert memory.after_bytes[place] == after
            oracle.peak = max(oracle.peak, before)
        assert memory.peak_bytes[rank] == oracle.peak
        assert oracle.live == oracle.state, "something was never freed"


@for_each("seed", range(20))
def test_recomputing_a_layer_that_keeps_less_never_needs_more_in_1f1b(seed):
    rng = np.random.default_rng(seed)
    costs, borders, _, schedule = random_step(rng, "1f1b")
    smaller = {name: getattr(costs, name) for name in costs.__slots__}
    smaller["kept_bytes"] = costs.saved_bytes // 2
    costs = type(costs)(**smaller)
    chosen = np.zeros(costs.num_layers, bool)
    before = memory_of(schedule, stage_costs(costs, borders, chosen)).peak_bytes
    for layer in rng.permutation(costs.num_layers):
        chosen[layer] = True
        after = memory_of(schedule, stage_costs(costs, borders, chosen)).peak_bytes
        assert (after <= before).all()
        before = after


def test_stage_s_of_1f1b_holds_the_micro_batches_of_the_stages_that_are_left():
    costs = random_costs(np.random.default_rng(1), 4, 8)
    flat = {name: getattr(costs, name) for name in costs.__slots__}
    nothing = np.zeros((4, 8), np.int64)
    flat |= {"saved_bytes": np.full((4, 8), 10), "working_bytes": nothing, "sent_bytes": nothing}
    flat["state_bytes"] = np.arange(4) * 100
    stages = stage_costs(type(costs)(**flat), np.arange(5), np.zeros(4, bool))
    assert memory_of(make_schedule("1f1b", 4, 8), stages).peak_bytes.tolist() == [40, 130, 220, 310]
