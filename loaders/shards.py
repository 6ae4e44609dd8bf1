"""One group of samples out of a shard, in each of the three formats: `open_shards` gives the reader of a build.

Arrow groups are views into the mapped file: nothing is copied before decoding. At most MAX_OPEN shards are open at a
time. Reads are by absolute position, so a reader holds no position of its own.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import ConfigError, DamagedShard, DataError
from loaders.index import GroupIndex, Manifest, ShardFile

MAX_OPEN = 64
"""Open shards at a time: a block of groups lies in one or two shards, and at most 31 lanes have a block open."""

Int32Array = NDArray[np.int32]
Opened = TypeVar("Opened")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGroup:
    """The samples of a group as they are stored: tokens packed, images not yet decoded."""

    where: str
    """The shard and the group, for messages."""
    sample_ids: tuple[str, ...]
    input_ids: Int32Array
    """(tokens,), one sample behind the other, as `labels`."""
    labels: Int32Array
    cu_seqlens: Int32Array
    """(num_samples + 1,)."""
    images: Sequence[bytes | pa.Buffer]
    """Encoded files, in the order of their places in `input_ids`."""
    image_sizes: Int32Array
    """(num_images, 2): height and width as counted."""
    image_samples: Int32Array
    """(num_images,): the place in the group of each image's sample."""


class ShardReader(Protocol):
    """Reads groups by their row in the index."""

    def read(self, group: int) -> RawGroup:
        """One group. DataError or DamagedShard, with the shard or the sample in it, if it cannot be read."""


def open_shards(manifest: Manifest, index: GroupIndex, image_root: Path | None) -> ShardReader:
    """The reader for a build's format. `image_root` replaces the folder that a refs build takes its images from."""
    if manifest.format == "webdataset":
        return TarShards(manifest.shards, index)
    if manifest.format == "arrow":
        return ArrowShards(manifest.shards, index)
    root = image_root or manifest.data_root
    if root is None or not root.is_dir():
        raise ConfigError(f"image folder {root} of the refs build {manifest.root} is not there; give image_root")
    return ArrowShards(manifest.shards, index, image_root=root)


class OpenFiles(Generic[Opened]):
    """Shards opened on demand; the one unused for longest is closed when there are more than MAX_OPEN."""

    def __init__(self, shards: Sequence[ShardFile], opener: Callable[[Path], Opened], max_open: int = MAX_OPEN) -> None:
        self._shards, self._opener, self._max_open = shards, opener, max_open
        self._opened: OrderedDict[int, Opened] = OrderedDict()

    def __len__(self) -> int:
        return len(self._opened)

    def get(self, shard: int) -> Opened:
        """The opened shard. DamagedShard if it is missing or has another size than the manifest says."""
        if shard not in self._opened:
            file = self._shards[shard]
            size = file.path.stat().st_size if file.path.is_file() else None
            if size != file.size:
                found = "is missing" if size is None else f"has {size} bytes"
                raise DamagedShard(f"{file.path}: {found}, the manifest says {file.size} bytes; copy or build it again")
            self._opened[shard] = self._opener(file.path)
            if len(self._opened) > self._max_open:
                # closed by its own finaliser, once no view of it is in use any more
                self._opened.popitem(last=False)
        self._opened.move_to_end(shard)
        return self._opened[shard]


class ArrowShards:
    """Groups of Arrow shards: one record batch each, read from its byte range; images inside, or as paths (refs)."""

    def __init__(self, shards: Sequence[ShardFile], index: GroupIndex, image_root: Path | None = None) -> None:
        self._shards, self._index, self._image_root = shards, index, image_root
        self._files = OpenFiles(shards, _map_arrow)

    def read(self, group: int) -> RawGroup:
        """One group: views into the mapped shard, valid as long as they are referenced."""
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        where = f"{self._shards[shard].path.name}, group {group}"
        try:
            schema, content = self._files.get(shard)
            batch = pa.ipc.read_record_batch(content.slice(offset, length), schema)
            batch.validate(full=True)  # damaged offsets would otherwise be followed outside of the file
            raw = self._raw_group(batch, where)
        except (pa.ArrowException, OSError, EOFError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DamagedShard(f"{where}: not readable ({error}); run `packer verify`") from None
        _check_counts(raw, self._index, group)
        return raw

    def _raw_group(self, batch: pa.RecordBatch, where: str) -> RawGroup:
        sample_ids = tuple(batch.column("sample_id").to_pylist())
        lengths = batch.column("input_ids").value_lengths().to_numpy()
        heights = batch.column("image_heights")
        # shape (num_images, 2)
        sizes = np.stack([heights.flatten().to_numpy(), batch.column("image_widths").flatten().to_numpy()], axis=1)
        image_samples = np.repeat(np.arange(len(sample_ids), dtype=np.int32), heights.value_lengths().to_numpy())
        images: Sequence[bytes | pa.Buffer]
        if self._image_root is None:
            images = [value.as_buffer() for value in batch.column("images").flatten()]
        else:
            paths = batch.column("image_paths").flatten().to_pylist()
            owners = [sample_ids[place] for place in image_samples]
            images = [_read_image(self._image_root / path, i, where) for path, i in zip(paths, owners, strict=True)]
        return RawGroup(
            where=where,
            sample_ids=sample_ids,
            input_ids=batch.column("input_ids").flatten().to_numpy(),
            labels=batch.column("labels").flatten().to_numpy(),
            cu_seqlens=_borders(lengths),
            images=images,
            image_sizes=sizes,
            image_samples=image_samples,
        )


class TarShards:
    """Groups of WebDataset shards: a byte range of whole tar members."""

    def __init__(self, shards: Sequence[ShardFile], index: GroupIndex) -> None:
        self._shards, self._index = shards, index
        self._files = OpenFiles(shards, lambda path: path.open("rb", buffering=0))

    def read(self, group: int) -> RawGroup:
        """One group, its image files as bytes."""
        shard, offset, length = self._index.row(group, "shard", "offset", "length")
        where = f"{self._shards[shard].path.name}, group {group}"
        try:
            content = os.pread(self._files.get(shard).fileno(), length, offset)
            raw = _from_members(_tar_members(content), where)
        except (tarfile.TarError, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            raise DamagedShard(f"{where}: not readable ({error!r}); run `packer verify`") from None
        _check_counts(raw, self._index, group)
        return raw


def _map_arrow(path: Path) -> tuple[pa.Schema, pa.Buffer]:
    """Schema and content of an Arrow file; the content is the mapped file, not a copy."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).schema, source.read_buffer()


def _tar_members(content: bytes) -> dict[str, bytes]:
    """Name -> content of the members in a byte range of a tar, in order."""
    members = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                raise ValueError(f"member {member.name} is not a file")
            members[member.name] = file.read()
    return members


def _from_members(members: dict[str, bytes], where: str) -> RawGroup:
    keys = [name.removesuffix(".json") for name in members if name.endswith(".json")]
    infos: list[dict[str, Any]] = [json.loads(members[f"{key}.json"]) for key in keys]
    input_ids = [_array(members[f"{key}.input_ids.npy"]) for key in keys]
    sizes = [size for info in infos for size in zip(info["image_heights"], info["image_widths"], strict=True)]
    return RawGroup(
        where=where,
        sample_ids=tuple(info["sample_id"] for info in infos),
        input_ids=np.concatenate(input_ids),
        labels=np.concatenate([_array(members[f"{key}.labels.npy"]) for key in keys]),
        cu_seqlens=_borders([len(ids) for ids in input_ids]),
        images=[members[f"{key}.{name}"] for key, info in zip(keys, infos, strict=True) for name in info["images"]],
        image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        image_samples=np.repeat(np.arange(len(keys), dtype=np.int32), [len(info["images"]) for info in infos]),
    )


def _array(content: bytes) -> Int32Array:
    """A one-dimensional int32 .npy file; np.load takes 23 us for what takes 1 us here."""
    start = 10 + int.from_bytes(content[8:10], "little")  # magic, version, length of the header, header
    if not content.startswith(b"\x93NUMPY\x01\x00") or b"'descr': '<i4'" not in content[10:start]:
        raise ValueError("tokens are not an .npy file of int32")
    return np.frombuffer(content, dtype="<i4", offset=start)


def _borders(lengths: Sequence[int] | Int32Array) -> Int32Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _read_image(path: Path, sample_id: str, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"sample {sample_id!r} ({where}): image {path} cannot be read ({error.strerror}); restore it"
        ) from None


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
