"""`StreamRecords`: what a rank reads of an IterableDataset, by number.

A stream is read once per epoch, forward. Where a dataset can save its position a resumed run begins
there; else it reads its items again, and leaves out those that were used.
"""

import copy
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from isobatch.balance.order.step_order import GlobalShuffle
from isobatch.common.errors import DataError, first_line
from isobatch.common.types import IntArray
from isobatch.loaders.online.per_rank.sharding import FIRST_ITEMS, parts_of
from isobatch.loaders.online.records import Records, Transform, is_hugging_face


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated, not indexed, and each time from its beginning."""
    # one may have items too (columns, with `datasets`), or be its own iterator (LitData's)
    if isinstance(dataset, IterableDataset):
        return True
    is_iterator = hasattr(dataset, "__next__") or hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not is_iterator


def as_stream(dataset: Any) -> Any:
    """A dataset with rows and no items as a stream; any other as it is."""
    has_rows = hasattr(dataset, "iter_rows") and not hasattr(dataset, "__getitem__")
    return RowStream(dataset) if has_rows else dataset


class RowStream(IterableDataset[Any]):
    """The rows of a dataset that is iterated by a method, as Ray Data's are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.iter_rows())


class ShuffledPart(IterableDataset[Any]):
    """A rank's own items by number, as a stream in another random order each epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._epoch, self._given = dataset, seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch."""
        self._epoch, self._given = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Items that were given of the epoch."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after so many items."""
        self._given = state["given"]

    def __iter__(self) -> Iterator[Any]:
        order = GlobalShuffle(num_groups=len(self._dataset), seed=self._seed, epoch=self._epoch)
        order.take(self._given)
        while order.remaining:
            self._given += 1
            yield self._dataset[int(order.take(1)[0])]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pass whose first items were looked at."""

    epoch: int
    opened: Any
    first: list[Any]
    rest: Iterator[Any]


class StreamRecords(Records):
    """The items of one rank: of n ranks, every n-th number is one rank's."""

    is_sharded = False
    """Whether the dataset gives each rank its own items by itself."""

    def __init__(self, dataset: Any, transform: Transform | None, *, as_files: bool) -> None:
        self._dataset, self._transform, self.as_files = dataset, transform, as_files
        self._can_save = hasattr(dataset, "load_state_dict")
        self._can_save &= not _loses_items(getattr(dataset, "_ex_iterable", None))
        self._epoch, self._rank, self._ranks = 0, 0, 1
        self._begun: _Begun | None = None
        self.content = 0, 0
        """Of a dataset that shards itself: items read in this epoch, and a sum of their parts."""

    def __len__(self) -> int:
        """Nobody knows; not none."""
        return 1

    def first_items(self) -> list[Any]:
        """The dataset's first items on this rank; none if it raises, which the first step says.

        The first pass goes on after them: some loaders (Energon's) never begin again.
        """
        if self._begun is None:
            with suppress(Exception):
                opened, _ = self._opened(is_split=False)
                items = iter(opened)
                self._begun = _Begun(self._epoch, opened, [*islice(items, FIRST_ITEMS)], items)
        return [] if self._begun is None else self._begun.first

    def restart(
        self, epoch: int, ranks: tuple[int, int], states: dict[int, Any], needed: IntArray
    ) -> None:
        """Begin an epoch of this rank of so many. `states` are the dataset's own before this rank's
        n-th item, if any; `needed` are the items that are to be read again.
        """
        self._epoch, (self._rank, self._ranks) = epoch, ranks
        known = {number: state for number, state in states.items() if state is not None}
        self._states, self._needed = {0: None} | known, set(needed.tolist())
        self._items: Iterator[Any] | None = None
        self._kept = dict[int, Any]()
        self._next, self._is_ended = self._rank, False
        self._found: tuple[IntArray, list[Any]] = needed[:0], []
        self.content = 0, 0

    def read(self, numbers: IntArray) -> IntArray:
        """Read items for `take`; -> those that there are. DataError if the stream raises."""
        wanted = self._needed.union(numbers.tolist())
        while self._next <= numbers.max() and not self._is_ended:
            try:
                if self._items is None or self._next not in wanted:
                    self._come_to(min(number for number in wanted if number >= self._next))
                value = next(self._items)  # type: ignore[arg-type]
            except StopIteration:
                self._is_ended = True
            except Exception as error:
                self._items = None  # a generator would say that it has ended
                why = f"{type(error).__name__}: {first_line(error)}"
                raise DataError(f"the stream raised {why}; mend the dataset") from error
            else:
                self._count(value)
                if self._next in wanted:
                    self._kept[self._next] = value
                self._next += self._ranks
        there = np.array([row for row in numbers.tolist() if row in self._kept], np.int64)
        if not self._needed.intersection(numbers.tolist()) <= self._kept.keys():
            raise DataError("the stream has fewer items than in the run that saved the state")
        self._needed.difference_update(numbers.tolist())
        self._found = there, [self._kept.pop(row) for row in there.tolist()]
        return there

    def take(self, indices: IntArray) -> list[Any]:
        """What `read` has just found; DataError for other items, which can be read only once."""
        return self.transformed(self.take_items(indices))

    def take_items(self, indices: IntArray) -> list[Any]:
        """The same as the dataset gave them."""
        there, values = self._found
        if indices is not there:  # a thread of an iterator that has ended
            raise DataError("items of a stream are read once, and these were given")
        return values

    def _count(self, value: Any) -> None:
        """Note an item, where other ranks may have the same ones."""
        if self.is_sharded:
            count, total = self.content
            self.content = count + 1, (total + sum(parts_of(value))) % 2**64

    def state(self) -> Any:
        """The dataset's state where the stream is; None without one that JSON holds."""
        if self._items is None or self._is_ended or not self._can_save:
            return None
        try:
            state = self._open.state_dict()  # it may go on to change
            return plain if (plain := json.loads(json.dumps(state))) == state else None
        except Exception:  # of the user's code, or no plain values
            return None

    def _come_to(self, number: int) -> None:
        """Open the stream at the last state before an item, unless it is nearer."""
        start = max(
            start_of_state
            for start_of_state in self._states
            if start_of_state <= number // self._ranks
        )
        if self._items is not None and start <= self._next // self._ranks:
            return
        if len(self._states) == 1 and number >= self._ranks:
            why = "the dataset has no state of where it was"
            warnings.warn(f"{why}: {number // self._ranks:,} items are read again", stacklevel=2)
        begun, self._begun = self._begun, None
        items: Iterable[Any]
        if begun and (start, self._epoch) == (0, begun.epoch) and not self._can_save:
            share = (0, 1) if self.is_sharded else (self._rank, self._ranks)
            self._open, items = begun.opened, chain(begun.first, begun.rest)
        else:
            self._open, share = self._opened()
            items = self._open
        if self._states[start] is not None:
            self._open.load_state_dict(copy.deepcopy(self._states[start]))
        rank, size = share
        # a state is right after this rank's item
        self._items = islice(items, size - 1 if start else rank, None, size)
        self._next = start * self._ranks + self._rank

    def _opened(self, *, is_split: bool = True) -> tuple[Any, tuple[int, int]]:
        """The dataset for one pass, which iterating may change; and this rank's share of it."""
        dataset, share = self._dataset, (self._rank, self._ranks)
        if self.is_sharded or not is_split:
            share = 0, 1
        elif is_hugging_face(dataset):
            from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

            dataset, share = split_dataset_by_node(dataset, *share), (0, 1)
        opened = copy.copy(dataset)
        if hasattr(opened, "_ex_iterable"):  # has the position, of `datasets`
            with suppress(TypeError):  # it has what cannot be copied
                opened._ex_iterable = copy.deepcopy(opened._ex_iterable)
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(self._epoch)
        elif hasattr(opened, "next_epoch"):  # of MosaicML's
            opened.next_epoch = self._epoch
        return opened, share


def _loses_items(examples: Any) -> bool:
    """Whether a position of `datasets` is without the items in a buffer that it shuffles."""
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]
    is_buffer = type(examples).__name__.startswith("BufferShuffled")
    return is_buffer or any(_loses_items(iterable) for iterable in inner if iterable is not None)
