"""Candidate stages: their layers, and which of those are recomputed.

Where each rank has one stage, each minimal choice of recomputed layers is a window, unless another
is as fast for every micro-batch. Where ranks have several, whole partitions are chosen for.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.planning.rank_memory import stage_peaks
from isobatch.engine.planning.search._bounds import range_bounds
from isobatch.engine.planning.search._windows import Windows
from isobatch.engine.planning.search.limits import SearchLimits
from isobatch.engine.planning.search.local_search import NEVER, PartitionEvaluator

MOST_COMBINED = 1_000
"""Combinations of the ranks' choices that are simulated per partition."""


def every_stage(evaluator: PartitionEvaluator, limit_ns: int) -> list[Windows]:
    """Ranges of layers that each stage of a step under `limit_ns` can have; nothing recomputed.

    Those that `range_bounds` and the memory of their weights do not rule out.
    """
    num_layers, num_stages = evaluator.costs.num_layers, evaluator.schedule.num_stages
    state = np.concatenate([[0], np.cumsum(evaluator.layers.state)])
    places = np.arange(num_layers + 1)
    fits = state - state[:, np.newaxis] <= evaluator.memory_bytes
    fits &= places > places[:, np.newaxis]
    chain = []
    for stage in range(num_stages):
        after = num_stages - 1 - stage
        # the first stage begins with the first layer, the last one ends with the last
        starts = (places >= stage) if stage else (places == 0)
        ends = (places <= num_layers - after) if after else (places == num_layers)
        bounds = range_bounds(evaluator.sums, evaluator.schedule, stage)
        begin, end = np.nonzero(fits & (bounds < limit_ns) & starts[:, np.newaxis] & ends)
        chain.append(
            Windows(
                borders=np.stack([begin, end], axis=1),
                choices=np.zeros((len(begin), 1), np.int64),
                bound_ns=bounds[begin, end],
                head=begin,
                tail=end,
            )
        )
    return chain


class StageChoices:
    """Numbered choices of recomputed layers; number 0 recomputes nothing."""

    def __init__(self, evaluator: PartitionEvaluator) -> None:
        self.evaluator = evaluator
        self.are_of_stages = evaluator.schedule.num_stages == evaluator.schedule.num_ranks
        self.masks = [np.zeros(evaluator.costs.num_layers, np.bool_)]
        self.extra_ns: IntArray = np.zeros((1, evaluator.costs.num_micro_batches), np.int64)
        """(choices, micro_batches): recomputation in the stage's backward passes."""

    def expand(
        self, chain: list[Windows], bounds: list[IntArray], limits: SearchLimits
    ) -> tuple[int, list[Windows]]:
        """Windows of one stage -> one per fitting choice, and the least bound of untried ones.

        `bounds`: as `chain_bounds`; those of least bound are tried first.
        """
        nothing = np.zeros(self.evaluator.costs.num_layers, np.bool_)
        max_peaks, min_peaks = (
            self._peaks(chain, mask) for mask in (nothing, self.evaluator.frees)
        )
        memory = self.evaluator.memory_bytes
        # stages that fit without recomputation
        indices = [[np.flatnonzero(needs <= memory)] for needs in max_peaks]
        numbers = [[np.zeros(len(rows), np.int64)] for (rows,) in indices]
        # stages that fit with some of it
        tight = [
            np.flatnonzero((a > memory) & (b <= memory))
            for a, b in zip(max_peaks, min_peaks, strict=True)
        ]
        extra = [self.extra_ns]
        left_out = NEVER
        by_bound = sorted(
            (int(bounds[rank][index]), rank, int(index))
            for rank, windows in enumerate(tight)
            for index in windows
        )
        for bound, rank, index in by_bound:
            if limits.is_over():
                left_out = min(left_out, bound)
                break
            starts, ends = chain[rank].borders[index][:, np.newaxis]
            masks, is_all = self.evaluator.choices(rank, starts, ends)
            masks, times = self._fastest(masks)
            left_out = left_out if is_all else min(left_out, bound)
            indices[rank].append(np.full(len(masks), index))
            numbers[rank].append(len(self.masks) + np.arange(len(masks)))
            self.masks.extend(masks)
            extra.append(times)
        self.extra_ns = np.concatenate(extra)
        expanded = [
            replace(one.take(np.concatenate(rows)), choices=np.concatenate(chosen)[:, np.newaxis])
            for one, rows, chosen in zip(chain, indices, numbers, strict=True)
        ]
        return left_out, expanded

    def _peaks(self, chain: list[Windows], mask: BoolArray) -> list[IntArray]:
        """Peaks of the windows of each stage with these layers recomputed."""
        orders, layers = self.evaluator.orders, self.evaluator.layers
        return [
            np.asarray(stage_peaks(layers, order, one.borders, mask))
            for order, one in zip(orders, chain, strict=True)
        ]

    def _fastest(self, masks: BoolArray) -> tuple[BoolArray, IntArray]:
        """Choices and their added times, without those that another one never exceeds."""
        times = masks.astype(np.int64) @ self.evaluator.costs.recompute_ns
        keep: list[int] = []
        for row in np.argsort(times.sum(axis=1), kind="stable").tolist():
            if not any((times[other] <= times[row]).all() for other in keep):
                keep.append(row)
        return masks[keep], times[keep]

    def of_partition(
        self, borders: IntArray, numbers: IntArray
    ) -> tuple[IntArray, BoolArray, bool]:
        """Choices for a partition that fit: -> (step times, recomputed layers, whether all).

        `numbers`: of its stages, where each rank has one; otherwise combinations are tried.
        """
        is_all = True
        if self.are_of_stages:
            masks = np.logical_or.reduce([self.masks[number] for number in numbers])[np.newaxis]
        else:
            masks, is_all = self._of_ranks(borders)
        same = np.broadcast_to(borders, (len(masks), len(borders)))
        return self.evaluator.times(same, masks), masks, is_all

    def _of_ranks(self, borders: IntArray) -> tuple[BoolArray, bool]:
        """Combinations of the ranks' choices, (combinations, layers), and whether these are all."""
        choices = [
            self.evaluator.choices(rank, *self.evaluator.stages_of(borders, rank))
            for rank in range(self.evaluator.schedule.num_ranks)
        ]
        count = math.prod(len(masks) for masks, _ in choices)
        some = itertools.islice(itertools.product(*(masks for masks, _ in choices)), MOST_COMBINED)
        masks = np.zeros((min(count, MOST_COMBINED), self.evaluator.costs.num_layers), np.bool_)
        for row, combination in enumerate(some):
            masks[row] = np.logical_or.reduce(combination)
        return masks, count <= MOST_COMBINED and all(is_all for _, is_all in choices)
