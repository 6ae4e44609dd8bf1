"""`StreamRecords`: what each rank reads of an IterableDataset, by number.

A stream is read once per epoch, forward. Where a dataset can save its position a resumed run begins
there; else it reads its items again, and leaves out those that were used.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from balance.errors import ConfigError, DataError, first_line
from balance.types import IntArray
from loaders.online.records import Records, Transform, is_hugging_face


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated, not indexed. ConfigError for what can be read only once."""
    if hasattr(dataset, "__next__"):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}, which can be read only once; give an "
            "IterableDataset, which each epoch reads again"
        )
    # the items of a stream of `datasets` are its columns
    has_items = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__iter__") and not has_items


class StreamRecords(Records):
    """The items of all ranks' streams: of n ranks, every n-th number is one rank's."""

    num_ranks: int
    """Set once."""

    def __init__(
        self, dataset: Any, transform: Transform | None, *, as_files: bool, is_sharded: bool
    ) -> None:
        """`is_sharded`: the dataset gives each rank its own items by itself."""
        self._dataset, self._transform, self._as_files = dataset, transform, as_files
        # of `datasets` after `split_dataset_by_node`
        self.is_sharded = is_sharded or getattr(dataset, "_distributed", None) is not None

    def __len__(self) -> int:
        """More than there can be."""
        return sys.maxsize

    def restart(self, epoch: int, marks: list[dict[str, Any]], needed: IntArray) -> None:
        """Begin an epoch. `marks` are of `OwnLengths`, `needed` those of the items before them."""
        size, self._found = self.num_ranks, (needed[:0], list[Any]())
        self._streams = [
            _RankStream(
                self._dataset,
                (0, 1) if self.is_sharded else (rank, size),
                epoch,
                {mark["read"][rank]: mark["states"][rank] for mark in marks},
                (needed[needed % size == rank] // size).tolist(),
            )
            for rank in range(size)
        ]

    def states(self) -> dict[int, Any]:
        """The dataset's states of the streams that are read here, by rank; None without one."""
        return {rank: stream.state() for rank, stream in enumerate(self._streams)}

    def read(self, numbers: IntArray) -> IntArray:
        """Read items for `take`; -> those that there are. DataError if a stream raises."""
        size, owners, values = self.num_ranks, numbers % self.num_ranks, dict[int, Any]()
        for rank in np.unique(owners).tolist():
            found = self._streams[rank].read((numbers[owners == rank] // size).tolist())
            values |= {number * size + rank: value for number, value in found.items()}
        there = np.array([each for each in numbers.tolist() if each in values], np.int64)
        self._found = there, [values[each] for each in there.tolist()]
        return there

    def take(self, indices: IntArray) -> list[Any]:
        """What `read` has just found; DataError for other items, which can be read only once."""
        there, values = self._found
        if indices is not there:  # a thread of an iterator that has ended
            raise DataError("items of a stream are read once, and these were given")
        return list(map(self._transformed, values))


class _RankStream:
    """The items of one rank, numbered from 0 in each epoch."""

    def __init__(
        self,
        dataset: Any,
        share: tuple[int, int],
        epoch: int,
        states: dict[int, Any],
        needed: list[int],
    ) -> None:
        """`share`: rank and ranks that the items are dealt to here; `states` are the dataset's own
        before items; `needed` are those before the last of them that are to be read again.
        """
        self._dataset, (self._rank, self._size), self._epoch = dataset, share, epoch
        known = {number: state for number, state in states.items() if state is not None}
        self._states, self._needed = {0: None} | known, set(needed)
        self._can_save = hasattr(dataset, "load_state_dict")
        self._can_save &= not _loses_items(getattr(dataset, "_ex_iterable", None))
        self._items: Iterator[Any] | None = None
        self._kept = dict[int, Any]()  # items that are needed, and were not asked for yet
        self._next, self._is_ended = 0, False

    def read(self, numbers: list[int]) -> dict[int, Any]:
        """Items by number, those that there are; each is given once.

        DataError if the stream raises, or has no longer what it had when a state was saved.
        """
        wanted = self._needed.union(numbers)
        while self._next <= max(numbers) and not self._is_ended:
            try:
                if self._items is None or self._next not in wanted:
                    self._come_to(min(number for number in wanted if number >= self._next))
                value = next(self._items)  # type: ignore[arg-type]
            except StopIteration:
                self._is_ended = True
            except Exception as error:
                self._items = None  # a generator would say that it has ended
                raise DataError(
                    f"the stream raised {type(error).__name__}: {first_line(error)}; mend the "
                    "dataset, or let it leave such items out"
                ) from error
            else:
                if self._next in wanted:
                    self._kept[self._next] = value
                self._next += 1
        found = {number: self._kept.pop(number) for number in numbers if number in self._kept}
        if not self._needed.intersection(numbers) <= found.keys():
            raise DataError(
                "the stream has fewer items than when the state was saved; give the loader the "
                "dataset of that run"
            )
        self._needed.difference_update(numbers)
        return found

    def state(self) -> Any:
        """The dataset's state where the stream is; None without one that JSON holds."""
        if self._items is None or self._is_ended or not self._can_save:
            return None
        try:
            state = self._open.state_dict()
            return state if json.loads(json.dumps(state)) == state else None
        except Exception:  # of the user's code, or no plain values
            return None

    def _come_to(self, number: int) -> None:
        """Open the stream at the last state before an item, unless it is nearer."""
        start = max(each for each in self._states if each <= number)
        if self._items is not None and start <= self._next:
            return
        if number and len(self._states) == 1:
            warnings.warn(
                f"the dataset has no state of where it was: {number:,} items are read again",
                stacklevel=2,
            )
        self._open = self._copy()
        if hasattr(self._open, "set_epoch"):
            self._open.set_epoch(self._epoch)
        if self._states[start] is not None:
            self._open.load_state_dict(self._states[start])
        # a state is right after this rank's item
        first = self._size - 1 if start else self._rank
        self._items, self._next = islice(self._open, first, None, self._size), start

    def _copy(self) -> Any:
        """The dataset for one pass, since iterating may change it; of `datasets` these files."""
        if self._size > 1 and is_hugging_face(self._dataset):
            from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

            self._dataset = split_dataset_by_node(self._dataset, self._rank, self._size)
            self._rank, self._size = 0, 1
        opened = copy.copy(self._dataset)
        if hasattr(opened, "_ex_iterable"):  # has the position, of `datasets`
            with suppress(TypeError):  # it has what cannot be copied
                opened._ex_iterable = copy.deepcopy(opened._ex_iterable)
        return opened


def _loses_items(examples: Any) -> bool:
    """Whether a position of `datasets` is without the items in a buffer that it shuffles."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]
    is_buffer = type(examples).__name__.startswith("BufferShuffled")
    return is_buffer or any(map(_loses_items, inner))
