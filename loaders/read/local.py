"""Builds on disk: byte ranges of mapped shards, and the files that a refs build points to.

An Arrow group is a view of its mapped shard until its images are decoded. At most MAX_OPEN shards
are open at a time.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa

from balance.errors import ConfigError, DamagedShard, DataError, first_line
from loaders.read.shard_reader import Traffic, group_place
from shards.decode import MediaReader
from shards.index import BuildFile, GroupIndex, Manifest

MAX_OPEN = 64
"""Open shards at a time: a block of groups lies in one or two shards, and at most 31 lanes have a
block open.
"""
Opened = TypeVar("Opened")


class OpenFiles(Generic[Opened]):
    """Shards opened on demand; the one unused for longest is closed when there are more than
    MAX_OPEN. Thread-safe.
    """

    def __init__(
        self,
        root: Path,
        shards: Sequence[BuildFile],
        opener: Callable[[Path], Opened],
        max_open: int = MAX_OPEN,
    ) -> None:
        self._root, self._shards, self._opener, self._max_open = root, shards, opener, max_open
        self._opened: OrderedDict[int, Opened] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._opened)

    def get(self, shard: int) -> Opened:
        """The opened shard. DamagedShard if it is missing or has another size than the manifest
        says.
        """
        with self._lock:
            if shard not in self._opened:
                self._opened[shard] = self._open(self._shards[shard])
                if len(self._opened) > self._max_open:
                    # closed by its own finaliser, once no view of it is in use any more
                    self._opened.popitem(last=False)
            self._opened.move_to_end(shard)
            return self._opened[shard]

    def opened(self, shard: int) -> Opened | None:
        """The shard, if it is open."""
        with self._lock:
            return self._opened.get(shard)

    def _open(self, file: BuildFile) -> Opened:
        path = self._root / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DamagedShard(
                f"{path}: {found}, the manifest says {file.size} bytes; copy or build it again"
            )
        try:
            return self._opener(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedShard(
                f"{path}: cannot be opened ({first_line(error)}); run `packer verify`"
            ) from None


class LocalShards:
    """Byte ranges of mapped shards."""

    is_remote = False

    def __init__(self, root: Path, shards: Sequence[BuildFile], index: GroupIndex) -> None:
        self._shards, self._index = shards, index
        self._files = OpenFiles(root, shards, _Mapped)

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""
        return group_place(self._shards[self._index.row(group, "shard")[0]].name, group)

    def schema(self) -> pa.Schema:
        """Columns of the first shard that has a group."""
        return pa.ipc.open_file(self._files.get(self._index.row(0, "shard")[0]).content).schema

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """A view into the mapped shard. DamagedShard if the shard was cut since it was opened."""
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        mapped = self._files.get(shard)
        if offset < 0 or length < 0 or offset + length > mapped.content.size:
            raise DamagedShard(
                f"{self.where(group)}: the index puts it outside of the shard; run `packer verify`"
            )
        size = mapped.size_now
        if size < mapped.content.size:
            raise DamagedShard(
                f"{self.where(group)}: the shard was cut to {size} bytes while it was read, the manifest says "
                f"{mapped.content.size} bytes; copy or build it again"
            )
        return mapped.content.slice(offset, length)

    def release(self, group: int) -> None:
        """Its pages stay in the system's cache, but count no longer as this process's."""
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        mapped = self._files.opened(shard)
        if mapped is not None:
            mapped.release(offset, offset + length)

    def prefetch(self, groups: Sequence[int]) -> None:
        """Nothing: the operating system reads ahead."""

    def traffic(self) -> Traffic:
        """Nothing is asked of a store."""
        return Traffic()

    def cancel(self) -> None:
        """Nothing: reads do not wait."""

    def close(self) -> None:
        """Nothing: files are closed when the last view of them is gone."""


class _Mapped:
    """A mapped file. The mapping stays for as long as views of it are in use."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
        self.content: pa.Buffer = pa.py_buffer(self._map)

    @property
    def size_now(self) -> int:
        """Bytes of the file now: to touch a page behind its end would end the process with
        SIGBUS.
        """
        return os.fstat(self._file.fileno()).st_size

    def release(self, start: int, end: int) -> None:
        """Take the whole pages in `[start, end)` out of this process's memory; they come back when
        they are touched.
        """
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + mmap.PAGESIZE <= end:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class LocalMedia:
    """Files in a folder, for refs builds."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Contents of the files. DataError with the sample and the file if one cannot be read."""
        return [self._read(name, owner, where) for name, owner in zip(names, owners, strict=True)]

    def _read(self, name: str, owner: str, where: str) -> bytes:
        path = self._root / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(
                f"sample {owner!r} ({where}): image {path} cannot be read ({error.strerror}); restore it"
            ) from None

    def cancel(self) -> None:
        """Nothing: reads do not wait."""

    def close(self) -> None:
        """Nothing: files are closed as they are read."""


def open_media(manifest: Manifest, image_root: str | Path | None) -> MediaReader | None:
    """The folder that a refs build takes its images from; None for other formats. ConfigError if it
    is not there.

    `image_root` replaces the folder that the manifest names.
    """
    if manifest.format != "refs":
        return None
    root = image_root or manifest.data_root
    if root is None or not Path(root).is_dir():
        raise ConfigError(
            f"image folder {root} of the refs build {manifest.place} is not there; give image_root"
        )
    return LocalMedia(Path(root))
