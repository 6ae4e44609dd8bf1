"""One group of samples out of a build, in each of the three formats: `ShardReader`.

A reader gets a group's bytes from a `GroupBytes` (`loaders.read.local` for folders,
`loaders.read.remote` for object stores), checks them and decodes them. Any number of threads may
read at once.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import DamagedShard, first_line
from shards.checksums import group_checksum
from shards.decode import ArrowLayout, MediaReader, StoredGroup, decode_arrow, decode_tar
from shards.index import GroupIndex, Manifest

__all__ = ["GroupBytes", "StoredGroup", "ShardReader", "Traffic", "Verify", "group_place"]

Verify = Literal["first", "never"]
"""Compare a group's checksum with the index's when a process reads it for the first time, from disk
or from a store; or never. XXH3 of a group of 200 KB in memory takes some 30 us, less than one of
its images takes to decode.
"""
_DAMAGE = (
    *(pa.ArrowException, tarfile.TarError, OSError, EOFError),
    *(LookupError, TypeError, ValueError, OverflowError),
)
"""What decoding raises for bytes that were changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What reading from a store has cost; zeros for builds on disk."""

    requests: int = 0
    retries: int = 0
    """Requests that were made again, without those that obstore makes by itself."""
    bytes: int = 0
    cache_hits: int = 0
    """Groups that the cache on disk gave."""
    cache_misses: int = 0
    """Groups that were looked for there and asked of the store."""


class GroupBytes(Protocol):
    """Where the bytes of groups come from."""

    is_remote: bool
    """In a store, and not on disk."""

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""

    def schema(self) -> pa.Schema:
        """Columns of the shards, which are all the same; Arrow shards only."""

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """The group's byte range. DataError or DamagedShard if it cannot be had.

        `again`: what was given for this group was damaged; get it from the origin, if there are
        copies.
        """

    def release(self, group: int) -> None:
        """What was read of this group is in use no more; views of it would still be right."""

    def prefetch(self, groups: Sequence[int]) -> None:
        """These groups will be read soon, in about this order."""

    def traffic(self) -> Traffic:
        """What has been done so far."""

    def cancel(self) -> None:
        """Stop what is under way, without waiting for it; whoever waits for it gets DataError."""

    def close(self) -> None:
        """Stop what is under way and let go of threads and connections."""


class ShardReader:
    """Reads groups by their row in the index; thread-safe."""

    def __init__(
        self,
        manifest: Manifest,
        index: GroupIndex,
        source: GroupBytes,
        media: MediaReader | None,
        verify: Verify,
    ) -> None:
        self._index, self._source, self._media = index, source, media
        self._is_tar = manifest.format == "webdataset"
        self._layout: ArrowLayout | None = None
        # one bit per group: whether its checksum was compared
        self._checked: NDArray[np.uint8] | None = None
        if verify == "first":
            self._checked = np.zeros(-(-len(index) // 8), np.uint8)

    def read(self, group: int) -> StoredGroup:
        """One group. DataError or DamagedShard, with the shard or the sample in it, if it cannot be
        read.

        A group of an Arrow shard is views into its bytes, valid as long as they are referenced.
        """
        content = self._source.read(group)
        if self._checked is not None and not self._checked[group >> 3] >> (group & 7) & 1:
            content = self._check(group, content)
        where = self._source.where(group)
        try:
            raw = self._decode(content, where)
        except _DAMAGE as error:
            raise DamagedShard(
                f"{where}: not readable ({first_line(error)}); run `packer verify`"
            ) from None
        _check_counts(raw, self._index, group)
        return raw

    @property
    def is_remote(self) -> bool:
        """Whether groups lie in a store, and not on disk."""
        return self._source.is_remote

    def stored_bytes(self, group: int) -> int:
        """Length of a group."""
        return self._index.row(group, "length")[0]

    def release(self, group: int) -> None:
        """Say that what was read of a group is in use no more. A hint: views of it stay right."""
        self._source.release(group)

    def prefetch(self, groups: Sequence[int]) -> None:
        """Say which groups will be read next, in about this order; neighbours among them travel as
        one request.

        A hint: groups may be read without it. Local builds ignore it. Ask for a few steps, not for
        an epoch: what was fetched ahead and is not read yet lies in memory.
        """
        self._source.prefetch(groups)

    def cancel(self) -> None:
        """Wake all threads that wait for a store: their reads end with DataError. For those who
        then join them.
        """
        self._source.cancel()
        if self._media is not None:
            self._media.cancel()

    def close(self) -> None:
        """Stop requests that are under way and let go of threads and connections. Nothing may be
        read afterwards.
        """
        self._source.close()
        if self._media is not None:
            self._media.close()

    @property
    def cache_hits(self) -> int:
        """Groups that the cache on disk gave; 0 for builds on disk."""
        return self._source.traffic().cache_hits

    def traffic(self) -> Traffic:
        """What reading the shards has cost so far, in this process."""
        return self._source.traffic()

    def _check(self, group: int, content: pa.Buffer) -> pa.Buffer:
        """`content`, or what the origin gives if that has another checksum than the index says."""
        assert self._checked is not None
        expected = self._index.row(group, "checksum")[0]
        if group_checksum(content) != expected:
            content = self._source.read(group, again=True)
            if group_checksum(content) != expected:
                raise DamagedShard(
                    f"{self._source.where(group)}: its bytes have another checksum than the index says; "
                    "run `packer verify`, and copy or build the shard again"
                )
        self._checked[group >> 3] |= 1 << (group & 7)
        return content

    def _decode(self, content: pa.Buffer, where: str) -> StoredGroup:
        if self._is_tar:
            return decode_tar(content, where)
        if self._layout is None:
            self._layout = ArrowLayout(self._source.schema())
        return decode_arrow(content, self._layout, where, self._media)


def group_place(shard_name: str, group: int) -> str:
    """A group, for messages.

    >>> group_place("shards/shard-00003.arrow", 71)
    'shard-00003.arrow, group 71'
    """
    return f"{shard_name.rpartition('/')[2]}, group {group}"


def _check_counts(raw: StoredGroup, index: GroupIndex, group: int) -> None:
    """DamagedShard unless the group has as many samples and tokens as the index says."""
    num_samples, *tokens = index.row(
        group, "num_samples", "num_image_tokens", "num_text_tokens", "num_audio_tokens"
    )
    found = len(raw.sample_ids), len(raw.input_ids), len(raw.labels), len(raw.images)
    expected = num_samples, sum(tokens), sum(tokens), len(raw.image_sizes)
    if found != expected:
        raise DamagedShard(
            f"{raw.where}: {found} samples, tokens, labels and images, but the index says {expected}; "
            "run `packer verify`"
        )
