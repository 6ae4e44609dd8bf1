"""What a stage can be: which layers, and which of them it recomputes. For
`engine.planning.search.branch_and_bound`.

Where each rank has one stage, what fits into its memory depends on that stage alone: each minimal
choice of recomputed layers is a window of its own, and those are left out that take no less time
for any micro-batch than another. Where ranks have several stages, choices are made for whole
partitions.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from engine.planning.rank_memory import stage_peaks
from engine.planning.search._bounds import window_steps
from engine.planning.search._windows import Windows
from engine.planning.search.local_search import NEVER, PartitionEvaluator

MOST_COMBINED = 1_000
"""Combinations of the ranks' choices that are simulated of a partition, where ranks have several
stages.
"""


def every_stage(evaluator: PartitionEvaluator) -> list[Windows]:
    """By stage, every run of layers that it can have, without bounds yet; nothing is recomputed."""
    num_layers, num_stages = evaluator.costs.num_layers, evaluator.schedule.num_stages
    chain = []
    for stage in range(num_stages):
        behind = num_stages - 1 - stage
        starts = np.arange(stage, num_layers - behind) if stage else np.arange(1)
        ends = np.arange(stage + 1, num_layers - behind + 1) if behind else np.array([num_layers])
        borders = np.stack(np.meshgrid(starts, ends, indexing="ij"), axis=-1).reshape(-1, 2)
        borders = borders[borders[:, 0] < borders[:, 1]]
        chain.append(
            Windows(
                borders=borders,
                choices=np.zeros((len(borders), 1), np.int64),
                bound_ns=np.zeros(len(borders), np.int64),
                left=borders[:, 0],
                right=borders[:, 1],
            )
        )
    return chain


class StageChoices:
    """Choices of recomputed layers, by number; number 0 is to recompute nothing."""

    def __init__(self, evaluator: PartitionEvaluator) -> None:
        self.evaluator = evaluator
        self.are_of_stages = evaluator.schedule.num_stages == evaluator.schedule.num_ranks
        self.masks = [np.zeros(evaluator.costs.num_layers, np.bool_)]
        self.extra_ns: IntArray = np.zeros((1, evaluator.costs.num_micro_batches), np.int64)
        """(choices, micro_batches): how much longer the stage's backward passes take."""

    def expand(self, chain: list[Windows]) -> tuple[int, list[Windows]]:
        """Windows of one stage -> one for each choice with which the stage fits; none if it never
        does.

        Also the least bound of those of which not all choices could be looked at.
        """
        extra, left_out, expanded = [self.extra_ns], NEVER, []
        for rank, windows in enumerate(chain):
            order, layers = self.evaluator.orders[rank], self.evaluator.layers
            needs = stage_peaks(layers, order, windows.borders, self.masks[0])
            least = stage_peaks(layers, order, windows.borders, self.evaluator.frees)
            places, numbers = [np.flatnonzero(needs <= self.evaluator.memory_bytes)], []
            numbers.append(np.zeros(len(places[0]), np.int64))
            between = (needs > self.evaluator.memory_bytes) & (least <= self.evaluator.memory_bytes)
            for place in np.flatnonzero(between):
                starts, ends = windows.borders[place][:, np.newaxis]
                masks, is_all = self.evaluator.choices(rank, starts, ends, only_least=False)
                masks, times = self._fastest(masks)
                left_out = left_out if is_all else min(left_out, int(windows.bound_ns[place]))
                places.append(np.full(len(masks), place))
                numbers.append(len(self.masks) + np.arange(len(masks)))
                self.masks.extend(masks)
                extra.append(times)
            chosen = windows.take(np.concatenate(places))
            expanded.append(_with_choices(chosen, np.concatenate(numbers)))
        self.extra_ns = np.concatenate(extra)
        return left_out, expanded

    def _fastest(self, masks: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], IntArray]:
        """Choices, and what they add for each micro-batch, without those that another one never
        exceeds.
        """
        times = masks.astype(np.int64) @ self.evaluator.costs.recompute_ns
        keep: list[int] = []
        for place in np.argsort(times.sum(axis=1), kind="stable").tolist():
            if not any((times[other] <= times[place]).all() for other in keep):
                keep.append(place)
        return masks[keep], times[keep]

    def of_partition(
        self, borders: IntArray, numbers: IntArray
    ) -> tuple[IntArray, NDArray[np.bool_], bool]:
        """Every choice for a whole partition that fits: -> (steps, (choices,), recomputed layers,
        whether that is all).

        `numbers` are those of its stages where each rank has one; else at most MOST_COMBINED of
        what its ranks can choose are looked at.
        """
        evaluator, is_all = self.evaluator, True
        if self.are_of_stages:
            masks = np.logical_or.reduce([self.masks[number] for number in numbers])[np.newaxis]
        else:
            masks, is_all = self._of_ranks(borders)
        # (choices x stages, micro_batches)
        extra = np.concatenate(
            [np.zeros((0, evaluator.costs.num_micro_batches), np.int64)]
            + [evaluator.extra_ns(borders, mask) for mask in masks]
        )
        rows = np.arange(len(extra)).reshape(len(masks), len(borders) - 1)
        every = np.broadcast_to(borders, (len(masks), len(borders)))
        return (
            window_steps(evaluator.schedule, evaluator.sums, 0, every, rows, extra),
            masks,
            is_all,
        )

    def _of_ranks(self, borders: IntArray) -> tuple[NDArray[np.bool_], bool]:
        """Combinations of the ranks' minimal choices, (combinations, layers), and whether they are
        all.
        """
        own = [
            self.evaluator.choices(rank, *self.evaluator.stages_of(borders, rank), only_least=False)
            for rank in range(self.evaluator.schedule.num_ranks)
        ]
        count = math.prod(len(masks) for masks, _ in own)
        some = itertools.islice(itertools.product(*(masks for masks, _ in own)), MOST_COMBINED)
        masks = np.zeros((min(count, MOST_COMBINED), self.evaluator.costs.num_layers), np.bool_)
        for place, combination in enumerate(some):
            masks[place] = np.logical_or.reduce(combination)
        return masks, count <= MOST_COMBINED and all(is_all for _, is_all in own)


def _with_choices(windows: Windows, numbers: IntArray) -> Windows:
    return Windows(
        borders=windows.borders,
        choices=numbers[:, np.newaxis],
        bound_ns=windows.bound_ns,
        left=windows.left,
        right=windows.right,
    )
