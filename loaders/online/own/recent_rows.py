"""`RecentRows`: rows of counts of the samples in use, of a dataset that may have no end."""

from __future__ import annotations

import sys
import threading

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from loaders.online._length_table import ROW, LengthTable, count_sources


class RecentRows(LengthTable):
    """Threads may use it at a time: what is known is replaced, never changed."""

    def __init__(self) -> None:
        super().__init__(np.zeros((1, ROW), np.int32))
        self._lock = threading.Lock()
        # ascending; the last is no sample, so that every place has a row
        self._known = np.array([sys.maxsize], np.int64), self.rows
        self._past: IntArray = np.zeros(0, np.int64)

    def get(self, samples: IntArray) -> NDArray[np.int32]:
        """Rows of samples; zeros of those that are not known or forgotten."""
        numbers, rows = self._known
        places = np.searchsorted(numbers, samples)
        return np.where((numbers[places] == samples)[..., None], rows[places], np.int32(0))

    def set(self, samples: IntArray, rows: NDArray[np.int32]) -> None:
        """Rows of samples that are known now."""
        with self._lock:
            numbers = np.concatenate([samples, self._known[0]])
            numbers, first = np.unique(numbers, return_index=True)
            self._known = numbers, np.concatenate([rows, self._known[1]])[first]

    def forget(self, samples: IntArray) -> None:
        """Drop rows; of the usable ones the sources are counted."""
        with self._lock:
            numbers, rows = self._known
            is_past = np.isin(numbers, samples)
            self._past = self._with_past(rows[is_past])
            self._known = numbers[~is_past], rows[~is_past]

    def usable_by_source(self) -> IntArray:
        """As of `LengthTable`, forgotten ones too."""
        with self._lock:
            return self._with_past(self._known[1])

    def _with_past(self, rows: NDArray[np.int32]) -> IntArray:
        counts = count_sources(rows, len(self._past))
        counts[: len(self._past)] += self._past
        return counts
