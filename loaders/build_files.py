"""Whole files of a build (index.arrow, counts.parquet, groups.parquet): opened where they lie, or fetched once.

The first process of a machine that needs a file of a remote build fetches it into the cache and checks it against the
manifest's SHA-256; the others wait for it and map the same pages. Without a cache each holds it in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from balance.errors import DamagedShard
from loaders.cache import Cache
from loaders.index import BuildFile, Manifest
from loaders.object_store import SLOWEST_BYTES_PER_S, Bucket

PIECE_BYTES = 8 << 20
PIECES_AT_ONCE = 8


class BuildFiles(Protocol):
    """Opens files of a build."""

    def open(self, name: str) -> pa.NativeFile:
        """A file that the manifest lists, seekable. DamagedShard if it is not what the manifest says."""


class LocalFiles:
    """Files in the folder of a build, mapped."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> pa.NativeFile:
        """The file. DamagedShard if it cannot be opened."""
        try:
            return pa.memory_map(str(self._root / name))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise DamagedShard(
                f"{self._root / name}: cannot be opened ({reason}); run `packer verify`, or build again"
            ) from None


class RemoteFiles:
    """Files of a build in a bucket."""

    def __init__(self, bucket: Bucket, manifest: Manifest, cache: Cache) -> None:
        self._bucket, self._manifest, self._cache = bucket, manifest, cache

    def open(self, name: str) -> pa.NativeFile:
        """The file: mapped from the cache, or out of memory. DamagedShard if it is not what the manifest says."""
        file = self._manifest.file(name)
        # a process that fetches gets the time of a request for all of it
        with self._cache.alone(name, self._bucket.time_limit_s + file.size / SLOWEST_BYTES_PER_S):
            path = self._cache.path(name, file.size) or self._store(file)
            if path is not None:
                return pa.memory_map(str(path))
        content = bytearray(file.size)
        for at, piece in self._pieces(file):
            content[at : at + len(piece)] = piece
        self._check(file, hashlib.sha256(content).hexdigest())
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
                self._check(file, hashlib.file_digest(written, "sha256").hexdigest())
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

    def _check(self, file: BuildFile, sha256: str) -> None:
        if sha256 != file.sha256:
            raise DamagedShard(
                f"{self._bucket.uri}/{file.name}: its SHA-256 is not the manifest's; run `packer verify`, and copy or "
                "build it again"
            )


def _write_at(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written
