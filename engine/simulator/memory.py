"""Memory of each rank over a step: exact peaks of live bytes. Pure NumPy.

A rank allocates and frees as its own operations run, so live bytes depend on their order alone, and
a schedule's peak is known before it is simulated. Outputs that wait at the next rank do not count.
"""

from dataclasses import dataclass

import numpy as np

from balance.types import IntArray
from engine.simulator.schedule import Schedule
from engine.simulator.stages import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU of each rank, int64; operations in the schedule's order."""

    state_bytes: IntArray
    """(ranks,): weights, gradients, optimizer state."""
    before_bytes: IntArray
    """(operations,): live when an operation begins, state included."""
    during_bytes: IntArray
    """(operations,): peak while it runs."""
    after_bytes: IntArray
    """(operations,): live when it has ended."""
    peak_bytes: IntArray
    """(ranks,)."""


def memory_of(schedule: Schedule, stages: StageCosts) -> Memory:
    """Memory of each rank under a schedule.

    A backward pass of both gradients frees what the forward pass left. Where they run apart, the
    input's frees nothing and leaves what was recomputed; the weights' frees it all. Memory of
    encodings ahead (ENCODE) depends on times: `engine.tuning.precompute` adds it.
    """
    kinds, stage, micro_batch = schedule.kinds, schedule.stages, schedule.micro_batches
    left, most = bytes_by_kind(stages)
    change = left[kinds, stage, micro_batch]
    state = schedule.sum_by_rank(stages.state_bytes)
    ranks, offsets = schedule.ranks, schedule.rank_offsets
    running = np.concatenate([[0], np.cumsum(change)])
    # changes since the rank's first operation, on top of its state
    before = running[:-1] - running[offsets[:-1]][ranks] + state[ranks]
    during = before + most[kinds, stage, micro_batch]
    return Memory(
        state_bytes=state,
        before_bytes=before,
        during_bytes=during,
        after_bytes=before + change,
        peak_bytes=np.maximum(np.maximum.reduceat(during, offsets[:-1]), state),
    )


def bytes_by_kind(stages: StageCosts) -> tuple[IntArray, IntArray]:
    """Bytes that an action leaves, and its extra peak; (kinds, stages, micro_batches)."""
    live, held, nothing = stages.live_bytes, stages.held_bytes, np.zeros_like(stages.live_bytes)
    left = (live, -live, held - live, -held, nothing)
    backward, apart = stages.backward_peak_bytes - live, stages.apart_peak_bytes - live
    most = (stages.forward_peak_bytes, backward, apart, nothing, nothing)
    return np.stack(left), np.stack(most)
