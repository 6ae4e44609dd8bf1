"""Candidate stages: their layers, and which of those are recomputed.

Where each rank has one stage, each minimal choice of recomputed layers is a window, unless another
is as fast for every micro-batch. Where ranks have several, whole partitions are chosen for.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from balance.types import BoolArray, IntArray
from engine.planning.rank_memory import stage_peaks
from engine.planning.search._windows import Windows
from engine.planning.search.local_search import NEVER, PartitionEvaluator

MOST_COMBINED = 1_000
"""Combinations of the ranks' choices that are simulated per partition."""


def every_stage(evaluator: PartitionEvaluator) -> list[Windows]:
    """All possible ranges of layers of each stage, without bounds; nothing is recomputed."""
    num_layers, num_stages = evaluator.costs.num_layers, evaluator.schedule.num_stages
    chain = []
    for stage in range(num_stages):
        after = num_stages - 1 - stage
        starts = np.arange(stage, num_layers - after) if stage else np.arange(1)
        ends = np.arange(stage + 1, num_layers - after + 1) if after else np.array([num_layers])
        borders = np.stack(np.meshgrid(starts, ends, indexing="ij"), axis=-1).reshape(-1, 2)
        borders = borders[borders[:, 0] < borders[:, 1]]
        zeros = np.zeros((len(borders), 1), np.int64)
        left, right = borders.T
        chain.append(
            Windows(borders=borders, choices=zeros, bound_ns=zeros[:, 0], left=left, right=right)
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

    def expand(self, chain: list[Windows]) -> tuple[int, list[Windows]]:
        """Windows of one stage -> one per fitting choice, and the least bound of untried ones."""
        extra, left_out, expanded = [self.extra_ns], NEVER, []
        memory, layers = self.evaluator.memory_bytes, self.evaluator.layers
        for rank, windows in enumerate(chain):
            order = self.evaluator.orders[rank]
            needs = stage_peaks(layers, order, windows.borders, self.masks[0])
            least = stage_peaks(layers, order, windows.borders, self.evaluator.frees)
            # stages that fit without recomputation
            indices = [np.flatnonzero(needs <= memory)]
            numbers = [np.zeros(len(indices[0]), np.int64)]
            # stages that fit with some of it
            for index in np.flatnonzero((needs > memory) & (least <= memory)):
                starts, ends = windows.borders[index][:, np.newaxis]
                masks, is_all = self.evaluator.choices(rank, starts, ends)
                masks, times = self._fastest(masks)
                left_out = left_out if is_all else min(left_out, int(windows.bound_ns[index]))
                indices.append(np.full(len(masks), index))
                numbers.append(len(self.masks) + np.arange(len(masks)))
                self.masks.extend(masks)
                extra.append(times)
            chosen = windows.take(np.concatenate(indices))
            expanded.append(replace(chosen, choices=np.concatenate(numbers)[:, np.newaxis]))
        self.extra_ns = np.concatenate(extra)
        return left_out, expanded

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
        own = [
            self.evaluator.choices(rank, *self.evaluator.stages_of(borders, rank))
            for rank in range(self.evaluator.schedule.num_ranks)
        ]
        count = math.prod(len(masks) for masks, _ in own)
        some = itertools.islice(itertools.product(*(masks for masks, _ in own)), MOST_COMBINED)
        masks = np.zeros((min(count, MOST_COMBINED), self.evaluator.costs.num_layers), np.bool_)
        for row, combination in enumerate(some):
            masks[row] = np.logical_or.reduce(combination)
        return masks, count <= MOST_COMBINED and all(is_all for _, is_all in own)
