"""Bounded cache on disk, shared by a machine's processes; drops the oldest.

A file gets its name when it is complete, so readers need no lock and a killed writer leaves only a
temporary file, which the next process removes. Space is reserved before writing, so the limit holds
(`loaders.read._cache_quota`). A cache that cannot be written (disk full) warns once and stops.
"""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from isobatch.common.errors import os_reason
from isobatch.common.visible_text import visible_line
from isobatch.loaders.read._cache_quota import Quota, locked


class Cache:
    """Files of one build in the cache folder `root`, whose builds take `limit_bytes` at most.

    Any number of processes and threads may use one folder. `limit_bytes` 0: nothing is kept.
    """

    def __init__(self, root: Path, build: str, limit_bytes: int, *, pinned: str = "") -> None:
        """Files of this build whose name begins with `pinned` do not leave, if that is given."""
        self._root, self._folder, self._limit = root, root / build, limit_bytes
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
                        locked(self._root / f".{self._folder.name}-{name}.lock", wait_s)
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
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _mark_used(path: Path | int) -> None:
    """Now, finer than the some milliseconds of the clock that the system itself would take."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
