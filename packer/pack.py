"""Staged samples -> a block as the shards hold it: tokens expanded, files read and checked.

A sample whose files changed since they were counted, or whose PNGs fail their own checksums, is left out by name. All
samples of a block are worked on at once, because one by one the arrays' overhead would cost more than the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from packer.storage import is_uri, open_root, readers

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
    images, audios = block.images, block.audios
    jobs = [
        (place, [*images.media[image[0] : image[1]], *audios.media[audio[0] : audio[1]]])
        for place, image, audio in zip(
            (plan.data_roots[part] for part in samples.parts.tolist()),
            pairwise(images.offsets.tolist()),
            pairwise(audios.offsets.tolist()),
            strict=True,
        )
    ]
    remote = next((place for place in plan.data_roots if is_uri(place)), "")
    with readers(remote) as pool:
        read = partial(_read_files, plan, blobs)
        found = list(pool.map(read, jobs) if pool else map(read, jobs))
    for row, files in zip(samples.rows.tolist(), found, strict=True):
        if isinstance(files, MediaProblem):
            lost.append((row, files.reason, files.detail))
    kept = np.array([not isinstance(files, MediaProblem) for files in found])
    contents = [files for files in found if not isinstance(files, MediaProblem)]
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
    num_images = np.diff(block.images.offsets).tolist()
    seq_len = sum(block.counts[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
    packed = PackedBlock(
        sample_ids=[name for name, keep in zip(samples.sample_ids, kept.tolist(), strict=True) if keep],
        counts=block.counts,
        token_offsets=np.concatenate([[0], np.cumsum(seq_len)]),
        input_ids=input_ids,
        labels=labels,
        images=_files(block.images, [f[:n] for f, n in zip(contents, num_images, strict=True)], refs=plan.refs),
        audios=_files(block.audios, [f[n:] for f, n in zip(contents, num_images, strict=True)], refs=plan.refs),
    )
    return packed, kept


def _read_files(plan: PackPlan, blobs: Path, job: tuple[str, list[Media]]) -> list[bytes] | MediaProblem:
    """The files of a sample, or what is wrong; for refs too, so that it comes out whatever the format."""
    place, files = job
    root = open_root(place, follow_links=plan.follow_links)
    contents = []
    try:
        for media in files:
            data = read_media(root, media, blobs)
            if data.startswith(PNG_MAGIC):
                check_png(media.name, data)  # found here, and not in the middle of a training run
            if plan.refs and media.container:
                raise ConfigError(
                    f"--format refs: {media.name} is no file of its own, so no shard can refer to it;"
                    " use arrow or webdataset"
                )
            contents.append(data)
    except MediaProblem as problem:
        return problem
    return contents


def _files(staged: StagedFiles, contents: Sequence[list[bytes]], *, refs: bool) -> PackedFiles:
    return PackedFiles(
        offsets=staged.offsets,
        paths=[media.name for media in staged.media],
        data=[] if refs else [data for sample in contents for data in sample],
        numbers=staged.numbers,
    )
