"""What is to be read for a micro-batch: samples out of stored groups (`GroupSlice`, `Selection`,
`SampleRefs`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balance.types import Groups, IntArray


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Samples of one stored group."""

    build: int
    """Place of the build among the loader's builds."""
    group: int
    """Row of the build's index."""
    places: tuple[int, ...] | None
    """Of the samples in the group, in the order wanted; None for the whole group as it is."""


Selection = tuple[GroupSlice, ...]
"""What a micro-batch, or a batch of an encoder, is made of; no pick where the epoch has ended."""


@dataclass(frozen=True, slots=True)
class SampleRefs:
    """Samples as places in stored groups; int64 arrays of one length."""

    builds: IntArray
    groups: IntArray
    places: IntArray
    """From 0 in the stored group."""

    def item(self, samples: IntArray) -> Selection:
        """What to read for `samples`, numbers in these arrays, in that order: neighbours of one
        group together.

        >>> members = Members(np.zeros(4, int), np.array([7, 7, 7, 9]), np.array([0, 1, 2, 0]))
        >>> members.item(np.array([2, 0, 3]))
        (Pick(build=0, group=7, places=(2, 0)), Pick(build=0, group=9, places=(0,)))
        """
        if not len(samples):
            return ()
        builds, groups, places = self.builds[samples], self.groups[samples], self.places[samples]
        starts = np.flatnonzero((np.diff(builds) != 0) | (np.diff(groups) != 0)) + 1
        firsts, runs = [0, *starts.tolist()], np.split(places, starts)
        return tuple(
            GroupSlice(int(builds[first]), int(groups[first]), tuple(run.tolist()))
            for first, run in zip(firsts, runs, strict=True)
        )

    def items(self, batches: Groups) -> tuple[Selection, ...]:
        """What to read for each of some batches of samples."""
        return tuple(self.item(batches[batch]) for batch in range(len(batches)))


def whole_groups(builds: IntArray, groups: IntArray, sizes: IntArray) -> SampleRefs:
    """All samples of stored groups of `sizes` samples.

    >>> whole_groups(np.array([0, 0]), np.array([5, 3]), np.array([2, 1])).places.tolist()
    [0, 1, 0]
    """
    places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return SampleRefs(np.repeat(builds, sizes), np.repeat(groups, sizes), places)
