"""`OwnLengths`: what samples cost that each rank loads for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from balance.types import BoolArray, IntArray
from loaders.online.lengths import SampleLengths
from loaders.online.reader import RecordReader
from loaders.ranks import RankChecks

CHUNK = 16
"""Records that are counted together: the memory of all is kept as long as one is in use."""


class OwnLengths(SampleLengths):
    """Samples are measured in each epoch, each by the rank that will train on it."""

    ranks: tuple[int, int]
    """This rank and their number."""
    owners: dict[int, int]
    """Sample -> rank, of samples that are read and not given yet."""

    def open(self, reader: RecordReader, ranks: tuple[int, int], checks: RankChecks | None) -> None:
        """Keep what `reader` has loaded until it is given; `checks` count what ranks begin."""
        self._reader, self.ranks, self._checks = reader, ranks, checks
        self._counter.chunk_records, self._rank = CHUNK, ranks[0]

    def restart(self, epoch: int, owners: dict[int, int]) -> None:
        """Forget all that is loaded; what ranks tell from now on is new."""
        self.owners = owners
        self._begun = f"own/{self._checks.num_compared if self._checks else 0}/{epoch}"
        self._rows[:] = 0
        self._reader.close()

    def rank_of(self, samples: IntArray) -> IntArray:
        """The rank that loads each sample, int64, same shape."""
        return np.array([self.owners[sample] for sample in samples.tolist()], np.int64)

    def measure(
        self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: object = 0
    ) -> BoolArray:
        """As for `SampleLengths`, but each rank loads its own."""
        return super().measure(samples, is_cancelled, self._begun)

    def drop(self, samples: IntArray) -> None:
        """Forget samples that were given."""
        self._reader.drop(samples)
        for sample in samples.tolist():
            self.owners.pop(sample, None)

    def state(self, carried: IntArray) -> dict[str, Any]:
        """For a state: the ranks, and which of them has each sample that is carried."""
        return {"ranks": self.ranks[1], "owners": self.rank_of(carried).tolist()}

    def _share(self, samples: IntArray, rank: int) -> IntArray:
        """The samples that one rank loads; without an exchange all."""
        return samples if self._exchange is None else samples[self.rank_of(samples) == rank]
