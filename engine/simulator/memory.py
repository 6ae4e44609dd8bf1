"""What each rank's memory holds over a step: the peak of what is live, not an average times what is
under way. NumPy.

A rank allocates and frees as its own operations run, one after the other, so what is live depends
on their order only, and a schedule's peak is known before it is simulated. Not counted: outputs
that wait at the next rank for their turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balance.types import IntArray
from engine.simulator.schedule import Schedule
from engine.simulator.stages import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU of each rank: int64; per operation, in the schedule's order, but for the
    first and last.
    """

    state_bytes: IntArray
    """(ranks,): weights, gradients, optimizer state."""
    before_bytes: IntArray
    """(operations,): live when an operation begins, state included."""
    during_bytes: IntArray
    """(operations,): at most while it runs."""
    after_bytes: IntArray
    """(operations,): when it has ended."""
    peak_bytes: IntArray
    """(ranks,)."""


def memory_of(schedule: Schedule, stages: StageCosts) -> Memory:
    """What each rank's memory holds.

    A backward pass of both gradients frees what the forward pass left. Where they run apart, that
    of the input frees nothing and leaves what was recomputed, and that of the weights frees it all.
    What encodings ahead (ENCODE) hold depends on when they run, not on the order alone:
    `engine.tuning.precompute` adds that, here they are free.
    """
    kinds, stage, micro_batch = schedule.kinds, schedule.stages, schedule.micro_batches
    left, most = bytes_by_kind(stages)
    change = left[kinds, stage, micro_batch]
    state = np.zeros(schedule.num_ranks, np.int64)
    np.add.at(state, np.arange(stages.num_stages) % schedule.num_ranks, stages.state_bytes)
    ranks, offsets = schedule.ranks, schedule.rank_offsets
    running = np.concatenate([[0], np.cumsum(change)])
    # from what its rank had at first
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
    """Bytes that an action leaves behind, and at most besides what is live before; (kinds, stages,
    micro_batches).
    """
    nothing = np.zeros_like(stages.live_bytes)
    left = [
        stages.live_bytes,
        -stages.live_bytes,
        stages.held_bytes - stages.live_bytes,
        -stages.held_bytes,
        nothing,
    ]
    most = [
        stages.forward_peak_bytes,
        stages.backward_peak_bytes - stages.live_bytes,
        stages.apart_peak_bytes - stages.live_bytes,
        nothing,
        nothing,
    ]
    return np.stack(left), np.stack(most)
