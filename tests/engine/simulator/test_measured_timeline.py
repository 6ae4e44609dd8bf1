"""A measured step in the form of a simulated one: a simulation that is taken for a measurement
comes out unchanged.
"""

from dataclasses import replace

import numpy as np
import pytest

from isobatch.engine.simulator.measured_timeline import measured_timeline
from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.simulator.simulate import critical_path, simulate, transfers
from support.cases import for_each
from support.costs.random_steps import random_stages

NAMES = ("1f1b", "gpipe", "zero_bubble", "interleaved")


def simulated(seed, name, *, sends=True):
    """A simulated step whose times are in milliseconds."""
    rng = np.random.default_rng(seed)
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, 4, int(rng.integers(1, 9)), chunks)
    program = make_program(
        schedule, random_stages(rng, schedule.num_stages, schedule.num_micro_batches)
    )
    return simulate(
        replace(
            program,
            duration_ns=10**6 * program.duration_ns,
            edge_ns=10**6 * program.edge_ns * (1 if sends else 0),
        )
    )


@pytest.mark.parametrize("name", NAMES)
@for_each("seed", range(20))
def test_times_stay_and_begin_with_the_first_pass(seed, name):
    timeline = simulated(seed, name)
    measured = measured_timeline(timeline.program, timeline.start_ns + 77, timeline.end_ns + 77)
    np.testing.assert_array_equal(measured.start_ns, timeline.start_ns)
    np.testing.assert_array_equal(measured.end_ns, timeline.end_ns)
    np.testing.assert_array_equal(measured.bubble_ratio, timeline.bubble_ratio)


@pytest.mark.parametrize("name", NAMES)
@for_each("seed", range(20))
def test_nothing_is_shown_to_arrive_after_the_pass_that_takes_it_up(seed, name):
    timeline = simulated(seed, name)
    measured = measured_timeline(timeline.program, timeline.start_ns, timeline.end_ns)
    sent = transfers(measured)
    assert (sent.end_ns <= measured.start_ns[sent.targets]).all()
    assert (sent.start_ns >= measured.end_ns[sent.sources]).all()
    # where a rank waits, that is what it waits for
    before = np.concatenate([[0], measured.end_ns[:-1]])
    before[timeline.program.schedule.rank_offsets[:-1]] = 0
    waits = measured.start_ns[sent.targets] > before[sent.targets]
    arrived = sent.end_ns == measured.start_ns[sent.targets]
    assert arrived[waits & sent.crosses].all()


@pytest.mark.parametrize("name", NAMES)
@for_each("seed", range(20))
def test_the_critical_path_is_the_same_where_sends_take_no_time(seed, name):
    timeline = simulated(seed, name, sends=False)
    measured = measured_timeline(timeline.program, timeline.start_ns, timeline.end_ns)
    assert critical_path(measured) == critical_path(timeline)
