"""The exact search: brute force over partitions and recomputed layers, its bounds, its answer's stability."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from random_costs import random_model, vlm

from engine.bounds import layer_sums, window_steps
from engine.costs import Costs
from engine.descend import Fitter, descend, neighbours
from engine.evaluate import evaluate, schedule_for
from engine.exact import anchors, search_exact
from engine.memory import memory_of
from engine.recompute import InfeasiblePlan, choose_recompute, rank_choices
from engine.schedule import make_schedule
from engine.stages import stage_costs

PLENTY = 10**15
SHAPES = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2)]


def partitions(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield np.array([0, *inner, num_layers])


def subsets(num_layers):
    return (np.array(bits) for bits in itertools.product([False, True], repeat=num_layers))


def peak(costs, borders, schedule, recompute):
    return int(memory_of(schedule, stage_costs(costs, borders, recompute)).peak_bytes.max())


def instance(seed, *, most_layers, most_stages=4):
    """Costs and schedule, and a memory in which a random partition fits if it recomputes something, or nearly so."""
    rng = np.random.default_rng(seed)
    name, chunks = SHAPES[seed % len(SHAPES)]
    num_ranks = int(rng.integers(1, most_stages // chunks + 1))
    num_stages = num_ranks * chunks
    costs = random_model(rng, int(rng.integers(num_stages, most_layers + 1)), int(rng.integers(1, 7)))
    schedule = make_schedule(name, num_ranks, costs.num_micro_batches, chunks)
    inner = np.sort(rng.choice(np.arange(1, costs.num_layers), num_stages - 1, replace=False))
    borders = np.array([0, *inner.tolist(), costs.num_layers])
    least, most = (peak(costs, borders, schedule, np.full(costs.num_layers, full)) for full in (True, False))
    return costs, schedule, int(rng.integers(least * 7 // 8, most + 1))


def check(costs, schedule, memory, best):
    """The search finds `best`, a step's time or None, and proves it."""
    if best is None:
        with pytest.raises(InfeasiblePlan):
            search_exact(costs, schedule, memory)
        return
    found = search_exact(costs, schedule, memory)
    assert (found.step_ns, found.lower_bound_ns, found.is_proven, found.gap) == (best, best, True, 0.0)
    outcome = evaluate(costs, found.borders, found.recompute, schedule)
    assert outcome.step_ns == best
    assert outcome.fits(memory)


@pytest.mark.parametrize("seed", range(120))
def test_nothing_beats_it_of_all_partitions_and_all_subsets_of_recomputed_layers(seed):
    costs, schedule, memory = instance(seed, most_layers=6)
    outcomes = (
        evaluate(costs, borders, recompute, schedule)
        for borders in partitions(costs.num_layers, schedule.num_stages)
        for recompute in subsets(costs.num_layers)
        if peak(costs, borders, schedule, recompute) <= memory
    )
    check(costs, schedule, memory, min((outcome.step_ns for outcome in outcomes), default=None))


@pytest.mark.parametrize("seed", range(200))
def test_nothing_beats_it_of_all_partitions_of_up_to_12_layers_with_all_minimal_choices(seed):
    costs, schedule, memory = instance(1000 + seed, most_layers=12)
    best = None
    for borders in partitions(costs.num_layers, schedule.num_stages):
        own = [rank_choices(costs, borders, schedule, rank, memory) for rank in range(schedule.num_ranks)]
        for combination in itertools.product(*own):
            step = evaluate(costs, borders, np.logical_or.reduce(combination), schedule).step_ns
            best = step if best is None else min(best, step)
    check(costs, schedule, memory, best)


@pytest.mark.parametrize("seed", range(100))
def test_nothing_beats_it_of_all_partitions_of_up_to_12_layers_where_all_fits(seed):
    costs, schedule, _ = instance(2000 + seed, most_layers=12)
    nothing = np.zeros(costs.num_layers, bool)
    every = partitions(costs.num_layers, schedule.num_stages)
    check(costs, schedule, PLENTY, min(evaluate(costs, borders, nothing, schedule).step_ns for borders in every))


@pytest.mark.parametrize("seed", range(200))
def test_bounds_rise_with_the_window_and_end_at_the_simulated_step(seed):
    rng = np.random.default_rng(seed)
    costs, schedule, _ = instance(3000 + seed, most_layers=14, most_stages=6)
    num_stages = schedule.num_stages
    inner = np.sort(rng.choice(np.arange(1, costs.num_layers), num_stages - 1, replace=False))
    borders = np.array([0, *inner.tolist(), costs.num_layers])
    recompute = rng.random(costs.num_layers) < 0.5
    extra = np.add.reduceat(costs.recompute_ns * recompute[:, np.newaxis], borders[:-1], axis=0)
    sums, below = layer_sums(costs, schedule), np.zeros(num_stages + 1, np.int64)
    for width in range(1, num_stages + 1):
        bounds = np.array(
            [
                window_steps(
                    schedule, sums, first, borders[np.newaxis, first : first + width + 1], extra[np.newaxis, own]
                )[0]
                for first in range(num_stages - width + 1)
                for own in [slice(first, first + width)]
            ]
        )
        assert (bounds >= np.maximum(below[:-1], below[1:])).all()
        below = bounds
    assert below.tolist() == [evaluate(costs, borders, recompute, schedule).step_ns]


@pytest.mark.parametrize("seed", range(200))
def test_a_step_is_never_faster_when_something_takes_longer(seed):
    """What every bound rests on."""
    rng = np.random.default_rng(seed)
    costs, schedule, _ = instance(4000 + seed, most_layers=12, most_stages=6)
    inner = np.sort(rng.choice(np.arange(1, costs.num_layers), schedule.num_stages - 1, replace=False))
    borders = np.array([0, *inner.tolist(), costs.num_layers])
    recompute = rng.random(costs.num_layers) < 0.5
    step = evaluate(costs, borders, recompute, schedule).step_ns
    for name in ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns"):
        times = getattr(costs, name) + rng.integers(0, 50, costs.forward_ns.shape) * (rng.random() < 0.7)
        assert evaluate(replace(costs, **{name: times}), borders, recompute, schedule).step_ns >= step
    assert evaluate(costs, borders, recompute | (rng.random(costs.num_layers) < 0.5), schedule).step_ns >= step


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
@pytest.mark.parametrize("most_windows", [0, 2_000, 6_000])
def test_a_search_that_is_cut_short_still_knows_a_bound(name, chunks, most_windows):
    costs = vlm(np.random.default_rng(1), 14, 14, 16, spread=0.2)
    schedule = make_schedule(name, 4 // chunks * 2, 16, chunks)
    short = search_exact(costs, schedule, PLENTY, most_windows=most_windows)
    whole = search_exact(costs, schedule, PLENTY, most_windows=3_000_000)
    assert short.lower_bound_ns <= whole.step_ns <= short.step_ns
    assert 0 <= short.gap < 0.2
    assert evaluate(costs, short.borders, short.recompute, schedule).step_ns == short.step_ns


@pytest.mark.parametrize("seed", range(20))
def test_small_moves_end_where_no_move_helps(seed):
    costs, schedule, memory = instance(5000 + seed, most_layers=12)
    fitter = Fitter(costs, schedule, memory, layer_sums(costs, schedule))
    for anchor in anchors(costs, schedule.num_stages):
        borders, step = descend(fitter.steps, anchor)
        assert step <= fitter.steps(anchor[np.newaxis])[0]
        assert (fitter.steps(neighbours(borders)) >= step).all()
        if fitter.recompute(borders) is not None:
            recompute = choose_recompute(costs, borders, schedule, memory)
            assert recompute.tolist() == fitter.recompute(borders).tolist()
            assert evaluate(costs, borders, recompute, schedule).step_ns == step


def test_where_no_anchor_fits_one_that_does_is_found():
    """One layer's weights fill a rank, so its stage must be as short as can be, which no method aims at."""
    costs = vlm(np.random.default_rng(0), 12, 12, 8, spread=0.0)
    costs.state_bytes[:] = 1
    costs.state_bytes[20] = 10**12
    for name, chunks in SHAPES:
        schedule = make_schedule(name, 4 // chunks, 8, chunks)
        with pytest.raises(InfeasiblePlan, match=r"rank \d needs .* split the model over \d+ times"):
            search_exact(costs, schedule, 10**12)
        found = search_exact(costs, schedule, 10**12 + 8 * 10**9)
        assert evaluate(costs, found.borders, found.recompute, schedule).fits(10**12 + 8 * 10**9)


def shaken(costs: Costs, rng: np.random.Generator) -> Costs:
    """Every layer's times 1 % more or less, the same for all micro-batches."""
    factors = 1 + 0.01 * rng.choice([-1, 1], (costs.num_layers, 1))
    names = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns")
    return replace(costs, **{name: np.rint(getattr(costs, name) * factors).astype(np.int64) for name in names})


def models(seed):
    rng = np.random.default_rng(seed)
    if seed % 2:
        return vlm(rng, int(rng.integers(10, 50)), int(rng.integers(10, 60)), 16, spread=0.1)
    return random_model(rng, int(rng.integers(8, 24)), 8, most=10**6)


@pytest.mark.parametrize("seed", range(30))
def test_after_a_change_of_a_percent_the_old_plan_is_at_most_two_percent_slower_than_a_new_one(seed):
    rng = np.random.default_rng(seed)
    costs, num_stages = models(seed), int(rng.choice([2, 4, 8]))
    schedule = schedule_for("1f1b", np.arange(num_stages + 1), costs.num_micro_batches)
    need = search_exact(costs, schedule, PLENTY)
    memory = int(0.9 * peak(costs, need.borders, schedule, need.recompute))
    try:
        old = search_exact(costs, schedule, memory)
    except InfeasiblePlan:
        old, memory = need, PLENTY
    for _ in range(3):
        changed = shaken(costs, rng)
        new = search_exact(changed, schedule, memory)
        kept = evaluate(changed, old.borders, old.recompute, schedule)
        assert kept.step_ns <= 1.02 * new.step_ns


@pytest.mark.parametrize("seed", range(8))
def test_the_same_costs_give_the_same_plan(seed):
    costs = models(seed)
    schedule = schedule_for("1f1b", np.arange(5), costs.num_micro_batches)
    one, other = (search_exact(costs, schedule, PLENTY, most_windows=5_000) for _ in range(2))
    assert one.borders.tolist() == other.borders.tolist()
    assert one.recompute.tolist() == other.recompute.tolist()
    assert (one.step_ns, one.lower_bound_ns) == (other.step_ns, other.lower_bound_ns)
