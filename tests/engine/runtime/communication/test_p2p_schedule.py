"""Schedules that a pipeline cannot run are refused before anything is sent."""

from dataclasses import replace
from graphlib import TopologicalSorter

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.communication.p2p import make_p2p_schedule
from isobatch.engine.simulator.schedule import SCHEDULES, Action, PassKind, Schedule, make_schedule
from isobatch.engine.simulator.simulate import Deadlock
from support.cases import for_each

GRADS = (True, False)


def reordered(schedule, rng):
    """With the micro-batches in a random order."""
    order = rng.permutation(schedule.num_micro_batches)
    return replace(schedule, micro_batches=order[schedule.micro_batches])


def changed(change):
    """1F1B of two stages and three micro-batches, after `change(actions of each rank)`."""
    plain = make_schedule("1f1b", 2, 3)
    actions = [plain.of_rank(rank) for rank in range(2)]
    change(actions)
    return Schedule.of("changed", 2, 3, actions)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda actions: actions[0].pop(),
            "does not run micro-batch 2 once forward and once backward through stage 0",
        ),
        (
            lambda actions: actions[1].append(actions[1][-1]),
            "micro-batch 2 once forward and once backward through stage 1",
        ),
        (lambda actions: actions.reverse(), "forward of micro-batch 0 in stage 1 on rank 0"),
        (
            lambda actions: actions[0].append(Action(PassKind.INPUT_GRAD, 0, 1)),
            "does not run micro-batch 1 once forward and once backward through stage 0",
        ),
    ],
)
def test_a_schedule_that_lacks_or_misplaces_a_pass_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        make_p2p_schedule(changed(change), GRADS, 0)


def test_a_schedule_whose_passes_wait_for_each_other_is_refused():
    with pytest.raises(
        Deadlock, match="rank 0 waits to begin backward of micro-batch 0 in stage 0"
    ):
        make_p2p_schedule(
            changed(lambda actions: actions[0].insert(0, actions[0].pop(2))), GRADS, 0
        )


@pytest.mark.parametrize("name", SCHEDULES)
@for_each("seed", range(5))
def test_what_one_rank_sends_is_what_another_receives(name, seed):
    rng = np.random.default_rng(seed)
    chunks = 2 if name == "interleaved" else 1
    count = int(rng.integers(1, 8))
    schedule = reordered(make_schedule(name, 4, count, chunks), rng)
    grads = (*rng.choice([True, False], schedule.num_stages - 1).tolist(), False)
    routes = [make_p2p_schedule(schedule, grads, rank) for rank in range(4)]
    sent = {
        (message, rank, other)
        for rank in range(4)
        for own in routes[rank].outgoing.values()
        for message, other in own
    }
    came = {
        (message, other, rank)
        for rank in range(4)
        for own in routes[rank].incoming.values()
        for message, other in own
    }
    assert sent == came
    between = routes[0].messages
    assert {(m, *pair) for pair, messages in between.items() for m in messages} == {
        s for s in sent if s[1] != s[2]
    }
    # in the order in which they are made
    assert all(messages == sorted(messages) for messages in between.values())
    assert len(sent) == count * (schedule.num_stages - 1 + sum(grads))


@pytest.mark.parametrize("name", SCHEDULES)
@for_each("seed", range(10))
def test_passes_that_wait_for_all_that_was_posted_never_wait_in_a_circle(name, seed):
    rng = np.random.default_rng(seed)
    chunks = int(rng.integers(1, 4)) if name == "interleaved" else 1
    ranks, count = int(rng.integers(2, 6)), int(rng.integers(1, 12))
    schedule = reordered(make_schedule(name, ranks, count, chunks), rng)
    grads = (*rng.choice([True, False], schedule.num_stages - 1, p=[0.8, 0.2]).tolist(), False)
    routes = [make_p2p_schedule(schedule, grads, rank) for rank in range(ranks)]
    awaited = {at: set() for at in range(len(schedule))}
    early, all_of = 0, 0
    for rank, own in enumerate(routes):
        first, last = schedule.rank_offsets[rank : rank + 2].tolist()
        posted = set()
        for at in range(first, last):
            inputs, ahead = own.incoming.get(at, []), own.ahead.get(at, [])
            assert set(ahead) <= set(own.incoming.get(at + 1, []))
            # also what the same rank made before is posted then
            for message, sender in [*inputs, *ahead]:
                sent = own.messages.get((sender, rank), [message])
                posted |= {other.source for other in sent[: sent.index(message) + 1]}
            awaited[at] |= posted | ({at - 1} if at > first else set())
            early += len(ahead)
            all_of += len(inputs)
    assert len([*TopologicalSorter(awaited).static_order()]) == len(schedule)
    assert early < all_of
    if name == "1f1b" and count > 2 * ranks and all(grads[:-1]):
        assert early > 0.4 * all_of
