"""Evaluation of a partition: simulated time, and exact peaks of memory. Pure.

A rank allocates and frees as its own operations run, so live bytes depend on their order alone, and
a schedule's peak is known before it is simulated. Of the messages, those on their way count: each
rank sends and receives an output and a gradient at a time. Others that wait at a rank do not.
"""

from dataclasses import dataclass

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.simulate import Timeline, simulate
from isobatch.engine.simulator.stages import StageCosts, stage_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU of each rank, int64; operations in the schedule's order."""

    state_bytes: IntArray
    """(ranks,): weights, gradients, optimizer state."""
    during_bytes: IntArray
    """(operations,): peak while an operation runs, state and messages included."""
    after_bytes: IntArray
    """(operations,): live when it has ended, likewise."""
    peak_bytes: IntArray
    """(ranks,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step."""

    stages: StageCosts
    timeline: Timeline
    memory: Memory

    @property
    def step_ns(self) -> int:
        """Time of the step, without the reduction of gradients and the optimizer."""
        return self.timeline.step_ns

    def fits(self, memory_bytes: int) -> bool:
        """Whether no rank needs more than `memory_bytes`."""
        return int(self.memory.peak_bytes.max()) <= memory_bytes


def evaluate(
    costs: Costs, borders: IntArray, recompute: BoolArray, schedule: Schedule
) -> SimulatedStep:
    """Simulate a step. ConfigError or ValueError if costs, partition and schedule do not match."""
    stages = stage_costs(costs, borders, recompute)
    return SimulatedStep(
        stages=stages,
        timeline=simulate(make_program(schedule, stages)),
        memory=memory_of(schedule, stages),
    )


def memory_of(schedule: Schedule, stages: StageCosts) -> Memory:
    """Memory of each rank under a schedule.

    A backward pass frees what the forward pass left; where weight gradients are deferred, it leaves
    what they need. Memory of encodings ahead (ENCODE) depends on times: `engine.tuning.precompute`
    adds it.
    """
    kinds, stage, micro_batch = schedule.kinds, schedule.stages, schedule.micro_batches
    changes, peaks = bytes_by_kind(stages)
    change = changes[kinds, stage, micro_batch]
    state = schedule.sum_by_rank(stages.state_bytes)
    constant = state + messages_of_ranks(schedule, stages)
    ranks, offsets = schedule.ranks, schedule.rank_offsets
    running = np.concatenate([[0], np.cumsum(change)])
    # changes since the rank's first operation, on top of what it always holds
    before = running[:-1] - running[offsets[:-1]][ranks] + constant[ranks]
    during = before + peaks[kinds, stage, micro_batch]
    return Memory(
        state_bytes=state,
        during_bytes=during,
        after_bytes=before + change,
        peak_bytes=np.maximum(np.maximum.reduceat(during, offsets[:-1]), constant),
    )


def messages_of_ranks(schedule: Schedule, stages: StageCosts) -> IntArray:
    """Bytes of messages on their way to and from each rank, (ranks,): the most of its stages."""
    by_rank = stages.message_bytes.max(axis=1, initial=0).reshape(-1, schedule.num_ranks)
    return np.asarray(by_rank.max(axis=0) * (schedule.num_ranks > 1))


def bytes_by_kind(stages: StageCosts) -> tuple[IntArray, IntArray]:
    """Bytes that an action leaves, and its extra peak; (kinds, stages, micro_batches)."""
    live, held, nothing = stages.live_bytes, stages.held_bytes, np.zeros_like(stages.live_bytes)
    changes = (live, -live, held - live, -held, nothing)
    backward, apart = stages.backward_peak_bytes - live, stages.apart_peak_bytes - live
    peaks = (stages.forward_peak_bytes, backward, apart, stages.weight_peak_bytes, nothing)
    return np.array(changes), np.array(peaks)
