"""Random costs and schedules for the engine's tests, all from a seeded generator."""

import numpy as np

from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.program import Encodings
from isobatch.engine.simulator.schedule import Action, PassKind, Schedule, make_schedule
from isobatch.engine.simulator.stages import StageCosts

LETTERS = {
    "F": PassKind.FORWARD,
    "B": PassKind.BACKWARD,
    "I": PassKind.INPUT_GRAD,
    "W": PassKind.WEIGHT_GRAD,
    "E": PassKind.ENCODE,
}
NAMES = {kind: letter for letter, kind in LETTERS.items()}


def random_schedule(rng):
    """One of the five, of random size."""
    ranks, micro_batches = int(rng.integers(1, 7)), int(rng.integers(1, 13))
    made = [
        make_schedule("gpipe", ranks, micro_batches),
        make_schedule("1f1b", ranks, micro_batches),
        make_schedule("zero_bubble", ranks, micro_batches),
        make_schedule("interleaved", ranks, micro_batches, int(rng.integers(1, 5))),
        make_schedule("interleaved_zero_bubble", ranks, micro_batches, int(rng.integers(1, 5))),
    ]
    return made[rng.integers(len(made))]


def permuted(schedule, rng, ahead=()):
    """The same actions in a random order in which nothing waits for what comes later; stages stay
    on their ranks.

    The vision encoder's passes of the micro-batches `ahead` come besides, on random ranks.
    """
    rank_of = {schedule.action(place): int(rank) for place, rank in enumerate(schedule.ranks)}
    rank_of |= {
        Action(PassKind.ENCODE, 0, int(number)): int(rng.integers(schedule.num_ranks))
        for number in ahead
    }
    orders, done = [[] for _ in range(schedule.num_ranks)], set()
    left = list(rank_of)
    while left:
        possible = [action for action in left if _may_run(action, done, rank_of)]
        action = possible[rng.integers(len(possible))]
        left.remove(action)
        done.add(action)
        orders[rank_of[action]].append(action)
    return Schedule.of("permuted", schedule.num_stages, schedule.num_micro_batches, orders)


def _may_run(action, done, known):
    kind, stage, number = action
    before = {
        PassKind.FORWARD: [(PassKind.FORWARD, stage - 1, number), (PassKind.ENCODE, stage, number)],
        PassKind.WEIGHT_GRAD: [(PassKind.INPUT_GRAD, stage, number)],
        PassKind.ENCODE: [],
    }.get(
        kind,
        [
            (PassKind.FORWARD, stage, number),
            (PassKind.BACKWARD, stage + 1, number),
            (PassKind.INPUT_GRAD, stage + 1, number),
        ],
    )
    return all(one in done for one in before if one in known)


def random_stages(rng, num_stages, num_micro_batches, *, most=50):
    """Stage costs, the first stages frozen at random; times from 0, so that many ends fall
    together.
    """
    shape = num_stages, num_micro_batches
    frozen = int(rng.integers(num_stages + 1)) if rng.random() < 0.4 else 0
    is_trained = np.arange(num_stages) >= frozen
    # a trained stage's gradient goes to the stage before only where that one trains something too
    times = {
        name: rng.integers(0, most, shape)
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    }
    sends_grad = np.append(is_trained[:-1], False)
    send, back = rng.integers(0, most, shape), rng.integers(0, most, shape)
    send[-1] = 0
    back[1:][~sends_grad[:-1]] = 0
    back[0] = 0
    for name in ("input_grad_ns", "weight_grad_ns"):
        times[name][~is_trained] = 0
    sizes = {
        name: rng.integers(0, most, shape)
        for name in (
            "live_bytes",
            "forward_peak_bytes",
            "backward_peak_bytes",
            "held_bytes",
            "apart_peak_bytes",
            "weight_peak_bytes",
            "message_bytes",
        )
    }
    return StageCosts(
        **times,
        **sizes,
        send_ns=send,
        send_back_ns=back,
        state_bytes=rng.integers(0, most, num_stages),
        sends_grad=sends_grad,
    )


def constant_stages(
    num_stages, num_micro_batches, *, forward=1, input_grad=1, weight_grad=1, send=0
):
    """Equal stages and micro-batches, all trained."""
    shape = num_stages, num_micro_batches
    sent = np.full(shape, send)
    sent[-1] = 0
    back = np.full(shape, send)
    back[0] = 0
    zeros = np.zeros(shape, np.int64)
    return StageCosts(
        forward_ns=np.full(shape, forward),
        input_grad_ns=np.full(shape, input_grad),
        weight_grad_ns=np.full(shape, weight_grad),
        send_ns=sent,
        send_back_ns=back,
        live_bytes=zeros,
        forward_peak_bytes=zeros,
        backward_peak_bytes=zeros,
        held_bytes=zeros,
        apart_peak_bytes=zeros,
        weight_peak_bytes=zeros,
        state_bytes=np.zeros(num_stages, np.int64),
        message_bytes=zeros,
        sends_grad=np.arange(num_stages) < num_stages - 1,
    )


def random_encodings(rng, num_micro_batches, *, most=50):
    """What encoding each micro-batch ahead takes."""
    return Encodings(
        forward_ns=rng.integers(0, most, num_micro_batches),
        send_ns=rng.integers(0, most, num_micro_batches),
    )


def random_costs(rng, num_layers, num_micro_batches, *, most=100):
    """Costs of layers, the first ones frozen at random."""
    shape = num_layers, num_micro_batches
    columns = {
        name: rng.integers(0, most, shape)
        for name in ("forward_ns", "recompute_ns", "send_ns", "sent_bytes")
    }
    columns |= {
        name: rng.integers(0, most, shape)
        for name in ("saved_bytes", "kept_bytes", "working_bytes", "deferred_bytes")
    }
    # as good as drawn, so that what is drawn after them stays
    working = columns["working_bytes"]
    columns |= {
        "input_working_bytes": 7 * working % most,
        "weight_working_bytes": 11 * working % most,
    }
    frozen = int(rng.integers(num_layers)) if rng.random() < 0.4 else 0
    is_trained = np.arange(num_layers) >= frozen
    grads = {
        name: rng.integers(0, most, shape) * is_trained[:, np.newaxis]
        for name in ("input_grad_ns", "weight_grad_ns")
    }
    return Costs(
        names=tuple(f"layer {number}" for number in range(num_layers)),
        kinds=tuple(f"kind {number}" for number in range(num_layers)),
        **columns,
        **grads,
        state_bytes=rng.integers(0, most, num_layers),
        param_counts=rng.integers(0, most, num_layers),
        sends_grad=is_trained,
    )


def as_oracle(schedule, stages, encodings=None):
    """The arguments of `oracle.Pipeline` for a step."""
    actions = [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]
    orders = [[(NAMES[kind], stage, number) for kind, stage, number in own] for own in actions]
    times = {"F": stages.forward_ns, "I": stages.input_grad_ns, "W": stages.weight_grad_ns}
    durations, travel = {}, {}
    for kind, stage, number in (action for order in orders for action in order):
        action = kind, stage, number
        if kind == "E":
            durations[action], travel[action] = (
                int(encodings.forward_ns[number]),
                int(encodings.send_ns[number]),
            )
            continue
        parts = "IW" if kind == "B" else kind
        durations[action] = sum(int(times[part][stage, number]) for part in parts)
        sent = stages.send_ns if kind == "F" else stages.send_back_ns
        travel[action] = int(sent[stage, number])
    return orders, durations, travel, stages.sends_grad.tolist()
