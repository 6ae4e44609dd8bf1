"""`OwnLengths`: what samples cost that each rank loads for itself."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.order.rank_rounds import deal
from isobatch.common.consoles import messages
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import BoolArray, IntArray
from isobatch.loaders.online._length_table import ROW, STATUS, UNKNOWN, LengthTable
from isobatch.loaders.online.lengths import MeasuredPart, SampleLengths
from isobatch.loaders.online.per_rank.sharding import FIRST_ITEMS, is_sharded, parts_of
from isobatch.loaders.online.per_rank.streams import StreamRecords
from isobatch.loaders.online.reader import RecordReader

CHUNK = 16
"""Records that are counted together: the memory of all is kept as long as one is in use."""
OWN_ITEMS = (
    "the dataset gives each rank items of its own; samples that it leaves out or repeats by "
    "itself, so that ranks have equally many (drop_last=True), are not seen here"
)
MORE = 1 << 24
"""Samples that a stream is taken to have left until it ends: more than one plans with."""


class RecentRows(LengthTable):
    """Rows of the samples in use, of a dataset that may have no end."""

    def __init__(self) -> None:
        super().__init__(np.zeros((1, ROW), np.int32))
        self._known = dict[int, NDArray[np.int32]]()

    def get(self, samples: IntArray) -> NDArray[np.int32]:
        """Rows of samples; zeros of those that are not known or forgotten."""
        rows = [self._known.get(sample, self.rows[0]) for sample in samples.ravel().tolist()]
        return np.array(rows, np.int32).reshape(*samples.shape, ROW)

    def set(self, samples: IntArray, rows: NDArray[np.int32]) -> None:
        """Rows of samples that are known now."""
        self._known |= zip(samples.tolist(), rows, strict=True)

    def forget(self, samples: IntArray) -> None:
        """Drop the rows of samples."""
        for sample in samples.tolist():
            self._known.pop(sample, None)


class OwnLengths(SampleLengths):
    """Samples are measured in each epoch, each by the rank that will train on it.

    The number of a stream's sample says its rank: of n ranks, every n-th is one's.
    """

    ranks: tuple[int, int]
    """This rank and their number."""
    owners: dict[int, int]
    """Sample -> rank, of samples that are read and not given yet."""
    stream: StreamRecords | None = None
    """None for a dataset with items by number."""
    marks: list[list[list[Any]]]
    """Where streams were after each window: items asked for, whether there were fewer, and the
    dataset's own states, each by rank.
    """
    _table: RecentRows

    def __len__(self) -> int:
        if self.stream is None:
            return len(self._reader.records)
        read, ended, _ = self.marks[-1]
        return int(sum(read)) + (0 if all(ended) else MORE)

    @property
    def are_reading(self) -> BoolArray:
        """Whether each rank may have more samples than it has been asked for, (ranks,)."""
        ended = [False] * self.ranks[1] if self.stream is None else self.marks[-1][1]
        return ~np.array(ended, np.bool_)

    def open(self, reader: RecordReader, ranks: tuple[int, int]) -> str:
        """Keep what `reader` has loaded until it is given; -> what tells these records."""
        self._reader, self.ranks = reader, ranks
        self._counter.chunk_records, self._rank = CHUNK, ranks[0]
        self._num_used, size = Counter[int](), str(len(reader.records))
        if isinstance(reader.records, StreamRecords):
            self.stream, size = reader.records, "a stream"
            if ranks[1] > 1 and self._exchange is None:
                raise ConfigError(
                    "a stream on several ranks needs torch.distributed; initialise it"
                )
        return f"{size} {self._counter.identity}"

    def compare_items(self, asked: bool | None) -> None:
        """Find out whether the ranks have the same items, together with all ranks.

        `asked`: what the user says. ConfigError if some items would be used by no rank, or by
        several.
        """
        if self._exchange is None:
            return
        stream, records = self.stream, self._reader.records
        if stream is not None:
            items = stream.first_items()
        else:
            rows = np.linspace(0, len(records) - 1, FIRST_ITEMS).astype(np.int64)
            items = [getattr(item, "value", item) for item in records.take(np.unique(rows))]
        part = [*map(parts_of, items)], len(records)
        parts = self._exchange.all_gather("first items", part, lambda: False)
        firsts, sizes = ([*column] for column in zip(*parts, strict=True))
        if stream is not None:
            stream.is_sharded = is_sharded(firsts, asked)
            if stream.is_sharded and self._options.tells:
                messages.print(f"note: {OWN_ITEMS}", soft_wrap=True)
        elif len(set(sizes)) > 1 or is_sharded(firsts, asked):
            raise ConfigError(
                f"the ranks' datasets are not the same ({sizes[0]} items on rank 0, {sizes[-1]} on "
                f"rank {len(sizes) - 1}); give every rank the whole dataset, or, where each has a "
                "part of its own, is_sharded=True"
            )

    def restart(self, epoch: int, state: dict[str, Any]) -> dict[str, Any]:
        """Forget all that is loaded, and load a state's samples again.

        -> the state, for these ranks. ConfigError for a stream's state of another number of ranks.
        """
        rank, size = self.ranks
        waiting, owners = state.get("waiting", []), state.get("owners", [])
        if state.get("ranks", size) != size:  # dealt in turn; empty groups fill the last round
            if self.stream is not None:
                raise ConfigError(
                    f"state is of a stream on {state['ranks']} ranks, and this loader has {size}: "
                    "resume on as many, or begin an epoch (`set_epoch`)"
                )
            waiting = [group for group in waiting if group]
            waiting += [[]] * (-len(waiting) % size)
            owners = [number % size for number in range(len(owners))]
            state = {**state, "waiting": waiting}
        self.owners = {sample: n % size for n, group in enumerate(waiting) for sample in group}
        self.owners |= zip(state.get("carried", []), owners, strict=True)
        self._table = RecentRows()
        self._reader.close()
        marks = state.get("marks")
        if self.stream is not None:
            self.marks = [*(marks or [[[0] * size, [False] * size, [None] * size]])]
            self._is_resumed = bool(marks)
            states = {read[rank]: states[rank] for read, _, states in self.marks}
            needed = [sample for sample in self.owners if sample % size == rank]
            self.stream.restart(epoch, self.ranks, states, np.array(needed, np.int64))
        return state

    def of(self, samples: IntArray) -> IntArray:
        """The rank that loads each sample, int64, same shape."""
        return np.array([self.owners[sample] for sample in samples.tolist()], np.int64)

    def deal(self, size: int, carried: IntArray, in_order: Callable[[int], IntArray]) -> IntArray:
        """New samples, each for a rank: a rank that carries many over gets few.

        Of a stream at least one for each rank that may have more.
        """
        num_ranks = self.ranks[1]
        carries = np.bincount(self.of(carried), minlength=num_ranks)
        if self.stream is None:
            samples = in_order(size)
            counts = deal(len(samples), carries.tolist())
        else:
            read, ended, _ = self.marks[-1]
            counts = deal(size, np.where(ended, MORE, carries).tolist())
            counts = np.where(ended, 0, np.maximum(1, counts)).tolist()
            of_ranks = [
                (read[rank] + np.arange(counts[rank])) * num_ranks + rank
                for rank in range(num_ranks)
            ]
            samples = np.concatenate(of_ranks)
        ranks = np.repeat(np.arange(num_ranks), counts)
        self.owners |= dict(zip(samples.tolist(), ranks.tolist(), strict=True))
        return samples

    def measure(
        self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: str = ""
    ) -> BoolArray:
        """As for `SampleLengths`, but each rank loads its own."""
        self._states, self._contents = [None] * self.ranks[1], [(0, 0)] * self.ranks[1]
        usable = super().measure(samples, is_cancelled, epoch)
        if self.stream is not None:
            self._add_mark(samples)
        return usable

    def source_shares(self) -> dict[str, float]:
        """Share of each source in the samples that were given."""
        total = max(1, self._num_used.total())
        return {name: self._num_used[place] / total for place, name in enumerate(self.sources)}

    def drop(self, samples: IntArray, consumed: int, live: IntArray) -> None:
        """Forget samples that were used; those `live` of the first `consumed` are needed still."""
        self._num_used.update(self.source_numbers(samples).tolist())
        self._reader.drop(samples)
        self._table.forget(samples)
        for sample in samples.tolist():
            self.owners.pop(sample, None)
        if self.stream is not None:
            with self._lock:
                later = [mark for mark in self.marks if sum(mark[0]) > consumed]
                self.marks = self._marks_before(consumed, live) + later

    def state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """For a state: the ranks, which of them has each sample that is carried, and the marks."""
        state: dict[str, Any] = {"ranks": self.ranks[1], "owners": self.of(carried).tolist()}
        if self.stream is not None:
            with self._lock:
                state["marks"] = self._marks_before(consumed, live)
        return state

    def _marks_before(self, consumed: int, live: IntArray) -> list[Any]:
        """The last mark before each sample that is live, and that after `consumed` samples."""
        read = np.array([mark[0] for mark in self.marks])  # (marks, ranks)
        size = self.ranks[1]
        places = (read[:, live % size] <= live // size).sum(axis=0) - 1
        after = read.sum(axis=1).tolist().index(consumed)
        return [self.marks[place] for place in np.unique(np.append(places, after)).tolist()]

    def _add_mark(self, samples: IntArray) -> None:
        """After these were asked for. DataError if streams have ended, and too many were bad."""
        size, last = self.ranks[1], self.marks[-1][0]
        read, ended = np.array(last), np.array(self.marks[-1][1])
        np.maximum.at(read, samples % size, samples // size + 1)
        ended[(samples % size)[self._table.get(samples)[:, STATUS] == UNKNOWN]] = True
        if read.tolist() != last:  # not samples of a state
            with self._lock:
                self.marks.append([read.tolist(), ended.tolist(), self._states])
        if ended.all():
            self._min_measured = 0  # there are no more by which to judge
            self._check_rejected()
            if not self._is_resumed:
                self._check_contents()

    def _check_contents(self) -> None:
        """DataError if ranks whose streams are their own have read the same items."""
        first = dict[tuple[int, int], int]()
        for rank, content in enumerate(self._contents):
            if content[0] and first.setdefault(content, rank) != rank:
                raise DataError(
                    f"the ranks {first[content]} and {rank} have read the same {content[0]:,} items"
                    " in other orders, so each was used more than once; shard the dataset by rank,"
                    " or give all ranks the same order, and each item goes to one rank"
                )

    def _part(self, samples: IntArray, is_cancelled: Callable[[], bool]) -> MeasuredPart:
        part = super()._part(samples, is_cancelled)
        if (stream := self.stream) is None:
            return part
        return replace(part, state=stream.state(), content=stream.content)

    def _add(self, samples: IntArray, part: MeasuredPart) -> None:
        super()._add(samples, part)
        self._states[part.rank], self._contents[part.rank] = part.state, part.content

    def _existing(self, samples: IntArray) -> IntArray:
        return samples if self.stream is None else self.stream.read(samples)

    def _share(self, samples: IntArray, rank: int) -> IntArray:
        """The samples that one rank loads; without an exchange all."""
        return samples if self._exchange is None else samples[self.of(samples) == rank]
