"""Local search over partitions, by the simulated time of a step.

From a partition to the best of those in which one border, or several neighbouring borders, move a
little, until none is better. 0.1 s for 125 layers in 8 stages.
"""

from collections.abc import Callable, Sequence

import numpy as np

from balance.types import BoolArray, IntArray
from engine.cost_model.costs import Costs
from engine.planning.rank_memory import peak_bytes
from engine.planning.recompute import RecomputeChooser
from engine.planning.search._bounds import layer_sums, window_steps
from engine.simulator.schedule import Schedule

NEVER = np.iinfo(np.int64).max
"""Time of a partition that does not fit."""
FARTHEST = 3
"""Layers by which a border moves at most."""


class PartitionEvaluator(RecomputeChooser):
    """Step times of partitions with the least recomputation that fits."""

    def __init__(self, costs: Costs, schedule: Schedule, memory_bytes: int) -> None:
        super().__init__(costs, schedule, memory_bytes)
        self.sums = layer_sums(costs, schedule)

    def steps(self, partitions: IntArray) -> IntArray:
        """Step times of `partitions`, (partitions, stages + 1); NEVER where one does not fit."""
        found = [self.least(borders) for borders in partitions]
        fits = np.array([chosen is not None for chosen in found], np.bool_)
        masks = [chosen for chosen in found if chosen is not None]
        steps = np.full(len(partitions), NEVER)
        steps[fits] = self.times(partitions[fits], masks)
        return steps

    def times(self, partitions: IntArray, masks: Sequence[BoolArray]) -> IntArray:
        """Step times of `partitions` where layers are recomputed by the mask of each."""
        if not len(masks):
            return np.zeros(0, np.int64)
        # (partitions x stages, micro_batches)
        extra_ns = np.concatenate(
            [
                np.add.reduceat(self.costs.recompute_ns * mask[:, np.newaxis], borders[:-1])
                for borders, mask in zip(partitions, masks, strict=True)
            ]
        )
        rows = np.arange(len(extra_ns)).reshape(len(masks), -1)
        return window_steps(self.schedule, self.sums, 0, partitions, rows, extra_ns)

    def least_peaks(self, partitions: IntArray) -> IntArray:
        """Peak of the fullest rank of each partition, (partitions,), everything recomputed."""

        def least_peak(borders: IntArray) -> int:
            peaks = (
                peak_bytes(self.layers, order, *self.stages_of(borders, rank), self.frees)
                for rank, order in enumerate(self.orders)
            )
            return int(max(peaks))

        return np.array([least_peak(borders) for borders in partitions])


def improve_partition(
    value: Callable[[IntArray], IntArray], borders: IntArray
) -> tuple[IntArray, int]:
    """-> (borders, value) of the local minimum that small moves from `borders` lead to.

    `value`: a function of (partitions, stages + 1) borders: `steps` or `least_peaks`.
    """
    least = int(value(borders[np.newaxis])[0])
    while True:
        near = neighbours(borders)
        values = value(near)
        if not len(values) or values.min() >= least:
            return borders, least
        borders, least = near[int(values.argmin())], int(values.min())


def neighbours(borders: IntArray) -> IntArray:
    """Partitions, (neighbours, stages + 1), with one border moved, or several adjacent ones by 1.

    >>> neighbours(np.array([0, 1, 3])).tolist()
    [[0, 2, 3]]
    """
    inner = len(borders) - 2
    first, last = np.triu_indices(inner)
    ranges = np.zeros((len(first), len(borders)), np.int64)
    for row, (start, end) in enumerate(zip(first, last, strict=True)):
        ranges[row, start + 1 : end + 2] = 1
    alone = ranges[first == last]
    longer = [sign * far * alone for far in range(2, FARTHEST + 1) for sign in (1, -1)]
    near = borders + np.concatenate([ranges, -ranges, *longer])
    return np.asarray(near[(np.diff(near, axis=1) > 0).all(axis=1)])
