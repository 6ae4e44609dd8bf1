"""`Build`: a finished build in a folder or at a URI, opened to be read.

Builds on disk are mapped. Of builds at `s3:// gs:// az:// http(s)://` record batches of the index
are fetched when they are first read, once per machine, into the cache, and mapped from there;
groups as they are read; and the manifest each time: it says whether the cache holds this build. Any
number of threads may read at once.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.common.config import check_types
from isobatch.common.errors import ConfigError, DamagedShard, first_line
from isobatch.loaders.read.cache import Cache
from isobatch.loaders.read.local import LocalMedia, LocalShards
from isobatch.loaders.read.range_reader import RangeReader
from isobatch.loaders.read.remote import RemoteMedia, RemoteShards
from isobatch.loaders.read.write_behind import WriteBehind
from isobatch.shards.arrow_shards import decode_arrow, shard_schema
from isobatch.shards.checksums import wrong_bytes
from isobatch.shards.index import INDEX_NAME
from isobatch.shards.manifest import (
    MANIFEST_NAME,
    TAR_FORMATS,
    Manifest,
    parse_manifest,
    read_manifest,
    unfinished,
)
from isobatch.shards.stored_group import DECODE_ERRORS, GroupBytes, StoredGroup
from isobatch.shards.tar_shards import decode_tar

if TYPE_CHECKING:
    from isobatch.shards.tables import SampleTable

SCHEMES = ("s3", "gs", "az", "http", "https")
DEFAULT_CACHE_BYTES = 16 << 30
TIMEOUT_S = 60.0
Verify = Literal["first", "never"]
"""When a group's checksum is compared. XXH3 takes 30 us for 200 KB, less than decoding an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How builds are checked, and how those and images that are not on disk are read."""

    cache_dir: str | Path | None = None
    """Shared by all processes of the machine, of several jobs too; None: `default_cache_dir`."""
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """Limit of the files in the cache; 0 keeps nothing."""
    timeout_s: float = TIMEOUT_S
    """Time limit of a request with its retries, plus 1 s per megabyte; then DataError."""
    verify: Verify = "first"
    """Checks of groups' checksums; "never" also skips that of a local build's index."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.cache_bytes < 0:
            raise ConfigError(
                f"cache_bytes is {self.cache_bytes}; it must be at least 0 (no cache)"
            )
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0")


class Build:
    """Manifest, index and groups of one build."""

    def __init__(
        self,
        manifest: Manifest,
        shards: LocalShards | RemoteShards,
        media: LocalMedia | RemoteMedia | None,
        verify: Verify,
    ) -> None:
        self.manifest, self.shards, self.index = manifest, shards, shards.index
        self._media = media
        self._remote = [s for s in (shards, media) if isinstance(s, RemoteShards | RemoteMedia)]
        self._is_mapped = manifest.format == "arrow" and not shards.is_remote
        self._schema: pa.Schema | None = None
        # one bit per group: whether its checksum was compared
        self._checked: bytearray | None = None
        if verify == "first":
            self._checked = bytearray(-(-len(self.index) // 8))

    def skip_missing_files(self) -> None:
        """Read a refs build's files that are not there as `MissingFile`, without an error."""
        if self._media is not None:
            self._media.skip_missing = True

    @cached_property
    def samples(self) -> "SampleTable":
        """Counts of each sample; read when first asked for."""
        from isobatch.shards.tables import read_samples  # noqa: PLC0415  (see `loaders`)

        return read_samples(self.manifest, self.index, self.shards.open_file)

    def sample_values(self, name: str) -> NDArray[Any]:
        """A column of counts.parquet for all samples, in stored order."""
        from isobatch.shards.tables import read_sample_values  # noqa: PLC0415  (see `loaders`)

        return read_sample_values(self.manifest, name, self.shards.open_file)

    def id_hashes(self) -> NDArray[np.uint64]:
        """A hash of each sample's id, in stored order."""
        from isobatch.shards.tables import read_id_hashes  # noqa: PLC0415  (see `loaders`)

        return read_id_hashes(self.manifest, self.shards.open_file)

    def read(self, group: int) -> StoredGroup:
        """One group, by its row in the index. DataError or DamagedShard, with the shard or sample.

        A group of an Arrow shard is views into its bytes, valid as long as they are referenced.
        """
        content: GroupBytes = self.shards.read(group)
        if self._checked is not None and not self._checked[group >> 3] >> (group & 7) & 1:
            content = self._check(group, content, self._checked)
        where = self.shards.where(group)
        try:
            stored = self._decode(content, where)
        except DECODE_ERRORS as error:
            reason = first_line(error)
            raise DamagedShard(f"{where}: not readable ({reason}); run `packer verify`") from None
        self._check_counts(stored, group)
        return stored

    def is_quick(self, group: int) -> bool:
        """Whether reading a group only makes views of mapped bytes that have been checked."""
        return self._is_mapped and (
            self._checked is None or self._checked[group >> 3] >> (group & 7) & 1 == 1
        )

    def cancel(self) -> None:
        """Wake the threads that wait for a store with DataError; later reads work again."""
        for source in self._remote:
            source.cancel()

    def close(self) -> None:
        """Stop what is under way and release connections, without waiting for a store."""
        for source in self._remote:
            source.close()

    def _check(self, group: int, content: GroupBytes, checked: bytearray) -> GroupBytes:
        """`content`, or what the origin gives if that has another checksum than the index says."""
        (expected,) = self.index.row(group, "checksum")
        if wrong_bytes(expected, "the index says", content):
            content = self.shards.read(group, again=True)
            if problem := wrong_bytes(expected, "the index says", content):
                advice = "run `packer verify`, and copy or build the shard again"
                raise DamagedShard(f"{self.shards.where(group)}: {problem}; {advice}")
        checked[group >> 3] |= 1 << (group & 7)
        return content

    def _decode(self, content: GroupBytes, where: str) -> StoredGroup:
        if self.manifest.format in TAR_FORMATS:
            return decode_tar(content, where)
        if self._schema is None:
            # shards of version 2 that are older than audio have no columns for it
            is_refs = self.manifest.format == "refs"
            has_all = self.manifest.version > 2
            videos, extras = self.manifest.has_videos, self.manifest.extras
            known = shard_schema(refs=is_refs, videos=videos, extras=extras)
            self._schema = known if has_all else self.shards.schema()
        return decode_arrow(content, self._schema, where, self._media, self.manifest.extras)

    def _check_counts(self, stored: StoredGroup, group: int) -> None:
        """DamagedShard unless the group has as many samples and tokens as the index says."""
        num_samples, *tokens = self.index.row(
            group, "num_samples", "num_image_tokens", "num_text_tokens", "num_audio_tokens"
        )
        lengths = tuple(
            map(len, (stored.sample_ids, stored.input_ids, stored.labels, stored.images))
        )
        num_tokens = sum(tokens)
        expected = num_samples, num_tokens, num_tokens, len(stored.image_sizes)
        if lengths != expected:
            raise DamagedShard(
                f"{stored.where}: {lengths} samples, tokens, labels and images, but the index says "
                f"{expected}; run `packer verify`"
            )


def open_builds(
    urls: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    options: StorageOptions | None = None,
) -> list[Build]:
    """Open all, or none; ConfigError unless they were made for the same model and tokens."""
    builds: list[Build] = []
    try:
        for url in urls:
            builds.append(open_build(url, image_root=image_root, options=options))
            first, last = builds[0].manifest, builds[-1].manifest
            for name in ("model", "image_token_id", "audio_token_id", "vocab_size"):
                if getattr(last, name) != getattr(first, name):
                    raise ConfigError(
                        f"{url} was built for another {name} than {urls[0]}; "
                        "give builds of one model and tokenizer"
                    )
    except BaseException:
        for build in builds:
            build.close()
        raise
    return builds


def open_build(
    url: str | Path, *, image_root: str | Path | None = None, options: StorageOptions | None = None
) -> Build:
    """Open the build at `url`: a folder, `file://`, or a URI of an object store or web server.

    `image_root` replaces the folder or URI that a refs build takes its images from. DataError if
    there is no readable build, ConfigError if an option is wrong or the extra `cloud` is missing.
    """
    options = options or StorageOptions()
    place = _place(url)
    if not is_remote(place):
        manifest = read_manifest(place)
        local = LocalShards(manifest, verify=options.verify != "never")
        return Build(manifest, local, _open_media(manifest, image_root, options), options.verify)
    store = RangeReader(place, options.timeout_s)
    try:
        manifest = _fetch_manifest(store)
        cache = _open_cache(manifest, options)
        shards = RemoteShards(store, manifest, cache)
        media = _open_media(manifest, image_root, options, shards.cache)
        return Build(manifest, shards, media, options.verify)
    except BaseException:
        store.close()
        raise


def _fetch_manifest(store: RangeReader) -> Manifest:
    try:
        return parse_manifest(store.read(MANIFEST_NAME, patient=False), store.uri)
    except FileNotFoundError:
        raise unfinished(store.uri) from None


def _open_media(
    manifest: Manifest,
    image_root: str | Path | None,
    options: StorageOptions,
    cache: WriteBehind | None = None,
) -> LocalMedia | RemoteMedia | None:
    """Reader of a refs build's files, else None; ConfigError if their folder is missing."""
    if manifest.format != "refs":
        return None
    place = _place(image_root or manifest.data_root or "")
    if is_remote(place):
        cache = cache or WriteBehind(_open_cache(manifest, options))
        return RemoteMedia(RangeReader(place, options.timeout_s), cache)
    if not place or not Path(place).is_dir():
        raise ConfigError(
            f"image folder {place or None} of the refs build {manifest.place} is not there; "
            "give image_root"
        )
    return LocalMedia(Path(place))


def _open_cache(manifest: Manifest, options: StorageOptions) -> Cache:
    root = Path(options.cache_dir) if options.cache_dir is not None else default_cache_dir()
    return Cache(
        root, manifest.hash[:32], options.cache_bytes, pinned=manifest.table_path(INDEX_NAME)
    )


def default_cache_dir() -> Path:
    """A folder on this machine's disk: ISOBATCH_CACHE if set, else below the temporary one."""
    named = os.environ.get("ISOBATCH_CACHE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"isobatch-{os.getuid()}"


def is_remote(place: str) -> bool:
    """Whether a place is reached by requests. ConfigError for an unknown scheme."""
    scheme, separator, _ = place.partition("://")
    if separator and scheme not in SCHEMES:
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise ConfigError(f"{place}: unknown scheme; use a folder, file:// or {known}")
    return bool(separator)


def _place(url: str | Path) -> str:
    return str(url).removeprefix("file://")
