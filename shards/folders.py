"""Folders of raw data, on disk or in a bucket, behind one small protocol.

A `Folder` opens and lists files by their name relative to it. What is wrong with one file comes out
as OSError, as from the file system, so that it costs one sample; what is wrong with the whole place
(no such bucket, wrong credentials) raises DataError, and stops the build.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Protocol

from balance.errors import ConfigError, DataError

READERS = 16
"""Files of an object store that a process reads at a time."""

URI_SCHEMES = ("s3", "gs", "az")
"""Object stores that data may lie in."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class OutsideFolder(OSError):
    """A name that leads out of the folder it is relative to."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a root."""

    name: str
    """Relative to the root, with forward slashes."""
    size: int
    version: str
    """Changes when the file does: its time of change, or the store's entity tag."""


class Folder(Protocol):
    """A folder of raw data."""

    uri: str

    def open(self, name: str) -> IO[bytes]:
        """The file, seekable. OSError if it cannot be opened."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, from `offset` on, all or `length` of them. OSError if it cannot be
        read.
        """

    def read_into(self, name: str, view: memoryview) -> int:
        """Fill `view` with the begin of a file; -> the size of the file. OSError if it cannot be
        read.
        """

    def info(self, name: str) -> FileInfo:
        """Size and version of a file. FileNotFoundError if there is none."""

    def files(self, folder: str = "") -> Iterator[FileInfo]:
        """All files under a folder and its folders, in the order of their names."""

    def names(self) -> list[str]:
        """Names of the files in the root itself, sorted."""

    def has_folder(self, folder: str) -> bool:
        """Whether there is anything under that name."""


class WritableFolder(Folder, Protocol):
    """A folder in an object store, which can be written to. DataError when it cannot."""

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file, whole or not at all."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file if there is none of that name; -> whether there was none."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; one that is not there is no error."""


def is_uri(place: str) -> bool:
    """Whether a place lies in an object store.

    >>> is_uri("s3://bucket/data"), is_uri("data/images")
    (True, False)
    """
    return "://" in place


def join(root: str, name: str) -> str:
    """A place under a root, which is a folder or a URI."""
    return f"{root.rstrip('/')}/{name}" if is_uri(root) else str(Path(root) / name)


def split(place: str) -> tuple[str, str]:
    """The folder and the name of a file.

    >>> split("s3://bucket/a/b.json"), split("data/b.json")
    (('s3://bucket/a', 'b.json'), ('data', 'b.json'))
    """
    if is_uri(place):
        folder, _, name = place.rstrip("/").rpartition("/")
        return folder, name
    path = Path(place)
    return str(path.parent), path.name


@lru_cache(maxsize=64)
def open_folder(place: str, *, follow_links: bool = False) -> Folder:
    """The folder at a path or a URI; ConfigError for a URI of an unknown kind."""
    return (
        open_object_folder(place)
        if is_uri(place)
        else LocalFolder(place, follow_links=follow_links)
    )


@lru_cache(maxsize=64)
def open_object_folder(uri: str) -> WritableFolder:
    """The folder at a URI; ConfigError for one of an unknown kind."""
    scheme = uri.partition("://")[0]
    if scheme not in URI_SCHEMES:
        kinds = ", ".join(f"{name}://" for name in URI_SCHEMES)
        raise ConfigError(
            f"{uri}: {scheme}:// is no object store that packer knows: use a path, or one of {kinds}"
        )
    try:
        from shards.object_folder import ObjectFolder  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise ConfigError(
            f"{uri}: object stores need obstore: pip install 'isobatch[cloud]'"
        ) from None
    return ObjectFolder(uri)


@contextmanager
def on_disk(place: str, names: Sequence[str]) -> Iterator[Path]:
    """A folder that holds the named files of a place, those that exist: the place itself, or a
    temporary copy.
    """
    if not is_uri(place):
        yield Path(place)
        return
    root = open_folder(place)
    with TemporaryDirectory(prefix="isobatch-") as folder, naming_full_disk(folder):
        for name in names:
            try:
                with root.open(name) as source, Path(folder, name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except FileNotFoundError:
                continue  # whoever needs it says so
        try:
            yield Path(folder)
        except DataError as error:  # the copy is no place that its reader knows
            raise type(error)(str(error).replace(folder, place)) from None


@contextmanager
def naming_full_disk(folder: Path | str) -> Iterator[None]:
    """What is written in here lies in `folder`: when that has no room left, DataError says so."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        reason = os.strerror(error.errno or 0).lower()
        raise DataError(
            f"{folder}: {reason}: make room there, then run the same command again"
        ) from None


@contextmanager
def readers(place: str) -> Iterator[ThreadPoolExecutor | None]:
    """Threads to read the files of a place with: many for an object store, where each waits; none
    for a disk.
    """
    if not is_uri(place):
        yield None
        return
    with ThreadPoolExecutor(READERS) as pool:
        yield pool


def _open_now(path: str, flags: int = 0) -> int:
    """Open without waiting: a pipe that lies where an image should would keep a build for ever."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)


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
        """Fill `view` with the begin of a file, without a copy; -> the size of the file."""
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
            raise DataError(
                f"{error.filename}: cannot be listed: {error.strerror or error}"
            ) from None

        found = []
        for parent, folders, names in os.walk(
            self._path / folder, onerror=fail, followlinks=self._follow_links
        ):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [
                Path(parent, name).relative_to(self._path).as_posix()
                for name in names
                if name[0] != "."
            ]
        yield from map(self.info, sorted(found))

    def names(self) -> list[str]:
        """Names of the files in the root itself, sorted."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def has_folder(self, folder: str) -> bool:
        """Whether there is such a folder."""
        return (self._path / folder).is_dir()

    def _descriptor(self, name: str) -> int:
        """The file, opened with as few system calls as can be: they are most of what a small image
        costs.
        """
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
            raise OutsideFolder(
                f"{name} is a link out of {self.uri}; add --follow-links if that is meant"
            )
        return path

    def _holds(self, folder: str) -> bool:
        return (
            folder == self._real or folder.startswith(self._real + os.sep) or self._real == os.sep
        )
