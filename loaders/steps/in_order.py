"""`StoredSource`: every sample once in stored order, for evaluation.

A last round of fewer groups than ranks would leave ranks without a micro-batch, and FSDP would wait
for them forever. So as many samples from the end as are missing are given singly: all ranks then
have equally many micro-batches, and none is empty. Positions count samples, so they fit any ranks.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from isobatch.balance.order.step_order import LoadLookup, unfit_state
from isobatch.common.types import BoolArray, Groups, IntArray, Limits
from isobatch.loaders.steps.build_groups import (
    PlannedBuild,
    SampleGroups,
    choice_digest,
    pack_chosen,
)
from isobatch.loaders.steps.source import GroupSource, GroupTable


class StoredSource(GroupSource["StoredOrder"]):
    """The groups of all builds, build after build, the same in every epoch."""

    order = "stored"

    def __init__(
        self, builds: Sequence[PlannedBuild], chosen: Sequence[BoolArray] | None = None
    ) -> None:
        """`chosen`: for each build, whether each of its samples is."""
        self.model, self._builds = builds[0].manifest.model, builds
        hashes = "\n".join(build.manifest.hash for build in builds)
        self.identity = {"manifest_hash": hashes, "regroup": None}
        masks: Sequence[BoolArray | None] = [None] * len(builds) if chosen is None else chosen
        if chosen is not None:
            self.identity["samples"] = choice_digest(np.concatenate(chosen))
        firsts = np.cumsum([0, *(build.samples.offsets[-1] for build in builds)])
        parts = [pack_chosen(build, mask) for build, mask in zip(builds, masks, strict=True)]
        self._groups = Groups.joined(
            [
                Groups(part.samples + first, part.offsets)
                for part, first in zip(parts, firsts[:-1], strict=True)
            ]
        )

    def begin(
        self, epoch: int, state: dict[str, Any], ranks: int
    ) -> "tuple[SampleGroups, StoredOrder]":
        """Micro-batches for so many ranks, and their order after as many samples as `state` says.

        The same in every epoch.
        """
        groups, begun = self._groups, _begun(**state)
        if not 0 <= begun <= len(groups.samples):
            raise unfit_state(f"{begun} of {len(groups.samples)} samples")
        borders = cut_borders(groups.offsets, begun, ranks)
        table = SampleGroups(self._builds, Groups(groups.samples, borders))
        return table, StoredOrder(borders, begun)

    def samples_between(self, table: GroupTable, first: "StoredOrder", last: "StoredOrder") -> int:
        """Samples between two positions."""
        return last.num_taken - first.num_taken


def _begun(samples: int = 0) -> int:
    return samples


def group_in_order(
    vision: IntArray, tokens: IntArray, limits: Limits, *, packing: bool, is_last: bool
) -> tuple[Groups, IntArray]:
    """Groups of neighbours under the caps, and those that wait: the last group, if more may come.

    For samples that are measured while they are loaded; one over a cap is a group of its own.

    >>> caps = Limits(max_seq_len=9, max_vision=9, min_seq_len=9, min_vision=9)
    >>> lengths = np.array([4, 4, 2, 20, 3])
    >>> groups, rest = group_in_order(lengths * 0, lengths, caps, packing=True, is_last=False)
    >>> groups.offsets.tolist(), rest.tolist()
    ([0, 2, 3, 4], [4])
    """
    borders = [0]
    images = total = longest = 0
    for place, (image, length) in enumerate(zip(vision.tolist(), tokens.tolist(), strict=True)):
        images, total, longest = images + image, total + length, max(longest, length)
        used = total if packing else longest * (place + 1 - borders[-1])
        if (used > limits.max_seq_len or images > limits.max_vision) and place > borders[-1]:
            borders.append(place)
            images, total, longest = image, length, length
    if is_last:
        borders.append(len(tokens))
    offsets = np.array(borders, np.int64)
    return Groups(np.arange(offsets[-1]), offsets), np.arange(offsets[-1], len(tokens))


def cut_groups(groups: Groups, ranks: int, before: int = 0) -> Groups:
    """As many groups that they and those `before` are a multiple of `ranks`, if samples suffice."""
    return Groups(groups.samples, cut_borders(groups.offsets, 0, ranks, before))


def cut_borders(borders: IntArray, begun: int, ranks: int, before: int = 0) -> IntArray:
    """Borders of groups, one at `begun`, and such that those after it are a multiple of `ranks`.

    The samples from the end are parted first; fewer samples than that are parted one by one.
    Groups `before` these count too.

    >>> cut_borders(np.array([0, 3, 6]), 0, 4).tolist()
    [0, 3, 4, 5, 6]
    """
    is_border = np.zeros(int(borders[-1]) + 1, bool)
    is_border[borders] = is_border[begun] = True
    missing = -(before + int(is_border[begun + 1 :].sum())) % ranks
    inner = begun + np.flatnonzero(~is_border[begun:])
    is_border[inner[max(0, len(inner) - missing) :]] = True
    return np.flatnonzero(is_border)


def dealt(groups: IntArray, dp: int, micro_batches: int) -> IntArray:
    """A step of neighbours, one after the other to ranks: (dp, micro_batches), filled up by -1."""
    step = np.full(dp * micro_batches, -1, np.int64)
    step[: len(groups)] = groups
    return step.reshape(micro_batches, dp).T


class StoredOrder:
    """Groups one after the other, dealt to ranks in turn. Its state is the samples taken."""

    def __init__(self, borders: IntArray, begun: int) -> None:
        """`borders` of the groups in samples; `begun` is one of them."""
        self._borders, self._next = borders, int(np.searchsorted(borders, begun))

    @property
    def num_taken(self) -> int:
        """Samples of the groups that are past."""
        return int(self._borders[self._next])

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
        return dealt(self.take(dp * micro_batches), dp, micro_batches)

    def state(self) -> dict[str, Any]:
        """What `StoredSource.begin` takes, plain JSON, to continue exactly here."""
        return {"samples": self.num_taken}

    def copy(self) -> "StoredOrder":
        """An order in the same state that moves independently."""
        return copy(self)
