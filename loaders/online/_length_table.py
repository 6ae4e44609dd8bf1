"""A row of counts per sample, in memory and in a file for later runs."""

import json
import os
import warnings
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isobatch.common.cache_files import LENGTHS, MAX_BYTES, note_use, remove_files
from isobatch.common.errors import ConfigError, os_reason
from isobatch.common.types import COUNT_COLUMNS, IntArray
from isobatch.common.visible_text import visible_line
from isobatch.counting.records.fields import NeverRead
from isobatch.loaders.online.records import Records

UNKNOWN, USABLE, REJECTED = range(3)
STATUS, SOURCE = len(COUNT_COLUMNS), len(COUNT_COLUMNS) + 1
"""Places of these in a row, after the columns of `Counts`."""
ROW = len(COUNT_COLUMNS) + 2
UNREAD_SUFFIX = ".unread"


class LengthTable:
    """Rows of int32; zero where nothing is known."""

    def __init__(self, rows: NDArray[np.int32], file: Path | None = None) -> None:
        """`file`: where new rows are written, if this process writes them."""
        self.rows, self._file = rows, file
        self.sources: list[str] = []
        self.never_read: dict[str, NeverRead] = {}
        """Source -> keys that nothing reads, of the samples of earlier runs."""
        self._num_kept = 0  # sources in the file's list of them

    @classmethod
    def open(
        cls, folder: str | Path | None, records: Records, identity: str, *, may_write: bool
    ) -> "LengthTable":
        """The rows that earlier runs with the same records and `identity` have left in a folder."""
        rows = np.zeros((len(records), ROW), np.int32)
        if folder is None:
            return cls(rows)
        values = f"{version('isobatch')} {records.fingerprint()} {identity}"
        key = blake2b(values.encode(), digest_size=16).hexdigest()
        file = Path(folder) / (key + LENGTHS)
        table = cls(rows, file if may_write else None)
        try:
            is_found = table._load(file)
            if may_write:
                file.parent.mkdir(parents=True, exist_ok=True)
                # rows whose sources are lost go; the disk has room now, or a write would kill later
                with file.open("ab" if is_found else "wb") as table_file:
                    if hasattr(os, "posix_fallocate"):  # not on macOS
                        os.posix_fallocate(table_file.fileno(), 0, rows.nbytes)
                    else:
                        table_file.truncate(rows.nbytes)
                note_use(file)
                remove_files(file.parent, LENGTHS, MAX_BYTES[LENGTHS], keep=file)
        except OSError as error:
            raise ConfigError(f"lengths_cache {folder}: {error.strerror or error}") from None
        return table

    def get(self, samples: IntArray) -> NDArray[np.int32]:
        """Rows of samples, shape (*samples.shape, ROW)."""
        return self.rows[samples]

    def set(self, samples: IntArray, rows: NDArray[np.int32]) -> None:
        """Rows of samples that are known now."""
        self.rows[samples] = rows
        if self._file is not None:
            try:
                self._write(self._file, samples, rows)
            except OSError as error:  # on this rank alone: the others would wait for it
                why = f"{self._file}: lengths are not kept: {os_reason(error)}"
                warnings.warn(visible_line(why), stacklevel=2)
                self._file = None

    def keep_never_read(self, never_read: dict[str, NeverRead]) -> None:
        """Keep what nothing reads in the measured samples, for runs that find their rows."""
        if self._file is None:
            return
        file = self._file.with_suffix(UNREAD_SUFFIX)
        try:
            file.with_suffix(".new").write_text(json.dumps(never_read), "utf-8")
            file.with_suffix(".new").replace(file)
        except OSError:  # as of the rows, which say so
            self._file = None

    def _write(self, file: Path, samples: IntArray, rows: NDArray[np.int32]) -> None:
        if len(self.sources) > self._num_kept:
            names = file.with_suffix(".tmp")
            names.write_text(json.dumps(self.sources), "utf-8")
            names.replace(file.with_suffix(".json"))  # whole, whenever this process ends
            self._num_kept = len(self.sources)
        usable = rows[:, STATUS] == USABLE
        saved = np.memmap(file, np.int32, "r+", shape=self.rows.shape)
        saved[samples[usable]] = rows[usable]
        saved.flush()

    def _load(self, file: Path) -> bool:
        """Whether there are rows; none if it is not known what their sources are."""
        names = file.with_suffix(".json")
        if not (file.exists() and names.exists()):
            return False
        saved = np.fromfile(file, np.int32)
        try:
            sources = json.loads(names.read_text("utf-8"))
        except ValueError:
            return False
        if len(saved) != self.rows.size:
            return False
        saved = saved.reshape(self.rows.shape)
        if saved[:, SOURCE].max() >= len(sources):
            return False
        self.rows[:], self.sources, self._num_kept = saved, sources, len(sources)
        self.never_read = _read_never_read(file.with_suffix(UNREAD_SUFFIX))
        return True


def _read_never_read(file: Path) -> dict[str, NeverRead]:
    """What an earlier run has kept; nothing if that is damaged."""
    try:
        saved = json.loads(file.read_text("utf-8"))
        return {
            source: {path: (number, str(example)) for path, (number, example) in keys.items()}
            for source, keys in saved.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
