"""Groups -> shards: which groups go into which shard, and the writing of one shard.

The plan depends on the counts alone, and a shard on its own groups alone; so any number of processes writes the same
bytes. A sample whose image files changed their length since they were counted, or whose PNGs fail their own checksums,
is rejected here, by name; its group goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from balance.errors import ConfigError
from balance.records import Groups, IntArray
from packer.images import check_png
from packer.media import Media, MediaProblem, read_media
from packer.shards.arrow import ArrowShardWriter
from packer.shards.index import ShardIndex, read_described
from packer.shards.manifest import describe_file
from packer.shards.sample import PackedSample, ShardWriter
from packer.shards.webdataset import WebDatasetShardWriter
from packer.staging import StagedSample, StagedSamples, Staging
from packer.storage import open_bucket, open_root
from packer.text import expand

ShardFormat = Literal["arrow", "webdataset", "refs"]
SHARD_FORMATS: tuple[ShardFormat, ...] = ("arrow", "webdataset", "refs")
SUFFIXES: dict[ShardFormat, str] = {"arrow": "arrow", "webdataset": "tar", "refs": "arrow"}

TOKEN_BYTES = 8
"""`input_ids` and `labels` are int32."""
SAMPLE_BYTES = 256
"""Ids, offsets and padding of a sample, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What is the same for all shards of a build; plain values, so that it travels to other processes."""

    out: str
    """Folder of the build, or where one into an object store is prepared."""
    format: ShardFormat
    data_roots: tuple[str, ...]
    """Of each part of the dataset."""
    follow_links: bool
    image_token_id: int
    audio_token_id: int | None
    uri: str | None = None
    """Where the shards go once they are written, if not into the folder."""


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


def shard_name(shard: int, shard_format: ShardFormat) -> str:
    """Path of a shard under the build directory."""
    return f"shards/shard-{shard:05d}.{SUFFIXES[shard_format]}"


def index_part(out: Path, shard: int) -> Path:
    """File of a shard's index rows while the build is unfinished."""
    return out / "staging" / "index" / f"shard-{shard:05d}.arrow"


def plan_shards(groups: Groups, seq_len: IntArray, media_bytes: IntArray, *, shard_bytes: int) -> list[tuple[int, int]]:
    """Half-open ranges of groups, one per shard, of about `shard_bytes` each.

    >>> groups = Groups(np.arange(4), np.arange(5))
    >>> plan_shards(groups, np.zeros(4, int), np.array([400, 400, 400, 400]), shard_bytes=1300)
    [(0, 2), (2, 4)]
    """
    sizes = groups.sum(media_bytes + seq_len * TOKEN_BYTES + SAMPLE_BYTES)
    shard = (np.cumsum(sizes) - sizes) // shard_bytes
    firsts = np.flatnonzero(np.diff(shard, prepend=-1))
    return [(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(groups)], strict=True)]


def write_shard(task: WriteTask) -> int:
    """Write a shard and then its index rows; -> its number. A shard whose index rows exist is left as it is."""
    out = Path(task.plan.out)
    part = index_part(out, task.shard)
    name = shard_name(task.shard, task.plan.format)
    if part.exists() and _is_there(task.plan, read_described(part)):
        return task.shard
    staging = Staging(out / "staging")
    state = staging.samples.stat()
    staged = _open_staged(staging.samples, state.st_ino, state.st_mtime_ns)
    index = ShardIndex(task.shard)
    temporary = out / (name + ".tmp")
    writer = _open_writer(task.plan, temporary)
    for number, (first, last) in enumerate(pairwise(task.offsets.tolist())):
        samples = list(_pack_group(task, range(first, last), staged, staging.blobs, index))
        if samples:
            index.add(writer.add(task.first_group + number, samples), samples)
    writer.close()
    # hashed while it is still in memory
    index.described = {**describe_file(open_root(task.plan.out, follow_links=True), name + ".tmp"), "name": name}
    if task.plan.uri is None:
        temporary.replace(out / name)
    else:
        open_bucket(task.plan.uri).put(name, temporary)
        temporary.unlink()
    index.save(part)
    return task.shard


def _is_there(plan: WritePlan, described: dict[str, Any]) -> bool:
    """Whether a shard lies where it belongs, in its full length."""
    try:
        found = open_root(plan.uri or plan.out, follow_links=True).info(described["name"])
    except FileNotFoundError:
        return False
    return found.size == int(described["size"])


@lru_cache(maxsize=1)
def _open_staged(path: Path, inode: int, mtime_ns: int) -> StagedSamples:
    """The staged samples of a build, opened once per process; another file in the same place is another one."""
    return StagedSamples(path)


def _open_writer(plan: WritePlan, path: Path) -> ShardWriter:
    if plan.format == "webdataset":
        return WebDatasetShardWriter(path)
    return ArrowShardWriter(path, refs=plan.format == "refs")


def _pack_group(
    task: WriteTask, places: range, staged: StagedSamples, blobs: Path, index: ShardIndex
) -> Iterator[PackedSample]:
    for place in places:
        root = task.plan.data_roots[task.parts[place]]
        try:
            yield _pack(task.plan, task.sample_ids[place], staged[int(task.positions[place])], root, blobs)
        except MediaProblem as problem:
            index.rejected.append((int(task.rows[place]), problem.reason, problem.detail))


def _pack(plan: WritePlan, sample_id: str, sample: StagedSample, root: str, blobs: Path) -> PackedSample:
    input_ids, labels = expand(
        sample.input_ids,
        sample.loss_spans,
        plan.image_token_id,
        sample.image_tokens,
        audio_token_id=plan.audio_token_id,
        tokens_per_audio=sample.audio_tokens,
    )
    # read for refs too, so that what is wrong with a file comes out whatever the format
    files = open_root(root, follow_links=plan.follow_links)
    images = [read_media(files, media, blobs) for media in sample.images]
    audios = [read_media(files, media, blobs) for media in sample.audios]
    for media, data in zip(sample.images, images, strict=True):
        if data.startswith(b"\x89PNG"):
            check_png(media.name, data)  # found here, and not in the middle of a training run
    refs = plan.format == "refs"
    if refs:
        _require_files([*sample.images, *sample.audios], sample_id)
    return PackedSample(
        sample_id=sample_id,
        counts=sample.counts,
        input_ids=input_ids,
        labels=labels,
        image_paths=[media.name for media in sample.images],
        images=[] if refs else images,
        image_widths=sample.image_widths,
        image_heights=sample.image_heights,
        audio_paths=[media.name for media in sample.audios],
        audios=[] if refs else audios,
        audio_lengths=sample.audio_lengths,
    )


def _require_files(files: list[Media], sample_id: str) -> None:
    inside = next((media for media in files if media.container), None)
    if inside is not None:
        raise ConfigError(
            f"--format refs: {inside.name} of sample {sample_id!r} is no file of its own, so no shard can refer to it;"
            " use arrow or webdataset"
        )
