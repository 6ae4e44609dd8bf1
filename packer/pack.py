"""Staged samples -> a block as the shards hold it: tokens expanded, files read and checked.

A sample whose files changed since they were counted, or whose PNGs fail their own checksums, is left out by name. All
samples of a block are worked on at once, because one by one the arrays' overhead would cost more than the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.records import IntArray
from packer.expand import expand
from packer.images import check_png
from packer.media import Media, MediaProblem, read_media
from packer.shards.block import PackedBlock, PackedFiles
from packer.staging import StagedFiles, StagedSamples
from packer.storage import Root, open_root

PNG_MAGIC = b"\x89PNG"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """What is the same for all samples of a build; plain values, so that it travels to other processes."""

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
    positions: IntArray
    """Where each lies among the staged ones."""
    sample_ids: list[str]
    parts: IntArray
    """The part of the dataset that each comes from."""


Lost = tuple[int, str, str]
"""A sample that was left out: row of the counts table, reason, detail."""


def pack_block(
    plan: PackPlan, samples: SamplesToPack, staged: StagedSamples, blobs: Path, lost: list[Lost]
) -> tuple[PackedBlock, NDArray[np.bool_]]:
    """The samples that can be written, and which those are; the others are appended to `lost`."""
    block = staged.take(samples.positions)
    roots = [open_root(place, follow_links=plan.follow_links) for place in plan.data_roots]
    files = _Reader(plan, blobs)
    kept = np.ones(len(samples.rows), np.bool_)
    images: list[list[bytes]] = []
    audios: list[list[bytes]] = []
    starts = zip(samples.parts.tolist(), block.images.offsets.tolist(), block.audios.offsets.tolist(), strict=False)
    ends = zip(block.images.offsets[1:].tolist(), block.audios.offsets[1:].tolist(), strict=True)
    for place, ((part, image, audio), (image_end, audio_end)) in enumerate(zip(starts, ends, strict=True)):
        try:
            found = files.read(roots[part], block.images.media[image:image_end])
            heard = files.read(roots[part], block.audios.media[audio:audio_end])
        except MediaProblem as problem:
            lost.append((int(samples.rows[place]), problem.reason, problem.detail))
            kept[place] = False
            continue
        images.append(found)
        audios.append(heard)
    if not kept.all():
        block = staged.take(samples.positions[kept])
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
        sample_ids=[name for name, keep in zip(samples.sample_ids, kept.tolist(), strict=True) if keep],
        counts=block.counts,
        token_offsets=np.concatenate([[0], np.cumsum(seq_len)]),
        input_ids=input_ids,
        labels=labels,
        images=_files(block.images, images, refs=plan.refs),
        audios=_files(block.audios, audios, refs=plan.refs),
    )
    return packed, kept


@dataclass(frozen=True, slots=True)
class _Reader:
    plan: PackPlan
    blobs: Path

    def read(self, root: Root, files: list[Media]) -> list[bytes]:
        """The files of a sample; for refs too, so that what is wrong with one comes out whatever the format."""
        contents = []
        for media in files:
            data = read_media(root, media, self.blobs)
            if data.startswith(PNG_MAGIC):
                check_png(media.name, data)  # found here, and not in the middle of a training run
            if self.plan.refs and media.container:
                raise ConfigError(
                    f"--format refs: {media.name} is no file of its own, so no shard can refer to it;"
                    " use arrow or webdataset"
                )
            contents.append(data)
        return contents


def _files(staged: StagedFiles, contents: Sequence[list[bytes]], *, refs: bool) -> PackedFiles:
    return PackedFiles(
        offsets=staged.offsets,
        paths=[media.name for media in staged.media],
        data=[] if refs else [data for sample in contents for data in sample],
        numbers=staged.numbers,
    )
