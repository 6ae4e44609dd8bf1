"""Many orders at once: the same nanoseconds and bytes as simulating each by itself."""

import numpy as np
import pytest

from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.simulate import simulate
from isobatch.engine.tuning.order_times import NEVER, EncodeAhead, order_problem, times_of_orders
from support.cases import for_each
from support.costs.random_steps import random_schedule, random_stages


def random_case(seed, *, most=50):
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    stages = random_stages(rng, schedule.num_stages, schedule.num_micro_batches, most=most)
    orders = np.array([rng.permutation(schedule.num_micro_batches) for _ in range(4)])
    return rng, schedule, stages, orders


@pytest.mark.parametrize("most", [3, 50, 10**12])
@for_each("seed", range(100))
def test_times_are_those_of_the_simulator(seed, most):
    _, schedule, stages, orders = random_case(seed, most=most)
    times = times_of_orders(order_problem(schedule, stages), orders)
    assert times.tolist() == [
        simulate(make_program(schedule, stages.take(order))).step_ns for order in orders
    ]


@for_each("seed", range(100))
def test_orders_that_need_more_than_the_memory_are_never_done(seed):
    _, schedule, stages, orders = random_case(seed)
    peaks = [int(memory_of(schedule, stages.take(order)).peak_bytes.max()) for order in orders]
    times = times_of_orders(order_problem(schedule, stages, sorted(peaks)[1]), orders)
    assert (times != NEVER).tolist() == [peak <= sorted(peaks)[1] for peak in peaks]


@pytest.mark.parametrize("everywhere", [False, True])
@for_each("seed", range(60))
def test_encoding_ahead_never_makes_an_order_slower(seed, everywhere):
    rng, schedule, stages, orders = random_case(seed)
    allowed = np.full(schedule.num_ranks, everywhere)
    allowed[0] = True
    encode_ns = rng.integers(0, stages.forward_ns[0] + 1)
    nothing = np.zeros(schedule.num_ranks, np.int64)
    ahead = EncodeAhead(
        encode_ns, rng.integers(0, 9, len(encode_ns)), allowed, schedule.num_micro_batches, nothing
    )
    plain = times_of_orders(order_problem(schedule, stages), orders)
    assert (times_of_orders(order_problem(schedule, stages, None, ahead), orders) <= plain).all()
