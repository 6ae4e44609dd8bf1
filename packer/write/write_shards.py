"""Groups -> shards: which groups go into which shard, and the writing of one shard.

The plan depends on the counts alone, and a shard on its own groups alone; so any number of
processes writes the same bytes. A sample that cannot be packed any more
(`packer.write.pack_samples`) is rejected by name; its group goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.types import Groups, IntArray
from packer.count.staging import StagedSamples, Staging
from packer.write.pack_samples import PackPlan, SamplesToPack, pack_block
from shards._index_writer import ShardIndex, read_described
from shards.arrow_shards import ArrowShardWriter
from shards.block import GroupPlace, ShardWriter
from shards.folders import open_folder, open_object_folder
from shards.tar_shards import TarShardWriter

ShardFormat = Literal["arrow", "webdataset", "refs"]
SHARD_FORMATS: tuple[ShardFormat, ...] = ("arrow", "webdataset", "refs")
SUFFIXES: dict[ShardFormat, str] = {"arrow": "arrow", "webdataset": "tar", "refs": "arrow"}

TOKEN_BYTES = 8
"""`input_ids` and `labels` are int32."""
SAMPLE_BYTES = 256
"""Ids, offsets and padding of a sample, roughly."""
SLAB_BYTES = 8 << 20
"""Of samples that are held in memory at a time, about: little enough for the processor's caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What is the same for all shards of a build; plain values, so that it travels to other
    processes.
    """

    out: str
    """Folder of the build, or where one into an object store is prepared."""
    uri: str | None = None
    """Where the shards go once they are written, if not into the folder."""
    format: ShardFormat
    pack: PackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """One shard to write: its samples in path order, and where its groups end among them."""

    plan: WritePlan
    shard: int
    first_group: int
    offsets: IntArray
    """Borders of the groups, shape (num_groups + 1,)."""
    rows: IntArray
    """Row of each sample in the counts table."""
    positions: IntArray
    """Where each sample lies among the staged ones."""
    sample_ids: list[str]
    parts: IntArray
    """The part of the dataset that each sample comes from."""
    num_bytes: IntArray
    """Bytes that each sample takes in memory and, but for refs, in the shard (`sample_bytes`)."""


def shard_name(shard: int, shard_format: ShardFormat) -> str:
    """Path of a shard under the build directory."""
    return f"shards/shard-{shard:05d}.{SUFFIXES[shard_format]}"


def index_part(out: Path, shard: int) -> Path:
    """File of a shard's index rows while the build is unfinished."""
    return out / "staging" / "index" / f"shard-{shard:05d}.arrow"


def sample_bytes(seq_len: IntArray, media_bytes: IntArray) -> IntArray:
    """Bytes of each sample in a shard, about: its tokens, labels and files."""
    return media_bytes + seq_len * TOKEN_BYTES + SAMPLE_BYTES


def plan_shards(groups: Groups, num_bytes: IntArray, *, shard_bytes: int) -> list[tuple[int, int]]:
    """Half-open ranges of groups, one per shard, of about `shard_bytes` each, from the bytes of
    each sample.

    >>> groups = Groups(np.arange(4), np.arange(5))
    >>> plan_shards(groups, np.array([600, 600, 600, 600]), shard_bytes=1200)
    [(0, 2), (2, 4)]
    """
    sizes = groups.sum(num_bytes)
    shard = (np.cumsum(sizes) - sizes) // shard_bytes
    firsts = np.flatnonzero(np.diff(shard, prepend=-1))
    return [(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(groups)], strict=True)]


def write_shard(task: WriteTask) -> int:
    """Write a shard and then its index rows; -> its number. A shard whose index rows exist is left
    as it is.
    """
    out = Path(task.plan.out)
    part = index_part(out, task.shard)
    name = shard_name(task.shard, task.plan.format)
    if part.exists() and _is_there(task.plan, read_described(part)):
        return task.shard
    staging = Staging(out / "staging")
    state = staging.samples.stat()
    staged = _open_staged(staging.samples, state.st_ino, state.st_mtime_ns).take(task.positions)
    index = ShardIndex(task.shard)
    temporary = out / (name + ".tmp")
    writer = _open_writer(task.plan, temporary)
    for first, last in _slabs(task.offsets, task.num_bytes):
        samples = slice(task.offsets[first], task.offsets[last])
        block, kept = pack_block(
            task.plan.pack, _part(task, staged, samples), staging.blobs, index.rejected
        )
        groups = _groups(task.first_group + first, task.offsets[first : last + 1], kept)
        index.add(block, groups, writer.add(block, groups))
    writer.close()
    index.finish(name, temporary)
    if task.plan.uri is None:
        temporary.replace(out / name)
    else:
        open_object_folder(task.plan.uri).put(name, temporary)
        temporary.unlink()
    index.save(part)
    return task.shard


def _is_there(plan: WritePlan, described: dict[str, Any]) -> bool:
    """Whether a shard lies where it belongs, in its full length."""
    try:
        found = open_folder(plan.uri or plan.out, follow_links=True).info(described["name"])
    except FileNotFoundError:
        return False
    return found.size == int(described["size"])


def _slabs(offsets: IntArray, num_bytes: IntArray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of groups with about SLAB_BYTES each: as much as is held in memory at a
    time.
    """
    running = np.concatenate([[0], np.cumsum(num_bytes)])[offsets]
    slab = running[:-1] // SLAB_BYTES
    firsts = np.flatnonzero(np.diff(slab, prepend=-1)).tolist()
    yield from pairwise([*firsts, len(slab)])


def _part(task: WriteTask, staged: pa.RecordBatch, samples: slice) -> SamplesToPack:
    return SamplesToPack(
        rows=task.rows[samples],
        staged=staged.slice(samples.start, samples.stop - samples.start),
        sample_ids=task.sample_ids[samples],
        parts=task.parts[samples],
    )


def _groups(first_group: int, offsets: IntArray, kept: NDArray[np.bool_]) -> list[GroupPlace]:
    """The groups of a block without the samples that were lost; a group without any sample is
    none.
    """
    places = np.concatenate([[0], np.cumsum(kept)])[offsets - offsets[0]].tolist()
    return [GroupPlace(first_group + i, a, b) for i, (a, b) in enumerate(pairwise(places)) if a < b]


@lru_cache(maxsize=1)
def _open_staged(path: Path, inode: int, mtime_ns: int) -> StagedSamples:
    """The staged samples of a build, opened once per process; another file in the same place is
    another one.
    """
    return StagedSamples(path)


def _open_writer(plan: WritePlan, path: Path) -> ShardWriter:
    if plan.format == "webdataset":
        return TarShardWriter(path)
    return ArrowShardWriter(path, refs=plan.format == "refs")
