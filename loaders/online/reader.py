"""`RecordReader`: reads samples of a dataset as one `StoredGroup`.

What this rank measured itself is kept, as far as memory allows; other records are read and counted
again, so only the rank that trains on a sample reads its files.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from isobatch.common.errors import DataError
from isobatch.common.types import COUNT_COLUMNS, BoolArray, IntArray
from isobatch.common.visible_text import visible_line
from isobatch.counting.record_counter import CountedRecords, RecordCounter, RejectedSample
from isobatch.loaders.online.lengths import SampleLengths
from isobatch.loaders.online.processes.pool import WorkerPool
from isobatch.loaders.online.records import Records
from isobatch.loaders.read.reader import SelectionReader, with_extras
from isobatch.loaders.steps.selection import Selection, StoredSample
from isobatch.shards.stored_group import StoredGroup

KEPT_BYTES = 256 << 20
"""Memory for records that this rank has counted, and may train on."""


class RecordReader(SelectionReader):
    """Counts records, and gives those of a micro-batch with their files."""

    def __init__(
        self,
        records: Records,
        counter: RecordCounter,
        extras: tuple[str, ...],
        *,
        may_lose: bool,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`may_lose`: whether samples that changed since they were measured are left out."""
        self.records, self._counter, self._extras = records, counter, extras
        self._may_lose, self._kept_bytes = may_lose, kept_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, CountedRecords] = OrderedDict()
        # sample -> which of the kept records it is in, and its row
        self._places: dict[int, tuple[int, int]] = {}
        self._lost: set[int] = set()
        self._number, self._held_bytes = 0, 0
        self.lengths: SampleLengths
        """What steps were planned by; set once."""
        self.pool: WorkerPool | None = None
        """Processes that count records; None: threads of this one do."""

    @property
    def row_bytes(self) -> int:
        """Bytes of arrays for each unit of what they cost the vision encoder."""
        return self._counter.row_bytes

    def measure(
        self, samples: IntArray, admit: Callable[[IntArray], IntArray]
    ) -> Iterator[CountedRecords]:
        """Records, counted some at a time, in order, and kept for `read`.

        `admit` is called before some are read, and gives those that there are.
        """
        for counted in self._count(self._chunks(samples, admit), is_awaited=False):
            self._keep(counted)
            yield counted

    def _chunks(
        self, samples: IntArray, admit: Callable[[IntArray], IntArray]
    ) -> Iterator[IntArray]:
        while len(samples):
            size = self._counter.chunk_records
            if self.pool is not None:
                size = self.pool.records_per_task(size, len(samples))
            if len(chunk := admit(samples[:size])):
                yield chunk
            samples = samples[size:]

    def _count(self, chunks: Iterable[IntArray], *, is_awaited: bool) -> Iterator[CountedRecords]:
        """Chunks of records, counted in this thread or by the workers."""
        if self.pool is None:
            for chunk in chunks:
                yield self._counter.count(chunk, self.records.take(chunk))
            return
        for counted, row_bytes in self.pool.count(chunks, self.records, is_awaited=is_awaited):
            self._counter.row_bytes = max(self._counter.row_bytes, row_bytes)
            yield counted

    def _keep(self, counted: CountedRecords) -> None:
        self.has_videos = self.has_videos or counted.has_videos
        with self._lock:
            self._number += 1
            self._kept[self._number] = counted
            rows = enumerate(counted.indices.tolist())
            self._places |= {index: (self._number, row) for row, index in rows}
            self._held_bytes += counted.num_bytes
            while self._held_bytes > self._kept_bytes:
                number, dropped = self._kept.popitem(last=False)
                self._held_bytes -= dropped.num_bytes
                for index in dropped.indices.tolist():
                    if self._places.get(index, (0, 0))[0] == number:
                        del self._places[index]

    def drop(self, samples: IntArray) -> None:
        """Forget samples, and counted records of which no other is left."""
        with self._lock:
            numbers = {self._places.pop(index, (0, 0))[0] for index in samples.tolist()} - {0}
            for number in numbers - {number for number, _ in self._places.values()}:
                self._held_bytes -= self._kept.pop(number).num_bytes

    def in_memory(self) -> dict[int, tuple[CountedRecords, int]]:
        """Samples in memory: where each is among those counted, and its row."""
        with self._lock:
            return {
                index: (self._kept[number], row) for index, (number, row) in self._places.items()
            }

    def read(self, selection: Selection) -> StoredGroup:
        """The samples of a selection, in its order; those that changed are left out and noted."""
        indices = np.array([part.group for part in selection], np.int64)
        parts, lost = self._counted(indices)
        self._lost.difference_update(indices.tolist())  # a file may be there again
        raw = self._counter.empty_group
        if parts:
            raw, changed = self._counter.group(parts, indices)
            lost += changed
        if lost:
            self._lose(lost)
        return with_extras(raw, self._extras) if len(raw.sample_ids) == 0 else raw

    def stored_samples(self, selection: Selection) -> list[StoredSample]:
        """Where each sample of a selection is stored: by its index alone."""
        return [(0, part.group, 0) for part in selection if part.group not in self._lost]

    def cancel(self) -> None:
        """End reads that no worker has begun; others do not wait for long."""
        if self.pool is not None:
            self.pool.cancel()

    def close(self) -> None:
        """Drop what is kept."""
        with self._lock:
            self._kept.clear()
            self._held_bytes = 0
            self._places.clear()

    def _counted(
        self, indices: IntArray
    ) -> tuple[list[tuple[CountedRecords, IntArray]], list[RejectedSample]]:
        """Counted records with the usable rows wanted of each, and what is wrong with others.

        A record that gives other counts than those it was planned by would break its step's sums.
        """
        by_number: dict[int, list[int]] = {}
        missing: list[int] = []
        with self._lock:
            for index in indices.tolist():
                number, row = self._places.get(index, (0, index))
                (by_number.setdefault(number, []) if number else missing).append(row)
            parts = [(self._kept[number], np.array(rows)) for number, rows in by_number.items()]
        if missing:
            again = np.array(missing, np.int64)
            # a thread has all at once, workers share them
            chunks = [again] if self.pool is None else self._chunks(again, lambda chunk: chunk)
            counted_again = self._count(chunks, is_awaited=True)
            parts += [(counted, np.arange(len(counted.indices))) for counted in counted_again]
        usable, lost = [], []
        for counted, rows in parts:
            same = self._as_planned(counted, rows)
            if (same & counted.usable[rows]).any():
                usable.append((counted, rows[same & counted.usable[rows]]))
            if not counted.usable[rows].all():
                wanted = set(counted.indices[rows].tolist())
                lost += [sample for sample in counted.rejected if sample.index in wanted]
            lost += [self._changed(counted, row) for row in rows[~same & counted.usable[rows]]]
        return usable, lost

    def _as_planned(self, counted: CountedRecords, rows: IntArray) -> BoolArray:
        planned = [self.lengths.column(name, counted.indices[rows]) for name in COUNT_COLUMNS]
        return np.asarray((np.stack(planned, axis=1) == counted.counts[rows]).all(axis=1))

    def _changed(self, counted: CountedRecords, row: int) -> RejectedSample:
        planned = [self.lengths.column(name, counted.indices[row]) for name in COUNT_COLUMNS]
        pairs = zip(COUNT_COLUMNS, planned, counted.counts[row], strict=True)
        name, was, now = next(pair for pair in pairs if pair[1] != pair[2])
        detail = (
            f"{name} is {now} and was {was} when it was measured: the dataset gives another record "
            "each time, or the lengths are another dataset's"
        )
        index = int(counted.indices[row])
        sample_id = counted.table.column("sample_id")[row].as_py()
        return RejectedSample(index, sample_id, counted.sources[row], "record_changed", detail)

    def _lose(self, lost: list[RejectedSample]) -> None:
        first = lost[0]
        named = f"sample {first.sample_id!r} (record {first.index}): {first.reason}: {first.detail}"
        if not self._may_lose:
            raise DataError(f"{named}; restore it, or use on_error='skip'")
        warnings.warn(visible_line(f"left out: {named}"), stacklevel=2)
        self._lost |= {sample.index for sample in lost}
        self.lengths.lose(lost)
