"""One group of samples out of a build, in each of the three formats: `open_shards` gives the reader of a build.

A reader gets a group's bytes from a `GroupBytes` (`LocalShards` here, `loaders.remote` for object stores), checks them
and decodes them. Local shards are mapped: an Arrow group is a view of its shard until its images are decoded. At most
MAX_OPEN shards are open at a time. Any number of threads may read at once.
"""

from __future__ import annotations

import tarfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import ConfigError, DamagedShard, DataError
from loaders.formats import MediaRoot, RawGroup, check_schema, decode_arrow, decode_tar
from loaders.index import BuildFile, GroupIndex, Manifest

__all__ = [
    "GroupBytes",
    "LocalShards",
    "OpenFiles",
    "RawGroup",
    "ShardReader",
    "Traffic",
    "Verify",
    "group_place",
    "open_media",
    "open_shards",
]

MAX_OPEN = 64
"""Open shards at a time: a block of groups lies in one or two shards, and at most 31 lanes have a block open."""

Verify = Literal["first", "never"]
"""Compare a group's checksum with the index's when a process reads it for the first time, or never."""
_DAMAGE = (
    *(pa.ArrowException, tarfile.TarError, OSError, EOFError),
    *(LookupError, TypeError, ValueError, OverflowError),
)
"""What decoding raises for bytes that were changed."""
Opened = TypeVar("Opened")


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

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""

    def schema(self) -> pa.Schema:
        """Columns of the shards, which are all the same; Arrow shards only."""

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """The group's byte range. DataError or DamagedShard if it cannot be had.

        `again`: what was given for this group was damaged; get it from the origin, if there are copies.
        """

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
        self, manifest: Manifest, index: GroupIndex, source: GroupBytes, media: MediaRoot | None, verify: Verify
    ) -> None:
        self._index, self._source, self._media = index, source, media
        self._is_tar = manifest.format == "webdataset"
        self._schema: pa.Schema | None = None
        # one bit per group: whether its checksum was compared
        self._checked: NDArray[np.uint8] | None = None
        if verify == "first" and index.has_checksums:
            self._checked = np.zeros(-(-len(index) // 8), np.uint8)

    def read(self, group: int) -> RawGroup:
        """One group. DataError or DamagedShard, with the shard or the sample in it, if it cannot be read.

        A group of an Arrow shard is views into its bytes, valid as long as they are referenced.
        """
        content = self._source.read(group)
        if self._checked is not None and not self._checked[group >> 3] >> (group & 7) & 1:
            content = self._check(group, content)
        where = self._source.where(group)
        try:
            raw = self._decode(content, where)
        except _DAMAGE as error:
            raise DamagedShard(f"{where}: not readable ({_one_line(error)}); run `packer verify`") from None
        _check_counts(raw, self._index, group)
        return raw

    def prefetch(self, groups: Sequence[int]) -> None:
        """Say which groups will be read next, in about this order; neighbours among them travel as one request.

        A hint: groups may be read without it. Local builds ignore it. Ask for a few steps, not for an epoch: what was
        fetched ahead and is not read yet lies in memory.
        """
        self._source.prefetch(groups)

    def cancel(self) -> None:
        """Wake all threads that wait for a store: their reads end with DataError. For those who then join them."""
        self._source.cancel()
        if self._media is not None:
            self._media.cancel()

    def close(self) -> None:
        """Stop requests that are under way and let go of threads and connections. Nothing may be read afterwards."""
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
        if zlib.crc32(content) != expected:
            content = self._source.read(group, again=True)
            if zlib.crc32(content) != expected:
                raise DamagedShard(
                    f"{self._source.where(group)}: its bytes have another checksum than the index says; "
                    "run `packer verify`, and copy or build the shard again"
                )
        self._checked[group >> 3] |= 1 << (group & 7)
        return content

    def _decode(self, content: pa.Buffer, where: str) -> RawGroup:
        if self._is_tar:
            return decode_tar(content, where)
        if self._schema is None:
            schema = self._source.schema()
            check_schema(schema)
            self._schema = schema
        return decode_arrow(content, self._schema, where, self._media)


def open_shards(
    manifest: Manifest,
    index: GroupIndex,
    image_root: Path | None = None,
    *,
    source: GroupBytes | None = None,
    media: MediaRoot | None = None,
    verify: Verify = "never",
) -> ShardReader:
    """The reader of a build, on disk unless `source` gives the groups' bytes.

    `image_root` replaces the folder that a refs build takes its images from; `media` stands in place of a folder.
    `verify` is "never" by default: reading a mapped group takes about 50 us, its checksum another 100 to 150.
    """
    if media is None:
        media = open_media(manifest, image_root)
    return ShardReader(manifest, index, source or LocalShards(manifest.root, manifest.shards, index), media, verify)


def open_media(manifest: Manifest, image_root: str | Path | None) -> MediaRoot | None:
    """The folder that a refs build takes its images from; None for other formats. ConfigError if it is not there."""
    if manifest.format != "refs":
        return None
    root = image_root or manifest.data_root
    if root is None or not Path(root).is_dir():
        raise ConfigError(f"image folder {root} of the refs build {manifest.place} is not there; give image_root")
    return LocalMedia(Path(root))


class OpenFiles(Generic[Opened]):
    """Shards opened on demand; the one unused for longest is closed when there are more than MAX_OPEN. Thread-safe."""

    def __init__(
        self, root: Path, shards: Sequence[BuildFile], opener: Callable[[Path], Opened], max_open: int = MAX_OPEN
    ) -> None:
        self._root, self._shards, self._opener, self._max_open = root, shards, opener, max_open
        self._opened: OrderedDict[int, Opened] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._opened)

    def get(self, shard: int) -> Opened:
        """The opened shard. DamagedShard if it is missing or has another size than the manifest says."""
        with self._lock:
            if shard not in self._opened:
                self._opened[shard] = self._open(self._shards[shard])
                if len(self._opened) > self._max_open:
                    # closed by its own finaliser, once no view of it is in use any more
                    self._opened.popitem(last=False)
            self._opened.move_to_end(shard)
            return self._opened[shard]

    def _open(self, file: BuildFile) -> Opened:
        path = self._root / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DamagedShard(f"{path}: {found}, the manifest says {file.size} bytes; copy or build it again")
        try:
            return self._opener(path)
        except (pa.ArrowException, OSError) as error:
            raise DamagedShard(f"{path}: cannot be opened ({_one_line(error)}); run `packer verify`") from None


class LocalShards:
    """Byte ranges of mapped shards."""

    def __init__(self, root: Path, shards: Sequence[BuildFile], index: GroupIndex) -> None:
        self._shards, self._index = shards, index
        self._files = OpenFiles(root, shards, _map)

    def where(self, group: int) -> str:
        """The shard and the group, for messages."""
        return group_place(self._shards[self._index.row(group, "shard")[0]].name, group)

    def schema(self) -> pa.Schema:
        """Columns of the first shard that has a group."""
        return pa.ipc.open_file(self._files.get(self._index.row(0, "shard")[0])).schema

    def read(self, group: int, *, again: bool = False) -> pa.Buffer:
        """A view into the mapped shard."""
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        content = self._files.get(shard)
        if offset < 0 or length < 0 or offset + length > content.size:
            raise DamagedShard(f"{self.where(group)}: the index puts it outside of the shard; run `packer verify`")
        return content.slice(offset, length)

    def prefetch(self, groups: Sequence[int]) -> None:
        """Nothing: the operating system reads ahead."""

    def traffic(self) -> Traffic:
        """Nothing is asked of a store."""
        return Traffic()

    def cancel(self) -> None:
        """Nothing: reads do not wait."""

    def close(self) -> None:
        """Nothing: files are closed when the last view of them is gone."""


def group_place(shard_name: str, group: int) -> str:
    """A group, for messages.

    >>> group_place("shards/shard-00003.arrow", 71)
    'shard-00003.arrow, group 71'
    """
    return f"{shard_name.rpartition('/')[2]}, group {group}"


def _map(path: Path) -> pa.Buffer:
    with pa.memory_map(str(path)) as source:
        return source.read_buffer()


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


def _check_counts(raw: RawGroup, index: GroupIndex, group: int) -> None:
    """DamagedShard unless the group has as many samples and tokens as the index says."""
    num_samples, *tokens = index.row(group, "num_samples", "num_image_tokens", "num_text_tokens", "num_audio_tokens")
    found = len(raw.sample_ids), len(raw.input_ids), len(raw.labels), len(raw.images)
    expected = num_samples, sum(tokens), sum(tokens), len(raw.image_sizes)
    if found != expected:
        raise DamagedShard(
            f"{raw.where}: {found} samples, tokens, labels and images, but the index says {expected}; "
            "run `packer verify`"
        )


def _one_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
