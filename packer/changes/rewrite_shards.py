"""Shards of stored groups and samples, written again as they are, by any number of processes.

Nothing is decoded or counted: rows of Arrow shards and members of tars are copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from isobatch.common.errors import DamagedShard, first_line
from isobatch.common.types import IntArray
from isobatch.packer.write.write_shards import index_part
from isobatch.shards.arrow_shards import ArrowShardWriter, shard_schema, stored_rows
from isobatch.shards.checksums import wrong_bytes
from isobatch.shards.folders import Folder, is_uri, open_folder, open_object_folder
from isobatch.shards.index import IndexPart, read_shard_file
from isobatch.shards.manifest import TAR_FORMATS
from isobatch.shards.stored_group import DECODE_ERRORS, ExtraTypes
from isobatch.shards.tar_shards import Member, TarShardWriter, stored_samples


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored group, or a sample of it."""

    shard: str
    offset: int
    length: int
    checksum: int
    place: int | None = None
    """Of the sample in the group; None: all samples."""

    @property
    def group(self) -> tuple[str, int]:
        """What tells stored groups apart."""
        return self.shard, self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """One shard to write; plain values, for other processes. What `IndexPart.add` needs is here."""

    place: str
    """Folder or URI of the build."""
    work: str
    """Folder of the unfinished change."""
    format: str
    has_videos: bool
    extras: ExtraTypes
    pad_each_to: int
    number: int
    """Among the shards that are written."""
    name: str
    """Path of the shard under the build."""
    first_group: int
    """Number of its first group, in the keys of tars."""
    groups: tuple[tuple[StoredPart, ...], ...]
    """What each group is made of."""
    group_offsets: IntArray
    sample_ids: list[str]
    counts: dict[str, IntArray]


def rewrite_shard(task: RewriteTask) -> int:
    """Write a shard and then its index rows, unless these exist; -> its groups."""
    part = index_part(Path(task.work), task.number)
    root = open_folder(task.place, follow_links=True)
    if part.exists() and _is_there(root, part):
        return len(task.groups)
    temporary = part.with_suffix(".shard")
    index = IndexPart(task.number, task.pad_each_to)
    index.add(task, _write(task, root, temporary))
    index.finish(task.name, temporary)
    if is_uri(task.place):
        open_object_folder(task.place).put(task.name, temporary)
        temporary.unlink()
    else:
        temporary.replace(Path(task.place, task.name))
    index.save(part)
    return len(task.groups)


def _is_there(root: Folder, part: Path) -> bool:
    file = read_shard_file(part)
    try:
        return root.info(file.name).size == file.size
    except FileNotFoundError:
        return False


def _write(task: RewriteTask, root: Folder, path: Path) -> list[tuple[int, int]]:
    """Write the shard to a file; -> the range of each group."""
    ranges = []
    if task.format in TAR_FORMATS:
        tar = TarShardWriter(path)
        stored = _Stored(root, task, _samples)
        for number, parts in enumerate(task.groups, start=task.first_group):
            ranges.append(tar.add_samples(number, [one for of in parts for one in stored.take(of)]))
        tar.close()
        return ranges
    is_refs = task.format == "refs"
    schema = shard_schema(refs=is_refs, videos=task.has_videos, extras=task.extras)
    arrow = ArrowShardWriter(path, refs=is_refs, videos=task.has_videos, extras=task.extras)

    def rows(content: bytes, places: Sequence[int] | None) -> list[pa.RecordBatch]:
        batch = stored_rows(pa.py_buffer(content), schema)
        # copies, so that what is not wanted leaves the memory
        return [batch] if places is None else [batch.take(pa.array([row])) for row in places]

    stored = _Stored(root, task, rows)
    for parts in task.groups:
        table = pa.Table.from_batches([one for of in parts for one in stored.take(of)], schema)
        ranges.append(arrow.add_rows(table.combine_chunks().to_batches()[0]))
    arrow.close()
    return ranges


def _samples(content: bytes, places: Sequence[int] | None) -> list[list[Member]]:
    samples = stored_samples(memoryview(content))
    return samples if places is None else [samples[place] for place in places]


class _Stored:
    """Samples of stored groups, each of which is read once."""

    def __init__(
        self,
        root: Folder,
        task: RewriteTask,
        decode: Callable[[bytes, Sequence[int] | None], list[Any]],
    ) -> None:
        """`decode`: samples at some places of a stored group, None: all, in one piece or more."""
        self._root, self._decode = root, decode
        self._wanted: dict[tuple[str, int], list[int]] = {}
        for part in (part for parts in task.groups for part in parts):
            if part.place is not None:
                self._wanted.setdefault(part.group, []).append(part.place)
        self._waiting: dict[tuple[tuple[str, int], int], Any] = {}

    def take(self, part: StoredPart) -> list[Any]:
        """The samples of a part, each of which is taken once. DamagedShard if it is damaged."""
        if part.place is None:
            return self._read(part, None)
        if (part.group, part.place) not in self._waiting:
            places = self._wanted[part.group]
            samples = zip(places, self._read(part, places), strict=True)
            self._waiting |= {(part.group, place): sample for place, sample in samples}
        return [self._waiting.pop((part.group, part.place))]

    def _read(self, part: StoredPart, places: Sequence[int] | None) -> list[Any]:
        content = _content(self._root, part)
        try:
            return self._decode(content, places)
        except DECODE_ERRORS as error:
            raise _damaged(self._root, part, first_line(error)) from None


def _content(root: Folder, part: StoredPart) -> bytes:
    content = root.read(part.shard, part.offset, part.length)
    expected = int(np.uint64(part.checksum))
    if problem := wrong_bytes(expected, "the index says", memoryview(content)):
        raise _damaged(root, part, problem)
    return content


def _damaged(root: Folder, part: StoredPart, problem: str) -> DamagedShard:
    return DamagedShard(
        f"{root.uri}/{part.shard}, byte {part.offset}: {problem}; run `packer verify`, and copy or"
        " build it again"
    )
