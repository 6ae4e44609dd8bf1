"""`open_build`: a finished build in a folder or at a URI, ready to be read.

Builds on disk are mapped. Of builds at `s3:// gs:// az:// http(s)://` the index is fetched once per
machine into the cache and mapped from there; groups are fetched as they are read. The manifest is
small and is fetched each time: it says whether what the cache holds still is this build. Wherever a
group lies, a process compares its checksum when it first reads it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from balance.errors import ConfigError
from loaders.read.build_files import BuildFiles, LocalFiles, RemoteFiles
from loaders.read.cache import Cache
from loaders.read.local import LocalShards, open_media
from loaders.read.remote import RemoteMedia, RemoteShards
from loaders.read.shard_reader import ShardReader, Verify
from loaders.read.write_behind import WriteBehind
from shards.decode import MediaReader
from shards.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    GroupIndex,
    Manifest,
    parse_manifest,
    read_manifest,
    unfinished,
)
from shards.object_store import RangeReader

SCHEMES = ("s3", "gs", "az", "http", "https")
DEFAULT_CACHE_BYTES = 16 << 30
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBuild:
    """An opened build."""

    manifest: Manifest
    index: GroupIndex
    shards: ShardReader
    files: BuildFiles

    def close(self) -> None:
        """Stop what is under way and let go of connections; never waits for a store that does not
        answer.
        """
        self.shards.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How builds are checked, and how those and images that are not on disk are read."""

    cache_dir: str | Path | None = None
    """Shared by all processes of the machine, of several jobs too; None: `default_cache_dir`."""
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """Limit of what lies in the cache; 0 keeps nothing."""
    timeout_s: float = TIMEOUT_S
    """Limit of each request, however often it is tried again, plus a second per megabyte; then
    DataError names the shard, or the sample whose file it is.
    """
    verify: Verify = "first"
    """Whether each group is compared with the index's checksum when a process reads it for the
    first time, from disk too; "never" also opens the index of a build on disk without comparing its
    checksum.
    """

    def __post_init__(self) -> None:
        if self.cache_bytes < 0:
            raise ConfigError(
                f"cache_bytes is {self.cache_bytes}; use 0 for no cache, or a number of bytes"
            )
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0")
        if self.verify not in {"first", "never"}:
            raise ConfigError(f"verify is {self.verify!r}; use 'first' or 'never'")


def open_build(
    url: str | Path, *, image_root: str | Path | None = None, options: StorageOptions | None = None
) -> StoredBuild:
    """Open the build at `url`: a folder, `file://`, or a URI of an object store or web server.

    `image_root` replaces the folder or URI that a refs build takes its images from. DataError if
    there is no readable build, ConfigError if an option is wrong or the extra `cloud` is missing.
    """
    options, place = options or StorageOptions(), _place(url)
    if not is_remote(place):
        manifest = read_manifest(Path(place))
        files = LocalFiles(Path(place), manifest, verify=options.verify)
        index = GroupIndex(files.open(INDEX_NAME), manifest.num_groups)
        media = _open_media(manifest, image_root, options)
        source = LocalShards(Path(place), manifest.shards, index)
        shards = ShardReader(manifest, index, source, media, options.verify)
        return StoredBuild(manifest=manifest, index=index, shards=shards, files=files)
    bucket = RangeReader(place, options.timeout_s)
    try:
        return _open_remote(bucket, image_root, options)
    except BaseException:
        bucket.close()
        raise


def _open_remote(
    bucket: RangeReader, image_root: str | Path | None, options: StorageOptions
) -> StoredBuild:
    try:
        manifest = parse_manifest(bucket.read(MANIFEST_NAME, patient=False), bucket.uri)
    except FileNotFoundError:
        raise unfinished(bucket.uri) from None
    stored = _open_cache(manifest, options)
    files, cache = RemoteFiles(bucket, manifest, stored), WriteBehind(stored)
    index = GroupIndex(files.open(INDEX_NAME), manifest.num_groups)
    source = RemoteShards(bucket, manifest.shards, index, cache)
    media = _open_media(manifest, image_root, options, cache)
    shards = ShardReader(manifest, index, source, media, options.verify)
    return StoredBuild(manifest=manifest, index=index, shards=shards, files=files)


def _open_media(
    manifest: Manifest,
    image_root: str | Path | None,
    options: StorageOptions,
    cache: WriteBehind | None = None,
) -> MediaReader | None:
    """Where the images of a refs build lie; None for other formats."""
    place = _place(image_root or manifest.data_root or "")
    if manifest.format != "refs" or not is_remote(place):
        return open_media(manifest, place or None)
    return RemoteMedia(
        RangeReader(place, options.timeout_s), cache or WriteBehind(_open_cache(manifest, options))
    )


def _open_cache(manifest: Manifest, options: StorageOptions) -> Cache:
    root = Path(options.cache_dir) if options.cache_dir is not None else default_cache_dir()
    return Cache(root, manifest.hash[:32], options.cache_bytes, pinned=INDEX_NAME)


def default_cache_dir() -> Path:
    """A folder of the user's own on this machine's disk; a home is often on a network.

    Under ISOBATCH_CACHE if that is set, else in the temporary directory.
    """
    named = os.environ.get("ISOBATCH_CACHE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"isobatch-{os.getuid()}"


def is_remote(place: str) -> bool:
    """Whether a place is reached by requests. ConfigError for a scheme that is not known.

    >>> is_remote("s3://bucket/build"), is_remote("/data/build")
    (True, False)
    """
    scheme, separator, _ = place.partition("://")
    if separator and scheme not in SCHEMES:
        raise ConfigError(
            f"{place}: unknown scheme; use a folder, file:// or {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    return bool(separator)


def _place(url: str | Path) -> str:
    return str(url).removeprefix("file://")
