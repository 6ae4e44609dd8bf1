"""Builds on disk: byte ranges of mapped shards, and files of refs builds."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from isobatch.common.errors import DamagedShard, DataError, first_line
from isobatch.shards.arrow_shards import read_schema
from isobatch.shards.index import GroupIndex, open_index
from isobatch.shards.manifest import BuildFile, FolderFiles, Manifest
from isobatch.shards.stored_group import MissingFile

MAX_OPEN = 64
"""Open shards at a time, each a file descriptor. A random order needs all of them by turns, but to
map one again takes microseconds.
"""


class LocalShards:
    """Byte ranges of mapped shards, at most MAX_OPEN of them open at a time; thread-safe."""

    is_remote = False
    cache_hits = 0

    def __init__(self, manifest: Manifest, *, verify: bool = True) -> None:
        """`verify`: compare the checksums of the index and of tables."""
        self._manifest, self._root = manifest, Path(manifest.place)
        self._opened: OrderedDict[int, _MappedFile] = OrderedDict()
        self._lock = threading.Lock()
        files = FolderFiles(manifest, verify=verify)
        self.open_file = files.open_file
        self.index = open_index(manifest, files)

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""
        return group_place(self._manifest, self.index, group)

    def schema(self) -> pa.Schema:
        """Columns of the shards, which all have the same; Arrow shards only."""
        shard, offset = self.index.row(0, "shard", "offset")
        return read_schema(self._open(shard).content[:offset])

    def read(self, group: int, *, again: bool = False) -> memoryview:
        """A view into the mapped shard. DamagedShard if the shard was cut since it was opened."""
        shard, offset, length = self.index.row(group, "shard", "offset", "length")
        mapped = self._open(shard)
        content = mapped.content
        end = offset + length
        if offset < 0 or length < 0 or end > len(content):
            raise DamagedShard(
                f"{self.where(group)}: the index puts it outside of the shard; run `packer verify`"
            )
        # touching a page after its end would kill the process by SIGBUS
        size = os.fstat(mapped.descriptor).st_size
        if size < len(content):
            raise DamagedShard(
                f"{self.where(group)}: the shard was cut to {size} bytes while it was read, the "
                f"manifest says {len(content)} bytes; copy or build it again"
            )
        return content[offset:end]

    def prefetch(self, groups: Sequence[int]) -> None:
        """Do nothing: the operating system reads ahead."""

    def release(self, group: int) -> None:
        """Say that a group is out of use: its pages no longer count as this process's."""
        shard, offset, length = self.index.row(group, "shard", "offset", "length")
        with self._lock:
            mapped = self._opened.get(shard)
        if mapped is not None:
            mapped.release(offset, offset + length)

    def _open(self, shard: int) -> "_MappedFile":
        """The mapped shard. DamagedShard if it is missing or has another size than it should."""
        mapped = self._opened.get(shard)
        if mapped is not None and len(self._manifest.shards) <= MAX_OPEN:
            return mapped  # none is ever closed, so nobody need know which was used last
        with self._lock:
            if shard not in self._opened:
                self._opened[shard] = self._map(self._manifest.shard(shard))
                if len(self._opened) > MAX_OPEN:
                    # closed by its own finaliser, once no view of it is in use any more
                    self._opened.popitem(last=False)
            self._opened.move_to_end(shard)
            return self._opened[shard]

    def _map(self, file: BuildFile) -> "_MappedFile":
        path = self._root / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            problem = "is missing" if size is None else f"has {size} bytes"
            raise file.wrong_size(str(path), problem)
        try:
            return _MappedFile(path)
        except (OSError, ValueError) as error:
            raise DamagedShard(
                f"{path}: cannot be opened ({first_line(error)}); run `packer verify`"
            ) from None


class _MappedFile:
    """A mapped file. The mapping stays for as long as views of it are in use."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.descriptor = self._file.fileno()
        self._map = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        self.content = memoryview(self._map)

    def release(self, start: int, end: int) -> None:
        """Drop the whole pages in `[start, end)` from memory until they are touched again."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + mmap.PAGESIZE <= end:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class LocalMedia:
    """Image and audio files in a folder, for refs builds."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.skip_missing = False
        """Give a `MissingFile` for a file that is not there, instead of raising DataError."""

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Contents of the files. DataError with the sample and the file if one cannot be read."""
        contents = []
        for name, owner in zip(names, owners, strict=True):
            path = self._root / name
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                if self.skip_missing and isinstance(error, FileNotFoundError):
                    contents.append(MissingFile(f"image {path} is missing"))
                    continue
                raise DataError(
                    f"sample {owner!r} ({where}): image {path} cannot be read ({error.strerror}); "
                    "restore it"
                ) from None
        return contents


def group_place(manifest: Manifest, index: GroupIndex, group: int) -> str:
    """A group, for messages: `shard-00003.arrow, group 71`."""
    name = manifest.shard(index.row(group, "shard")[0]).name
    return f"{name.rpartition('/')[2]}, group {group}"
