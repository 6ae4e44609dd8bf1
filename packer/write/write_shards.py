"""Groups -> shards: which groups go into which, and writing one shard.

The plan depends on the counts alone, and a shard on its own groups alone, so any number of
processes writes the same bytes. A sample that cannot be packed is rejected; its group is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from isobatch.common.types import Groups, IntArray
from isobatch.counting.pack_block import CountedBlock, PackOptions, pack_block
from isobatch.packer.count.staging import StagedSamples, Staging
from isobatch.shards.arrow_shards import ArrowShardWriter
from isobatch.shards.folders import is_uri, open_folder, open_object_folder
from isobatch.shards.index import IndexPart, read_shard_file
from isobatch.shards.manifest import TAR_FORMATS, ShardFormat
from isobatch.shards.stored_group import ShardWriter
from isobatch.shards.tar_shards import TarShardWriter

TOKEN_BYTES = 8
"""`input_ids` and `labels` are int32."""
SAMPLE_BYTES = 256
"""Ids, offsets and padding of a sample, roughly."""
SLAB_BYTES = 8 << 20
"""Size of the samples held in memory at a time, about: little enough for the processor's caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """What is the same for all shards of a build; plain values, for other processes."""

    work: str
    """Folder of the unfinished partition, with its staged samples."""
    out: str
    """Folder or URI of the build, which shards go to once they are written."""
    partition: int | None = None
    """Number that the names of the shards begin with; None: of the only partition."""
    data_roots: tuple[str, ...]
    """Data root of each part of the dataset."""
    has_videos: bool = False
    """Whether any sample of the build has one."""
    pad_each_to: int = 1
    """Of the build's `Limits`, for its index."""
    packing: PackOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to write: its samples in sort order, and where its groups end among them."""

    config: WriteConfig
    shard: int
    first_group: int
    offsets: IntArray
    """Borders of the groups, shape (num_groups + 1,)."""
    rows: IntArray
    """Row of each sample in the counts table."""
    positions: IntArray
    """Position of each sample among the staged ones."""
    sample_ids: list[str]
    parts: IntArray
    """Part of the dataset that each sample comes from."""
    num_bytes: IntArray
    """Bytes that each sample takes in memory and, except for refs, in the shard."""

    def block(self, first: int, last: int, staged: pa.RecordBatch) -> CountedBlock:
        """Groups [first, last); `staged` has all samples of the shard."""
        borders = self.offsets[first : last + 1]
        start, end = int(borders[0]), int(borders[-1])
        return CountedBlock(
            samples=staged.slice(start, end - start),
            sample_ids=self.sample_ids[start:end],
            data_roots=[self.config.data_roots[part] for part in self.parts[start:end].tolist()],
            group_offsets=borders - start,
            first_group=self.first_group + first,
        )


def shard_name(shard: int, shard_format: ShardFormat, partition: int | None = None) -> str:
    """Path of a shard under the build directory.

    >>> shard_name(2, "arrow"), shard_name(2, "webdataset", partition=7)
    ('shards/shard-00002.arrow', 'shards/shard-00007-00002.tar')
    """
    number = f"{shard:05d}" if partition is None else f"{partition:05d}-{shard:05d}"
    return f"shards/shard-{number}.{'tar' if shard_format in TAR_FORMATS else 'arrow'}"


def index_part(work: Path, shard: int) -> Path:
    """File of a shard's index rows while the partition is unfinished."""
    return work / "staging" / "index" / f"shard-{shard:05d}.arrow"


def sample_bytes(counts: pa.Table, *, with_media: bool = True) -> IntArray:
    """Bytes of each counted sample in a shard, about: its tokens, labels and files."""
    media, tokens = (counts.column(name).to_numpy() for name in ("media_bytes", "seq_len"))
    return np.asarray(media * with_media + tokens * TOKEN_BYTES + SAMPLE_BYTES)


def plan_shards(groups: Groups, num_bytes: IntArray, *, shard_bytes: int) -> list[tuple[int, int]]:
    """Half-open ranges of groups, one per shard of about `shard_bytes`.

    >>> groups = Groups(np.arange(4), np.arange(5))
    >>> plan_shards(groups, np.array([600, 600, 600, 600]), shard_bytes=1200)
    [(0, 2), (2, 4)]
    """
    if len(groups) == 0:
        return []
    sizes = groups.sum(num_bytes)
    shard = (np.cumsum(sizes) - sizes) // shard_bytes
    firsts = np.flatnonzero(np.diff(shard, prepend=-1))
    return [(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(groups)], strict=True)]


def write_shard(task: ShardTask) -> int:
    """Write a shard and then its index rows, unless these exist; -> its number."""
    config = task.config
    work = Path(config.work)
    part = index_part(work, task.shard)
    name = shard_name(task.shard, config.packing.format, config.partition)
    if is_finished(config.out, part):
        return task.shard
    staging = Staging(work / "staging")
    state = staging.samples.stat()
    staged = _open_staged(staging.samples, state.st_ino, state.st_mtime_ns).take(task.positions)
    index = IndexPart(task.shard, config.pad_each_to)
    temporary = part.with_suffix(".shard")
    writer: ShardWriter
    packing = config.packing
    if packing.format in TAR_FORMATS:
        writer = TarShardWriter(temporary, key_per_group=packing.format == "energon")
    else:
        is_refs = packing.format == "refs"
        writer = ArrowShardWriter(
            temporary, refs=is_refs, videos=config.has_videos, extras=packing.extras
        )
    blobs = open_folder(str(staging.blobs))
    for first, last in _slabs(task.offsets, task.num_bytes):
        block, lost = pack_block(task.block(first, last, staged), config.packing, blobs)
        index.add(block, writer.add(block))
        rows = task.rows[task.offsets[first] :]
        index.lost += [
            (int(rows[place]), problem.reason, problem.detail) for place, problem in lost.items()
        ]
    writer.close()
    finish_shard(index, name, config.out, part)
    return task.shard


def finish_shard(index: IndexPart, name: str, out: str, part: Path) -> None:
    """Bring a shard that is written next to `part` to a folder or URI, and then write its rows."""
    temporary = part.with_suffix(".shard")
    index.finish(name, temporary)
    if is_uri(out):
        open_object_folder(out).put(name, temporary)
        temporary.unlink()
    else:
        temporary.replace(Path(out, name))
    index.save(part)


def is_finished(out: str, part: Path) -> bool:
    """Whether a shard's rows are there, and it is where it belongs, in its full length."""
    if not part.exists():
        return False
    file = read_shard_file(part)
    try:
        return open_folder(out, follow_links=True).info(file.name).size == file.size
    except FileNotFoundError:
        return False


def _slabs(offsets: IntArray, num_bytes: IntArray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of groups of about SLAB_BYTES each, held in memory at a time."""
    running = np.concatenate([[0], np.cumsum(num_bytes)])[offsets]
    slab = running[:-1] // SLAB_BYTES
    firsts = np.flatnonzero(np.diff(slab, prepend=-1)).tolist()
    yield from pairwise([*firsts, len(slab)])


@lru_cache(maxsize=1)
def _open_staged(path: Path, inode: int, mtime_ns: int) -> StagedSamples:
    """The staged samples of a build, opened once per process and file."""
    return StagedSamples(path)
