"""`SampleReader`: reads what a micro-batch is made of and joins it to one `StoredGroup`.

A whole group is returned as it was read, views into the mapped shard. Samples out of several groups
are cut out and joined: tokens are copied, images are not. Safe to call from many threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from balance.types import IntArray
from loaders.batch.collate import EMPTY_GROUP, NO_TOKENS
from loaders.plan.selection import GroupSlice, Selection
from loaders.read.build import Build
from shards.stored_group import Int32Array, StoredGroup

CACHED_BYTES = 256 << 20
"""Stored groups, images included, of which samples were cut out: others of them may be wanted next.
"""

# sample -> its files -> what is told of each file; audio is there in builds that have it
MEDIA = {
    "vision": ("images", "image_sizes", "image_samples"),
    "audio": ("audios", "audio_lengths", "audio_samples"),
}


class SampleReader:
    """Reads the selections of steps."""

    def __init__(self, builds: Sequence[Build], cached_bytes: int = CACHED_BYTES) -> None:
        self._builds, self._cached_bytes = builds, cached_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[int, int], StoredGroup] = OrderedDict()
        self._held_bytes = 0

    @property
    def is_remote(self) -> bool:
        """Whether some of it is in a store, so that it matters what is asked for ahead."""
        return any(build.shards.is_remote for build in self._builds)

    @property
    def cache_hits(self) -> int:
        """Groups that the cache on disk gave; 0 for builds on disk."""
        return sum(build.shards.cache_hits for build in self._builds)

    def prefetch(self, items: Sequence[Selection]) -> None:
        """Say what will be read next, in about this order."""
        for place, build in enumerate(self._builds):
            groups = [pick.group for item in items for pick in item if pick.build == place]
            build.shards.prefetch(groups)

    def remote_bytes(self, items: Sequence[Selection]) -> int:
        """Bytes of the groups that are in a store."""
        picks = ((self._builds[pick.build], pick.group) for item in items for pick in item)
        return sum(
            build.index.row(group, "length")[0] for build, group in picks if build.shards.is_remote
        )

    def read(self, item: Selection) -> StoredGroup | None:
        """The samples of a selection, in its order; None if it is empty. Errors as `Build.read`."""
        if not item:
            return None
        if len(item) == 1 and item[0].places is None:
            return self._builds[item[0].build].read(item[0].group)
        return join([self._cut(pick) for pick in item])

    def release(self, item: Selection) -> None:
        """Say that what was read is no longer in use, so that it need not count as this process's
        memory.
        """
        for pick in item:
            if pick.places is None:  # others are kept for a while
                self._builds[pick.build].shards.release(pick.group)

    def cancel(self) -> None:
        """End the reads that are under way; later ones work again."""
        for build in self._builds:
            build.cancel()

    def close(self) -> None:
        """Release files and connections."""
        for build in self._builds:
            build.close()

    def _cut(self, pick: GroupSlice) -> StoredGroup:
        raw = self._stored(pick.build, pick.group)
        return raw if pick.places is None else take_samples(raw, pick.places)

    def _stored(self, build: int, group: int) -> StoredGroup:
        """A stored group, from the cache if it is there. Two threads may both read one: it is the
        same.
        """
        key = build, group
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        raw = self._builds[build].read(group)
        with self._lock:
            if key not in self._cached:
                self._cached[key] = raw
                self._held_bytes += stored_bytes(raw)
            while self._held_bytes > self._cached_bytes:
                self._held_bytes -= stored_bytes(self._cached.popitem(last=False)[1])
        return raw


def stored_bytes(raw: StoredGroup) -> int:
    """Bytes of the tokens, labels and files of some samples."""
    files = sum(len(file) for files, *_ in MEDIA.values() for file in getattr(raw, files, ()))
    return files + raw.input_ids.nbytes + raw.labels.nbytes


def take_samples(raw: StoredGroup, places: Sequence[int]) -> StoredGroup:
    """The samples at `places` of a group, in that order."""
    chosen = np.array(places, dtype=np.int64)
    tokens = _ranges(raw.cu_seqlens[chosen], raw.cu_seqlens[chosen + 1])
    lengths = np.diff(raw.cu_seqlens)[chosen]
    changed: dict[str, Any] = {
        "sample_ids": tuple(raw.sample_ids[place] for place in places),
        "image_names": (),
        "input_ids": raw.input_ids[tokens],
        "labels": raw.labels[tokens],
        "cu_seqlens": _borders(lengths),
    }
    for files, about, owners in _media_of(raw):
        of_sample = getattr(raw, owners)  # ascending
        starts, stops = (
            np.searchsorted(of_sample, chosen, side=side) for side in ("left", "right")
        )
        kept = _ranges(starts, stops)
        changed[files] = [getattr(raw, files)[place] for place in kept.tolist()]
        changed[about] = getattr(raw, about)[kept]
        changed[owners] = np.repeat(np.arange(len(places), dtype=np.int32), stops - starts)
    return replace(raw, **changed)


def join(parts: Sequence[StoredGroup]) -> StoredGroup:
    """The samples of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part.sample_ids) for part in parts]
    joined: dict[str, Any] = {
        "where": "; ".join(dict.fromkeys(part.where for part in parts)),
        "image_names": (),
        "sample_ids": tuple(sample_id for part in parts for sample_id in part.sample_ids),
        "input_ids": np.concatenate([part.input_ids for part in parts]),
        "labels": np.concatenate([part.labels for part in parts]),
        "cu_seqlens": _borders(np.concatenate([np.diff(part.cu_seqlens) for part in parts])),
    }
    firsts = np.cumsum([0, *counts[:-1]])
    for files, about, owners in _media_of(parts[0]):
        joined[files] = [file for part in parts for file in getattr(part, files)]
        joined[about] = np.concatenate([getattr(part, about) for part in parts])
        shifted = [getattr(part, owners) + first for part, first in zip(parts, firsts, strict=True)]
        joined[owners] = np.concatenate(shifted).astype(np.int32)
    return replace(parts[0], **joined)


def without_media(raw: StoredGroup, encoders: Collection[str]) -> StoredGroup:
    """Without the files of `encoders`, which are encoded elsewhere; what is told of them stays."""
    dropped = {MEDIA[name][0]: () for name in encoders if hasattr(raw, MEDIA[name][0])}
    return replace(raw, **dropped)  # type: ignore[arg-type]


def only_media(raw: StoredGroup, encoder: str) -> StoredGroup:
    """The files of one encoder without any token, for the rank that encodes them."""
    num_samples = len(raw.sample_ids)
    others = [names for name, names in MEDIA.items() if name != encoder and names in _media_of(raw)]
    nothing = {name: getattr(EMPTY_GROUP, name) for names in others for name in names}
    return replace(
        raw,
        input_ids=NO_TOKENS,
        labels=NO_TOKENS,
        cu_seqlens=np.zeros(num_samples + 1, np.int32),
        **nothing,
    )


def _media_of(raw: StoredGroup) -> list[tuple[str, str, str]]:
    return [names for names in MEDIA.values() if hasattr(raw, names[0])]


def _ranges(starts: IntArray | Int32Array, stops: IntArray | Int32Array) -> IntArray:
    """All of `starts[0]:stops[0]`, then all of `starts[1]:stops[1]`, ...

    >>> _ranges(np.array([5, 0]), np.array([7, 1])).tolist()
    [5, 6, 0]
    """
    sizes = (stops - starts).astype(np.int64)
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(sizes.sum()) + np.repeat(starts - (ends - sizes), sizes))


def _borders(lengths: Int32Array) -> Int32Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
