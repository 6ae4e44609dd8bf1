"""A finished build as a dataset: its samples are packed again, as they are.

For other caps, another format, or a mixture with new data. Nothing is tokenised or rendered again,
so model, tokenizer and chat template must be those of the build. Files in tars (`webdataset`,
`energon`) stay where they are, as byte ranges; those in Arrow shards come with the records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from isobatch.common.errors import ConfigError, DamagedShard, DataError, first_line
from isobatch.counting.records.media import Media
from isobatch.counting.records.record import STORED, Chunk, RawRecord
from isobatch.counting.text.stored_tokens import StoredTokens
from isobatch.media.frame_archive import unpack_frames
from isobatch.packer.sources.base import Located, OnBytes, Source, opened, prefix_under
from isobatch.packer.sources.tar_members import BrokenTarError, Member, read_members
from isobatch.shards.arrow_shards import decode_arrow, shard_schema
from isobatch.shards.checksums import group_checksum
from isobatch.shards.folders import open_folder
from isobatch.shards.index import INDEX_NAME, open_index
from isobatch.shards.manifest import (
    TAR_FORMATS,
    FolderFiles,
    hash_json,
    read_manifest,
    tables_on_disk,
)
from isobatch.shards.stored_group import DECODE_ERRORS, ExtraTypes, StoredGroup
from isobatch.shards.tar_shards import decode_members

_READ = (".json", ".npy")
"""Suffixes of members of tars that are read here; others are files."""


@dataclass(frozen=True, slots=True)
class StoredIn:
    """How the groups of a build are stored; plain values, for other processes."""

    place: str
    format: str
    has_videos: bool
    extras: ExtraTypes
    model: str
    tokenizer: str


def locate_build(place: str, wanted: str | None) -> Located:
    """The shards of a finished build. ConfigError for a split of it, or one whose files are not in
    it.
    """
    manifest = read_manifest(place)
    if wanted is not None:
        raise ConfigError(f"{place} is a build, which has no splits, so no {wanted!r}")
    if manifest.format == "refs":
        raise ConfigError(f"{place} is a build that refers to its files: name what it was made of")
    stored = StoredIn(
        manifest.place,
        manifest.format,
        manifest.has_videos,
        dict(manifest.extras),
        hash_json(manifest.values["model"]),
        manifest.values["tokenizer"]["hash"],
    )
    names = tuple(shard.name for shard in manifest.shards)
    return Located("build", place, names, (("stored", stored),))


@dataclass(frozen=True, slots=True)
class BuildChunk:
    """Successive groups of a shard."""

    stored: StoredIn
    shard: str
    container: str
    """Name of the shard under the data root."""
    groups: tuple[tuple[int, int, int, int], ...]
    """Number, offset, length and checksum of each."""
    first: int
    """Samples of the build before these."""

    def records(self) -> Iterator[RawRecord]:
        """The samples, in order. DamagedShard for a group that cannot be read."""
        position = self.first
        with opened(open_folder(self.stored.place, follow_links=True), self.shard) as file:
            for number, offset, length, checksum in self.groups:
                where = f"{self.stored.place}/{self.shard}, group {number}"
                try:
                    group = self._group(file, offset, length, checksum, where)
                    values = list(self._values(group))
                except (*DECODE_ERRORS, BrokenTarError, DataError) as error:
                    problem = f"not readable ({first_line(error)}); run `packer verify`"
                    raise DamagedShard(f"{where}: {problem}") from None
                for value in values:
                    yield RawRecord(position, value)
                    position += 1

    def _group(
        self, file: IO[bytes], offset: int, length: int, checksum: int, where: str
    ) -> StoredGroup:
        stored = self.stored
        if stored.format in TAR_FORMATS:
            return decode_members(_TarMembers(file, offset, offset + length), where)
        file.seek(offset)
        content = file.read(length)
        if len(content) != length or group_checksum(content) != checksum:
            raise ValueError("its checksum is not that of the index")
        schema = shard_schema(refs=False, videos=stored.has_videos, extras=stored.extras)
        return decode_arrow(pa.py_buffer(content), schema, where, None, stored.extras)

    def _values(self, group: StoredGroup) -> Iterator[dict[str, Any]]:
        """A record of each sample: its tokens and files, and the columns that the build kept."""
        about = zip(group.image_frames.tolist(), group.image_rates.tolist(), strict=True)
        visuals = [
            self._media(file, name, is_archive=bool(frames) and not rate)
            for file, name, (frames, rate) in zip(
                group.images, group.image_names or [""] * len(group.images), about, strict=True
            )
        ]
        audios = [self._media(file, "", is_archive=False) for file in group.audios]
        is_video = group.image_frames > 0
        borders = group.cu_seqlens.tolist()
        for number, sample_id in enumerate(group.sample_ids):
            own = np.flatnonzero(group.image_samples == number)
            tokens = slice(*borders[number : number + 2])
            clips = np.flatnonzero(group.audio_samples == number).tolist()
            yield {name: values[number] for name, values in group.extras.items()} | {
                "id": sample_id,
                "images": [visuals[place] for place in own[~is_video[own]].tolist()],
                "videos": [visuals[place] for place in own[is_video[own]].tolist()],
                "audios": [audios[place] for place in clips],
                STORED: StoredTokens(
                    input_ids=group.input_ids[tokens].copy(),
                    labels=group.labels[tokens].copy(),
                    videos_at=tuple(np.flatnonzero(is_video[own]).tolist()),
                    model=self.stored.model,
                    tokenizer=self.stored.tokenizer,
                    place=self.stored.place,
                ),
            }

    def _media(self, file: Any, name: str, *, is_archive: bool) -> Media:
        if isinstance(file, Member) and not is_archive:
            return Media(file.name, container=self.container, offset=file.offset, size=file.size)
        content = bytes(file.data or b"") if isinstance(file, Member) else bytes(file)
        if not is_archive:
            return Media(name or "file", data=content)
        frames = unpack_frames(content)
        return Media("frames", frames=tuple(Media("frame", data=frame) for frame in frames))


class _TarMembers(Mapping[str, Any]):
    """Members of a range of a tar: contents of those that say what is in it, places of files."""

    def __init__(self, file: IO[bytes], start: int, end: int) -> None:
        self._file = file
        self._members = {member.name: member for member in read_members(file, start, end)}

    def __getitem__(self, name: str) -> Any:
        member = self._members[name]
        if not name.endswith((*_READ, ".zip")):
            return member
        self._file.seek(member.offset)
        content = self._file.read(member.size)
        if name.endswith(_READ):
            return content
        return Member(member.name, member.header, member.offset, member.size, True, content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class PackedBuildSource(Source):
    """Samples of a build, group after group."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """ConfigError for tars outside the data root."""
        super().__init__(located, name, data_root)
        self._stored: StoredIn = dict(located.options)["stored"]
        self._prefix = prefix_under(located.folder, data_root, "shards")

    def describe(self) -> list[dict[str, Any]]:
        """The shards, with their checksums of the manifest."""
        return [shard.to_json() for shard in read_manifest(self.located.folder).shards]

    def bytes_per_record(self) -> float:
        """By the manifest."""
        manifest = read_manifest(self.located.folder)
        size = sum(shard.size for shard in manifest.shards)
        num_samples: int = manifest.values["totals"]["num_packed"]
        return max(1.0, size / max(1, num_samples))

    def columns(self) -> set[str]:
        """Columns of the raw data that the build kept."""
        return {"id", *self._stored.extras}

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """Groups of about `num_records` samples; only the index is read here."""
        manifest = read_manifest(self.located.folder)
        names = ("shard", "offset", "length", "checksum", "num_samples")
        with tables_on_disk(manifest, [INDEX_NAME]) as folder:
            index = open_index(manifest, FolderFiles(manifest, folder))
            shard, offset, length, checksum, sizes = map(index.column, names)
        checksum = checksum.astype(np.uint64)
        ends = np.cumsum(sizes)
        start = first = 0
        for group, end in enumerate(ends.tolist()):
            is_last = group + 1 == len(ends) or shard[group + 1] != shard[group]
            if end - first < num_records and not is_last:
                continue
            rows = slice(start, group + 1)
            columns = (values[rows].tolist() for values in (offset, length, checksum))
            groups = tuple(zip(range(start, group + 1), *columns, strict=True))
            name = manifest.shard(int(shard[group])).name
            yield BuildChunk(self._stored, name, self._prefix + name, groups, first)
            on_bytes(int(length[rows].sum()))
            start, first = group + 1, end
