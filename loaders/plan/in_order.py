"""`InOrder`: every sample once in stored order, for evaluation.

A last round of fewer groups than ranks would leave ranks without a micro-batch, and FSDP would wait
for them forever. So as many samples from the end as are missing are given singly: all ranks then
have equally many micro-batches, and none is empty. Positions count samples, so they fit any ranks.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from isobatch.balance.order.global_shuffle import LoadLookup, unfit_state
from isobatch.common.types import BoolArray, Groups, IntArray, Limits
from isobatch.loaders.plan.epoch_groups import (
    EpochSource,
    PlannedBuild,
    SampleGroups,
    choice_digest,
    join_groups,
    pack_chosen,
)


class InOrder(EpochSource):
    """The groups of all builds, build after build, the same in every epoch."""

    def __init__(
        self, builds: Sequence[PlannedBuild], chosen: Sequence[BoolArray] | None = None
    ) -> None:
        """`chosen`: for each build, whether each of its samples is."""
        self.builds = builds
        hashes = "\n".join(build.manifest.hash for build in builds)
        self.identity = {"manifest_hash": hashes, "regroup": None}
        self.num_samples = sum(build.manifest.num_packed for build in builds)
        if chosen is not None:
            self.identity["samples"] = choice_digest(np.concatenate(chosen))
            self.num_samples = sum(int(np.count_nonzero(each)) for each in chosen)
        self._tables = [build.samples for build in builds]
        firsts = np.cumsum([0, *(table.offsets[-1] for table in self._tables)])
        parts = [
            pack_chosen(build, None if chosen is None else chosen[place])
            for place, build in enumerate(builds)
        ]
        self._groups = join_groups(
            [
                Groups(part.samples + first, part.offsets)
                for part, first in zip(parts, firsts[:-1], strict=True)
            ]
        )

    def epoch(self, number: int) -> SampleGroups:
        """The same in every epoch."""
        return self._epoch(self._groups)

    def prepare(self, number: int) -> None:
        """Nothing."""

    def cut(self, ranks: int, samples: int = 0) -> "tuple[SampleGroups, StoredOrder]":
        """Micro-batches for so many ranks, and their order after `samples` samples."""
        if not 0 <= samples <= len(self._groups.samples):
            raise unfit_state(f"{samples} of {len(self._groups.samples)} samples")
        borders = cut_borders(self._groups.offsets, samples, ranks)
        return self._epoch(Groups(self._groups.samples, borders)), StoredOrder(borders, samples)

    def _epoch(self, groups: Groups) -> SampleGroups:
        return SampleGroups(self._tables, groups)


def group_in_order(
    vision: IntArray, tokens: IntArray, limits: Limits, *, packing: bool, is_last: bool
) -> tuple[Groups, IntArray]:
    """Groups of neighbours under the caps, and those that wait: the last group, if more may come.

    For samples that are measured while they are loaded; one over a cap is a group of its own.

    >>> caps = Limits(max_seq_len=9, max_vision=9, min_seq_len=9, min_vision=9)
    >>> lengths = np.array([4, 4, 2, 20, 3])
    >>> made, left = group_in_order(lengths * 0, lengths, caps, packing=True, is_last=False)
    >>> made.offsets.tolist(), left.tolist()
    ([0, 2, 3, 4], [4])
    """
    borders, images, own, longest = [0], 0, 0, 0
    for place, (image, length) in enumerate(zip(vision.tolist(), tokens.tolist(), strict=True)):
        images, own, longest = images + image, own + length, max(longest, length)
        used = own if packing else longest * (place + 1 - borders[-1])
        if (used > limits.max_seq_len or images > limits.max_vision) and place > borders[-1]:
            borders.append(place)
            images, own, longest = image, length, length
    if is_last:
        borders.append(len(tokens))
    offsets = np.array(borders, np.int64)
    return Groups(np.arange(offsets[-1]), offsets), np.arange(offsets[-1], len(tokens))


def cut_groups(groups: Groups, ranks: int, before: int = 0) -> Groups:
    """As many groups that they and those `before` are a multiple of `ranks`, if samples suffice."""
    return Groups(groups.samples, cut_borders(groups.offsets, 0, ranks, before))


def cut_borders(borders: IntArray, given: int, ranks: int, before: int = 0) -> IntArray:
    """Borders of groups, one at `given`, and such that those after it are a multiple of `ranks`.

    The samples from the end are parted first; fewer samples than that are parted one by one.
    Groups `before` these count too.

    >>> cut_borders(np.array([0, 3, 6]), 0, 4).tolist()
    [0, 3, 4, 5, 6]
    """
    is_border = np.zeros(int(borders[-1]) + 1, bool)
    is_border[borders] = is_border[given] = True
    missing = -(before + int(is_border[given + 1 :].sum())) % ranks
    inner = given + np.flatnonzero(~is_border[given:])
    is_border[inner[max(0, len(inner) - missing) :]] = True
    return np.flatnonzero(is_border)


class StoredOrder:
    """Groups one after the other, dealt to ranks in turn. Its state is the samples given."""

    def __init__(self, borders: IntArray, given: int) -> None:
        """`borders` of the groups in samples; `given` is one of them."""
        self._borders, self._next = borders, int(np.searchsorted(borders, given))

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""
        return len(self._borders) - 1 - self._next

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64; fewer at the end."""
        first = self._next
        self._next += min(count, self.remaining)
        return np.arange(first, self._next)

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where there are none left."""
        step = np.full(dp * micro_batches, -1, np.int64)
        taken = self.take(len(step))
        step[: len(taken)] = taken
        return step.reshape(micro_batches, dp).T

    def state(self) -> dict[str, Any]:
        """Keywords of `InOrder.cut`, plain JSON, with which an order continues exactly here."""
        return {"samples": int(self._borders[self._next])}

    def copy(self) -> "StoredOrder":
        """An order in the same state that moves independently."""
        return copy(self)
