"""OmniBal's four steps, against modelled memory that stands for a running model."""

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.planning.adaptive_recompute import OutOfMemory, adapt_recompute, in_flight
from isobatch.engine.planning.recompute import InfeasiblePlan, choose_recompute
from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.stages import stage_costs
from support.cases import for_each
from support.costs.random_costs import schedule_for, vlm


class Model:
    """A run of the memory model; noise in the largest part of what activations hold, always the
    same for a choice.
    """

    def __init__(self, costs, borders, schedule, memory, *, noise=0.0):
        self.costs, self.borders, self.schedule, self.memory, self.noise = (
            costs,
            borders,
            schedule,
            memory,
            noise,
        )
        self.runs = 0

    def peaks(self, recompute):
        return memory_of(self.schedule, stage_costs(self.costs, self.borders, recompute)).peak_bytes

    def __call__(self, recompute):
        self.runs += 1
        rng = np.random.default_rng(recompute.tolist())
        left = self.memory - self.peaks(recompute)
        if (left < 0).any():
            raise OutOfMemory(np.flatnonzero(left < 0).tolist())
        return left - np.rint(self.noise * self.memory * rng.random(len(left))).astype(np.int64)


def model(seed, *, name="1f1b", share=0.5, noise=0.0, spread=0.05):
    """`share`: how much of what recomputation can free the memory has, on the rank that needs
    most.
    """
    rng = np.random.default_rng(seed)
    costs = vlm(rng, int(rng.integers(15, 30)), int(rng.integers(15, 30)), 12, spread=spread)
    inner = np.sort(rng.choice(np.arange(4, costs.num_layers, 4), 3, replace=False))
    borders = np.array([0, *inner.tolist(), costs.num_layers])
    schedule = schedule_for(name, borders, 12)
    found = Model(costs, borders, schedule, 0)
    least, most = (found.peaks(np.full(costs.num_layers, full)).max() for full in (True, False))
    return Model(costs, borders, schedule, int(least + share * (most - least)), noise=noise)


def extra_ns(observe, recompute):
    return int(observe.costs.recompute_ns[recompute].sum())


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble"])
@for_each("share", [0.05, 0.3, 0.7, 1.0])
@for_each("seed", range(6))
def test_it_ends_within_a_layer_per_stage_of_the_exact_choice(name, share, seed):
    observe = model(seed, name=name, share=share)
    adapted = adapt_recompute(observe.costs, observe.borders, observe.schedule, observe)
    best = choose_recompute(observe.costs, observe.borders, observe.schedule, observe.memory)
    one_layer = observe.costs.recompute_ns.sum(axis=1).max()
    assert (observe.peaks(adapted.recompute) <= observe.memory).all()
    assert (
        0
        <= extra_ns(observe, adapted.recompute) - extra_ns(observe, best)
        <= len(observe.borders) * one_layer
    )
    away = np.add.reduceat(adapted.recompute.astype(int) - best, observe.borders[:-1])
    assert np.abs(away).max() <= 2
    assert observe.runs == len(adapted.trials) <= 20


@for_each("seed", range(12))
def test_noise_of_half_a_percent_of_the_memory_costs_two_layers_a_stage_at_most(seed):
    observe = model(seed, noise=0.005)
    reserve = int(0.005 * observe.memory)
    adapted = adapt_recompute(
        observe.costs, observe.borders, observe.schedule, observe, reserve_bytes=reserve
    )
    best = choose_recompute(
        observe.costs, observe.borders, observe.schedule, observe.memory - reserve
    )
    one_layer = observe.costs.recompute_ns.sum(axis=1).max()
    assert (observe.peaks(adapted.recompute) <= observe.memory - reserve).all()
    assert (adapted.left_bytes >= reserve).all()
    assert extra_ns(observe, adapted.recompute) - extra_ns(observe, best) <= 2 * 4 * one_layer


@for_each("seed", range(6))
def test_what_a_layer_holds_is_found(seed):
    observe = model(seed, share=0.9, spread=0.0)
    adapted = adapt_recompute(observe.costs, observe.borders, observe.schedule, observe)
    for kind in ("vit", "llm"):
        layer = observe.costs.kinds.index(kind)
        freed = observe.costs.saved_bytes[layer, 0] - observe.costs.kept_bytes[layer, 0]
        assert adapted.held_bytes[kind] == pytest.approx(freed, rel=0.15)


@for_each("seed", range(6))
def test_a_stage_that_runs_out_though_it_reports_much_left_is_backed_off_layer_by_layer(seed):
    """As with fragmentation: the allocator fails well before the memory is full."""
    honest = model(seed, share=0.6)
    limit = honest.memory * 9 // 10

    def observe(recompute):
        peaks = honest.peaks(recompute)
        if (peaks > limit).any():
            raise OutOfMemory(np.flatnonzero(peaks > limit).tolist())
        return honest.memory - peaks

    if (honest.peaks(np.ones(honest.costs.num_layers, bool)) > limit).any():
        with pytest.raises(InfeasiblePlan):
            adapt_recompute(honest.costs, honest.borders, honest.schedule, observe)
        return
    adapted = adapt_recompute(honest.costs, honest.borders, honest.schedule, observe)
    assert (honest.peaks(adapted.recompute) <= limit).all()
    best = choose_recompute(honest.costs, honest.borders, honest.schedule, limit)
    away = np.add.reduceat(adapted.recompute.astype(int) - best, honest.borders[:-1])
    assert np.abs(away).max() <= 3


def test_everything_recomputed_and_still_too_much_is_infeasible():
    observe = model(0, share=-0.01)
    with pytest.raises(
        InfeasiblePlan, match=r"^stages \[\d\] run out of memory with every layer recomputed"
    ):
        adapt_recompute(observe.costs, observe.borders, observe.schedule, observe)
    observe = model(0, share=0.1)
    with pytest.raises(InfeasiblePlan, match=r"bytes in reserve: use smaller micro-batches"):
        adapt_recompute(
            observe.costs, observe.borders, observe.schedule, observe, reserve_bytes=observe.memory
        )


def test_several_stages_per_rank_are_refused():
    observe = model(2)
    schedule = schedule_for("interleaved", observe.borders, 12, 2)
    with pytest.raises(
        ConfigError,
        match=r"interleaved runs 4 stages on 2 ranks, .* one stage per rank; use schedule",
    ):
        adapt_recompute(observe.costs, observe.borders, schedule, observe)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@for_each("seed", range(4))
def test_with_few_layers_per_stage_it_ends_with_the_exact_choice(name, share, seed):
    rng = np.random.default_rng(seed)
    costs = vlm(rng, 4, 5, 6, spread=0.05)
    borders = np.array([0, int(rng.integers(3, 6)), 8, costs.num_layers])
    schedule = schedule_for(name, borders, 6)
    found = Model(costs, borders, schedule, 0)
    least, most = (found.peaks(np.full(costs.num_layers, full)).max() for full in (True, False))
    observe = Model(costs, borders, schedule, int(least + share * (most - least)))
    adapted = adapt_recompute(costs, borders, schedule, observe)
    best = choose_recompute(costs, borders, schedule, observe.memory)
    assert extra_ns(observe, adapted.recompute) == extra_ns(observe, best)


def test_nothing_is_recomputed_where_all_fits():
    observe = model(1, share=1.0)
    observe.memory *= 2
    adapted = adapt_recompute(observe.costs, observe.borders, observe.schedule, observe)
    assert not adapted.recompute.any()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble"])
def test_micro_batches_under_way_are_what_memory_counts(name):
    schedule = schedule_for(name, np.arange(4), 6)
    costs = vlm(np.random.default_rng(0), 0, 0, 6, spread=0.0)
    for names in ("saved_bytes", "kept_bytes", "deferred_bytes"):
        getattr(costs, names)[:] = 1
    working = "working_bytes", "input_working_bytes", "weight_working_bytes"
    for other in (*working, "state_bytes", "sent_bytes"):
        getattr(costs, other)[:] = 0
    peaks = memory_of(schedule, stage_costs(costs, np.arange(4), np.zeros(3, bool))).peak_bytes
    waiting = np.arange(3) if name == "zero_bubble" else 0  # whose weights' gradients are to come
    assert (in_flight(schedule) <= peaks).all()
    assert (peaks <= in_flight(schedule) + waiting).all()
