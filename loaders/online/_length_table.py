"""A row of counts per sample, in memory and in a file for later runs."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.types import COUNT_COLUMNS, IntArray
from loaders.online.records import Records

UNKNOWN, USABLE, REJECTED = range(3)
STATUS, SOURCE = len(COUNT_COLUMNS), len(COUNT_COLUMNS) + 1
"""Places of these in a row, after the columns of `Counts`."""
ROW = len(COUNT_COLUMNS) + 2


class LengthTable:
    """Rows of int32; zero where nothing is known."""

    def __init__(self, rows: NDArray[np.int32], file: Path | None = None) -> None:
        """`file`: where new rows are written, if this process writes them."""
        self.rows, self._file = rows, file
        self.sources: list[str] = []

    @classmethod
    def open(
        cls, folder: str | Path | None, records: Records, identity: str, *, may_write: bool
    ) -> LengthTable:
        """The rows that earlier runs with the same records and `identity` have left in a folder."""
        rows = np.zeros((len(records), ROW), np.int32)
        if folder is None:
            return cls(rows)
        key = blake2b(f"{records.fingerprint()} {identity}".encode(), digest_size=16).hexdigest()
        file = Path(folder) / f"{key}.lengths"
        table = cls(rows, file if may_write else None)
        try:
            table._load(file)
            if may_write:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab"):
                    pass
                np.memmap(file, np.int32, "r+", shape=rows.shape).flush()
        except OSError as error:
            raise ConfigError(f"lengths_cache {folder}: {error.strerror or error}") from None
        return table

    def set(self, samples: IntArray, rows: NDArray[np.int32]) -> None:
        """Rows of samples that are known now."""
        self.rows[samples] = rows
        if self._file is not None:
            self._names().write_text(json.dumps(self.sources), "utf-8")
            usable = rows[:, STATUS] == USABLE
            saved = np.memmap(self._file, np.int32, "r+", shape=self.rows.shape)
            saved[samples[usable]] = rows[usable]
            saved.flush()

    def _load(self, file: Path) -> None:
        names = file.with_suffix(".json")
        if not (file.exists() and names.exists()):
            return
        saved = np.fromfile(file, np.int32)
        sources = json.loads(names.read_text("utf-8"))
        if len(saved) == self.rows.size and saved.reshape(self.rows.shape)[:, SOURCE].max() < len(
            sources
        ):
            self.rows[:], self.sources = saved.reshape(self.rows.shape), sources

    def _names(self) -> Path:
        assert self._file is not None
        return self._file.with_suffix(".json")
