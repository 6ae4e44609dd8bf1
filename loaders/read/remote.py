"""The bytes of groups that lie in an object store: ranged requests, neighbours joined, and the
cache on disk in front.

A group's bytes are looked for among what was fetched ahead, then in the cache, then in the store.
What comes from the store is put into the cache by the thread that reads it.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from balance.errors import DamagedShard, DataError
from balance.types import IntArray
from loaders.read.shard_reader import Traffic, group_place
from loaders.read.write_behind import WriteBehind
from shards.checksums import group_checksum
from shards.index import BuildFile, GroupIndex
from shards.object_store import RangeReader

REQUEST_BYTES = 4 << 20
"""Size up to which neighbours are joined: SeaweedFS gives 970 to 1,200 MB/s by 4 MB, 340 to 430 by
200 KB.
"""
GAP_BYTES = 64 << 10
"""Bytes between two groups that are read for nothing rather than asking twice: a request costs what
100 KB do.
"""
AHEAD_BYTES = 1 << 30
"""Memory for groups that were fetched ahead and are not read yet; the oldest are given up."""
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a shard, and the groups that lie in it."""

    shard: int
    start: int
    end: int
    groups: tuple[int, ...]


def join_ranges(
    groups: IntArray, shards: IntArray, offsets: IntArray, lengths: IntArray
) -> list[Request]:
    """Requests for the byte ranges of `groups`, neighbours joined, in the order of the first group
    of each.

    Groups 7 and 8 touch; 3 lies far behind them:

    >>> join_ranges(np.array([3, 8, 7]), np.zeros(3, int), np.array([10**6, 300, 200]), np.array([50, 90, 100]))
    [Request(shard=0, start=1000000, end=1000050, groups=(3,)), Request(shard=0, start=200, end=390,
    groups=(7, 8))]
    """
    ends = offsets + lengths
    runs: list[list[int]] = []
    start = 0
    for place in np.lexsort((offsets, shards)).tolist():
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and shards[place] == shards[last]
            and offsets[place] - ends[last] <= GAP_BYTES
            and ends[place] - start <= REQUEST_BYTES
        ):
            runs[-1].append(place)
        else:
            runs.append([place])
            start = offsets[place]
    return [
        Request(
            int(shards[run[0]]),
            int(offsets[run[0]]),
            int(ends[run].max()),
            tuple(int(groups[place]) for place in run),
        )
        for run in sorted(runs, key=min)
    ]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A group that was asked for: where it lies in what a request will bring."""

    future: Future[Any]
    request: Request


class RemoteShards:
    """Byte ranges of shards in a bucket; thread-safe."""

    is_remote = True

    def __init__(
        self,
        bucket: RangeReader,
        shards: Sequence[BuildFile],
        index: GroupIndex,
        cache: WriteBehind,
    ) -> None:
        self._bucket, self._shards, self._index, self._cache = bucket, shards, index, cache
        self._ahead: OrderedDict[int, _Ahead] = OrderedDict()
        self._ahead_bytes = 0
        self._lock = threading.Lock()
        self._cache_hits = self._cache_misses = 0

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""
        return group_place(self._shards[self._index.row(group, "shard")[0]].name, group)

    def schema(self) -> pa.Schema:
        """Columns of the shards: what the first one has in front of its first group."""
        shard, offset = self._index.row(0, "shard", "offset")
        name = f"{shard:05d}/schema"
        head = _read_sealed(self._cache, name)
        if head is None or len(head) != offset:
            head = bytes(self._fetch(shard, 0, offset, self.where(0)))
            _write_sealed(self._cache, name, head)
        try:
            return pa.ipc.read_schema(pa.BufferReader(head[8:]))  # behind the magic and its padding
        except (pa.ArrowException, OSError) as error:
            self._cache.remove(name)
            raise DamagedShard(
                f"{self._shards[shard].name}: no Arrow file ({error}); run `packer verify`"
            ) from None

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """The group's bytes. DataError or DamagedShard, with the shard and the group, when they
        cannot be had.
        """
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        name = _cache_name(shard, group)
        if again:
            self._cache.remove(name)
        else:
            content = self._take_ahead(group, offset, length) or self._cached(name, length)
            if content is not None:
                return content
        content = pa.py_buffer(self._fetch(shard, offset, offset + length, self.where(group)))
        self._cache.write(name, content)
        return content

    def release(self, group: int) -> None:
        """Nothing: its memory goes with the last view of it."""

    def prefetch(self, groups: Sequence[int]) -> None:
        """Ask for the groups that neither lie in the cache nor were asked for."""
        rows = [self._index.row(group, "shard", "offset", "length") for group in groups]
        with self._lock:
            wanted = [
                place
                for place, (group, (shard, _, _)) in enumerate(zip(groups, rows, strict=True))
                if group not in self._ahead and not self._cache.has(_cache_name(shard, group))
            ]
            if not wanted:
                return
            self._cache_misses += len(wanted)
            # shape (len(wanted), 3)
            table = np.array(rows, np.int64)[wanted]
            for request in join_ranges(np.array(groups, np.int64)[wanted], *table.T):
                self._ask(request)
            while self._ahead_bytes > AHEAD_BYTES:
                self._forget(next(iter(self._ahead)))

    def traffic(self) -> Traffic:
        """What has been done so far."""
        counters = self._bucket.counters
        return Traffic(
            requests=counters.requests,
            retries=counters.retries,
            bytes=counters.bytes,
            cache_hits=self._cache_hits,
            cache_misses=self._cache_misses,
        )

    def cancel(self) -> None:
        """Cancel what is under way and forget what was asked for ahead."""
        with self._lock:
            self._ahead.clear()
            self._ahead_bytes = 0
        self._bucket.cancel()

    def close(self) -> None:
        """Let go of the bucket; what is under way is cancelled."""
        self._bucket.close()
        self._cache.close()

    def _ask(self, request: Request) -> None:
        shard = self._shards[request.shard]
        future = self._bucket.start(shard.name, request.start, request.end, shard.size)
        for group in request.groups:
            self._ahead[group] = _Ahead(future, request)
            self._ahead_bytes += self._index.row(group, "length")[0]

    def _forget(self, group: int) -> _Ahead:
        self._ahead_bytes -= self._index.row(group, "length")[0]
        return self._ahead.pop(group)

    def _take_ahead(self, group: int, offset: int, length: int) -> pa.Buffer | None:
        """What was fetched ahead, waited for if need be; None if it was not asked for, or had
        failed before this.
        """
        with self._lock:
            ahead = self._forget(group) if group in self._ahead else None
        if ahead is None or _has_failed(ahead.future):
            return None  # what failed earlier, maybe under an iterator that was given up, says nothing of now
        request = ahead.request
        content = self._wait(ahead.future, request.end - request.start, self.where(group))
        part = pa.py_buffer(content).slice(offset - request.start, length)
        self._cache.write(_cache_name(request.shard, group), part)
        return part

    def _cached(self, name: str, length: int) -> pa.Buffer | None:
        content = self._cache.read(name, length)
        hit = content is not None
        with self._lock:
            self._cache_hits += hit
            self._cache_misses += not hit
        return pa.py_buffer(content) if hit else None

    def _fetch(self, shard: int, start: int, end: int, where: str) -> Any:
        file = self._shards[shard]
        return self._wait(self._bucket.start(file.name, start, end, file.size), end - start, where)

    def _wait(self, future: Future[Any], number_of_bytes: int, where: str) -> Any:
        try:
            return self._bucket.wait(future, number_of_bytes)
        except DataError as error:
            raise type(error)(f"{where}: {error}") from None


class RemoteMedia:
    """Images and audio files of a refs build that lie in a bucket. Files of one group are read at
    the same time.
    """

    def __init__(self, bucket: RangeReader, cache: WriteBehind) -> None:
        self._bucket, self._cache = bucket, cache

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Contents of the files. DataError with the sample and the file if one cannot be read."""
        found = [_read_sealed(self._cache, self._cache_name(name)) for name in names]
        futures = [
            self._bucket.start_file(name) if content is None else None
            for name, content in zip(names, found, strict=True)
        ]
        return [
            content if future is None else self._wait(future, name, f"sample {owner!r} ({where})")  # type: ignore[misc]
            for content, future, name, owner in zip(found, futures, names, owners, strict=True)
        ]

    def _wait(self, future: Future[Any], name: str, whose: str) -> bytes:
        try:
            content = bytes(self._bucket.wait(future, 0))
        except FileNotFoundError:
            raise DataError(
                f"{whose}: image {self._bucket.uri}/{name} is missing; restore it"
            ) from None
        except DataError as error:
            raise DataError(f"{whose}: image {error}") from None
        _write_sealed(self._cache, self._cache_name(name), content)
        return content

    def cancel(self) -> None:
        """Cancel what is under way."""
        self._bucket.cancel()

    def close(self) -> None:
        """Let go of the bucket; what is under way is cancelled."""
        self._bucket.close()
        self._cache.close()

    def _cache_name(self, name: str) -> str:
        digest = hashlib.sha256(f"{self._bucket.uri}/{name}".encode()).hexdigest()
        return f"media-{digest[:2]}/{digest}"


def _has_failed(future: Future[Any]) -> bool:
    return future.cancelled() or (future.done() and future.exception() is not None)


def _write_sealed(cache: WriteBehind, name: str, content: bytes) -> None:
    """Store what has no checksum in index or manifest, with one behind it."""
    cache.write(name, content + _CHECKSUM.pack(group_checksum(content)))


def _read_sealed(cache: WriteBehind, name: str) -> bytes | None:
    """What was stored with its checksum; None if it is not there, or not what was stored, and then
    it is removed.
    """
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
