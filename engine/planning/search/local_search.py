"""Local search over partitions, by the simulated time of a step.

From a partition to the best of those in which one border, or several neighbouring borders, move a
little, until none is better. 0.1 s for 125 layers in 8 stages.
"""

from collections.abc import Callable, Iterator

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.rank_memory import peak_bytes
from isobatch.engine.planning.recompute import RecomputeChooser
from isobatch.engine.planning.search._bounds import layer_sums, window_steps
from isobatch.engine.planning.search.limits import CHUNK_ACTIONS, UNLIMITED, SearchLimits
from isobatch.engine.simulator.schedule import Schedule

NEVER = np.iinfo(np.int64).max
"""Time of a partition that does not fit."""
FARTHEST = 3
"""Layers by which a border moves at most."""


class PartitionEvaluator(RecomputeChooser):
    """Step times of partitions with the least recomputation that fits."""

    def __init__(self, costs: Costs, schedule: Schedule, memory_bytes: int) -> None:
        super().__init__(costs, schedule, memory_bytes)
        self.sums = layer_sums(costs, schedule)
        self.chunk = max(1, CHUNK_ACTIONS // len(schedule.kinds))
        """Partitions that are simulated at a time."""
        self._peaks: dict[tuple[int, ...], int] = {}
        self._bounds: dict[tuple[int, ...], int] = {}

    def steps(self, partitions: IntArray, limit_ns: int = NEVER) -> IntArray:
        """Step times of `partitions`, (partitions, stages + 1); NEVER where one does not fit.

        NEVER also where a stage alone says that the step is not below `limit_ns`.
        """
        extra = [np.zeros((1, self.costs.num_micro_batches), np.int64)]
        num_rows = 1
        rows = np.zeros((len(partitions), self.schedule.num_stages), np.int64)
        fits = np.ones(len(partitions), np.bool_)
        # row 0: nothing is recomputed
        for rank, indices, starts, ends in self._distinct(partitions):
            recompute = self.choose_for_rank(rank, starts, ends)
            if recompute is None or self._bound(rank, starts, ends, recompute) >= limit_ns:
                fits[indices] = False
            elif recompute.any():
                stage_ns = self._extra_ns(starts, ends, recompute)
                stages = np.arange(rank, rows.shape[1], self.schedule.num_ranks)
                rows[np.ix_(indices, stages)] = num_rows + np.arange(len(stage_ns))
                extra.append(stage_ns)
                num_rows += len(stage_ns)
        self.actions += int(fits.sum()) * len(self.schedule)
        steps = np.full(len(partitions), NEVER)
        steps[fits] = window_steps(
            self.schedule, self.sums, 0, partitions[fits], rows[fits], np.concatenate(extra)
        )
        return steps

    def _bound(self, rank: int, starts: IntArray, ends: IntArray, recompute: BoolArray) -> int:
        """Least time of a step in which a rank has these stages and recomputes these layers."""
        key = rank, *starts.tolist(), *ends.tolist()
        if key not in self._bounds:
            extra_ns = self._extra_ns(starts, ends, recompute)
            steps = [
                window_steps(
                    self.schedule,
                    self.sums,
                    rank + place * self.schedule.num_ranks,
                    np.array([[start, end]]),
                    np.array([[place]]),
                    extra_ns,
                )
                for place, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            self._bounds[key] = int(np.max(steps))
        return self._bounds[key]

    def _extra_ns(self, starts: IntArray, ends: IntArray, recompute: BoolArray) -> IntArray:
        """Recomputation in the backward passes of these stages, (stages, micro_batches)."""
        times = self.costs.recompute_ns * recompute[:, np.newaxis]
        return np.stack([times[a:b].sum(axis=0) for a, b in zip(starts, ends, strict=True)])

    def _distinct(self, partitions: IntArray) -> Iterator[tuple[int, IntArray, IntArray, IntArray]]:
        """(rank, partitions, starts, ends) of all different stages of a rank."""
        for rank in range(self.schedule.num_ranks):
            starts, ends = self.stages_of(partitions.T, rank)
            codes = np.zeros(len(partitions), np.int64)
            for column in (*starts, *ends):
                codes = codes * (self.costs.num_layers + 1) + column
                _, codes = np.unique(codes, return_inverse=True)
            order = np.argsort(codes, kind="stable")
            for equal in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
                if not len(equal):
                    return  # there are no partitions
                first, last = (np.ascontiguousarray(table[:, equal[0]]) for table in (starts, ends))
                yield rank, equal, first, last

    def smallest(self, starts: IntArray, ends: IntArray) -> BoolArray:
        """The recomputation, (layers,), with which a rank with these stages needs least memory."""
        del starts, ends  # for all the same: everything
        return self.frees

    def least_peaks(self, partitions: IntArray, limit_bytes: int = NEVER) -> IntArray:
        """Peak of the fullest rank of each partition, (partitions,), with least memory."""
        del limit_bytes  # as the limit of `steps`; there is nothing to save here
        self.actions += len(partitions) * len(self.schedule)
        peaks = np.zeros(len(partitions), np.int64)
        for rank, indices, starts, ends in self._distinct(partitions):
            key = rank, *starts.tolist(), *ends.tolist()
            if key not in self._peaks:
                smallest = self.smallest(starts, ends)
                peak = peak_bytes(self.layers, self.orders[rank], starts, ends, smallest)
                self._peaks[key] = int(peak)
            peaks[indices] = np.maximum(peaks[indices], self._peaks[key])
        return peaks


def improve_partition(
    value: Callable[[IntArray, int], IntArray],
    borders: IntArray,
    *,
    chunk: int = CHUNK_ACTIONS,
    limits: SearchLimits = UNLIMITED,
) -> tuple[IntArray, int]:
    """-> (borders, value) of the local minimum that small moves from `borders` lead to.

    `value`: a function of (partitions, stages + 1) borders and a limit below which values must be
    right: `steps` or `least_peaks`. Of `chunk` neighbours at a time the best is taken; when the
    time is up, the best so far.
    """
    best, first, unchanged = int(value(borders[np.newaxis], NEVER)[0]), 0, 0
    near = neighbours(borders)
    while unchanged < len(near) and not limits.is_over():
        # the next ones, in a circle
        some = near[(first + np.arange(min(chunk, len(near)))) % len(near)]
        values = value(some, best)
        first, unchanged = (first + len(some)) % len(near), unchanged + len(some)
        if values.min() < best:
            borders, best, unchanged = some[int(values.argmin())], int(values.min()), 0
            near = neighbours(borders)
    return borders, best


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
