"""Bounded cache on disk, shared by a machine's processes; drops the oldest.

A file gets its name when it is complete, so readers need no lock and a killed writer leaves only a
temporary file, which the next process removes. A cache that cannot be written (disk full) warns
once and stops.

All processes that use a folder keep one sum of its bytes, in a file that they change under one lock
(`flock`, which ends with its holder). Space is reserved there before anything is written, so the
limit holds.
"""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobatch.common.errors import os_reason
from isobatch.common.visible_text import visible_line

BLOCK_BYTES = 4096
"""What file systems round a file's size up to."""
KEPT = 0.9
"""Fill after making room, which lists all files: seconds for a million."""
LOCK_WAIT_S = 2.0
"""Wait for a process that was stopped while it held the lock; then nothing is stored."""
_TEMPORARY = ".tmp-"
_LEDGER = "size"
_LEDGER_BYTES = 8


class Cache:
    """Files of one build in the cache folder `root`, whose builds take `limit_bytes` at most.

    Any number of processes and threads may use one folder. `limit_bytes` 0: nothing is kept.
    """

    def __init__(self, root: Path, build: str, limit_bytes: int, *, pinned: str = "") -> None:
        """Files of this build whose name begins with `pinned` do not leave, if that is given."""
        self._root = root
        self._folder = root / build
        self._limit = limit_bytes
        self._room = Quota(root, limit_bytes, self._folder / pinned if pinned else None)
        self.is_storing = limit_bytes > 0
        """Whether it stores anything, as far as is known now."""
        self._said = threading.Lock()
        if self.is_storing:
            try:
                self._room.open()
            except OSError as error:
                self._give_up(error)

    def read(self, name: str, size: int | None = None) -> bytes | None:
        """Content of the file, if it is there, as `path` gives it."""
        path = self.path(name, size)
        try:
            return None if path is None else path.read_bytes()
        except OSError:
            return None  # removed between the two

    def path(self, name: str, size: int | None = None) -> Path | None:
        """Path of the file, if it is there; it counts as used. One of another size is removed."""
        if not self._limit:
            return None
        path = self._folder / name
        try:
            _mark_used(path)
            if size in (None, path.stat().st_size):
                return path
        except OSError:
            return None
        self.remove(name)  # or it would prevent the right one
        return None

    def has(self, name: str) -> bool:
        """Whether the file is there now; another process may remove it at any time."""
        return self._limit > 0 and (self._folder / name).exists()

    def remove(self, name: str) -> None:
        """Remove a file that is not what it should be."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def write(self, name: str, content: object) -> None:
        """Store a file (anything with the buffer protocol), whole or not at all."""
        view = memoryview(content).cast("B")  # type: ignore[arg-type]
        with self.writing(name, len(view)) as descriptor:
            if descriptor is not None:
                write_at(descriptor, view, 0)

    @contextlib.contextmanager
    def writing(self, name: str, size: int) -> Iterator[int | None]:
        """A file of `size` bytes to write by `os.pwrite`, named when the block ends well.

        None if there is no space, or nothing is stored. An OSError in the block ends storing.
        """
        place = None
        if self.is_storing:
            try:
                place = self._room.take(self._folder / name, size)
            except OSError as error:
                self._give_up(error)
        if place is None:
            yield None
            return
        try:
            yield place.descriptor
            _mark_used(place.descriptor)
            place.path.replace(self._folder / name)
        except OSError as error:
            place.path.unlink(missing_ok=True)
            self._give_up(error)
        except BaseException:
            place.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(place.descriptor)

    @contextlib.contextmanager
    def alone(self, name: str, wait_s: float) -> Iterator[None]:
        """Let one process at a time do what all of them want; after `wait_s` do it nevertheless."""
        with contextlib.ExitStack() as held:
            if self.is_storing:
                with contextlib.suppress(OSError):
                    held.enter_context(
                        locked(
                            self._root / f".{self._folder.name}-{name.replace('/', '-')}.lock",
                            wait_s,
                        )
                    )
            yield

    def _give_up(self, error: OSError) -> None:
        """Store nothing from now on; what is there can still be read."""
        with self._said:
            if not self.is_storing:
                return
            self.is_storing = False
        warnings.warn(
            f"cache {visible_line(str(self._root))}: {os_reason(error)}; going on without storing "
            "more in it. Free disk space, or give another cache_dir or a smaller cache_bytes",
            RuntimeWarning,
            stacklevel=2,
        )


def write_at(descriptor: int, content: memoryview, at: int) -> None:
    """Write all of `content` at a place of a file."""
    while content:  # of a call at most 2 GB
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _mark_used(path: Path | int) -> None:
    """Now, finer than the some milliseconds of the clock that the system itself would take."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


# --- space: what files take, and which are removed ---


@dataclass(frozen=True, slots=True)
class Reservation:
    """A temporary file of the right size, held by its lock."""

    path: Path
    descriptor: int


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    bytes: int
    """Bytes on disk."""
    used_ns: int
    """Time of its last use."""
    is_temporary: bool


class Quota:
    """The bytes that files of all builds under `root` may take. Every method may raise OSError."""

    def __init__(self, root: Path, limit_bytes: int, pinned: Path | None) -> None:
        """Files whose path begins with `pinned` do not leave."""
        self._root = root
        self._limit = limit_bytes
        self._pinned = str(pinned)

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
        deadline = time.monotonic() + wait_s
        pause_s = 0.0002
        while not (is_locked := _try_to_lock(descriptor)) and time.monotonic() <= deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        yield descriptor if is_locked else None
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
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
