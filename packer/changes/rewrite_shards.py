"""Shards of stored groups and samples, written again as they are.

Nothing is decoded or counted: rows of Arrow shards and members of tars are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from isobatch.common.errors import DamagedShard, first_line
from isobatch.common.types import IntArray
from isobatch.packer.write.write_shards import finish_shard, index_part, is_finished
from isobatch.shards.arrow_shards import ArrowShardWriter, shard_schema, stored_rows
from isobatch.shards.checksums import wrong_bytes
from isobatch.shards.folders import Folder, open_folder
from isobatch.shards.index import IndexPart
from isobatch.shards.manifest import TAR_FORMATS
from isobatch.shards.stored_group import DECODE_ERRORS, ByteRange, ExtraTypes
from isobatch.shards.tar_shards import Member, TarShardWriter, stored_samples

Stored = TypeVar("Stored")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored group, or a sample of it."""

    shard: str
    offset: int
    length: int
    checksum: int
    place: int | None = None
    """Of the sample in the group; None: all samples."""


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
    """What each group is made of: one stored group, or samples of several."""
    group_offsets: IntArray
    sample_ids: list[str]
    counts: dict[str, IntArray]


def rewrite_shard(task: RewriteTask) -> int:
    """Write a shard and then its index rows, unless these exist; -> its groups."""
    part = index_part(Path(task.work), task.number)
    if not is_finished(task.place, part):
        root = open_folder(task.place, follow_links=True)
        index = IndexPart(task.number, task.pad_each_to)
        index.add(task, _write(task, root, part.with_suffix(".shard")))
        finish_shard(index, task.name, task.place, part)
    return len(task.groups)


def _write(task: RewriteTask, root: Folder, path: Path) -> list[ByteRange]:
    """Write the shard to a file; -> the range of each group."""
    if task.format in TAR_FORMATS:
        return _write_tar(task, root, path)
    is_refs = task.format == "refs"
    schema = shard_schema(refs=is_refs, videos=task.has_videos, extras=task.extras)
    writer = ArrowShardWriter(path, refs=is_refs, videos=task.has_videos, extras=task.extras)
    ranges = []

    def rows_of(part: StoredPart) -> pa.RecordBatch:
        return _decoded(root, part, lambda content: stored_rows(pa.py_buffer(content), schema))

    # single samples in one table: a batch of its own for each would be larger than a text
    batches, row_of = [schema.empty_table().to_batches()], dict[StoredPart, int]()
    for stored, parts in _by_group(task).items():
        batches.append([rows_of(stored).take(pa.array([part.place for part in parts]))])
        row_of |= {part: len(row_of) + number for number, part in enumerate(parts)}
    table = pa.Table.from_batches([one for of in batches for one in of], schema).combine_chunks()
    for group_parts in task.groups:
        if group_parts[0].place is None:
            # copied, for between its columns a stored group has bytes of the next one
            rows = rows_of(group_parts[0])
            ranges.append(writer.add_rows(rows.take(pa.array(range(len(rows))))))
            continue
        group = table.take(pa.array([row_of[part] for part in group_parts]))
        ranges.append(writer.add_rows(group.combine_chunks().to_batches()[0]))
    writer.close()
    return ranges


def _write_tar(task: RewriteTask, root: Folder, path: Path) -> list[ByteRange]:
    writer = TarShardWriter(path)
    ranges = []

    def samples_of(part: StoredPart) -> list[list[Member]]:
        return _decoded(root, part, lambda content: stored_samples(memoryview(content)))

    sample_of = dict[StoredPart, list[Member]]()
    for stored, parts in _by_group(task).items():
        samples = samples_of(stored)
        sample_of |= {part: samples[part.place] for part in parts if part.place is not None}
    for number, group_parts in enumerate(task.groups, start=task.first_group):
        first, is_whole = group_parts[0], group_parts[0].place is None
        samples = samples_of(first) if is_whole else [sample_of.pop(of) for of in group_parts]
        ranges.append(writer.add_samples(number, samples))
    writer.close()
    return ranges


def _by_group(task: RewriteTask) -> dict[StoredPart, list[StoredPart]]:
    """Stored groups, and the single samples that are wanted of each, so that it is read once."""
    samples: dict[StoredPart, list[StoredPart]] = {}
    for part in (part for parts in task.groups for part in parts if part.place is not None):
        samples.setdefault(replace(part, place=None), []).append(part)
    return samples


def _decoded(root: Folder, part: StoredPart, decode: Callable[[bytes], Stored]) -> Stored:
    """The samples of a stored group. DamagedShard if it is damaged."""
    content = _content(root, part)
    try:
        return decode(content)
    except DECODE_ERRORS as error:
        raise _damaged(root, part, first_line(error)) from None


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
