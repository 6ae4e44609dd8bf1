"""What a micro-batch reads: samples of stored groups.

For planning, which makes selections, and for the reader. Pure.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from isobatch.common.types import Groups, IntArray


class GroupSlice(NamedTuple):
    """Samples of one stored group."""

    build: int
    """Index of the build among the loader's builds."""
    group: int
    """Row of the build's index."""
    places: tuple[int, ...] | None
    """Positions of the samples in the group, in the order wanted; None for the whole group."""


StoredSample = tuple[int, int, int]
"""Where a sample is stored: build, row of its index, and position in the group."""
Selection = tuple[GroupSlice, ...]
"""Content of a micro-batch or an encoder's batch; empty after the end of an epoch."""


@dataclass(frozen=True, slots=True)
class SampleRefs:
    """Samples as positions in stored groups; int64 arrays of one length."""

    builds: IntArray
    groups: IntArray
    places: IntArray
    """From 0 in the stored group."""

    def select(self, samples: IntArray) -> Selection:
        """What to read for `samples`, indices here; neighbours of one group share a slice.

        >>> refs = SampleRefs(np.zeros(4, int), np.array([7, 7, 7, 9]), np.array([0, 1, 2, 0]))
        >>> for group_slice in refs.select(np.array([2, 0, 3])): print(group_slice)
        GroupSlice(build=0, group=7, places=(2, 0))
        GroupSlice(build=0, group=9, places=(0,))
        """
        if not len(samples):
            return ()
        builds, groups, places = self.builds[samples], self.groups[samples], self.places[samples]
        starts = np.flatnonzero((np.diff(builds) != 0) | (np.diff(groups) != 0)) + 1
        firsts, slices = [0, *starts.tolist()], np.split(places, starts)
        return tuple(
            GroupSlice(int(builds[first]), int(groups[first]), tuple(positions.tolist()))
            for first, positions in zip(firsts, slices, strict=True)
        )

    def select_batches(self, batches: Groups) -> tuple[Selection, ...]:
        """What to read for each batch of samples."""
        return tuple(self.select(batches[batch]) for batch in range(len(batches)))


def whole_groups(builds: IntArray, groups: IntArray, sizes: IntArray) -> SampleRefs:
    """All samples of stored groups of `sizes` samples.

    >>> whole_groups(np.array([0, 0]), np.array([5, 3]), np.array([2, 1])).places.tolist()
    [0, 1, 0]
    """
    places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return SampleRefs(np.repeat(builds, sizes), np.repeat(groups, sizes), places)
