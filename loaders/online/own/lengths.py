"""`OwnLengths`: what samples cost that each rank loads for itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from balance.errors import ConfigError, DataError
from balance.types import BoolArray, IntArray, Limits
from loaders.online._length_table import STATUS, UNKNOWN
from loaders.online.lengths import MeasuredPart, SampleLengths
from loaders.online.own.recent_rows import RecentRows
from loaders.online.own.streams import Points, StreamRecords
from loaders.online.reader import RecordReader
from loaders.online.records import Records
from loaders.ranks import RankChecks

CHUNK = 16
"""Records that are counted together: the memory of all is kept as long as one is in use."""


class OwnLengths(SampleLengths):
    """Samples are measured in each epoch, each by the rank that will train on it.

    Of a stream a sample's number says its rank: of n ranks, every n-th is one's.
    """

    _table: RecentRows
    ranks: tuple[int, int]
    """This rank and their number."""
    owners: dict[int, int]
    """Sample -> rank, of samples of a dataset with items that are read and not given yet."""
    stream: StreamRecords | None = None
    """None: a dataset with items by number."""
    at: tuple[IntArray, BoolArray]
    """Items that each rank was to read of its stream so far, and whether it has ended before."""

    def __len__(self) -> int:
        """Samples; of a stream that has not ended on all ranks more than there can be."""
        if self.stream is None:
            return len(self._records)
        read, ended = self.at
        return int(read.sum()) if ended.all() else sys.maxsize

    @property
    def is_endless(self) -> bool:
        """Whether nobody knows yet how many samples there are."""
        return len(self) == sys.maxsize

    def open(
        self,
        records: Records,
        reader: RecordReader,
        ranks: tuple[int, int],
        checks: RankChecks | None,
    ) -> str:
        """Keep what `reader` has loaded until it is given; -> what tells the dataset from others,
        as far as items that may be others each time do. `checks` count what ranks begin.
        """
        self._records, self._reader, self.ranks, self._checks = records, reader, ranks, checks
        self._counter.chunk_records, self._rank = CHUNK, ranks[0]
        if isinstance(records, StreamRecords):
            self.stream, records.num_ranks = records, ranks[1]
            if records.is_sharded and ranks[1] > 1 and self._exchange is None:
                raise ConfigError(
                    "dp_rank and dp_world_size are given without torch.distributed, and the "
                    "dataset gives each rank its own items: what others have is not known"
                )
        return f"{len(records) if self.stream is None else 'a stream'} {self._counter.identity}"

    def restart(
        self, epoch: int, owners: dict[int, int], streams: list[dict[str, Any]] | None = None
    ) -> None:
        """Forget all that is loaded; what ranks tell from now on is new.

        `streams`: of a state, where each rank's stream was; `owners` has all that is still needed.
        """
        self.owners = owners
        self._begun = f"own/{self._checks.num_compared if self._checks else 0}/{epoch}"
        self._table = RecentRows()
        self._reader.close()
        if self.stream is not None:
            begun = streams or [{"read": 0, "ended": False, "points": []}] * self.ranks[1]
            read, ended = ([each[name] for each in begun] for name in ("read", "ended"))
            self._points: list[Points] = [{0: None, **dict(each["points"])} for each in begun]
            needed = np.array([*owners], np.int64)
            self.stream.restart(epoch, [dict(each) for each in self._points], needed)
            self.at = np.array(read, np.int64), np.array(ended, np.bool_)
            self._past, self._is_new = {sum(read): self.at}, not sum(read)

    def rank_of(self, samples: IntArray) -> IntArray:
        """The rank that loads each sample, int64, same shape."""
        if self.stream is not None:
            return samples % self.ranks[1]
        return np.array([self.owners[sample] for sample in samples.tolist()], np.int64)

    def measure(
        self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: object = 0
    ) -> BoolArray:
        """As for `SampleLengths`, but each rank loads its own."""
        usable = super().measure(samples, is_cancelled, self._begun)
        if self.stream is not None:
            self._note_streams(samples)
        self._table.forget(samples[~usable])
        return usable

    def within(self, samples: IntArray, limits: Limits) -> IntArray:
        """As for `SampleLengths`; what is rejected is forgotten."""
        kept = super().within(samples, limits)
        self._table.forget(np.setdiff1d(samples, kept))
        return kept

    def drop(self, samples: IntArray, consumed: int, live: IntArray) -> None:
        """Forget samples that were given; those `live` of the first `consumed` are needed still."""
        self._reader.drop(samples)
        self._table.forget(samples)
        for sample in samples.tolist():
            self.owners.pop(sample, None)
        if self.stream is not None and min(self._past) < consumed:
            with self._lock:
                self._past = {key: at for key, at in self._past.items() if key >= consumed}
                for rank, read in enumerate(self._past[consumed][0].tolist()):
                    later = {n: state for n, state in self._points[rank].items() if n > read}
                    self._points[rank] = self._points_of(rank, read, live) | later

    def state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """For a state: the ranks, and which of them has each sample that is carried; or where their
        streams were, and begin again to find the samples `live`.
        """
        if self.stream is None:
            return {"ranks": self.ranks[1], "owners": self.rank_of(carried).tolist()}
        with self._lock:
            streams = [
                {
                    "read": read,
                    "ended": ended,
                    "points": [[n, at] for n, at in self._points_of(rank, read, live).items() if n],
                }
                for rank, (read, ended) in enumerate(
                    zip(*(each.tolist() for each in self._past[consumed]), strict=True)
                )
            ]
        return {"ranks": self.ranks[1], "streams": streams}

    def _points_of(self, rank: int, read: int, live: IntArray) -> Points:
        """The last points before the samples of a rank that are live, and before the next ones."""
        own = live[self.rank_of(live) == rank] // self.ranks[1]
        points = np.array(sorted(self._points[rank]), np.int64)
        places = np.searchsorted(points, np.append(own, read), "right") - 1
        return {number: self._points[rank][number] for number in np.unique(points[places]).tolist()}

    def _note_streams(self, samples: IntArray) -> None:
        """How far the ranks' streams are, after these samples were asked for."""
        owners, size = self.rank_of(samples), self.ranks[1]
        read, ended = self.at[0].copy(), self.at[1].copy()
        np.maximum.at(read, owners, samples // size + 1)
        ended[owners[self._table.get(samples)[:, STATUS] == UNKNOWN]] = True
        with self._lock:
            self.at = self._past[int(read.sum())] = read, ended
        if ended.all():
            if self._is_new and not self.num_measured:
                raise DataError("the dataset gave no items on any rank")
            self._least = 0  # there are no more by which to judge
            self._check_rejected()

    def _part(self, samples: IntArray, is_cancelled: Callable[[], bool]) -> MeasuredPart:
        part = super()._part(samples, is_cancelled)
        return part if self.stream is None else replace(part, points=self.stream.points())

    def _add(self, samples: IntArray, part: MeasuredPart) -> None:
        super()._add(samples, part)
        with self._lock:
            for rank, (number, state) in part.points.items():
                self._points[rank].setdefault(number, state)

    def _existing(self, samples: IntArray) -> IntArray:
        return samples if self.stream is None else self.stream.read(samples)

    def _share(self, samples: IntArray, rank: int) -> IntArray:
        """The samples that one rank loads; without an exchange all."""
        return samples if self._exchange is None else samples[self.rank_of(samples) == rank]
