"""Whole files of a build (index.arrow, counts.parquet, groups.parquet): opened where they lie, or
fetched once.

On disk, files of up to CHECKED_BYTES are compared with the manifest's checksum each time they are
opened; larger ones only with its size, for opening must not cost a pass over gigabytes.

The first process of a machine that needs a file of a remote build fetches it into the cache and
checks it against the manifest's checksum; the others wait for it and map the same pages. Without a
cache each holds it in memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from balance.errors import DamagedShard
from loaders.read.cache import Cache
from loaders.read.shard_reader import Verify
from shards.checksums import FileChecksum, file_checksum
from shards.index import BuildFile, Manifest
from shards.object_store import SLOWEST_BYTES_PER_S, RangeReader

CHECKED_BYTES = 256 << 20
"""The index of a million groups of eight samples; XXH3 takes some 40 ms for it."""
PIECE_BYTES = 8 << 20
PIECES_AT_ONCE = 8


class BuildFiles(Protocol):
    """Opens files of a build."""

    def open(self, name: str) -> pa.NativeFile:
        """A file that the manifest lists, seekable. DamagedShard if it is not what the manifest
        says.
        """


class LocalFiles:
    """Files in the folder of a build, mapped."""

    def __init__(self, root: Path, manifest: Manifest, *, verify: Verify = "first") -> None:
        self._root, self._verify = root, verify
        self._listed = {file.name: file for file in manifest.files}

    def open(self, name: str) -> pa.NativeFile:
        """The file. DamagedShard if it cannot be opened, or is not what the manifest says."""
        try:
            opened = pa.memory_map(str(self._root / name))
            if name in self._listed:
                self._check(opened, self._listed[name])
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise DamagedShard(
                f"{self._root / name}: cannot be opened ({reason}); run `packer verify`, or build again"
            ) from None
        return opened

    def _check(self, opened: pa.NativeFile, file: BuildFile) -> None:
        path, size = self._root / file.name, opened.size()
        if size != file.size:
            raise DamagedShard(
                f"{path}: has {size} bytes, the manifest says {file.size} bytes; copy or build it again"
            )
        if self._verify == "never" or size > CHECKED_BYTES:
            return
        if file_checksum(opened)[0] != file.checksum:
            raise DamagedShard(
                f"{path}: its checksum is not the manifest's; run `packer verify`, and copy or build it again"
            )
        opened.seek(0)


class RemoteFiles:
    """Files of a build in a bucket."""

    def __init__(self, bucket: RangeReader, manifest: Manifest, cache: Cache) -> None:
        self._bucket, self._manifest, self._cache = bucket, manifest, cache

    def open(self, name: str) -> pa.NativeFile:
        """The file: mapped from the cache, or out of memory. DamagedShard if it is not what the
        manifest says.
        """
        file = self._manifest.file(name)
        # a process that fetches gets the time of a request for all of it
        with self._cache.alone(name, self._bucket.time_limit_s + file.size / SLOWEST_BYTES_PER_S):
            path = self._cache.path(name, file.size) or self._store(file)
            if path is not None:
                return pa.memory_map(str(path))
        content, checksum = bytearray(file.size), FileChecksum()
        for at, piece in self._pieces(file):
            content[at : at + len(piece)] = piece
            checksum.add(piece)
        self._check(file, checksum.hex)
        return pa.BufferReader(pa.py_buffer(content))

    def _store(self, file: BuildFile) -> Path | None:
        """Fetch a file into the cache; None if that has no room for it."""
        with self._cache.writing(file.name, file.size) as descriptor:
            if descriptor is None:
                return None
            for at, piece in self._pieces(file):
                _write_at(descriptor, memoryview(piece), at)
            with open(os.dup(descriptor), "rb") as written:
                written.seek(0)
                self._check(file, file_checksum(written)[0])
            os.fsync(descriptor)  # it is checked this once
        return self._cache.path(file.name, file.size)

    def _pieces(self, file: BuildFile) -> Iterator[tuple[int, Any]]:
        """(offset, bytes) of the whole file, a few requests ahead."""
        waiting: deque[tuple[int, int, Future[Any]]] = deque()
        for start in range(0, file.size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, file.size)
            waiting.append((start, end, self._bucket.start(file.name, start, end, file.size)))
            if len(waiting) == PIECES_AT_ONCE:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[int, int, Future[Any]]]) -> tuple[int, Any]:
        start, end, future = waiting.popleft()
        return start, self._bucket.wait(future, end - start)

    def _check(self, file: BuildFile, checksum: str) -> None:
        if checksum != file.checksum:
            raise DamagedShard(
                f"{self._bucket.uri}/{file.name}: its checksum is not the manifest's; run `packer verify`, and copy or "
                "build it again"
            )


def _write_at(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written
