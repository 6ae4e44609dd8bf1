"""The simulator: to the last nanosecond what an independent simulation says, and what can be drawn
by hand.
"""

import numpy as np
import pytest

from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.schedule import (
    INTERLEAVED,
    Action,
    PassKind,
    Schedule,
    make_schedule,
)
from isobatch.engine.simulator.simulate import Deadlock, critical_path, simulate, transfers
from support.cases import draws, for_each
from support.costs.random_steps import (
    LETTERS,
    NAMES,
    as_oracle,
    constant_stages,
    permuted,
    random_encodings,
    random_schedule,
    random_stages,
)
from support.oracles.simulation_oracle import Pipeline, StandstillError


def random_case(seed):
    """(schedule, stages, encodings or None)."""
    rng = np.random.default_rng(seed)
    schedule, encodings = random_schedule(rng), None
    if rng.random() < 0.6:
        ahead = (
            np.flatnonzero(rng.random(schedule.num_micro_batches) < 0.5)
            if rng.random() < 0.6
            else []
        )
        schedule = permuted(schedule, rng, ahead)
        encodings = random_encodings(rng, schedule.num_micro_batches) if len(ahead) else None
    most = int(rng.choice([3, 50, 10**12]))
    return (
        schedule,
        random_stages(rng, schedule.num_stages, schedule.num_micro_batches, most=most),
        encodings,
    )


def oracle_times(schedule, stages, encodings=None):
    """(start, end) of each action, in the schedule's order."""
    times = Pipeline(*as_oracle(schedule, stages, encodings)).run()
    places = [schedule.action(place) for place in range(len(schedule))]
    pairs = np.array([times[NAMES[kind], stage, number] for kind, stage, number in places])
    return pairs[:, 0], pairs[:, 1]


@pytest.mark.thorough
@for_each("seed", draws(80))
def test_every_operation_runs_when_an_event_by_event_simulation_says(seed):
    schedule, stages, encodings = random_case(seed)
    timeline = simulate(make_program(schedule, stages, encodings))
    start, end = oracle_times(schedule, stages, encodings)
    np.testing.assert_array_equal(timeline.start_ns, start)
    np.testing.assert_array_equal(timeline.end_ns, end)
    assert timeline.step_ns == end.max()


@for_each("seed", draws(60))
def test_orders_that_come_to_a_standstill_are_the_same_ones(seed):
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    orders = [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]
    rank = int(rng.integers(len(orders)))
    one, other = rng.integers(len(orders[rank]), size=2)
    orders[rank][one], orders[rank][other] = orders[rank][other], orders[rank][one]
    swapped = Schedule.of("swapped", schedule.num_stages, schedule.num_micro_batches, orders)
    stages = random_stages(rng, schedule.num_stages, schedule.num_micro_batches)
    program = make_program(swapped, stages)
    stuck = oracle_standstill(swapped, stages)
    if not stuck:
        np.testing.assert_array_equal(simulate(program).start_ns, oracle_times(swapped, stages)[0])
        return
    with pytest.raises(Deadlock) as reported:
        simulate(program)
    assert str(reported.value).count(" waits to begin ") == len(stuck)
    for rank, (letter, stage, number) in stuck:
        assert f"rank {rank} waits to begin {Action(LETTERS[letter], stage, number)}" in str(
            reported.value
        )


def oracle_standstill(schedule, stages):
    """The first action of each rank that never begins."""
    try:
        oracle_times(schedule, stages)
    except StandstillError as found:
        return found.args[0]
    return []


def test_a_standstill_is_named_by_what_waits():
    forward, backward = Action(PassKind.FORWARD, 0, 0), Action(PassKind.BACKWARD, 0, 0)
    schedule = Schedule.of("mine", 1, 1, [[backward, forward]])
    with pytest.raises(Deadlock) as error:
        simulate(make_program(schedule, constant_stages(1, 1)))
    assert str(error.value) == (
        "schedule mine deadlocks: rank 0 waits to begin backward of micro-batch 0 in stage 0"
    )


def chart(timeline, letters="FBIWE"):
    """Each rank's time, a letter per unit; what waits is a dot."""
    schedule, rows = timeline.program.schedule, []
    for rank in range(schedule.num_ranks):
        row = ["."] * timeline.step_ns
        for place in range(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1]):
            for now in range(timeline.start_ns[place], timeline.end_ns[place]):
                number = str(schedule.micro_batches[place])
                row[now] = number if letters == "numbers" else letters[schedule.kinds[place]]
        rows.append("".join(row))
    return rows


def test_a_chart_of_1f1b_with_two_stages_drawn_by_hand():
    timeline = simulate(make_program(make_schedule("1f1b", 2, 3), constant_stages(2, 3)))
    assert chart(timeline) == [
        "FF..BBFBB.BB",
        ".FBBFBBFBB..",
    ]
    assert chart(timeline, "numbers") == [
        "01..00211.22",
        ".000111222..",
    ]


def test_a_chart_of_1f1b_with_four_stages_drawn_by_hand():
    timeline = simulate(make_program(make_schedule("1f1b", 4, 4), constant_stages(4, 4)))
    assert chart(timeline, "numbers") == [
        "0123......00.11.22.33",
        ".012....00311.22.33..",
        "..01..00211322.33....",
        "...000111222333......",
    ]


def test_a_chart_of_gpipe_drawn_by_hand():
    timeline = simulate(make_program(make_schedule("gpipe", 3, 2), constant_stages(3, 2)))
    assert chart(timeline) == [
        "FF......BBBB",
        ".FF...BBBB..",
        "..FFBBBB....",
    ]


def test_a_chart_with_time_to_send_drawn_by_hand():
    timeline = simulate(make_program(make_schedule("1f1b", 2, 2), constant_stages(2, 2, send=1)))
    assert chart(timeline) == [
        "FF....BB.BB",
        "..FBBFBB...",
    ]


def test_sends_to_one_rank_go_one_after_the_other():
    # gpipe: rank 0 has both outputs made at 1 and 2; each takes 10 to travel, the second leaves
    # when the first is there
    stages = constant_stages(2, 2, send=10)
    timeline = simulate(make_program(make_schedule("gpipe", 2, 2), stages))
    assert timeline.start_ns[timeline.program.schedule.rank_offsets[1] :].tolist()[:2] == [11, 21]
    sent = transfers(timeline)
    forward = sent.crosses & (sent.sources < 2)
    assert sent.start_ns[forward].tolist() == [1, 11]
    assert sent.end_ns[forward].tolist() == [11, 21]


@for_each("micro_batches", [4, 5, 8, 16])
@for_each("stages", [2, 4])
def test_1f1b_and_gpipe_wait_for_one_micro_batch_per_other_stage(stages, micro_batches):
    costs = constant_stages(stages, micro_batches)
    for schedule in (
        make_schedule("1f1b", stages, micro_batches),
        make_schedule("gpipe", stages, micro_batches),
    ):
        timeline = simulate(make_program(schedule, costs))
        assert timeline.step_ns == 3 * micro_batches + 3 * (stages - 1)
        np.testing.assert_allclose(
            timeline.bubble_ratio, (stages - 1) / (micro_batches + stages - 1)
        )


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks, chunks):
    micro_batches = 3 * ranks
    schedule = make_schedule("interleaved", ranks, micro_batches, chunks)
    timeline = simulate(make_program(schedule, constant_stages(ranks * chunks, micro_batches)))
    # a stage is 1/chunks of what a rank of 1F1B computes, so this is 3 * chunks * (ranks - 1) /
    # chunks
    assert timeline.step_ns - 3 * chunks * micro_batches == 3 * (ranks - 1)


@for_each(
    ("forward", "input_grad", "weight_grad"), [(1, 1, 1), (10, 10, 10), (10, 11, 9), (10, 12, 10)]
)
@for_each("stages", [2, 3, 4, 8])
def test_zero_bubble_waits_as_its_paper_says(stages, forward, input_grad, weight_grad):
    # ZB-H1 (arXiv 2401.10241, table 1): (stages - 1) (F + B - W), against (stages - 1) (F + B + W)
    micro_batches = 2 * stages
    costs = constant_stages(
        stages, micro_batches, forward=forward, input_grad=input_grad, weight_grad=weight_grad
    )
    work = micro_batches * (forward + input_grad + weight_grad)
    bubble = (
        simulate(make_program(make_schedule("zero_bubble", stages, micro_batches), costs)).step_ns
        - work
    )
    plain = (
        simulate(make_program(make_schedule("1f1b", stages, micro_batches), costs)).step_ns - work
    )
    assert plain == (stages - 1) * (forward + input_grad + weight_grad)
    assert bubble == (stages - 1) * (forward + input_grad - weight_grad)


@for_each("ranks", range(1, 7))
@for_each("chunks", [1, 2, 3, 5])
def test_interleaving_never_stands_still(ranks, chunks):
    for micro_batches in range(1, 3 * ranks + 3):
        for name in INTERLEAVED:
            schedule = make_schedule(name, ranks, micro_batches, chunks)
            costs = constant_stages(ranks * chunks, micro_batches)
            timeline = simulate(make_program(schedule, costs))
            assert timeline.step_ns >= 3 * chunks * micro_batches


@for_each(
    ("forward", "input_grad", "weight_grad"), [(10, 10, 10), (10, 13, 7), (10, 23, 7), (10, 8, 12)]
)
@for_each("ranks", [2, 4, 8])
@for_each("chunks", [2, 3, 4])
def test_deferred_weight_gradients_fill_the_interleaved_bubbles(
    ranks, chunks, forward, input_grad, weight_grad
):
    for micro_batches in (ranks, 2 * ranks - 1, 3 * ranks):
        costs = constant_stages(
            ranks * chunks,
            micro_batches,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )
        plain, split = (
            simulate(make_program(make_schedule(name, ranks, micro_batches, chunks), costs)).step_ns
            for name in INTERLEAVED
        )
        assert split < plain


def test_interleaved_zero_bubble_waits_as_its_docstring_says():
    costs = constant_stages(12, 8, forward=10, input_grad=13, weight_grad=7)
    waiting = [
        simulate(make_program(make_schedule(name, 4, 8, 3), costs)).bubble_ratio
        for name in INTERLEAVED
    ]
    np.testing.assert_allclose(waiting[0], 0.111, atol=5e-4)
    np.testing.assert_allclose(waiting[1], 0.040, atol=5e-4)


@pytest.mark.thorough
@for_each("seed", draws(50))
def test_a_step_takes_longer_by_whatever_its_critical_path_does(seed):
    schedule, stages, encodings = random_case(seed)
    program = make_program(schedule, stages, encodings)
    timeline = simulate(program)
    path = critical_path(timeline)
    assert timeline.start_ns[path[0]] == 0
    assert timeline.end_ns[path[-1]] == timeline.step_ns
    assert (timeline.start_ns[path[1:]] >= timeline.end_ns[path[:-1]]).all()
    for place in {path[0], path[len(path) // 2], path[-1]}:
        longer = program.duration_ns.copy()
        longer[place] += 7
        replaced = {
            name: getattr(program, name)
            for name in ("schedule", "edge_offsets", "edge_targets", "edge_ns")
        }
        assert (
            simulate(type(program)(duration_ns=longer, **replaced)).step_ns == timeline.step_ns + 7
        )


def test_what_held_a_result_up_on_its_way_is_on_the_critical_path():
    # the second output is made long before the first has arrived: without the first one's pass it
    # would not be faster
    stages = constant_stages(2, 2, send=10)
    timeline = simulate(make_program(make_schedule("gpipe", 2, 2), stages))
    schedule = timeline.program.schedule
    path = [str(schedule.action(place)) for place in critical_path(timeline)]
    assert path[:2] == [
        "forward of micro-batch 0 in stage 0",
        "forward of micro-batch 1 in stage 1",
    ]


@pytest.mark.thorough
@for_each("seed", draws(40))
def test_ways_carry_one_result_at_a_time_in_order(seed):
    schedule, stages, encodings = random_case(seed)
    timeline = simulate(make_program(schedule, stages, encodings))
    sent, ranks = transfers(timeline), schedule.ranks
    assert (sent.start_ns >= timeline.end_ns[sent.sources]).all()
    assert (sent.end_ns <= timeline.start_ns[sent.targets]).all()
    for edge in np.flatnonzero(sent.previous >= 0):
        before = sent.previous[edge]
        assert sent.end_ns[before] <= sent.start_ns[edge]
        assert ranks[sent.sources[before]] == ranks[sent.sources[edge]]
        assert ranks[sent.targets[before]] == ranks[sent.targets[edge]]
    assert not (sent.end_ns > sent.start_ns)[~sent.crosses].any()


@pytest.mark.thorough
@for_each("seed", range(50))
def test_busy_and_waiting_are_the_whole_step(seed):
    schedule, stages, encodings = random_case(seed)
    timeline = simulate(make_program(schedule, stages, encodings))
    busy = np.zeros(schedule.num_ranks, np.int64)
    np.add.at(busy, schedule.ranks, timeline.end_ns - timeline.start_ns)
    np.testing.assert_array_equal(timeline.busy_ns, busy)
    np.testing.assert_allclose(
        timeline.bubble_ratio * max(timeline.step_ns, 1), max(timeline.step_ns, 1) - busy
    )
