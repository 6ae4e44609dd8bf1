"""Small moves from a partition."""

import numpy as np

from isobatch.engine.planning.recompute import choose_recompute
from isobatch.engine.planning.search.local_search import (
    NEVER,
    PartitionEvaluator,
    improve_partition,
    neighbours,
)
from isobatch.engine.planning.search.partition_search import anchors
from isobatch.engine.simulator.evaluate import evaluate
from support.cases import for_each
from support.costs.random_costs import instance


@for_each("seed", range(20))
def test_small_moves_end_where_no_move_helps(seed):
    costs, schedule, memory = instance(5000 + seed, most_layers=12)
    evaluator = PartitionEvaluator(costs, schedule, memory)
    for anchor in anchors(costs, schedule.num_stages):
        borders, step = improve_partition(evaluator.steps, anchor)
        assert step <= evaluator.steps(anchor[np.newaxis])[0]
        assert (evaluator.steps(neighbours(borders)) >= step).all()
        if evaluator.choose(borders) is not None:
            recompute = choose_recompute(costs, borders, schedule, memory)
            assert recompute.tolist() == evaluator.choose(borders).tolist()
            assert evaluate(costs, borders, recompute, schedule).step_ns == step


def test_a_neighbour_has_one_border_moved_or_a_run_of_them_and_no_empty_stage():
    near = neighbours(np.array([0, 5, 6, 20])).tolist()
    assert [0, 2, 6, 20] in near  # alone, by 3
    assert [0, 6, 7, 20] in near  # together, by 1
    assert [0, 7, 8, 20] not in near
    assert [0, 6, 6, 20] not in near
    assert len(near) == len({tuple(borders) for borders in near})


def test_the_least_peaks_are_those_with_everything_recomputed():
    costs, schedule, _ = instance(12, most_layers=10)
    evaluator = PartitionEvaluator(costs, schedule, 0)
    tried = np.stack(anchors(costs, schedule.num_stages))
    peaks = [
        evaluate(costs, borders, evaluator.frees, schedule).memory.peak_bytes.max()
        for borders in tried
    ]
    assert evaluator.least_peaks(tried).tolist() == peaks
    assert (evaluator.steps(tried) == NEVER).all()
