"""Choice of recomputed layers: least time that fits into memory. Pure.

The peak of live bytes along each rank's own order must fit (`engine.simulator.evaluate`), not depth
times an average. Ranks are independent: no schedule's memory depends on times.
"""

import numpy as np

from isobatch.common.errors import IsobatchError
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.rank_memory import fastest_choice, layer_memory, rank_order
from isobatch.engine.simulator.evaluate import memory_of
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.stages import stage_costs

GIB = 1 << 30
PEAKS_PER_CHOICE = 40
"""Peaks of memory that a choice of recomputed layers takes, about: bisections for each kind."""


class InfeasiblePlan(IsobatchError):
    """A partition does not fit into memory even with every layer recomputed."""


def choose_recompute(
    costs: Costs, borders: IntArray, schedule: Schedule, memory_bytes: int
) -> BoolArray:
    """Layers to recompute, (layers,) bool: the least time with which every rank fits.

    Exact while kinds of layers are few (`rank_memory.MOST_TRIED`). Of equal layers in a stage the
    first ones. InfeasiblePlan, with what would fit, if even everything recomputed is too much.
    """
    chosen = RecomputeChooser(costs, schedule, memory_bytes).choose(borders)
    if chosen is None:
        raise InfeasiblePlan(what_would_fit(costs, borders, schedule, memory_bytes))
    return chosen


class RecomputeChooser:
    """The recomputation with which ranks fit; remembers the least of each rank's stages."""

    def __init__(self, costs: Costs, schedule: Schedule, memory_bytes: int) -> None:
        self.costs, self.schedule, self.memory_bytes = costs, schedule, memory_bytes
        self.layers = layer_memory(costs, schedule.num_ranks)
        self.frees: BoolArray = np.asarray(self.layers.kind >= 0)
        """(layers,): whether recomputation frees anything."""
        self.orders = [rank_order(schedule, rank) for rank in range(schedule.num_ranks)]
        self.actions = 0
        """Actions that were simulated, or whose memory was added up, so far."""
        self._chosen: dict[tuple[int, ...], BoolArray | None] = {}

    def stages_of(self, borders: IntArray, rank: int) -> tuple[IntArray, IntArray]:
        """Starts and ends of a rank's stages."""
        of_rank = slice(rank, None, self.schedule.num_ranks)
        return borders[:-1][of_rank], borders[1:][of_rank]

    def choose(self, borders: IntArray) -> BoolArray | None:
        """As `choose_recompute`; None if the partition never fits."""
        chosen = np.zeros(self.costs.num_layers, np.bool_)
        for rank in range(self.schedule.num_ranks):
            layers = self.choose_for_rank(rank, *self.stages_of(borders, rank))
            if layers is None:
                return None
            chosen |= layers
        return chosen

    def choose_for_rank(self, rank: int, starts: IntArray, ends: IntArray) -> BoolArray | None:
        """Layers that a rank with these stages recomputes, (layers,); None if it never fits."""
        key = rank, *starts.tolist(), *ends.tolist()
        if key not in self._chosen:
            # strided ones would have every kernel compiled a second time
            stages = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
            order = self.orders[rank]
            mask, tried = fastest_choice(self.layers, order, *stages, self.memory_bytes)
            self._chosen[key] = mask if tried else None
            self.actions += (1 + tried) * PEAKS_PER_CHOICE * len(order.kinds)
        return self._chosen[key]


def what_would_fit(costs: Costs, borders: IntArray, schedule: Schedule, memory_bytes: int) -> str:
    """Memory that a partition lacks with everything recomputed, and what would fit, in one line."""
    frees = np.asarray(layer_memory(costs, 1).kind >= 0)
    memory = memory_of(schedule, stage_costs(costs, borders, frees))
    rank = int(np.argmax(memory.peak_bytes))
    peak, state = int(memory.peak_bytes[rank]), int(memory.state_bytes[rank])
    lacks = (
        f"rank {rank} needs {peak / GIB:.2f} GiB with every layer recomputed and has "
        f"{memory_bytes / GIB:.2f} GiB, {(peak - memory_bytes) / GIB:.2f} GiB too little"
    )
    # more ranks split both weights and activations
    times = -(-peak // max(memory_bytes, 1))
    split = f"split the model over {times} times as many stages or tensor-parallel ranks"
    if state >= memory_bytes:
        held = f"{state / GIB:.2f} GiB are weights, gradients and optimizer state"
        return f"{lacks}: {held}; {split}"
    share = (memory_bytes - state) / (peak - state)
    return f"{lacks}: use micro-batches of at most {100 * share:.0f} % of this size, or {split}"
