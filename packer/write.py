"""Groups -> shards: which groups go into which shard, and the writing of one shard.

The plan depends on the counts alone, and a shard on its own groups alone; so any number of processes writes the same
bytes. A sample whose image files changed their length since they were counted, or whose PNGs fail their own checksums,
is rejected here, by name; its group goes on without it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from balance.records import Groups, IntArray
from packer.images import ImageProblem, image_path
from packer.shards.arrow import ArrowShardWriter
from packer.shards.index import ShardIndex
from packer.shards.sample import PackedSample, ShardWriter
from packer.shards.webdataset import WebDatasetShardWriter
from packer.staging import StagedSample, StagedSamples
from packer.text import expand

ShardFormat = Literal["arrow", "webdataset", "refs"]
SHARD_FORMATS: tuple[ShardFormat, ...] = ("arrow", "webdataset", "refs")
SUFFIXES: dict[ShardFormat, str] = {"arrow": "arrow", "webdataset": "tar", "refs": "arrow"}

TOKEN_BYTES = 8
"""`input_ids` and `labels` are int32."""
SAMPLE_BYTES = 256
"""Ids, offsets and padding of a sample, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """One shard to write; plain values, so that it travels to other processes."""

    shard: int
    first_group: int
    groups: Groups
    """Over rows of the counts table, in path order."""
    format: ShardFormat
    out: str
    data_root: str
    image_token_id: int


def shard_name(shard: int, shard_format: ShardFormat) -> str:
    """Path of a shard under the build directory."""
    return f"shards/shard-{shard:05d}.{SUFFIXES[shard_format]}"


def index_part(out: Path, shard: int) -> Path:
    """File of a shard's index rows while the build is unfinished."""
    return out / "staging" / "index" / f"shard-{shard:05d}.arrow"


def plan_shards(groups: Groups, seq_len: IntArray, image_bytes: IntArray, *, shard_bytes: int) -> list[tuple[int, int]]:
    """Half-open ranges of groups, one per shard, of about `shard_bytes` each.

    >>> groups = Groups(np.arange(4), np.arange(5))
    >>> plan_shards(groups, np.zeros(4, int), np.array([400, 400, 400, 400]), shard_bytes=1300)
    [(0, 2), (2, 4)]
    """
    sizes = groups.sum(image_bytes + seq_len * TOKEN_BYTES + SAMPLE_BYTES)
    shard = (np.cumsum(sizes) - sizes) // shard_bytes
    firsts = np.flatnonzero(np.diff(shard, prepend=-1))
    return [(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(groups)], strict=True)]


def write_shard(task: WriteTask) -> int:
    """Write a shard and then its index rows; -> its number. A shard whose index rows exist is left as it is."""
    out = Path(task.out)
    part = index_part(out, task.shard)
    path = out / shard_name(task.shard, task.format)
    if part.exists() and path.exists():
        return task.shard
    source = out / "staging" / "samples.arrow"
    state = source.stat()
    staged = _open_staged(source, state.st_ino, state.st_mtime_ns)
    index = ShardIndex(task.shard)
    temporary = path.with_name(path.name + ".tmp")
    writer = _open_writer(task, temporary)
    for number in range(len(task.groups)):
        samples = list(_pack_group(task, staged, task.groups[number], index))
        if samples:
            index.add(writer.add(task.first_group + number, samples), samples)
    writer.close()
    temporary.replace(path)
    index.save(part)
    return task.shard


@lru_cache(maxsize=1)
def _open_staged(path: Path, inode: int, mtime_ns: int) -> StagedSamples:
    """The staged samples of a build, opened once per process; another file in the same place is another one."""
    return StagedSamples(path)


def _open_writer(task: WriteTask, path: Path) -> ShardWriter:
    if task.format == "webdataset":
        return WebDatasetShardWriter(path)
    return ArrowShardWriter(path, refs=task.format == "refs")


def _pack_group(task: WriteTask, staged: StagedSamples, rows: IntArray, index: ShardIndex) -> Iterator[PackedSample]:
    for row in rows.tolist():
        try:
            yield _pack(task, staged[row])
        except ImageProblem as problem:
            index.rejected.append((row, problem.reason, problem.detail))


def _pack(task: WriteTask, sample: StagedSample) -> PackedSample:
    input_ids, labels = expand(sample.input_ids, sample.loss_spans, task.image_token_id, sample.image_tokens)
    files = zip(sample.images, sample.image_bytes, strict=True)
    # read for refs too, so that what is wrong with an image comes out whatever the format
    images = [_read_image(Path(task.data_root), *file) for file in files]
    return PackedSample(
        sample_id=sample.sample_id,
        counts=sample.counts,
        input_ids=input_ids,
        labels=labels,
        image_paths=sample.images,
        images=[] if task.format == "refs" else images,
        image_widths=sample.image_widths,
        image_heights=sample.image_heights,
    )


def _read_image(data_root: Path, relative: str, num_bytes: int) -> bytes:
    try:
        data = image_path(data_root, relative).read_bytes()
    except OSError as error:
        raise ImageProblem("image_changed", f"{relative}: {error.strerror or error}") from None
    if len(data) != num_bytes:
        raise ImageProblem("image_changed", f"{relative}: {num_bytes} bytes when counted, {len(data)} now")
    if data.startswith(b"\x89PNG"):
        _check_png(relative, data)
    return data


def _check_png(relative: str, data: bytes) -> None:
    """A PNG carries checksums: a damaged one is found here, at the price of a CRC, and not in the middle of a
    training run."""
    try:
        Image.open(io.BytesIO(data)).verify()
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageProblem("corrupt_image", f"{relative}: {str(error).splitlines()[0]}") from None
