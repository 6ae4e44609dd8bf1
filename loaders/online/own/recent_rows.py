"""`RecentRows`: counts of the samples in use, of a dataset that may have no end."""

from __future__ import annotations

import sys
import threading

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from loaders.online._length_table import ROW, LengthTable


class RecentRows(LengthTable):
    """Rows of samples, for several threads: what is known is replaced, never changed."""

    def __init__(self) -> None:
        super().__init__(np.zeros((1, ROW), np.int32))
        self._lock = threading.Lock()
        # ascending; the last is no sample, so that every place has a row
        self._known = np.array([sys.maxsize], np.int64), self.rows

    def get(self, samples: IntArray) -> NDArray[np.int32]:
        """Rows of samples; zeros of those that are not known or forgotten."""
        numbers, rows = self._known
        places = np.searchsorted(numbers, samples)
        return np.where((numbers[places] == samples)[..., None], rows[places], np.int32(0))

    def set(self, samples: IntArray, rows: NDArray[np.int32]) -> None:
        """Rows of samples that are known now."""
        with self._lock:
            numbers, known = self._known
            numbers, first = np.unique(np.concatenate([samples, numbers]), return_index=True)
            self._known = numbers, np.concatenate([rows, known])[first]

    def forget(self, samples: IntArray) -> None:
        """Drop the rows of samples."""
        with self._lock:
            numbers, rows = self._known
            is_kept = ~np.isin(numbers, samples)
            self._known = numbers[is_kept], rows[is_kept]
