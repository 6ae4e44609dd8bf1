"""Folders on disk or in an object store, with the same methods.

A `Folder` opens and lists files by their name relative to it. A problem with one file raises
OSError, and costs one sample; a problem with the whole place (no such bucket, wrong credentials)
raises DataError, and stops the build.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias

from isobatch.common.errors import ConfigError, DataError
from isobatch.shards.local_folder import LocalFolder
from isobatch.shards.store_errors import no_obstore

if TYPE_CHECKING:
    from isobatch.shards.object_folder import ObjectFolder

Folder: TypeAlias = "LocalFolder | ObjectFolder"
READERS = 16
"""Files of an object store that a process reads at a time."""
URI_SCHEMES = ("s3", "gs", "az")
"""Object stores that data may be in."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_uri(place: str) -> bool:
    """Whether a place is in an object store.

    >>> is_uri("s3://bucket/data"), is_uri("data/images")
    (True, False)
    """
    return "://" in place


def absolute(place: str) -> str:
    """A path from the root of the file system; a URI as it is."""
    return place if is_uri(place) else str(Path(place).resolve())


def join(root: str, name: str) -> str:
    """A place under a folder or URI."""
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
    if is_uri(place):
        return open_object_folder(place)
    return LocalFolder(place, follow_links=follow_links)


@lru_cache(maxsize=64)
def open_object_folder(uri: str) -> "ObjectFolder":
    """The folder at a URI, which can be written to; ConfigError for one of an unknown kind."""
    scheme = uri.partition("://")[0]
    if scheme not in URI_SCHEMES:
        kinds = ", ".join(f"{name}://" for name in URI_SCHEMES)
        unknown = f"{scheme}:// is no object store that packer knows"
        raise ConfigError(f"{uri}: {unknown}: use a path, or one of {kinds}")
    try:
        from isobatch.shards.object_folder import ObjectFolder  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise no_obstore(uri) from None
    return ObjectFolder(uri)


def cache_folder(name: str) -> Path:
    """A folder of ours in the user's cache, which need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "isobatch" / name


@contextmanager
def on_disk(place: str, names: Sequence[str], within: Path | None = None) -> Iterator[Path]:
    """A folder with the named files of a place that exist: itself, or a temporary copy.

    `within`: folder for the copy; None: that for temporary files.
    """
    if not is_uri(place):
        yield Path(place)
        return
    root = open_folder(place)
    with TemporaryDirectory(prefix="isobatch-", dir=within) as folder, naming_full_disk(folder):
        for name in names:
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
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
def naming_full_disk(folder: Path | str, advice: str = "make room there") -> Iterator[None]:
    """Raise DataError when `folder`, in which everything here is written, has no space left."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        reason = os.strerror(error.errno or 0).lower()
        if error.errno == errno.EFBIG:
            advice = "allow larger files (ulimit -f)"
        then = "then run the same command again"
        raise DataError(f"{folder}: {reason}: {advice}, {then}") from None


@contextmanager
def readers(place: str) -> Iterator[ThreadPoolExecutor | None]:
    """Threads to read the files of an object store with, where each waits; none for a disk."""
    if not is_uri(place):
        yield None
        return
    with ThreadPoolExecutor(READERS) as pool:
        yield pool
