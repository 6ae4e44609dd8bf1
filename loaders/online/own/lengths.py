"""`OwnLengths`: what samples cost that each rank loads for itself."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from balance.errors import ConfigError, DataError
from balance.types import BoolArray, IntArray, Limits
from loaders.online._length_table import STATUS, UNKNOWN
from loaders.online.lengths import MeasuredPart, SampleLengths
from loaders.online.own.recent_rows import RecentRows
from loaders.online.own.streams import StreamRecords
from loaders.online.reader import RecordReader
from loaders.online.records import Records
from loaders.ranks import RankChecks

CHUNK = 16
"""Records that are counted together: the memory of all is kept as long as one is in use."""


class OwnLengths(SampleLengths):
    """Samples are measured in each epoch, each by the rank that will train on it.

    Of a stream a sample's number says its rank: of n ranks, every n-th is one's.
    """

    ranks: tuple[int, int]
    """This rank and their number."""
    owners: dict[int, int]
    """Sample -> rank, of samples that are read and not given yet, but not of a stream."""
    stream: StreamRecords | None = None
    """None for a dataset with items by number."""
    marks: list[dict[str, list[Any]]]
    """Where streams were after a window, ascending: by rank the items that were asked for
    (`read`), whether there were fewer (`ended`), and the dataset's own state (`states`).
    """
    _table: RecentRows

    def __len__(self) -> int:
        """Samples; of a stream more than there can be, until it has ended on all ranks."""
        if self.stream is None:
            return len(self._records)
        return sum(self.marks[-1]["read"]) if all(self.marks[-1]["ended"]) else sys.maxsize

    def open(
        self,
        records: Records,
        reader: RecordReader,
        ranks: tuple[int, int],
        checks: RankChecks | None,
    ) -> str:
        """Keep what `reader` has loaded until it is given; `checks` count what ranks begin.

        -> what tells the dataset from others, where items may be others each time.
        """
        self._records, self._reader, self.ranks, self._checks = records, reader, ranks, checks
        self._counter.chunk_records, self._rank = CHUNK, ranks[0]
        self._given = Counter[int]()
        if isinstance(records, StreamRecords):
            self.stream, records.num_ranks = records, ranks[1]
            if records.is_sharded and ranks[1] > 1 and self._exchange is None:
                raise ConfigError("is_sharded needs torch.distributed, to know what others read")
        return f"{len(records) if self.stream is None else 'a stream'} {self._counter.identity}"

    def restart(self, epoch: int, owners: dict[int, int], marks: list[Any] | None = None) -> None:
        """Forget all that is loaded; what ranks tell from now on is new.

        `owners` has the samples of a state that are loaded again, `marks` are those of a stream.
        """
        self.owners = owners
        self._begun = f"own/{self._checks.num_compared if self._checks else 0}/{epoch}"
        self._table = RecentRows()
        self._reader.close()
        if self.stream is not None:
            none: dict[str, Any] = {"read": 0, "ended": False, "states": None}
            first = {name: [value] * self.ranks[1] for name, value in none.items()}
            self.marks = list(marks or [first])
            self.stream.restart(epoch, self.marks, np.array([*owners], np.int64))

    def rank_of(self, samples: IntArray) -> IntArray:
        """The rank that loads each sample, int64, same shape."""
        if self.stream is not None:
            return samples % self.ranks[1]
        return np.array([self.owners[sample] for sample in samples.tolist()], np.int64)

    def measure(
        self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: object = 0
    ) -> BoolArray:
        """As for `SampleLengths`, but each rank loads its own."""
        self._states = dict[int, Any]()
        usable = super().measure(samples, is_cancelled, self._begun)
        if self.stream is not None:
            self._add_mark(samples)
        self._table.forget(samples[~usable])
        return usable

    def within(self, samples: IntArray, limits: Limits) -> IntArray:
        """As for `SampleLengths`; what is rejected is forgotten."""
        kept = super().within(samples, limits)
        self._table.forget(np.setdiff1d(samples, kept))
        return kept

    def source_shares(self) -> dict[str, float]:
        """Share of each source in the samples that were given."""
        given, total = self._given, max(1, self._given.total())
        return {name: given[number] / total for number, name in enumerate(self.sources)}

    def drop(self, samples: IntArray, consumed: int, live: IntArray) -> None:
        """Forget samples that were given; those `live` of the first `consumed` are needed still."""
        self._given.update(self.source_numbers(samples).tolist())
        self._reader.drop(samples)
        self._table.forget(samples)
        for sample in samples.tolist():
            self.owners.pop(sample, None)
        if self.stream is not None:
            with self._lock:
                later = [mark for mark in self.marks if sum(mark["read"]) > consumed]
                self.marks = self._marks_before(consumed, live) + later

    def state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """For a state: the ranks, and which of them has each sample that is carried, or where their
        streams were.
        """
        if self.stream is None:
            return {"ranks": self.ranks[1], "owners": self.rank_of(carried).tolist()}
        with self._lock:
            return {"ranks": self.ranks[1], "marks": self._marks_before(consumed, live)}

    def _marks_before(self, consumed: int, live: IntArray) -> list[dict[str, list[Any]]]:
        """The last mark before each sample that is live, and that after `consumed` samples."""
        read = np.array([mark["read"] for mark in self.marks])  # (marks, ranks)
        places = (read[:, self.rank_of(live)] <= live // self.ranks[1]).sum(axis=0) - 1
        own = read.sum(axis=1).tolist().index(consumed)
        return [self.marks[place] for place in np.unique(np.append(places, own)).tolist()]

    def _add_mark(self, samples: IntArray) -> None:
        """After these samples were asked for. DataError if there are none, or too many bad ones."""
        owners, last = self.rank_of(samples), self.marks[-1]
        read, ended = np.array(last["read"]), np.array(last["ended"])
        np.maximum.at(read, owners, samples // self.ranks[1] + 1)
        ended[owners[self._table.get(samples)[:, STATUS] == UNKNOWN]] = True
        if read.tolist() == last["read"]:
            return  # samples of a state
        states = [self._states.get(rank) for rank in range(self.ranks[1])]
        with self._lock:
            self.marks.append({"read": read.tolist(), "ended": ended.tolist(), "states": states})
        if ended.all():
            if not self.num_measured and not any(last["read"]):
                raise DataError("the dataset gave no items on any rank")
            self._least = 0  # there are no more by which to judge
            self._check_rejected()

    def _part(self, samples: IntArray, is_cancelled: Callable[[], bool]) -> MeasuredPart:
        part = super()._part(samples, is_cancelled)
        return part if self.stream is None else replace(part, states=self.stream.states())

    def _add(self, samples: IntArray, part: MeasuredPart) -> None:
        super()._add(samples, part)
        self._states |= part.states

    def _existing(self, samples: IntArray) -> IntArray:
        return samples if self.stream is None else self.stream.read(samples)

    def _share(self, samples: IntArray, rank: int) -> IntArray:
        """The samples that one rank loads; without an exchange all."""
        return samples if self._exchange is None else samples[self.rank_of(samples) == rank]
