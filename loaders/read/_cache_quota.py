"""Space in a cache folder: what its files take, and which are removed.

All processes that use a folder keep one sum of its bytes, in a file that they change under one lock
(`flock`, which ends with its holder). Space is reserved there before anything is written.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
"""What file systems round a file's size up to."""
KEPT = 0.9
"""Fill after making room, which lists all files: seconds for a million."""
LOCK_WAIT_S = 2.0
"""For a process that was stopped while it held the lock; until then nothing is stored."""
_TEMPORARY = ".tmp-"
_LEDGER = "size"
_LEDGER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Reservation:
    """A temporary file of the right size, held by its lock."""

    path: Path
    descriptor: int


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    bytes: int
    """On disk."""
    used_ns: int
    """When it was last used."""
    is_temporary: bool


class Quota:
    """The bytes that files of all builds under `root` may take. Every method may raise OSError."""

    def __init__(self, root: Path, limit_bytes: int, pinned: Path | None) -> None:
        """Files whose path begins with `pinned` do not leave."""
        self._root, self._limit, self._pinned = root, limit_bytes, str(pinned)

    def open(self) -> None:
        """Make the folder, remove what killed processes left, and count what is there."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._root / _LEDGER, LOCK_WAIT_S) as ledger:
            if ledger is not None:
                _put_number(ledger, self._free(0))

    def take(self, target: Path, size: int) -> Reservation | None:
        """Space for `target`; others may be removed for it. None if it is there or does not fit."""
        needed = _on_disk(size)
        if needed > self._limit:
            return None
        with locked(self._root / _LEDGER, LOCK_WAIT_S) as ledger:
            if ledger is None or target.exists():
                return None
            used = _get_number(ledger)
            if used + needed > self._limit:
                used = self._free(needed)
                _put_number(ledger, used)
            if used + needed > self._limit:
                return None  # what is being written, or pinned, fills it
            # counted first: a process killed in between leaves the sum too large, never too small
            _put_number(ledger, used + needed)
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, size)  # listed with its full size from now on
            return Reservation(Path(path), descriptor)

    def _free(self, needed: int) -> int:
        """Remove the least recently used files until more than `needed` bytes fit; -> bytes left.

        Two listings: the first finds the age limit, so that a million files take 16 MB of memory.
        """
        ages, sizes = array("q"), array("q")
        used = 0
        for file in _files(self._root):
            if file.is_temporary and _is_abandoned(file.path):
                os.unlink(file.path)
                continue
            used += file.bytes
            if self._may_leave(file):
                ages.append(file.used_ns)
                sizes.append(file.bytes)
        if used + needed <= self._limit or not ages:
            return used
        too_much = used + needed - int(self._limit * KEPT)
        oldest_first = np.argsort(np.frombuffer(ages, np.int64), kind="stable")
        freed = np.cumsum(np.frombuffer(sizes, np.int64)[oldest_first])
        last = oldest_first[min(int(np.searchsorted(freed, too_much)), len(ages) - 1)]
        for file in _files(self._root):
            if too_much > 0 and self._may_leave(file) and file.used_ns <= ages[last]:
                os.unlink(file.path)
                used, too_much = used - file.bytes, too_much - file.bytes
        return used

    def _may_leave(self, file: _File) -> bool:
        return not file.is_temporary and not file.path.startswith(self._pinned)


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[int | None]:
    """A locked file, made if needed; None if another process held it for `wait_s`."""
    # opened each time: threads and forks would share an opened file's lock
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if _acquire(descriptor, time.monotonic() + wait_s) else None
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, deadline: float) -> bool:
    pause_s = 0.0002
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        else:
            return True


def _is_abandoned(path: str) -> bool:
    """Whether nobody holds a temporary file any more."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _files(root: Path) -> Iterator[_File]:
    """Files in the folders under `root`, without empty folders; only under the lock."""
    folders = [entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    while folders:
        folder = folders.pop()
        inner, files = _list(folder)
        if not inner and not files:
            os.rmdir(folder)
        folders += inner
        yield from files


def _list(folder: str) -> tuple[list[str], list[_File]]:
    """Folders and files in a folder; listed again if a file was renamed meanwhile."""
    for _ in range(100):
        inner, files = [], []
        try:
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    inner.append(entry.path)
                else:
                    state = entry.stat(follow_symlinks=False)
                    is_temporary = entry.name.startswith(_TEMPORARY)
                    files.append(
                        _File(entry.path, _on_disk(state.st_size), state.st_mtime_ns, is_temporary)
                    )
        except FileNotFoundError:
            continue
        break
    return inner, files


def _on_disk(size: int) -> int:
    """Bytes that a file takes.

    >>> _on_disk(0), _on_disk(1), _on_disk(4097)
    (0, 4096, 8192)
    """
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _get_number(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, _LEDGER_BYTES, 0), "little", signed=True)


def _put_number(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, value.to_bytes(_LEDGER_BYTES, "little", signed=True), 0)
