"""Bounds of windows: below every step, rising with the window, and what they rest on."""

from dataclasses import replace

import numpy as np

from isobatch.engine.planning.search._bounds import layer_sums, window_steps
from isobatch.engine.simulator.evaluate import evaluate
from support.cases import draws, for_each
from support.costs.random_costs import instance, random_borders


@for_each("seed", draws(80))
def test_bounds_rise_with_the_window_and_end_at_the_simulated_step(seed):
    rng = np.random.default_rng(seed)
    costs, schedule, _ = instance(3000 + seed, most_layers=14, most_stages=6)
    num_stages = schedule.num_stages
    borders = random_borders(rng, costs.num_layers, num_stages)
    recompute = rng.random(costs.num_layers) < 0.5
    extra = np.add.reduceat(costs.recompute_ns * recompute[:, np.newaxis], borders[:-1], axis=0)
    sums, below = layer_sums(costs, schedule), np.zeros(num_stages + 1, np.int64)
    for width in range(1, num_stages + 1):
        windows = [
            (first, borders[np.newaxis, first : first + width + 1])
            for first in range(num_stages - width + 1)
        ]
        rows = [np.arange(first, first + width)[np.newaxis] for first, _ in windows]
        bounds = np.array(
            [
                window_steps(schedule, sums, *window, own, extra)[0]
                for window, own in zip(windows, rows, strict=True)
            ]
        )
        assert (bounds >= np.maximum(below[:-1], below[1:])).all()
        if width == 1:
            work = costs.forward_ns + costs.backward_ns
            assert (bounds >= np.add.reduceat(work.sum(axis=1), borders[:-1])).all()
        below = bounds
    assert below.tolist() == [evaluate(costs, borders, recompute, schedule).step_ns]


@for_each("seed", draws(80))
def test_a_step_is_never_faster_when_something_takes_longer(seed):
    """What every bound rests on."""
    rng = np.random.default_rng(seed)
    costs, schedule, _ = instance(4000 + seed, most_layers=12, most_stages=6)
    borders = random_borders(rng, costs.num_layers, schedule.num_stages)
    recompute = rng.random(costs.num_layers) < 0.5
    step = evaluate(costs, borders, recompute, schedule).step_ns
    for name in ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns"):
        times = getattr(costs, name) + rng.integers(0, 50, costs.forward_ns.shape) * (
            rng.random() < 0.7
        )
        assert (
            evaluate(replace(costs, **{name: times}), borders, recompute, schedule).step_ns >= step
        )
    assert (
        evaluate(costs, borders, recompute | (rng.random(costs.num_layers) < 0.5), schedule).step_ns
        >= step
    )
