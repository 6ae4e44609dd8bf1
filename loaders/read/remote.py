"""Builds in an object store: ranged requests, joined, with a cache on disk.

A group is looked for among those fetched ahead, then in the cache, then in the store, from which it
goes into the cache. The first process of a machine that needs a record batch of the index, or a
table, fetches it into the cache; the others wait and map the same pages. All check what they map.
Without a cache it is in memory.
"""

import hashlib
import os
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from isobatch.common.errors import DataError
from isobatch.common.types import IntArray
from isobatch.loaders.read.cache import Cache, write_at
from isobatch.loaders.read.local import group_place
from isobatch.loaders.read.range_reader import SLOWEST_BYTES_PER_S, Check, RangeReader
from isobatch.loaders.read.write_behind import WriteBehind
from isobatch.shards.arrow_shards import read_schema, schema_problem
from isobatch.shards.checksums import FileChecksum, group_checksum, wrong_bytes
from isobatch.shards.index import open_index
from isobatch.shards.manifest import CHECKED_BYTES, BuildFile, Manifest
from isobatch.shards.stored_group import MissingFile

REQUEST_BYTES = 4 << 20
"""Largest joined request: SeaweedFS gives 970 to 1,200 MB/s by 4 MB, 340 to 430 by 200 KB."""
GAP_BYTES = 64 << 10
"""Gap between groups that is read rather than asking twice: a request costs what 100 KB do."""
AHEAD_BYTES = 1 << 30
"""Memory for groups that were fetched ahead and are not read yet; the oldest are dropped."""
PIECE_BYTES, PIECES_AT_ONCE = 8 << 20, 8
"""Requests for tables, and for the whole index of version 2."""
FILE_TRIES = 3
"""Times that a whole file is fetched if it comes damaged."""
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a shard, and the groups in it."""

    shard: int
    start: int
    end: int
    groups: tuple[int, ...]


def join_ranges(
    groups: IntArray, shards: IntArray, offsets: IntArray, lengths: IntArray
) -> list[Request]:
    """Requests for the byte ranges of `groups`, neighbours joined, in order of first groups.

    >>> offsets, lengths = np.array([10**6, 300, 200]), np.array([50, 90, 100])
    >>> for request in join_ranges(np.array([3, 8, 7]), np.zeros(3, int), offsets, lengths):
    ...     print(request)
    Request(shard=0, start=1000000, end=1000050, groups=(3,))
    Request(shard=0, start=200, end=390, groups=(7, 8))
    """
    ends = offsets + lengths
    runs: list[list[int]] = []
    for place in np.lexsort((offsets, shards)).tolist():
        if (
            runs
            and shards[place] == shards[runs[-1][0]]
            and offsets[place] - ends[runs[-1][-1]] <= GAP_BYTES
            and ends[place] - offsets[runs[-1][0]] <= REQUEST_BYTES
        ):
            runs[-1].append(place)
        else:
            runs.append([place])
    return [
        Request(
            shard=int(shards[run[0]]),
            start=int(offsets[run[0]]),
            end=int(ends[run].max()),
            groups=tuple(groups[run].tolist()),
        )
        for run in sorted(runs, key=min)
    ]


class RemoteShards:
    """Byte ranges of shards in a store; thread-safe."""

    is_remote = True

    def __init__(self, store: RangeReader, manifest: Manifest, cache: Cache) -> None:
        self._store, self._manifest = store, manifest
        files = _RemoteFiles(store, manifest, cache)
        self.open_file = files.open_file
        self.index = open_index(manifest, files)
        self.cache = WriteBehind(cache)
        self.cache_hits = 0
        self._ahead: OrderedDict[int, tuple[Future[Any], Request]] = OrderedDict()
        """Groups that were asked for, and the request that brings each."""
        self._ahead_bytes = 0
        self._lock = threading.Lock()

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""
        return group_place(self._manifest, self.index, group)

    def schema(self) -> pa.Schema:
        """Columns of the shards: what the first one has before its first group."""
        shard, offset = self.index.row(0, "shard", "offset")
        name = f"{shard:05d}/schema"
        head = _read_sealed(self.cache, name)
        if head is None or len(head) != offset:
            head = bytes(self._fetch(shard, 0, offset, self.where(0), schema_problem))
            _write_sealed(self.cache, name, head)
        return read_schema(head)

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """The group's bytes. DataError or DamagedShard, with the shard and the group.

        `again`: what was given for this group was damaged; get it from the store, more than once
        if it is damaged on the way.
        """
        shard, offset, length = self.index.row(group, "shard", "offset", "length")
        name = _cache_name(shard, group)
        if again:
            self.cache.remove(name)
        else:
            content = self._take_ahead(group, offset, length)
            if content is None and (cached := self.cache.read(name, length)) is not None:
                content = pa.py_buffer(cached)
                with self._lock:
                    self.cache_hits += 1
            if content is not None:
                return content
        (checksum,) = self.index.row(group, "checksum")
        check = partial(wrong_bytes, checksum, "the index says") if again else None
        fetched = self._fetch(shard, offset, offset + length, self.where(group), check)
        content = pa.py_buffer(fetched)
        self.cache.write(name, content)
        return content

    def prefetch(self, groups: Sequence[int]) -> None:
        """Ask for groups that are neither in the cache nor asked for, neighbours in one request.

        A hint, for a few steps and not an epoch: what was fetched and is not read takes memory.
        """
        rows = [self.index.row(group, "shard", "offset", "length") for group in groups]
        with self._lock:
            wanted = [
                place
                for place, (group, (shard, _, _)) in enumerate(zip(groups, rows, strict=True))
                if group not in self._ahead and not self.cache.has(_cache_name(shard, group))
            ]
            if not wanted:
                return
            # shape (len(wanted), 3)
            table = np.array(rows, np.int64)[wanted]
            for request in join_ranges(np.array(groups, np.int64)[wanted], *table.T):
                shard = self._manifest.shard(request.shard)
                future = self._store.start(shard.name, request.start, request.end, shard.size)
                for group in request.groups:
                    self._ahead[group] = future, request
                    self._ahead_bytes += self.index.row(group, "length")[0]
            while self._ahead_bytes > AHEAD_BYTES:
                self._forget(next(iter(self._ahead)))

    def release(self, group: int) -> None:
        """Do nothing: a group's memory is freed with the last view of it."""

    def cancel(self) -> None:
        """Cancel what is under way and forget what was asked for ahead."""
        with self._lock:
            self._ahead.clear()
            self._ahead_bytes = 0
        self._store.cancel()

    def close(self) -> None:
        """Cancel what is under way and release the store."""
        self._store.close()
        self.cache.close()

    def _forget(self, group: int) -> tuple[Future[Any], Request]:
        self._ahead_bytes -= self.index.row(group, "length")[0]
        return self._ahead.pop(group)

    def _take_ahead(self, group: int, offset: int, length: int) -> pa.Buffer | None:
        """What was fetched ahead, waited for if needed; None if not asked for, or failed."""
        with self._lock:
            ahead = self._forget(group) if group in self._ahead else None
        if ahead is None:
            return None
        future, request = ahead
        if future.cancelled() or (future.done() and future.exception() is not None):
            return None  # an old failure, maybe of an iterator that was given up, means nothing now
        content = self._wait(future, request.end - request.start, self.where(group))
        part = pa.py_buffer(content).slice(offset - request.start, length)
        self.cache.write(_cache_name(request.shard, group), part)
        return part

    def _fetch(
        self, shard: int, start: int, end: int, where: str, check: Check | None = None
    ) -> Any:
        file = self._manifest.shard(shard)
        future = self._store.start(file.name, start, end, file.size, check)
        return self._wait(future, end - start, where)

    def _wait(self, future: Future[Any], number_of_bytes: int, where: str) -> Any:
        try:
            return self._store.wait(future, number_of_bytes)
        except DataError as error:
            raise type(error)(f"{where}: {error}") from None


class _RemoteFiles:
    """The index and tables of a build in a store: mapped from the cache, or in memory.

    Record batches are files of their own in the cache, fetched when they are first read. What is
    damaged in the cache is fetched again.
    """

    at_once = 8

    def __init__(self, store: RangeReader, manifest: Manifest, cache: Cache) -> None:
        self._store, self._manifest, self._cache = store, manifest, cache

    def read_batch(self, file: BuildFile, number: int) -> pa.Buffer:
        """The message of a record batch. DamagedShard if its checksum is not the manifest's."""
        batch = file.batches[number]
        name = f"{file.name}-{number:05d}"
        check = partial(wrong_bytes, batch.checksum, "the manifest says")
        cached = self._map(name, batch.length, check)
        if cached is not None:
            return cached
        # of all processes of the machine, as many fetch at a time as one alone would
        with self._alone(f"{file.name}-{number % self.at_once}", batch.length):
            cached = self._map(name, batch.length, check)
            if cached is not None:
                return cached
            start, end = batch.offset, batch.offset + batch.length
            future = self._store.start(file.name, start, end, file.size, check)
            content = pa.py_buffer(self._store.wait(future, batch.length))
            self._cache.write(name, content)
            # from now on in memory once for all processes of the machine
            cached = self._map(name, batch.length, check)
            return content if cached is None else cached

    def open_file(self, name: str) -> pa.NativeFile:
        """The index or a table. DamagedShard if it is not what the manifest says."""
        file = self._manifest.file(name)
        with self._alone(file.name, file.size):
            cached = self._map(file.name, file.size, partial(_wrong_file, file))
            if cached is None:
                self._fetch_into_cache(file)
                cached = self._map(file.name, file.size, partial(_wrong_file, file))
            if cached is None:
                content = bytearray(file.size)
                self._fetch(file, memoryview(content).__setitem__)
                cached = pa.py_buffer(content)
            return pa.BufferReader(cached)

    def _alone(self, name: str, number_of_bytes: int) -> AbstractContextManager[None]:
        """A process that fetches gets the time of a request for all of it."""
        limit_s = self._store.time_limit_s + number_of_bytes / SLOWEST_BYTES_PER_S
        return self._cache.alone(name, limit_s)

    def _map(self, name: str, size: int, check: Check) -> pa.Buffer | None:
        """A file of the cache, mapped; None if it is not there. A damaged one is removed."""
        path = self._cache.path(name, size)
        if path is None:
            return None
        try:
            with pa.memory_map(str(path)) as mapped:
                content = mapped.read_buffer()
        except OSError:
            return None  # removed between the two
        if check(content):
            self._cache.remove(name)
            return None
        return content

    def _fetch_into_cache(self, file: BuildFile) -> None:
        """Fetch a file into the cache, if that has room for it."""
        with self._cache.writing(file.name, file.size) as descriptor:
            if descriptor is not None:
                self._fetch(file, lambda place, content: write_at(descriptor, content, place.start))
                os.fsync(descriptor)  # a large one is compared by its size only from now on

    def _fetch(self, file: BuildFile, put: Callable[[slice, memoryview], None]) -> None:
        """Give the whole file to `put`, piece by piece; again if it came damaged."""
        for _ in range(FILE_TRIES):
            checksum = FileChecksum()
            for at, piece in self._pieces(file):
                put(slice(at, at + len(piece)), memoryview(piece))
                checksum.update(piece)
            if checksum.hexdigest() == file.checksum:
                return
        raise file.wrong_checksum(f"{self._store.uri}/{file.name}")

    def _pieces(self, file: BuildFile) -> Iterator[tuple[int, Any]]:
        """(offset, bytes) of the whole file, a few requests ahead."""
        waiting: deque[tuple[int, int, Future[Any]]] = deque()
        for start in range(0, file.size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, file.size)
            waiting.append((start, end, self._store.start(file.name, start, end, file.size)))
            if len(waiting) == PIECES_AT_ONCE:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[int, int, Future[Any]]]) -> tuple[int, Any]:
        start, end, future = waiting.popleft()
        return start, self._store.wait(future, end - start)


def _wrong_file(file: BuildFile, content: pa.Buffer) -> str:
    """What is wrong with a file of the cache; a large one is compared by its size only."""
    if content.size > CHECKED_BYTES or FileChecksum(content).hexdigest() == file.checksum:
        return ""
    return "its checksum is not the manifest's"


class RemoteMedia:
    """Image and audio files of a refs build in a store, read a group's at a time."""

    def __init__(self, store: RangeReader, cache: WriteBehind) -> None:
        self._store, self._cache = store, cache
        self.skip_missing = False  # as in `LocalMedia`

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Contents of the files. DataError with the sample and the file if one cannot be read."""
        contents = [_read_sealed(self._cache, self._cache_name(name)) for name in names]
        missing = [place for place, content in enumerate(contents) if content is None]
        futures = [self._store.start_file(names[place]) for place in missing]
        for place, future in zip(missing, futures, strict=True):
            owner = f"sample {owners[place]!r} ({where})"
            contents[place] = self._wait(future, names[place], owner)
        return contents  # type: ignore[return-value]

    def _wait(self, future: Future[Any], name: str, whose: str) -> bytes:
        try:
            content: bytes = bytes(self._store.wait(future, 0))
        except FileNotFoundError:
            missing = f"image {self._store.uri}/{name} is missing"
            if self.skip_missing:
                return MissingFile(missing)
            raise DataError(f"{whose}: {missing}; restore it") from None
        except DataError as error:
            raise DataError(f"{whose}: image {error}") from None
        _write_sealed(self._cache, self._cache_name(name), content)
        return content

    def cancel(self) -> None:
        """Cancel what is under way."""
        self._store.cancel()

    def close(self) -> None:
        """Cancel what is under way and release the store."""
        self._store.close()
        self._cache.close()

    def _cache_name(self, name: str) -> str:
        digest = hashlib.sha256(f"{self._store.uri}/{name}".encode()).hexdigest()
        return f"media-{digest[:2]}/{digest}"


def _write_sealed(cache: WriteBehind, name: str, content: bytes) -> None:
    """Store what has no checksum in index or manifest, followed by one."""
    cache.write(name, content + _CHECKSUM.pack(group_checksum(content)))


def _read_sealed(cache: WriteBehind, name: str) -> bytes | None:
    """What was stored with its checksum, or None; one that is damaged is removed."""
    stored = cache.read(name)
    if stored is None:
        return None
    content, checksum = bytes(stored[: -_CHECKSUM.size]), stored[-_CHECKSUM.size :]
    if _CHECKSUM.pack(group_checksum(content)) == checksum:
        return content
    cache.remove(name)
    return None


def _cache_name(shard: int, group: int) -> str:
    return f"{shard:05d}/{group}"
