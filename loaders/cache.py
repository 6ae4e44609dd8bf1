"""A bounded cache on disk, shared by the processes of a machine: whole files, the longest unused leave first.

A file appears under its name when it is complete (written beside, then renamed), so readers need no lock and a killed
writer leaves nothing but a temporary file, which the next process removes. Room is taken before anything is written,
under one lock (`flock`, which ends with its holder), so all files together never exceed the limit. A cache that cannot
be written (disk full, no rights) stops storing, says so once, and costs nothing but its use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
"""What file systems round a file's size up to."""
KEPT = 0.9
"""How full the cache is after making room: each time all files are listed, which takes seconds for a million."""
LOCK_WAIT_S = 2.0
"""For a process that was stopped while it held the lock; until then nothing is stored."""
_TEMPORARY = ".tmp-"
_LEDGER = "size"
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class _Room:
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


class Cache:
    """Files of one build in the cache folder `root`, whose files of all builds take at most `limit_bytes`.

    Any number of processes and threads may use one folder. `limit_bytes` 0: nothing is kept.
    """

    def __init__(self, root: Path, build: str, limit_bytes: int, *, pinned: str = "") -> None:
        """`pinned` is a file of this build that does not leave."""
        self._root, self._folder, self._limit = root, root / build, limit_bytes
        self._pinned = self._folder / pinned if pinned else None
        self._storing = limit_bytes > 0
        self._said = threading.Lock()
        if self._storing:
            self._begin()

    def read(self, name: str) -> bytes | None:
        """The file, or None if it is not there; it counts as used."""
        if not self._limit:
            return None
        path = self._folder / name
        try:
            with path.open("rb", buffering=0) as file:
                content = file.readall()
            _mark_used(path)
        except OSError:
            return None  # not there, or removed between the two
        return content

    def path(self, name: str, size: int) -> Path | None:
        """Where the file lies, if it is there with that size; it counts as used."""
        path = self._folder / name
        try:
            _mark_used(path)
            return path if self._limit and path.stat().st_size == size else None
        except OSError:
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
            if descriptor is None:
                return
            at = 0
            while at < len(view):
                at += os.pwrite(descriptor, view[at:], at)

    @contextlib.contextmanager
    def writing(self, name: str, size: int) -> Iterator[int | None]:
        """A file of `size` bytes to write by `os.pwrite`; it gets its name when the block ends without an error.

        None if there is no room, or if the cache stores nothing. An OSError in the block switches storing off.
        """
        room = self._take(name, size) if self._storing else None
        if room is None:
            yield None
            return
        try:
            yield room.descriptor
            _mark_used(room.descriptor)
            room.path.replace(self._folder / name)
        except OSError as error:
            room.path.unlink(missing_ok=True)
            self._give_up(error)
        except BaseException:
            room.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(room.descriptor)

    @contextlib.contextmanager
    def alone(self, name: str, wait_s: float) -> Iterator[None]:
        """Let one process at a time do something that all of them want; after `wait_s` do it nevertheless."""
        with contextlib.ExitStack() as held:
            if self._storing:
                with contextlib.suppress(OSError):
                    held.enter_context(_locked(self._root / f".{self._folder.name}-{name}.lock", wait_s))
            yield

    def _begin(self) -> None:
        """Make the folder, remove what killed processes left, and count what is there."""
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self._root / _LEDGER, LOCK_WAIT_S) as ledger:
                if ledger is not None:
                    _put_number(ledger, self._make_room(0))
        except OSError as error:
            self._give_up(error)

    def _take(self, name: str, size: int) -> _Room | None:
        """Take room for a file, removing others if need be."""
        needed = _on_disk(size)
        if needed > self._limit:
            return None
        try:
            with _locked(self._root / _LEDGER, LOCK_WAIT_S) as ledger:
                target = self._folder / name
                if ledger is None or target.exists():
                    return None
                used = _get_number(ledger)
                if used + needed > self._limit:
                    used = self._make_room(needed)
                    _put_number(ledger, used)
                if used + needed > self._limit:
                    return None  # what is being written, or pinned, fills it
                # counted first: a process killed in between leaves the sum too large, never too small
                _put_number(ledger, used + needed)
                target.parent.mkdir(parents=True, exist_ok=True)
                descriptor, path = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
                room = _Room(Path(path), descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, size)  # listed with its full size from now on
                return room
        except OSError as error:
            self._give_up(error)
            return None

    def _make_room(self, needed: int) -> int:
        """Remove the longest unused files until `needed` bytes fit, and some more; -> bytes of what is left.

        Two listings: the first finds how old a file may be, so that a million files take 16 MB of memory.
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
        return not file.is_temporary and file.path != str(self._pinned)

    def _give_up(self, error: OSError) -> None:
        """Store nothing from now on; what is there can still be read."""
        with self._said:
            if not self._storing:
                return
            self._storing = False
        warnings.warn(
            f"cache {self._root}: {error.strerror or error}; going on without storing more in it. "
            "Free disk space, or give another cache_dir or a smaller cache_bytes",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[int | None]:
    """A file, locked; None if another process did not let go of it in time."""
    # opened anew each time: a lock belongs to the opened file, which threads and forked processes would share
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
    """Files in the folders under `root`; empty folders are removed. Only under the lock: no file is made meanwhile."""
    folders = [entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    while folders:
        folder = folders.pop()
        inner, files = _list(folder)
        if not inner and not files:
            os.rmdir(folder)
        folders += inner
        yield from files


def _list(folder: str) -> tuple[list[str], list[_File]]:
    """Folders and files in a folder. Listed again when a file went meanwhile: it was finished, and has its name now."""
    for _ in range(100):
        inner, files = [], []
        try:
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    inner.append(entry.path)
                else:
                    state = entry.stat(follow_symlinks=False)
                    is_temporary = entry.name.startswith(_TEMPORARY)
                    files.append(_File(entry.path, _on_disk(state.st_size), state.st_mtime_ns, is_temporary))
        except FileNotFoundError:
            continue
        break
    return inner, files


def _mark_used(path: Path | int) -> None:
    """Now, finer than the some milliseconds of the clock that the system itself would take."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _on_disk(size: int) -> int:
    """Bytes that a file takes.

    >>> _on_disk(0), _on_disk(1), _on_disk(4097)
    (0, 4096, 8192)
    """
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _get_number(descriptor: int) -> int:
    content = os.pread(descriptor, _NUMBER.size, 0)
    return int(_NUMBER.unpack(content)[0]) if len(content) == _NUMBER.size else 0


def _put_number(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, _NUMBER.pack(value), 0)
