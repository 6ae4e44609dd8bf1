"""Encoder pre-computation: placed in idle time, simulated exactly, memory of waiting features
counted.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.program import Encodings, make_program
from isobatch.engine.simulator.schedule import Action, PassKind, Schedule, make_schedule
from isobatch.engine.simulator.simulate import simulate, transfers
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning.order_times import (
    EncodeAhead,
    nothing_ahead,
    order_problem,
    times_of_orders,
)
from isobatch.engine.tuning.precompute import Encoder, encode_ahead, frozen_encoder, where_to_encode
from support.cases import draws, for_each
from support.costs.linear_costs import LinearModel, even_borders, mixed_samples
from support.costs.random_steps import constant_stages, random_stages

MODEL = LinearModel(layers=8, vit_token_ns=8_000)
NAMES = ("1f1b", "gpipe", "zero_bubble", "interleaved")


def case_of(seed, name="1f1b", where="own", *, ranks=4, window=None, send=50, count=None):
    """(problem, encoder, order)."""
    rng = np.random.default_rng(seed)
    count = count or int(rng.integers(1, 14))
    model = replace(MODEL, send_ns=send)
    costs = model(mixed_samples(rng, count))
    chunks = 2 if name == "interleaved" else 1
    borders = even_borders(model, ranks * chunks)
    stages = stage_costs(costs, borders, np.zeros(costs.num_layers, bool))
    schedule, encoder = make_schedule(name, ranks, count, chunks), frozen_encoder(costs, borders)
    ahead = where_to_encode(encoder, schedule, stages, where=where)
    if window is not None:
        ahead = ahead._replace(window=window)
    return order_problem(schedule, stages, None, ahead), encoder, rng.permutation(count)


def timed(step):
    """(action, rank, start, end) of everything that runs."""
    timeline, schedule = step.timeline, step.schedule
    actions = [schedule.action(place) for place in range(len(schedule))]
    return list(zip(actions, schedule.ranks, timeline.start_ns, timeline.end_ns, strict=True))


@pytest.mark.parametrize("name", NAMES)
@for_each("seed", draws(12))
def test_what_the_search_counts_with_is_what_the_simulator_says(name, seed):
    for where, send in (("never", 50), ("own", 50), ("any", 0)):
        problem, encoder, order = case_of(seed, name, where, send=send)
        step = encode_ahead(problem, encoder, order)
        assert step.timeline.step_ns == times_of_orders(problem, order[np.newaxis])[0]


@for_each("where", ["own", "any"])
@for_each("name", NAMES)
@for_each("seed", draws(12))
def test_every_encoding_ends_before_its_micro_batch_enters_and_all_work_is_done_once(
    name, where, seed
):
    problem, encoder, order = case_of(seed, name, where)
    step = encode_ahead(problem, encoder, order)
    runs = timed(step)
    entered = {
        a.micro_batch: start
        for a, _, start, _ in runs
        if a.kind is PassKind.FORWARD and a.stage == 0
    }
    encoded = {
        a.micro_batch: (int(rank), end) for a, rank, _, end in runs if a.kind is PassKind.ENCODE
    }
    assert {number: rank for number, (rank, _) in encoded.items()} == step.encoding_ranks
    assert all(end <= entered[number] for number, (_, end) in encoded.items())
    assert where == "any" or {rank for rank, _ in encoded.values()} <= {0}
    busy = sum(int(end - start) for _, _, start, end in runs)
    assert busy == problem.stages.forward_ns.sum() + problem.stages.backward_ns.sum()
    # apart from encodings it is the schedule
    rest = [
        [action for action in own if action.kind is not PassKind.ENCODE]
        for own in _by_rank(step.schedule)
    ]
    assert rest == _by_rank(problem.schedule)


def _by_rank(schedule):
    return [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]


def test_some_steps_gain_and_more_ranks_gain_more():
    times = {where: [] for where in ("never", "own", "any")}
    for seed in range(20):
        for where, own in times.items():
            problem, encoder, order = case_of(seed, where=where, count=12)
            own.append(encode_ahead(problem, encoder, order).timeline.step_ns)
    never, own, everywhere = (np.array(times[where]) for where in ("never", "own", "any"))
    assert (own <= never).all()
    assert own.mean() < 0.995 * never.mean()
    assert everywhere.mean() < own.mean()


@pytest.mark.parametrize("window", [0, 1, 2])
@for_each("seed", draws(10))
def test_features_of_no_more_micro_batches_wait_than_allowed(window, seed):
    problem, encoder, order = case_of(seed, where="own", window=window)
    runs = timed(encode_ahead(problem, encoder, order))
    begins = {a.micro_batch: start for a, _, start, _ in runs if a.kind is PassKind.ENCODE}
    ends = {
        a.micro_batch: end for a, _, _, end in runs if a.kind is PassKind.FORWARD and a.stage == 0
    }
    for moment in begins.values():
        assert sum(begin <= moment < ends[number] for number, begin in begins.items()) <= window
    assert window or not begins


@for_each("where", ["own", "any"])
@for_each("name", NAMES)
@for_each("seed", draws(8))
def test_peaks_are_those_of_adding_up_what_lies_in_memory_during_each_operation(name, where, seed):
    problem, encoder, order = case_of(seed, name, where)
    step = encode_ahead(problem, encoder, order)
    schedule, encoder = step.schedule, encoder.take(order)
    plain = memory_of(schedule, step.stages).during_bytes
    moved = transfers(step.timeline)
    arrival = dict(zip(moved.sources.tolist(), moved.end_ns.tolist(), strict=True))
    runs = timed(step)
    entered = {
        a.micro_batch: end for a, _, _, end in runs if a.kind is PassKind.FORWARD and a.stage == 0
    }
    held = []  # (rank, bytes, begin, end)
    for place, (action, rank, start, end) in enumerate(runs):
        if action.kind is PassKind.ENCODE:
            size, number = encoder.feature_bytes[action.micro_batch], action.micro_batch
            held.append((0, size, end if rank else start, entered[number]))
            if rank:
                held.append((rank, size, start, arrival[place]))
    for rank in range(schedule.num_ranks):
        copies = encoder.state_bytes if rank in set(step.encoding_ranks.values()) - {0} else 0
        peak = 0
        for place, (action, where_it_runs, start, end) in enumerate(runs):
            if where_it_runs == rank:
                waiting = sum(
                    size
                    for at, size, begin, until in held
                    if at == rank and begin < end and start < until
                )
                working = (
                    encoder.working_bytes[action.micro_batch]
                    if action.kind is PassKind.ENCODE
                    else 0
                )
                peak = max(peak, plain[place] + copies + waiting + working)
        assert step.peak_bytes[rank] == peak


def test_memory_limits_the_features_that_wait_and_the_ranks_that_hold_a_copy():
    problem, encoder, _ = case_of(3, where="any", count=10)
    peaks = memory_of(problem.schedule, problem.stages).peak_bytes
    most = int(encoder.feature_bytes.max())
    tight = int(peaks[0]) + 2 * most
    ahead = where_to_encode(
        encoder, problem.schedule, problem.stages, where="any", memory_bytes=tight
    )
    assert ahead.window == 2
    copy = encoder.state_bytes + most + int(encoder.working_bytes.max())
    assert ahead.allowed.tolist() == [True, *(peaks[1:] + copy <= tight)]
    none = where_to_encode(
        encoder, problem.schedule, problem.stages, where="any", memory_bytes=int(peaks[0])
    )
    assert none.window == 0
    assert (
        where_to_encode(encoder, problem.schedule, problem.stages, where="never").allowed.tolist()
        == nothing_ahead(problem.schedule).allowed.tolist()
    )


def test_by_hand():
    # two stages, three micro-batches; forward and backward 2 each, of which encoding is 1 in the
    # first stage: rank 0: F0 0-2, F1 2-4, waits until 6, B0 6-8, F2 8-10, B1 ...; rank 1: F0 2-4,
    # B0 4-6, F1 6-8, B1 8-10
    stages = constant_stages(2, 3, forward=2)
    ones = np.ones(3, np.int64)
    nothing = np.zeros(3, np.int64)
    encoder = Encoder(
        num_layers=1,
        forward_ns=ones,
        send_ns=nothing,
        feature_bytes=ones,
        working_bytes=nothing,
        state_bytes=1,
    )
    problem = order_problem(
        make_schedule("1f1b", 2, 3),
        stages,
        None,
        EncodeAhead(ones, nothing, np.array([True, False]), 3, np.zeros(2, np.int64)),
    )
    step = encode_ahead(problem, encoder, np.arange(3))
    assert step.schedule.of_rank(0)[2] == Action(PassKind.ENCODE, 0, 2)
    assert step.encoding_ranks == {2: 0}
    begun = {str(action): (start, end) for action, _, start, end in timed(step)}
    assert begun["encode of micro-batch 2 in stage 0"] == (4, 5)
    assert begun["forward of micro-batch 2 in stage 0"] == (8, 9)


@for_each("seed", draws(6))
def test_gaps_are_used_nearly_as_well_as_by_trying_all_places(seed):
    rng = np.random.default_rng(seed)
    count = 5
    stages = random_stages(rng, 3, count)
    schedule = make_schedule("1f1b", 3, count)
    encode_ns = rng.integers(0, stages.forward_ns[0] + 1)
    nothing = np.zeros(count, np.int64)
    encoder = Encoder(
        num_layers=1,
        forward_ns=encode_ns,
        send_ns=nothing,
        feature_bytes=nothing,
        working_bytes=nothing,
        state_bytes=0,
    )
    ahead = EncodeAhead(
        encode_ns, nothing, np.array([True, False, False]), count, np.zeros(3, np.int64)
    )
    ours = encode_ahead(
        order_problem(schedule, stages, None, ahead), encoder, np.arange(count)
    ).timeline.step_ns
    best = best_of_all_places(schedule, stages, encode_ns)
    assert best <= ours <= 1.05 * best


def best_of_all_places(schedule, stages, encode_ns):
    """Every micro-batch but the first encoded anywhere on rank 0 before it enters, or with its
    forward pass.
    """
    own, others = (
        schedule.of_rank(0),
        [schedule.of_rank(rank) for rank in range(1, schedule.num_ranks)],
    )
    enters = {
        action.micro_batch: place
        for place, action in enumerate(own)
        if action.kind is PassKind.FORWARD
    }
    numbers = range(1, schedule.num_micro_batches)
    best = None
    for places in product(*(range(1, enters[number] + 1) for number in numbers)):
        actions = []
        for place, action in enumerate(own):
            actions += [
                Action(PassKind.ENCODE, 0, n)
                for n, at in zip(numbers, places, strict=True)
                if at == place
            ]
            actions.append(action)
        made = Schedule.of(
            "tried", schedule.num_stages, schedule.num_micro_batches, [actions, *others]
        )
        forward = stages.forward_ns.copy()
        forward[0, 1:] -= encode_ns[1:]
        encodings = Encodings(forward_ns=encode_ns, send_ns=np.zeros_like(encode_ns))
        time = simulate(make_program(made, replace(stages, forward_ns=forward), encodings)).step_ns
        best = time if best is None else min(best, time)
    return best


def test_a_trained_encoder_cannot_run_ahead():
    model = replace(MODEL, encoder_trained=True)
    costs = model(mixed_samples(np.random.default_rng(0), 4))
    with pytest.raises(ConfigError, match=r"frozen encoder.*vit\.0.*trained"):
        frozen_encoder(costs, even_borders(model, 2))


def test_an_encoder_that_reaches_into_the_second_stage_cannot_run_ahead():
    costs = MODEL(mixed_samples(np.random.default_rng(0), 4))
    with pytest.raises(ConfigError, match=r"ends after layer 0.*vit\.1.*move the border"):
        frozen_encoder(costs, np.array([0, 1, 10]))
