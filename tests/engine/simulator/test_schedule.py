"""Schedules: every pass once, on its rank, in an order that the papers give."""

from collections import Counter

import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.simulator.schedule import (
    INTERLEAVED,
    SCHEDULES,
    Action,
    PassKind,
    make_schedule,
    most_deferred,
)
from support.cases import for_each

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (4, 2), (4, 4), (4, 9), (7, 5)]


def all_of(schedule):
    return [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]


def text(actions):
    return "".join(action.kind.name[0] + str(action.micro_batch) for action in actions)


def under_way(actions):
    """The most micro-batches of which a rank's stages have run forward and not yet back, at one
    time.
    """
    most = now = 0
    for action in actions:
        now += {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.WEIGHT_GRAD: -1}.get(
            action.kind, 0
        )
        most = max(most, now)
    return most


@for_each(("stages", "micro_batches"), SIZES)
@for_each("name", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once_each_way(name, stages, micro_batches):
    schedule = make_schedule(name, stages, micro_batches, 3 if "interleaved" in name else 1)
    kinds = (
        [PassKind.FORWARD, PassKind.INPUT_GRAD, PassKind.WEIGHT_GRAD]
        if schedule.splits_backward
        else [PassKind.FORWARD, PassKind.BACKWARD]
    )
    assert schedule.splits_backward == ("zero_bubble" in name)
    wanted = Counter(
        Action(kind, stage, number)
        for kind in kinds
        for stage in range(schedule.num_stages)
        for number in range(micro_batches)
    )
    assert Counter(action for own in all_of(schedule) for action in own) == wanted
    assert len(schedule) == wanted.total()


@for_each(("ranks", "micro_batches"), SIZES)
@for_each("chunks", [1, 2, 4])
def test_rank_r_runs_every_stage_that_leaves_the_rest_r(ranks, chunks, micro_batches):
    orders = [all_of(make_schedule(name, ranks, micro_batches, chunks)) for name in INTERLEAVED]
    for rank, own in [pair for each in orders for pair in enumerate(each)]:
        assert {action.stage for action in own} == {rank + chunk * ranks for chunk in range(chunks)}


@for_each(("stages", "micro_batches"), SIZES)
def test_1f1b_and_zero_bubble_have_as_many_micro_batches_under_way_as_stages_are_left(
    stages, micro_batches
):
    for schedule in (
        make_schedule("1f1b", stages, micro_batches),
        make_schedule("zero_bubble", stages, micro_batches),
    ):
        inputs = [
            [action for action in own if action.kind is not PassKind.WEIGHT_GRAD]
            for own in all_of(schedule)
        ]
        as_backward = [
            [
                a._replace(kind=PassKind.BACKWARD) if a.kind is PassKind.INPUT_GRAD else a
                for a in own
            ]
            for own in inputs
        ]
        assert [under_way(own) for own in as_backward] == [
            min(stages - s, micro_batches) for s in range(stages)
        ]


@for_each(("stages", "micro_batches"), SIZES)
def test_zero_bubble_keeps_no_more_than_the_first_stage_of_1f1b(stages, micro_batches):
    # ZB-H1's memory: the first s weight gradients of stage s wait, which has s fewer micro-batches
    # under way
    for own in all_of(make_schedule("zero_bubble", stages, micro_batches)):
        assert under_way(own) <= min(stages, micro_batches)


@for_each("name", ["zero_bubble", "interleaved_zero_bubble"])
def test_a_rank_holds_back_no_more_weight_gradients_than_it_may(name):
    most = most_deferred(name, 4)
    for deferred in (most, (0, 1, 1, 2), (0, 0, 0, 0), (1, 1, 1, 1)):
        per_rank = 2 if "interleaved" in name else 1
        schedule = make_schedule(name, 4, 9, per_rank, deferred)
        for own, limit in zip(all_of(schedule), deferred, strict=True):
            held, largest = 0, 0
            for action in own:
                held += (action.kind is PassKind.INPUT_GRAD) - (action.kind is PassKind.WEIGHT_GRAD)
                largest = max(largest, held)
            assert largest == limit
    whole, limited = (make_schedule(name, 4, 9, per_rank, each) for each in (None, most))
    assert all_of(whole) == all_of(limited)
    joint = make_schedule(name.removesuffix("zero_bubble").strip("_") or "1f1b", 4, 9, per_rank)
    assert all_of(make_schedule(name, 4, 9, per_rank, (0,) * 4)) == all_of(joint)


@for_each(("name", "deferred"), [("1f1b", (0, 0)), ("zero_bubble", (1,)), ("zero_bubble", (2, 2))])
def test_limits_of_deferral_that_cannot_be_are_refused(name, deferred):
    with pytest.raises(ConfigError, match=r"on 2 ranks .* holds back at most"):
        make_schedule(name, 2, 3, deferred=deferred)


def test_zero_bubble_leaves_weight_gradients_for_the_end():
    assert [text(own) for own in all_of(make_schedule("zero_bubble", 3, 3))] == [
        "F0F1F2I0W0I1W1I2W2",
        "F0F1I0F2I1W0I2W1W2",
        "F0I0F1I1F2I2W0W1W2",
    ]


@for_each(("ranks", "micro_batches"), SIZES)
@for_each("chunks", [1, 2, 4])
def test_zero_bubble_keeps_the_interleaved_order_and_defers_two_weight_gradients_per_rank_before(
    ranks, chunks, micro_batches
):
    plain, split = (
        all_of(make_schedule(name, ranks, micro_batches, chunks)) for name in INTERLEAVED
    )
    for rank, (whole, own) in enumerate(zip(plain, split, strict=True)):
        rest = [action for action in own if action.kind is not PassKind.WEIGHT_GRAD]
        assert [action[1:] for action in rest] == [action[1:] for action in whole]
        waiting = Counter(action.kind for action in own[: own.index(rest[-1])])
        assert waiting[PassKind.INPUT_GRAD] - waiting[PassKind.WEIGHT_GRAD] <= 2 * rank


@for_each(("stages", "micro_batches"), SIZES)
def test_interleaving_one_stage_per_rank_runs_in_1f1b_order_but_for_its_warm_up(
    stages, micro_batches
):
    schedule = make_schedule("interleaved", stages, micro_batches, 1)
    for rank, own in enumerate(all_of(schedule)):
        for kind in (PassKind.FORWARD, PassKind.BACKWARD):
            assert [action.micro_batch for action in own if action.kind is kind] == list(
                range(micro_batches)
            )
        assert under_way(own) == min(2 * (stages - rank) - 1, micro_batches)


def test_interleaving_passes_a_round_through_each_stage_in_turn():
    forwards = [
        action
        for action in make_schedule("interleaved", 2, 4, 2).of_rank(0)
        if action.kind is PassKind.FORWARD
    ]
    assert [(action.stage, action.micro_batch) for action in forwards] == [
        (0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3),
    ]  # fmt: skip


def test_gpipe_goes_back_from_the_last_micro_batch():
    assert [text(own) for own in all_of(make_schedule("gpipe", 2, 3))] == ["F0F1F2B2B1B0"] * 2


def test_schedules_are_made_once():
    assert make_schedule("1f1b", 4, 8) is make_schedule("1f1b", 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 3), f"schedule is '2f2b'; use one of {', '.join(SCHEDULES)}"),
        (
            ("1f1b", 2, 3, 2),
            "1f1b runs one stage per rank, not 2; use schedule 'interleaved' or "
            "'interleaved_zero_bubble'",
        ),
        (("1f1b", 0, 3), "0 stages and 3 micro-batches; give at least 1 of each"),
        (
            ("interleaved", 2, 0, 2),
            "4 stages and 0 micro-batches; give at least 1 of each",
        ),
    ],
)
def test_what_cannot_be_scheduled_is_said_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        make_schedule(*arguments)
    assert str(error.value) == message
