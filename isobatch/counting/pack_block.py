"""Counted samples -> a block as shards hold it: tokens expanded, files read.

A sample whose files changed since they were counted, or whose PNGs fail their own checksums, is
left out by name. A block is packed whole: one by one, the arrays' overhead would exceed the disk's.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError
from isobatch.common.types import COUNT_COLUMNS, LABEL_IGNORE, FloatArray, IntArray
from isobatch.counting.headers.image_header import check_png
from isobatch.counting.records.extras import typed
from isobatch.counting.records.media import Blobs, Media, SampleProblem, read_into
from isobatch.shards.arrow_shards import MOST_FILE_BYTES
from isobatch.shards.folders import is_uri, open_folder, readers
from isobatch.shards.manifest import ShardFormat
from isobatch.shards.stored_group import (
    EXTRAS,
    FRAMES,
    ExtraTypes,
    Int32Array,
    PackedBlock,
    PackedFiles,
)

PNG_MAGIC = b"\x89PNG"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """What is the same for all blocks; plain values, for other processes."""

    format: ShardFormat
    follow_links: bool
    image_token_id: int
    audio_token_id: int | None
    video_token_id: int | None = None
    extras: ExtraTypes = field(default_factory=dict)

    @property
    def visual_token_ids(self) -> tuple[int, ...]:
        """Tokens of images and, if they have their own, of videos."""
        if self.video_token_id is None or self.video_token_id == self.image_token_id:
            return (self.image_token_id,)
        return self.image_token_id, self.video_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBlock:
    """Counted samples of whole groups, group after group."""

    samples: pa.RecordBatch
    """Rows of the samples, as `SampleCounter` gives them."""
    sample_ids: list[str]
    data_roots: list[str]
    """Folder or URI that each sample's files are in."""
    group_offsets: IntArray
    """Borders of the groups, shape (num_groups + 1,)."""
    first_group: int = 0


def pack_block(
    counted: CountedBlock, options: PackOptions, blobs: Blobs
) -> tuple[PackedBlock, dict[int, SampleProblem]]:
    """The block, and why samples are left out of it, by their places in `counted`.

    `blobs` holds the content of files that came with the records.
    """
    places = np.arange(len(counted.sample_ids))
    samples = counted.samples
    lost: dict[int, SampleProblem] = {}
    while True:
        images, audios = _unread_files(samples, "images"), _unread_files(samples, "audios")
        roots = [counted.data_roots[place] for place in places.tolist()]
        problems = _read_samples(options, roots, samples, (images, audios), blobs)
        is_usable = np.array([problem is None for problem in problems], np.bool_)
        if is_usable.all():
            break
        both = zip(places.tolist(), problems, strict=True)
        lost |= {place: problem for place, problem in both if problem is not None}
        # a rare case, so the others are simply read again
        places, samples = places[is_usable], samples.filter(pa.array(is_usable))
    borders = np.searchsorted(places, counted.group_offsets)
    groups = counted.first_group + np.flatnonzero(np.diff(borders))
    counts = {name: samples.column(name).to_numpy().astype(np.int64) for name in COUNT_COLUMNS}
    seq_len = sum(counts[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
    input_ids, labels = _expand_tokens(options, samples)
    extras: dict[str, list[Any]] = {}
    if options.extras:
        rows = [json.loads(text) for text in samples.column(EXTRAS).to_pylist()]
        for name, kind in options.extras.items():
            extras[name] = [typed(row[name], kind) for row in rows]
    block = PackedBlock(
        groups=groups.tolist(),
        group_offsets=np.unique(borders),
        sample_ids=[counted.sample_ids[place] for place in places.tolist()],
        counts=counts,
        token_offsets=np.concatenate([[0], np.cumsum(seq_len)]),
        input_ids=input_ids,
        labels=labels,
        images=images,
        audios=audios,
        extras=extras,
    )
    return block, lost


def _expand_tokens(options: PackOptions, samples: pa.RecordBatch) -> tuple[Int32Array, Int32Array]:
    """`input_ids` and `labels` of all samples, one after the other."""
    ids, spans = samples.column("input_ids"), samples.column("loss_spans")
    starts = np.repeat(_borders(ids)[:-1], np.diff(_borders(spans)) // 2)
    runs = samples.column("image_runs")  # of all samples with images, or of none
    has_runs = runs.null_count < len(runs)
    return expand(
        ids.flatten().to_numpy(),
        spans.flatten().to_numpy().reshape(-1, 2) + starts[:, None],
        options.visual_token_ids,
        runs.flatten().to_numpy() if has_runs else _numbers(samples, "images", "tokens"),
        options.audio_token_id,
        _numbers(samples, "audios", "tokens"),
    )


def expand(
    input_ids: Int32Array,
    loss_spans: Int32Array | IntArray,
    image_token_ids: int | tuple[int, ...],
    tokens_per_image: Sequence[int] | NDArray[np.int32] | IntArray,
    audio_token_id: int | None = None,
    tokens_per_audio: Sequence[int] | NDArray[np.int64] = (),
) -> tuple[Int32Array, Int32Array]:
    """`input_ids` with each image or audio token repeated as often as its run has, and labels.

    For one sample, or several one after the other. Images and videos may have different tokens;
    `tokens_per_image` are of both, in their order. Labels are the ids inside `loss_spans`, and
    LABEL_IGNORE elsewhere and on image and audio tokens. ValueError unless there are as many
    numbers as tokens.

    >>> ids, labels = expand(np.int32([1, 9, 2, 3]), np.int32([[2, 4]]), 9, [3])
    >>> ids.tolist(), labels.tolist()
    ([1, 9, 9, 9, 2, 3], [-100, -100, -100, -100, 2, 3])
    """
    # +1 where a span begins and -1 after it: their running sum is 1 inside
    borders = np.zeros(len(input_ids) + 1, dtype=np.int32)
    starts, ends = np.minimum(loss_spans, len(input_ids)).T
    np.add.at(borders, starts, 1)
    np.subtract.at(borders, np.maximum(starts, ends), 1)
    labels = np.where(np.cumsum(borders[:-1]) > 0, input_ids, np.int32(LABEL_IGNORE))
    repeats = np.ones(len(input_ids), dtype=np.int64)
    audio_id = -1 if audio_token_id is None else audio_token_id  # no id is negative
    visual = np.atleast_1d(image_token_ids)
    ids = {"image": visual, "audio": np.array([audio_id])}
    media = {"image": tokens_per_image, "audio": tokens_per_audio}
    places = {}
    for kind, tokens in media.items():
        places[kind] = np.flatnonzero(np.isin(input_ids, ids[kind]))
        if len(places[kind]) != len(tokens):
            mismatch = f"{len(places[kind])} {kind} tokens but tokens for {len(tokens)} {kind}s"
            raise ValueError(f"{mismatch}; give one for each")
        repeats[places[kind]] = tokens
    # nearly all of the result is one token: filled first, then overwritten by the others
    token_ends = np.cumsum(repeats)
    total = int(token_ends[-1]) if len(token_ends) else 0
    expanded = np.full(total, visual[0], dtype=np.int32)
    expanded_labels = np.full(total, LABEL_IGNORE, dtype=np.int32)
    others = np.flatnonzero(np.isin(input_ids, [*visual[1:], audio_id]))
    runs = token_ends[others].tolist(), repeats[others].tolist(), input_ids[others].tolist()
    for end, count, token_id in zip(*runs, strict=True):
        expanded[end - count : end] = token_id
    is_text = np.ones(len(input_ids), dtype=np.bool_)
    is_text[np.concatenate(list(places.values()))] = False
    targets = token_ends[is_text] - 1
    expanded[targets] = input_ids[is_text]
    expanded_labels[targets] = labels[is_text]
    return expanded, expanded_labels


# --- files ---

_KEPT_NUMBERS = {"images": ("width", "height", "num_frames"), "audios": ("length",)}
"""Numbers of each file that the shards hold."""


def _unread_files(samples: pa.RecordBatch, column: str) -> PackedFiles:
    """The files of a column, with memory for their content, from which they are also written."""
    offsets = np.concatenate([[0], np.cumsum(_numbers(samples, column, "size"))])
    numbers: dict[str, IntArray | FloatArray]
    numbers = {name: _numbers(samples, column, name) for name in _KEPT_NUMBERS[column]}
    if column == "images":
        numbers["rate"] = samples.column(column).flatten().field("rate").to_numpy()
    return PackedFiles(
        offsets=_borders(samples.column(column)),
        paths=_paths(samples.column(column).flatten()),
        content=np.empty(int(offsets[-1]), np.uint8),
        content_offsets=offsets,
        numbers=numbers,
    )


def _paths(files: pa.StructArray) -> list[str]:
    """The files' names; of a list of images, those of all."""
    paths: list[str] = files.field("name").to_pylist()
    containers = files.field("container").to_pylist()
    for place in (place for place, container in enumerate(containers) if container == FRAMES):
        names = [name for name, *_ in json.loads(paths[place])]
        paths[place] = FRAMES + json.dumps(names, ensure_ascii=False)
    return paths


def _is_contained(media: Media) -> bool:
    """Whether a file, or an image of a list of them, is inside another file."""
    if media.container != FRAMES:
        return bool(media.container)
    return any(container for _, container, *_ in json.loads(media.name))


_File = tuple[Media, memoryview]
"""A file, and the memory that its bytes go to."""


def _read_samples(
    options: PackOptions,
    roots: list[str],
    samples: pa.RecordBatch,
    files: tuple[PackedFiles, PackedFiles],
    blobs: Blobs,
) -> list[SampleProblem | None]:
    """Read all images and audio files; -> what is wrong with each sample."""
    jobs = zip(
        roots,
        _by_sample(samples.column("images"), files[0]),
        _by_sample(samples.column("audios"), files[1]),
        strict=True,
    )
    read = partial(_read_sample, options, blobs)
    remote = next((place for place in roots if is_uri(place)), "")
    with readers(remote) as pool:
        return list(pool.map(read, jobs) if pool else map(read, jobs))


def _by_sample(lists: pa.ListArray, files: PackedFiles) -> Iterator[list[_File]]:
    samples = lists.flatten()
    view = files.content.data
    fields = [samples.field(name).to_pylist() for name in ("name", "container", "offset", "size")]
    views = [view[a:b] for a, b in pairwise(files.content_offsets.tolist())]
    pairs = list(zip(starmap(Media, zip(*fields, strict=True)), views, strict=True))
    yield from (pairs[a:b] for a, b in pairwise(files.offsets.tolist()))


def _read_sample(
    options: PackOptions, blobs: Blobs, job: tuple[str, list[_File], list[_File]]
) -> SampleProblem | None:
    """Read the files of a sample; refs too, so that every format rejects the same samples."""
    place, images, audios = job
    for files in (images, audios) if options.format == "arrow" else ():
        if (num_bytes := sum(len(view) for _, view in files)) > MOST_FILE_BYTES:
            advice = "an Arrow shard's group holds 2 GiB; use --format webdataset or refs"
            return SampleProblem("too_many_bytes", f"{num_bytes:,} bytes: {advice}")
    root = open_folder(place, follow_links=options.follow_links)
    try:
        for media, view in (*images, *audios):
            if options.format == "refs" and _is_contained(media):
                what = "a list of images" if media.container == FRAMES else media.name
                refused = f"{what} is no file of its own, so no shard can refer to it"
                raise ConfigError(f"--format refs: {refused}; use arrow or webdataset")
            read_into(root, media, blobs, view)
            if view[:4] == PNG_MAGIC:
                # found here, and not in the middle of a training run
                check_png(media.name, view.tobytes())
    except SampleProblem as problem:
        return problem
    return None


def _borders(lists: pa.ListArray) -> IntArray:
    """Borders of the rows among the values of all."""
    return np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)])


def _numbers(samples: pa.RecordBatch, column: str, name: str) -> IntArray:
    return np.asarray(samples.column(column).flatten().field(name).to_numpy().astype(np.int64))
