"""BMP: the ranking against enumeration of every candidate, and what comes of running the best."""

import itertools

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.costs import NS_PER_MS
from isobatch.engine.planning.bmp import (
    candidate,
    greedy_anchor,
    rank_candidates,
    search_bmp,
)
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate
from support.cases import for_each
from support.costs.random_costs import random_model, schedule_for, vlm

PLENTY = 10**15


def step_of(costs, schedule):
    """borders -> time of a step with nothing recomputed."""
    nothing = np.zeros(costs.num_layers, bool)
    return lambda borders: evaluate(costs, borders, nothing, schedule).step_ns


def by_hand(costs, borders):
    """VAR in ms^2, SUM in bytes of a mean micro-batch, and their sum in ms as the module says."""
    forward = costs.forward_ns.mean(axis=1) / NS_PER_MS
    stages = [forward[a:b].sum() for a, b in itertools.pairwise(borders)]
    mean = sum(stages) / len(stages)
    variance = sum((stage - mean) ** 2 for stage in stages)
    sent = sum(costs.sent_bytes[cut - 1].mean() for cut in borders[1:-1])
    comm = sum(
        costs.send_ns[cut - 1].mean() / NS_PER_MS * (2 if costs.sends_grad[cut - 1] else 1)
        for cut in borders[1:-1]
    )
    return variance, sent, (variance / mean if mean else 0.0) + comm


@for_each("seed", range(100))
def test_the_ranking_is_that_of_all_candidates_in_the_windows(seed):
    rng = np.random.default_rng(seed)
    costs = random_model(rng, int(rng.integers(4, 14)), 2, most=10**7)
    num_stages, radius = int(rng.integers(1, 5)), int(rng.integers(0, 4))
    anchor = greedy_anchor(costs, num_stages)
    windows = [range(border - radius, border + radius + 1) for border in anchor[1:-1].tolist()]
    every = [[0, *inner, costs.num_layers] for inner in itertools.product(*windows)]
    every = [borders for borders in every if (np.diff(borders) > 0).all()]
    metrics = sorted(by_hand(costs, borders)[2] for borders in every)
    most = int(rng.integers(1, 20))
    found = rank_candidates(costs, anchor, radius=radius, max_count=most)
    assert len({tuple(one.borders) for one in found}) == len(found) == min(most, len(every))
    assert [one.metric_ms for one in found] == pytest.approx(metrics[:most])
    for one in found:
        variance, sent, metric = by_hand(costs, one.borders)
        assert (one.variance_ms2, one.metric_ms) == pytest.approx((variance, metric))
        assert abs(one.comm_bytes - sent) < 1


@for_each("seed", range(50))
def test_every_stage_of_the_anchor_is_as_near_to_its_share_as_one_layer_more_or_less(seed):
    rng = np.random.default_rng(seed)
    costs = random_model(rng, int(rng.integers(4, 30)), 3)
    num_stages = int(rng.integers(1, 5))
    borders = greedy_anchor(costs, num_stages)
    weights = costs.forward_ns.sum(axis=1)
    assert (np.diff(borders) > 0).all()
    for stage in range(num_stages - 1):
        start, end = borders[stage], borders[stage + 1]
        share = weights[start:].sum() / (num_stages - stage)
        away = abs(weights[start:end].sum() - share)
        for other in range(start + 1, costs.num_layers - (num_stages - stage) + 2):
            assert away <= abs(weights[start:other].sum() - share)


def test_equal_layers_are_cut_evenly():
    costs = vlm(np.random.default_rng(0), 0, 0, 2, spread=0.0)
    costs.forward_ns[:] = 7
    assert greedy_anchor(costs, 3).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stage_ms", "deviation"), [((500, 160, 150, 160), 148), ((2000, 1600, 1000, 1100), 402)]
)
def test_the_variance_is_that_of_figure_2(stage_ms, deviation):
    """OmniBal prints the population's deviation of the stages' times, cut to whole ms; eq. 4 does
    not divide by N.
    """
    costs = vlm(np.random.default_rng(0), 1, 0, 1)
    costs.forward_ns[:, 0] = np.array(stage_ms) * NS_PER_MS
    assert int(np.sqrt(candidate(costs, np.arange(5)).variance_ms2 / 4)) == deviation


@for_each("seed", range(20))
def test_the_best_is_the_fastest_of_what_was_run_and_no_slower_than_the_anchor(seed):
    rng = np.random.default_rng(seed)
    costs = vlm(rng, int(rng.integers(5, 20)), int(rng.integers(5, 20)), 8)
    schedule = schedule_for("1f1b", np.arange(5), 8)
    step = step_of(costs, schedule)
    found = search_bmp(costs, 4, step)
    assert found.best.step_ns == min(one.step_ns for one in found.candidates) <= step(found.anchor)
    assert step(found.best.borders) == found.best.step_ns
    assert len(found.candidates) <= 13
    assert np.abs(found.best.borders - found.anchor).max() <= 3
    assert search_partition(costs, schedule, PLENTY).step_ns <= found.best.step_ns


def test_a_gap_before_the_cut_that_sends_least_is_found_if_it_is_worth_it():
    """Where a projector makes the output small, a cut there beats one that is a little more
    even.
    """
    costs = vlm(np.random.default_rng(0), 10, 10, 8, spread=0.0)
    costs.forward_ns[:], costs.input_grad_ns[:], costs.weight_grad_ns[:] = (
        NS_PER_MS,
        NS_PER_MS,
        NS_PER_MS,
    )
    costs.send_ns[:-1] = 5 * NS_PER_MS
    costs.send_ns[9] = 0
    schedule = schedule_for("1f1b", np.arange(3), 8)
    assert greedy_anchor(costs, 2).tolist() == [0, 11, 23]
    best = search_bmp(costs, 2, step_of(costs, schedule)).best
    assert best.borders.tolist() == [0, 10, 23]


def test_candidates_that_do_not_fit_are_kept_as_evidence_and_none_fitting_is_an_error():
    costs = vlm(np.random.default_rng(0), 10, 10, 8)

    def step(borders):
        if borders[1] > 12:
            raise InfeasiblePlan("rank 0 needs more")
        return 100 - int(borders[1])

    found = search_bmp(costs, 2, step)
    assert found.best.borders[1] == 12
    assert {one.step_ns is None for one in found.candidates} == {True, False}
    with pytest.raises(InfeasiblePlan, match="rank 0 needs more"):
        search_bmp(costs, 2, lambda borders: step(borders + 20))


def test_a_negative_radius_is_refused():
    costs = vlm(np.random.default_rng(0), 5, 5, 2)
    with pytest.raises(ConfigError, match="radius -1"):
        rank_candidates(costs, greedy_anchor(costs, 2), radius=-1, max_count=3)
