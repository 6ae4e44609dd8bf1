"""`LocalFolder`: a folder on disk, with the methods of `ObjectFolder`."""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from isobatch.common.errors import DataError


class OutsideFolder(OSError):
    """A name that leads out of the folder."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a folder."""

    name: str
    """Path relative to the folder, with forward slashes."""
    size: int
    version: str
    """Time of change, or the store's entity tag: changes when the file does."""


def _open_now(path: str, flags: int = 0) -> int:
    """Open without waiting: a pipe in place of an image would stop a build for ever.

    So would a device without an end, such as /dev/zero; it is refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except ValueError:  # a null byte or half a character
        raise FileNotFoundError(errno.ENOENT, "no file can have this name", path) from None
    if stat.S_ISCHR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENODEV, "a device, not a file", path)
    return descriptor


class LocalFolder:
    """A folder on disk. Links that lead out of it are refused, unless they are to be followed."""

    def __init__(self, place: str, *, follow_links: bool = False) -> None:
        self.uri = place
        self._path = Path(place)
        self._follow_links = follow_links
        self._real = os.path.realpath(place)
        # most files share few folders: resolving those once leaves one look per file
        self._real_folder = lru_cache(maxsize=4096)(os.path.realpath)

    def open(self, name: str) -> IO[bytes]:
        """The file, seekable."""
        return open(self._descriptor(name), "rb")

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file."""
        with open(self._descriptor(name), "rb", buffering=0) as file:
            if offset:
                file.seek(offset)
            if length is None:
                return file.readall()
            data = file.read(length) or b""
            while len(data) < length and (more := file.read(length - len(data))):
                data += more
            return data

    def read_into(self, name: str, view: memoryview) -> int:
        """Fill `view` with the beginning of a file, without a copy; -> the size of the file."""
        descriptor = self._descriptor(name)
        try:
            done = 0
            while done < len(view) and (count := os.readv(descriptor, [view[done:]])):
                done += count
            return os.fstat(descriptor).st_size if done == len(view) else done
        finally:
            os.close(descriptor)

    def info(self, name: str) -> FileInfo:
        """Size and time of change of a file."""
        state = os.stat(self._inside(name))
        return FileInfo(name, state.st_size, str(state.st_mtime_ns))

    def files(self, folder: str = "") -> Iterator[FileInfo]:
        """All files under a folder, in the order of their names; hidden ones are left out."""

        def fail(error: OSError) -> None:
            reason = error.strerror or error
            raise DataError(f"{error.filename}: cannot be listed: {reason}") from None

        paths = []
        top = self._path / folder
        for parent, folders, names in os.walk(top, onerror=fail, followlinks=self._follow_links):
            folders[:] = [name for name in folders if name[0] != "."]
            visible = [Path(parent, name) for name in names if name[0] != "."]
            paths += [path.relative_to(self._path).as_posix() for path in visible]
        yield from map(self.info, sorted(paths))

    def names(self) -> list[str]:
        """Names of the files in the folder itself, sorted."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def has_folder(self, folder: str) -> bool:
        """Whether there is such a folder."""
        return (self._path / folder).is_dir()

    def _descriptor(self, name: str) -> int:
        """The file, opened with few system calls: they are most of what a small image costs."""
        path = f"{self.uri}/{name}"  # text, not `pathlib`, for the same reason
        if not self._follow_links and self._holds(self._real_folder(path.rpartition("/")[0])):
            try:
                return _open_now(path, os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
        return _open_now(self._inside(name))

    def _inside(self, name: str) -> str:
        """The path of a file; OutsideFolder if it is a link that leads out."""
        path = f"{self.uri}/{name}"
        if not self._follow_links and not self._holds(os.path.dirname(os.path.realpath(path))):
            where = f"{name} is a link out of {self.uri}"
            raise OutsideFolder(f"{where}; add --follow-links if that is meant")
        return path

    def _holds(self, folder: str) -> bool:
        return f"{folder}/".startswith(f"{self._real.rstrip('/')}/")
