"""Programs: a step as operations that wait for each other. Pure.

Each rank runs its operations in the given order. An operation also waits for results of others:
edges, each with the time that the result travels. Results on one link travel one after the other,
in the order in which they were computed; computing does not wait for sends.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from isobatch.common.types import IntArray
from isobatch.engine.simulator.schedule import PassKind, Schedule
from isobatch.engine.simulator.stages import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """Encoder passes that a schedule runs ahead; int64, (micro_batches,)."""

    forward_ns: IntArray
    send_ns: IntArray
    """Send of the features to the first stage's rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations, one per action of a schedule, and their dependencies; int64 arrays."""

    schedule: Schedule
    duration_ns: IntArray
    """(operations,)."""
    edge_offsets: IntArray
    """(operations + 1,): edges `edge_offsets[o]:edge_offsets[o + 1]` leave operation o."""
    edge_targets: IntArray
    """(edges,): the operation that waits."""
    edge_ns: IntArray
    """(edges,): time of the send; 0 inside a rank."""

    @property
    def edge_sources(self) -> IntArray:
        """(edges,): the operation whose result is sent."""
        return np.repeat(np.arange(len(self.schedule)), np.diff(self.edge_offsets))


def make_program(
    schedule: Schedule, stages: StageCosts, encodings: Encodings | None = None
) -> Program:
    """The operations of a schedule.

    `stages.forward_ns` must not include the encoding of micro-batches that are encoded ahead.
    ValueError if schedule and costs are of different stages or micro-batches.
    """
    shape = schedule.num_stages, schedule.num_micro_batches
    if shape != (stages.num_stages, stages.num_micro_batches):
        raise ValueError(
            f"the schedule has {shape[0]} stages and {shape[1]} micro-batches, the costs "
            f"{stages.num_stages} and {stages.num_micro_batches}"
        )
    edges = _edges(schedule, tuple(stages.sends_grad.tolist()))
    kinds, stage, micro_batch = schedule.kinds, schedule.stages, schedule.micro_batches
    times = [stages.forward_ns, stages.backward_ns, stages.input_grad_ns, stages.weight_grad_ns]
    sent = [stages.send_ns, stages.send_back_ns]
    if encodings is not None:
        # the same for every stage, so that one lookup serves all kinds
        times.append(np.broadcast_to(encodings.forward_ns, shape))
        sent.append(np.broadcast_to(encodings.send_ns, shape))
    elif (kinds == PassKind.ENCODE).any():
        raise ValueError("the schedule encodes ahead, but no encodings are given")
    edge_ns = np.stack(sent)[edges.results, stage[edges.sources], micro_batch[edges.sources]]
    return Program(
        schedule=schedule,
        duration_ns=np.stack(times)[kinds, stage, micro_batch],
        edge_offsets=edges.offsets,
        edge_targets=edges.targets,
        edge_ns=np.where(edges.is_local, 0, edge_ns),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Dependencies without times; (edges,) but for the offsets."""

    offsets: IntArray
    sources: IntArray
    targets: IntArray
    results: IntArray
    """What is sent: 0 a stage's output, 1 a gradient, 2 an encoder's features."""
    is_local: IntArray


@lru_cache(maxsize=64)
def _edges(schedule: Schedule, sends_grad: tuple[bool, ...]) -> _Edges:
    """The edges of a schedule in which gradients come back to the stages with `sends_grad`."""
    kinds, stages, ranks = schedule.kinds, schedule.stages, schedule.ranks
    # index of each action; -1 if the schedule has none
    shape = len(PassKind), schedule.num_stages + 1, schedule.num_micro_batches
    place = np.full(shape, -1, np.int64)
    place[kinds, stages, schedule.micro_batches] = np.arange(len(schedule))
    back = np.maximum(place[PassKind.BACKWARD], place[PassKind.INPUT_GRAD])
    forward, apart = place[PassKind.FORWARD], place[PassKind.INPUT_GRAD]
    flows = np.array(sends_grad)[:-1]
    pairs = [
        (forward[:-2], forward[1:-1], 0),  # a stage's output
        (forward, back, 0),  # activations
        (back[1:-1][flows], back[:-2][flows], 1),
        (apart, place[PassKind.WEIGHT_GRAD], 1),
        (place[PassKind.ENCODE, 0], forward[0], 2),
    ]
    edges = np.concatenate(
        [np.stack([a.ravel(), b.ravel(), np.full(a.size, result)]) for a, b, result in pairs],
        axis=1,
    )
    sources, targets, results = edges[:, (edges[0] >= 0) & (edges[1] >= 0)]
    order = np.argsort(sources, kind="stable")
    sources, targets, results = sources[order], targets[order], results[order]
    return _Edges(
        offsets=np.searchsorted(sources, np.arange(len(schedule) + 1)),
        sources=sources,
        targets=targets,
        results=results,
        is_local=ranks[sources] == ranks[targets],
    )
