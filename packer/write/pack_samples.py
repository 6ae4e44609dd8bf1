"""Staged samples -> a block as the shards hold it: tokens expanded, files read and checked.

A sample whose files changed since they were counted, or whose PNGs fail their own checksums, is
left out by name. All samples of a block are worked on at once, because one by one the arrays'
overhead would cost more than the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.types import IntArray
from packer.count.staging import StagedBlock, StagedFiles
from packer.media.image_header import check_png
from packer.records.media import Media, SampleProblem, read_into
from packer.write.expand_placeholders import expand
from shards.block import PackedBlock, PackedFiles
from shards.folders import Folder, is_uri, open_folder, readers

PNG_MAGIC = b"\x89PNG"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """What is the same for all samples of a build; plain values, so that it travels to other
    processes.
    """

    data_roots: tuple[str, ...]
    """Of each part of the dataset."""
    follow_links: bool
    image_token_id: int
    audio_token_id: int | None
    refs: bool
    """Whether shards refer to files instead of holding them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesToPack:
    """Some samples, in the order in which they are written."""

    rows: IntArray
    """Row of each in the counts table."""
    staged: pa.RecordBatch
    """What counting left of each (`packer.count.staging.StagedSamples.take`)."""
    sample_ids: list[str]
    parts: IntArray
    """The part of the dataset that each comes from."""

    def only(self, kept: NDArray[np.bool_]) -> SamplesToPack:
        """Some of them."""
        names = [name for name, keep in zip(self.sample_ids, kept.tolist(), strict=True) if keep]
        return SamplesToPack(
            rows=self.rows[kept],
            staged=self.staged.filter(pa.array(kept)),
            sample_ids=names,
            parts=self.parts[kept],
        )


Lost = tuple[int, str, str]
"""A sample that was left out: row of the counts table, reason, detail."""


def pack_block(
    plan: PackPlan, samples: SamplesToPack, blobs: Path, lost: list[Lost]
) -> tuple[PackedBlock, NDArray[np.bool_]]:
    """The samples that can be written, and which those are; the others are appended to `lost`."""
    block = StagedBlock.of(samples.staged)
    images, audios = _Content.of(block.images), _Content.of(block.audios)
    jobs = zip(
        (plan.data_roots[part] for part in samples.parts.tolist()),
        images.by_sample(),
        audios.by_sample(),
        strict=True,
    )
    read = partial(_read_sample, plan, open_folder(str(blobs)))
    remote = next((place for place in plan.data_roots if is_uri(place)), "")
    with readers(remote) as pool:
        problems = list(pool.map(read, jobs) if pool else map(read, jobs))
    kept = np.array([problem is None for problem in problems], np.bool_)
    if not kept.all():
        found = zip(samples.rows.tolist(), problems, strict=True)
        lost += [
            (row, problem.reason, problem.detail) for row, problem in found if problem is not None
        ]
        # a rare case, so the others are simply read again
        packed, still = pack_block(plan, samples.only(kept), blobs, lost)
        kept[kept] = still
        return packed, kept
    input_ids, labels = expand(
        block.input_ids,
        block.loss_spans,
        plan.image_token_id,
        block.images.numbers["tokens"],
        plan.audio_token_id,
        block.audios.numbers["tokens"],
    )
    seq_len = sum(block.counts[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
    packed = PackedBlock(
        sample_ids=samples.sample_ids,
        counts=block.counts,
        token_offsets=np.concatenate([[0], np.cumsum(seq_len)]),
        input_ids=input_ids,
        labels=labels,
        images=images.packed(),
        audios=audios.packed(),
    )
    return packed, kept


File = tuple[Media, memoryview]
"""A file, and where its bytes go."""


@dataclass(frozen=True, slots=True)
class _Content:
    """Room for the bytes of all files of a block, in one piece: they are read to where they are
    written from.
    """

    files: StagedFiles
    offsets: IntArray
    content: NDArray[np.uint8]

    @classmethod
    def of(cls, files: StagedFiles) -> _Content:
        offsets = np.concatenate(
            [[0], np.cumsum([media.size for media in files.media], dtype=np.int64)]
        )
        return cls(files, offsets, np.empty(int(offsets[-1]), np.uint8))

    def by_sample(self) -> Iterator[list[File]]:
        view = self.content.data
        places = [view[a:b] for a, b in pairwise(self.offsets.tolist())]
        files = list(zip(self.files.media, places, strict=True))
        yield from (files[a:b] for a, b in pairwise(self.files.offsets.tolist()))

    def packed(self) -> PackedFiles:
        return PackedFiles(
            offsets=self.files.offsets,
            paths=[media.name for media in self.files.media],
            content=self.content,
            content_offsets=self.offsets,
            numbers=self.files.numbers,
        )


def _read_sample(
    plan: PackPlan, blobs: Folder, job: tuple[str, list[File], list[File]]
) -> SampleProblem | None:
    """Read the files of a sample; what is wrong comes out for refs too, as with every format."""
    place, images, audios = job
    root = open_folder(place, follow_links=plan.follow_links)
    try:
        for media, view in (*images, *audios):
            if plan.refs and media.container:
                raise ConfigError(
                    f"--format refs: {media.name} is no file of its own, so no shard can refer to it;"
                    " use arrow or webdataset"
                )
            read_into(root, media, blobs, view)
            if view[:4] == PNG_MAGIC:
                check_png(
                    media.name, view.tobytes()
                )  # found here, and not in the middle of a training run
    except SampleProblem as problem:
        return problem
    return None
