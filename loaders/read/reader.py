"""`SampleReader`: reads what a micro-batch is made of as one `StoredGroup`.

A whole group is returned as it was read, views into the mapped shard. Samples out of several groups
are cut out and joined: tokens are copied, images are not. Safe to call from many threads.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from isobatch.common.types import IntArray
from isobatch.loaders.read.build import Build
from isobatch.loaders.steps.selection import GroupSlice, Selection, StoredSample
from isobatch.shards.stored_group import EMPTY_GROUP, NO_NUMBERS, Int32Array, StoredGroup

CACHED_BYTES = 256 << 20
"""Stored groups of which samples were cut out, images included: others may be wanted next."""

MEDIA = {
    "vision": ("images", "image_samples", "image_sizes", "image_frames", "image_rates"),
    "audio": ("audios", "audio_samples", "audio_lengths"),
}
"""Encoder -> fields of `StoredGroup`: its files, the sample of each file, and their numbers."""


class SelectionReader:
    """Reads what micro-batches are made of; where nothing else is said, from no store."""

    is_remote = False
    """Whether some of it is in a store, so that it matters what is asked for ahead."""
    has_videos = False
    """Whether some of the images are videos, as far as is known."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of pixels, if that is more than the model's rule says."""
        return 0

    @property
    def cache_hits(self) -> int:
        """Reads from a cache on disk."""
        return 0

    def prefetch(self, selections: Sequence[Selection]) -> None:
        """Say what will be read next, in about this order."""

    def remote_bytes(self, selections: Sequence[Selection]) -> int:
        """Bytes that are in a store."""
        return 0

    def is_quick(self, selections: Sequence[Selection]) -> bool:
        """Whether `read` of all takes some microseconds."""
        return False

    def read(self, selection: Selection) -> StoredGroup:
        """The samples of a selection, in its order."""
        raise NotImplementedError

    def stored_samples(self, selection: Selection) -> list[StoredSample]:
        """Place in the builds of each sample of a selection, in its order."""
        raise NotImplementedError

    def release(self, selection: Selection) -> None:
        """Say that what was read is out of use, and need not count as this process's memory."""

    def cancel(self) -> None:
        """End the reads that are under way; later ones work again."""

    def close(self) -> None:
        """Release files and connections."""


class SampleReader(SelectionReader):
    """Reads the selections of steps."""

    def __init__(self, builds: Sequence[Build], cached_bytes: int = CACHED_BYTES) -> None:
        self._builds, self._cached_bytes = builds, cached_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[int, int], StoredGroup] = OrderedDict()
        self._held_bytes = 0
        self.is_remote = any(build.shards.is_remote for build in builds)
        self.has_videos = any(build.manifest.has_videos for build in builds)
        self._extras = tuple({name: None for build in builds for name in build.manifest.extras})

    @property
    def cache_hits(self) -> int:
        """Groups that the cache on disk gave; 0 for builds on disk."""
        return sum(build.shards.cache_hits for build in self._builds)

    def prefetch(self, selections: Sequence[Selection]) -> None:
        """Say what will be read next, in about this order."""
        parts = list(chain.from_iterable(selections))
        for place, build in enumerate(self._builds):
            build.shards.prefetch([part.group for part in parts if part.build == place])

    def remote_bytes(self, selections: Sequence[Selection]) -> int:
        """Bytes of the groups that are in a store."""
        parts = ((self._builds[part.build], part.group) for part in chain.from_iterable(selections))
        return sum(
            build.index.row(group, "length")[0] for build, group in parts if build.shards.is_remote
        )

    def is_quick(self, selections: Sequence[Selection]) -> bool:
        """Whether `read` of all takes some microseconds: `Build.is_quick`."""
        for selection in selections:
            for part in selection:
                if not self._builds[part.build].is_quick(part.group):
                    return False
        return True

    def read(self, selection: Selection) -> StoredGroup:
        """The samples of a selection, in its order, with the extras of all builds.

        Errors as `Build.read`.
        """
        if not selection:
            raw = EMPTY_GROUP
        elif len(selection) == 1 and selection[0].places is None:
            raw = self._builds[selection[0].build].read(selection[0].group)
        else:
            raw = join([self._cut(part) for part in selection])
        return raw if tuple(raw.extras) == self._extras else with_extras(raw, self._extras)

    def stored_samples(self, selection: Selection) -> list[StoredSample]:
        """Place in the builds of each sample of a selection, in its order."""
        samples = []
        for part in selection:
            places: Sequence[int] | None = part.places
            if places is None:
                places = range(*self._builds[part.build].index.row(part.group, "num_samples"))
            samples += [(part.build, part.group, place) for place in places]
        return samples

    def release(self, selection: Selection) -> None:
        """Say that what was read is out of use, and need not count as this process's memory."""
        for part in selection:
            if part.places is None:  # others are kept for a while
                self._builds[part.build].shards.release(part.group)

    def cancel(self) -> None:
        """End the reads that are under way; later ones work again."""
        for build in self._builds:
            build.cancel()

    def close(self) -> None:
        """Release files and connections."""
        for build in self._builds:
            build.close()

    def _cut(self, part: GroupSlice) -> StoredGroup:
        raw = self._stored(part.build, part.group)
        return raw if part.places is None else take_samples(raw, part.places)

    def _stored(self, build: int, group: int) -> StoredGroup:
        """A stored group, from memory if it is there. Two threads may read the same one."""
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
    return sum(map(len, (*raw.images, *raw.audios))) + raw.input_ids.nbytes + raw.labels.nbytes


def take_samples(raw: StoredGroup, places: Sequence[int]) -> StoredGroup:
    """The samples at `places` of a group, in that order."""
    chosen = np.array(places, dtype=np.int64)
    tokens = _ranges(raw.cu_seqlens[chosen], raw.cu_seqlens[chosen + 1])
    changed: dict[str, Any] = {
        "sample_ids": tuple(raw.sample_ids[place] for place in places),
        "input_ids": raw.input_ids[tokens],
        "labels": raw.labels[tokens],
        "cu_seqlens": _borders(np.diff(raw.cu_seqlens)[chosen]),
        "image_names": (),
        "extras": {
            name: [values[place] for place in places] for name, values in raw.extras.items()
        },
    }
    for files, owners, *numbers in MEDIA.values():
        of_sample = getattr(raw, owners)  # ascending
        starts, stops = (
            np.searchsorted(of_sample, chosen, side=side) for side in ("left", "right")
        )
        rows = _ranges(starts, stops)
        changed[files] = [getattr(raw, files)[place] for place in rows.tolist()]
        changed |= {name: getattr(raw, name)[rows] for name in numbers}
        changed[owners] = np.repeat(np.arange(len(places), dtype=np.int32), stops - starts)
    return replace(raw, **changed)


def join(parts: Sequence[StoredGroup]) -> StoredGroup:
    """The samples of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.extras)
    parts = [with_extras(part, names) for part in parts]
    joined: dict[str, Any] = {
        "where": "; ".join(dict.fromkeys(part.where for part in parts)),
        "sample_ids": tuple(sample_id for part in parts for sample_id in part.sample_ids),
        "input_ids": np.concatenate([part.input_ids for part in parts]),
        "labels": np.concatenate([part.labels for part in parts]),
        "cu_seqlens": _borders(np.concatenate([np.diff(part.cu_seqlens) for part in parts])),
        "image_names": (),
        "extras": {name: [*chain(*(part.extras[name] for part in parts))] for name in names},
    }
    firsts = np.cumsum([0, *(len(part.sample_ids) for part in parts[:-1])])
    for files, owners, *numbers in MEDIA.values():
        joined[files] = [file for part in parts for file in getattr(part, files)]
        for name in numbers:
            joined[name] = np.concatenate([getattr(part, name) for part in parts])
        shifted = [getattr(part, owners) + first for part, first in zip(parts, firsts, strict=True)]
        joined[owners] = np.concatenate(shifted).astype(np.int32)
    return replace(parts[0], **joined)


def with_extras(raw: StoredGroup, names: Iterable[str]) -> StoredGroup:
    """The samples with these extras: None in those that their build does not have."""
    nothing = [None] * len(raw.sample_ids)
    return replace(raw, extras={name: raw.extras.get(name, nothing) for name in names})


def without_media(raw: StoredGroup, encoders: Collection[str]) -> StoredGroup:
    """The samples without files of `encoders`, which are encoded elsewhere; their numbers stay."""
    return replace(raw, **{MEDIA[name][0]: () for name in encoders})  # type: ignore[arg-type]


def only_media(raw: StoredGroup, encoder: str) -> StoredGroup:
    """The files of one encoder without any token, for the rank that encodes them."""
    others = [names for name, names in MEDIA.items() if name != encoder]
    nothing = {name: getattr(EMPTY_GROUP, name) for names in others for name in names}
    return replace(
        raw,
        input_ids=NO_NUMBERS,
        labels=NO_NUMBERS,
        cu_seqlens=np.zeros(len(raw.sample_ids) + 1, np.int32),
        **nothing,
    )


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
