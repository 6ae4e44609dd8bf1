"""Random models for the tests of searches over partitions: a few kinds of layers, micro-batches
that differ.
"""

import numpy as np

from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.simulator.stages import stage_costs

SHAPES = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
    ("interleaved_zero_bubble", 2),
]
"""Schedules, and stages per rank."""


def schedule_for(name, borders, num_micro_batches, stages_per_rank=1):
    """Of a partition's stages."""
    num_ranks = (len(borders) - 1) // stages_per_rank
    return make_schedule(name, num_ranks, num_micro_batches, stages_per_rank)


def random_model(rng, num_layers, num_micro_batches, *, kinds=3, most=100):
    """Costs of runs of layers of a kind; the first ones may be frozen. Times from 0, so that many
    are equal.
    """
    runs = np.sort(rng.integers(0, kinds, num_layers))
    if rng.random() < 0.3:
        rng.shuffle(runs)
    frozen = int(rng.integers(num_layers)) if rng.random() < 0.3 else 0
    names = [
        f"{'trained' if layer >= frozen else 'frozen'} {run}" for layer, run in enumerate(runs)
    ]
    shape = len(set(names)), 1 if rng.random() < 0.3 else num_micro_batches
    where = [sorted(set(names)).index(name) for name in names]
    is_trained = np.arange(num_layers) >= frozen

    def column(low, high):
        return np.broadcast_to(
            rng.integers(low, high, shape)[where], (num_layers, num_micro_batches)
        ).copy()

    kept = column(0, most // 4) * is_trained[:, np.newaxis]
    send = column(0, most // 2)
    send[-1] = 0
    return Costs(
        names=tuple(f"layer {layer}" for layer in range(num_layers)),
        kinds=tuple(names),
        forward_ns=column(0, most),
        input_grad_ns=column(0, most) * is_trained[:, np.newaxis],
        weight_grad_ns=column(0, most) * is_trained[:, np.newaxis],
        recompute_ns=column(0, most) * is_trained[:, np.newaxis],
        send_ns=send,
        saved_bytes=kept + column(0, most) * is_trained[:, np.newaxis],
        kept_bytes=kept,
        working_bytes=column(0, most),
        # as good as drawn
        input_working_bytes=11 * kept % most,
        weight_working_bytes=13 * kept % most,
        deferred_bytes=7 * kept % most,
        sent_bytes=column(0, most),
        state_bytes=rng.integers(0, most, num_layers),
        param_counts=rng.integers(0, most, num_layers),
        sends_grad=is_trained,
    )


def vlm(rng, vision_layers, llm_layers, num_micro_batches, *, spread=0.1):
    """Something like InternVL: large vision activations, a projector after which less is sent, head
    and embedding.
    """
    kinds = ["patch", *["vit"] * vision_layers, "projector", *["llm"] * llm_layers, "head"]
    # forward ms; backward over forward; saved, kept, working, sent, state bytes (MB)
    table = {
        "patch": (1, 1, 30, 10, 0, 30, 200),
        "vit": (13, 2, 520, 30, 0, 30, 2000),
        "projector": (2, 2, 60, 30, 0, 12, 1500),
        "llm": (20, 2, 400, 12, 0, 12, 2000),
        "head": (8, 2, 20, 12, 1500, 12, 3000),
    }
    sizes = {
        kind: 1 + spread * rng.standard_normal(num_micro_batches).clip(-2, 2)
        for kind in ("vit", "llm")
    }
    rows = np.array([table[kind] for kind in kinds], np.float64)
    scale = np.array([sizes["llm" if kind in ("llm", "head") else "vit"] for kind in kinds])

    def column(values):
        return np.rint(values[:, np.newaxis] * scale).astype(np.int64)

    forward = column(rows[:, 0] * 1e6)
    sent = column(rows[:, 5] * 1e6)
    send = sent // 25  # 25 GB/s
    send[-1] = 0
    return Costs(
        names=tuple(f"{kind} {layer}" for layer, kind in enumerate(kinds)),
        kinds=tuple(kinds),
        forward_ns=forward,
        input_grad_ns=column(rows[:, 0] * 1e6 * rows[:, 1] / 2),
        weight_grad_ns=column(rows[:, 0] * 1e6 * rows[:, 1] / 2),
        recompute_ns=forward,
        send_ns=send,
        saved_bytes=column(rows[:, 2] * 1e6),
        kept_bytes=column(rows[:, 3] * 1e6),
        working_bytes=column(rows[:, 4] * 1e6),
        input_working_bytes=column(rows[:, 4] * 1e6),
        weight_working_bytes=column(rows[:, 4] * 0),
        deferred_bytes=column(rows[:, 2] * 0.8e6),
        sent_bytes=sent,
        state_bytes=(rows[:, 6] * 1e6).astype(np.int64),
        param_counts=(rows[:, 6] * 1e6 / 16).astype(np.int64),
        sends_grad=np.ones(len(kinds), np.bool_),
    )


def peak(costs, borders, schedule, recompute):
    """Bytes of the fullest rank."""
    return int(memory_of(schedule, stage_costs(costs, borders, recompute)).peak_bytes.max())


def instance(seed, *, most_layers, most_stages=4, shape=None):
    """Costs and schedule, and a memory in which a random partition fits if it recomputes something,
    or nearly so. `shape`: name of the schedule and stages per rank; else drawn.
    """
    rng = np.random.default_rng(seed)
    name, chunks = shape or SHAPES[seed % len(SHAPES)]
    num_ranks = int(rng.integers(1, most_stages // chunks + 1))
    num_stages = num_ranks * chunks
    costs = random_model(
        rng, int(rng.integers(num_stages, most_layers + 1)), int(rng.integers(1, 7))
    )
    schedule = make_schedule(name, num_ranks, costs.num_micro_batches, chunks)
    borders = random_borders(rng, costs.num_layers, num_stages)
    least, most = (
        peak(costs, borders, schedule, np.full(costs.num_layers, full)) for full in (True, False)
    )
    return costs, schedule, int(rng.integers(least * 7 // 8, most + 1))


def random_borders(rng, num_layers, num_stages):
    """Any partition."""
    inner = np.sort(rng.choice(np.arange(1, num_layers), num_stages - 1, replace=False))
    return np.array([0, *inner.tolist(), num_layers])
