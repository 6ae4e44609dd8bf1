"""One group of a build, read for a person: `inspect_group` and its views.

Reads the manifest, the group's row of the index, its rows of the tables and its bytes, so the build
may be of any size (at a URI, index and tables are fetched). Terminal, page and JSON show this view.
"""

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from isobatch.common.errors import ConfigError, DamagedShard, DataError, first_line
from isobatch.common.types import COUNT_COLUMNS, Limits
from isobatch.counting.headers.video_header import first_frame
from isobatch.counting.records.media import SampleProblem
from isobatch.media.decoder_faults import fault_of, quiet_decoders
from isobatch.media.frame_archive import is_frame_archive, pack_frames, unpack_frames
from isobatch.models.audio_tokens import plan_clip
from isobatch.models.image_tokens import ImagePlan, plan_image
from isobatch.models.video_rules import VideoRule
from isobatch.models.video_tokens import VideoFacts, plan_video
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.inspect.token_text import Piece, PieceKind, load_decoder, read_pieces
from isobatch.packer.sources.dataset import DEMO
from isobatch.packer.table_queries import find_rows, read_rows
from isobatch.shards.arrow_shards import decode_arrow, shard_schema
from isobatch.shards.folders import open_folder
from isobatch.shards.index import IDS_NAME, INDEX_NAME, open_index
from isobatch.shards.manifest import (
    TAR_FORMATS,
    FolderFiles,
    Manifest,
    read_manifest,
    tables_on_disk,
)
from isobatch.shards.stored_group import DECODE_ERRORS, StoredGroup, frame_paths
from isobatch.shards.tables import COUNTS_NAME, GROUPS_NAME, REJECTED_NAME, read_groups, read_table
from isobatch.shards.tar_shards import decode_tar

_TABLES = (INDEX_NAME, IDS_NAME, GROUPS_NAME, COUNTS_NAME, REJECTED_NAME)
Row = dict[str, Any]
"""What the counts table says about a sample."""
MOST_PIXELS = 160
"""Longer side of a thumbnail."""
JPEG_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A picture of at most MOST_PIXELS per side, as a `data:` URI."""

    uri: str
    width: int
    height: int
    full_width: int
    """Width of the decoded image, upright."""
    full_height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView:
    """An image or a video of a sample."""

    name: str
    """Path under the data root or in the tar; empty in Arrow shards, which hold no names."""
    width: int
    """Width as counted, upright."""
    height: int
    num_patches: int
    num_tokens: int
    """LLM tokens."""
    num_bytes: int | None
    """Size of the file; None if it cannot be read."""
    problem: str
    """Why it cannot be read or decoded, or how it differs from what was counted; else empty."""
    thumbnail: Thumbnail | None = field(repr=False)
    num_frames: int = 0
    """Frames of a video; 0 for an image."""
    rate: float = 0.0
    """Frames per second of a video; 0 for a list of images, too."""

    @property
    def kind(self) -> PieceKind:
        """Whether it is an image or a video."""
        return PieceKind.video if self.num_frames else PieceKind.image

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the thumbnail."""
        hidden = ("thumbnail",) if self.num_frames else ("thumbnail", "num_frames", "rate")
        return _plain(self, without=hidden) | {"problem": self.problem or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A sample of the group."""

    sample_id: str
    source: str
    counts: dict[str, int]
    """The six `num_*` columns and `seq_len`."""
    vision_load: int
    """What the vision cap counts."""
    pieces: tuple[Piece, ...]
    images: tuple[ImageView, ...]
    audio_seconds: tuple[float, ...]
    extras: dict[str, Any]
    """Value of each kept column."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without thumbnails."""
        return _plain(self, without=("vision_load",)) | {
            "pieces": [piece.to_json() for piece in self.pieces],
            "images": [image.to_json() for image in self.images],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group: its loads against the caps, and its samples in packed order."""

    group: int
    """Row of the index, from 0."""
    num_groups: int
    why: str
    """Why this group is shown; empty if it was asked for."""
    sample: str
    """Id of the sample that was asked for: it alone is shown as text; empty for all."""
    shard: str
    num_bytes: int
    limits: Limits
    counts: dict[str, int]
    """Sums over the samples."""
    vision_load: int
    samples: tuple[SampleView, ...]
    tokenizer: str
    """The tokenizer that the text comes from; empty if there is none and pieces hold only ids."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without thumbnails; `fill`, `vision_fill`: used shares of the caps."""
        return _plain(self, without=("why", "vision_load", "sample")) | {
            "limits": self.limits.to_json(),
            "fill": self.counts["seq_len"] / self.limits.max_seq_len,
            "vision_fill": self.vision_load / max(self.limits.max_vision, 1),
            "samples": [sample.to_json() for _, sample in self.shown_samples],
        }

    @property
    def shown_samples(self) -> list[tuple[int, SampleView]]:
        """(number in the group from 1, sample) of all samples, or of the one asked for."""
        numbered = enumerate(self.samples, start=1)
        return [pair for pair in numbered if self.sample in {"", pair[1].sample_id}]


def _plain(view: object, *, without: tuple[str, ...]) -> dict[str, Any]:
    names = [attribute.name for attribute in fields(view)]  # type: ignore[arg-type]
    return {name: getattr(view, name) for name in names if name not in without}


def inspect_group(
    out: Path | str,
    group: int | None = None,
    *,
    sample: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
) -> GroupView:
    """Read a group of the build at `out`, a folder or URI; None: the middle one by vision load.

    `sample`: the id of a sample, whose group it is then.

    `tokenizer` must be the build's own; without it only the demo's text can be read, and other
    builds show token ids. DataError for an unfinished or damaged build, ConfigError for a group
    that it does not have or another tokenizer. A missing or damaged image is a problem of its view.
    """
    manifest = read_manifest(out)
    unit = manifest.limits.vision_unit
    if group is not None and not 0 <= group < manifest.num_groups:
        raise ConfigError(f"--group {group}: the build has groups 0 to {manifest.num_groups - 1:,}")
    source = tokenizer or _demo_tokenizer(manifest)
    decoder = load_decoder(source, manifest, chat_template) if source else None

    with tables_on_disk(manifest, _TABLES) as folder:
        index = open_index(manifest, FolderFiles(manifest, folder))
        number = group
        if sample is not None:
            number = _group_of(folder, sample)
        elif number is None:
            by_load = np.argsort(index.column(f"num_{unit}"), kind="stable")
            number = int(by_load[len(by_load) // 2])
        counted = _counted(folder, number, index.sample_ids(number))
        counts = dict(zip(COUNT_COLUMNS, index.row(number, *COUNT_COLUMNS), strict=True))
        shard, offset, length = index.row(number, "shard", "offset", "length")
        sample_ids = index.sample_ids(number)
    name = manifest.shard(shard).name
    stored = _read_stored(manifest, name, offset, length)
    if stored.sample_ids != sample_ids:
        held = f"holds samples {list(stored.sample_ids)[:3]}, not those of the index"
        raise DamagedShard(f"{stored.where}: {held}; run `packer verify`")
    samples = tuple(
        _sample_view(stored, place, about, manifest, decoder) for place, about in enumerate(counted)
    )
    return GroupView(
        group=number,
        num_groups=manifest.num_groups,
        why="the middle one, by vision load" if group is None and sample is None else "",
        sample=sample or "",
        shard=name,
        num_bytes=length,
        limits=manifest.limits,
        counts=counts | {"seq_len": sum(sample.counts["seq_len"] for sample in samples)},
        vision_load=counts[f"num_{unit}"],
        samples=samples,
        tokenizer=source or "",
    )


def _group_of(folder: Path, sample_id: str) -> int:
    """The group that holds a sample. ConfigError if none does, with the reason if it has one."""
    groups = read_groups(read_table(folder / GROUPS_NAME))
    for row in find_rows(folder / COUNTS_NAME, "sample_id", sample_id):
        places = np.flatnonzero(groups.samples == row)
        if len(places):
            return int(np.searchsorted(groups.offsets, places[0], side="right")) - 1
    if rows := find_rows(folder / REJECTED_NAME, "sample_id", sample_id):
        (why,) = read_rows(folder / REJECTED_NAME, rows[:1], ["reason", "detail"])
        raise ConfigError(
            f"--sample {sample_id}: it was rejected: {why['reason']}: {why['detail']}"
        )
    raise ConfigError(f"--sample {sample_id}: the build has no sample with this id")


def _demo_tokenizer(manifest: Manifest) -> str | None:
    """The tokenizer that a demo build takes when none is given, if this build took it."""
    if manifest.values.get("config", {}).get("dataset") != DEMO:
        return None
    path = str(demo_tokenizer_path())
    try:
        load_decoder(path, manifest)
    except ConfigError:
        return None
    return path


def _counted(out: Path, group: int, sample_ids: tuple[str, ...]) -> list[Row]:
    """The rows of the counts table that the group holds, in its order."""
    samples = read_rows(out / GROUPS_NAME, [group], ["samples"])[0]["samples"]
    columns = ["sample_id", "source", *COUNT_COLUMNS, "seq_len"]
    rows = read_rows(out / COUNTS_NAME, samples, columns)
    if tuple(about["sample_id"] for about in rows) != sample_ids:
        raise DamagedShard(
            f"{out}: {GROUPS_NAME} and {INDEX_NAME} differ about group {group}; build again"
        )
    return rows


class _UnreadMedia:
    """The files of a refs build stay unread: the names are enough here."""

    def read(self, names: Sequence[str], owners: Sequence[str], where: str) -> list[bytes]:
        """Empty contents."""
        return [b""] * len(names)


def _read_stored(manifest: Manifest, shard: str, offset: int, length: int) -> StoredGroup:
    """The group at a byte range of a shard, which alone is read. DamagedShard if it is damaged."""
    where = f"{shard}, bytes {offset:,} to {offset + length:,}"
    is_refs = manifest.format == "refs"
    try:
        content = open_folder(manifest.place, follow_links=True).read(shard, offset, length)
        if len(content) != length:
            raise EOFError("the file ends before")
        if manifest.format in TAR_FORMATS:
            return decode_tar(pa.py_buffer(content), where)
        schema = shard_schema(refs=is_refs, videos=manifest.has_videos, extras=manifest.extras)
        media = _UnreadMedia() if is_refs else None
        return decode_arrow(pa.py_buffer(content), schema, where, media, manifest.extras)
    except DECODE_ERRORS as error:
        problem = getattr(error, "strerror", None) or first_line(error)
        raise DamagedShard(f"{where}: not readable ({problem}); run `packer verify`") from None


def _sample_view(
    stored: StoredGroup, place: int, about: Row, manifest: Manifest, decoder: Tokenizer | None
) -> SampleView:
    image_places = np.flatnonzero(stored.image_samples == place).tolist()
    plans = [_plan_of(stored, image, manifest) for image in image_places]
    images = tuple(map(partial(_image_view, stored, manifest), image_places, plans))
    image_runs = [(number, run) for number, plan in enumerate(plans) for run in plan.runs]
    token_ids = [manifest.image_token_id, manifest.video_token_id, manifest.audio_token_id]
    *visual, audio = ([] if token_id is None else [token_id] for token_id in token_ids)
    files: dict[PieceKind, tuple[Sequence[int], list[tuple[int, int]]]] = {
        PieceKind.image: ([*chain(*visual)], image_runs)
    }
    audio_seconds: tuple[float, ...] = ()
    if rule := manifest.model.audio:
        lengths = stored.audio_lengths[stored.audio_samples == place].tolist()
        clips = [plan_clip(rule, length, max(lengths)) for length in lengths]
        clip_tokens = [clip.num_audio_tokens for clip in clips]
        files[PieceKind.audio] = audio, list(enumerate(clip_tokens))
        audio_seconds = tuple(clip.num_samples / rule.sampling_rate for clip in clips)
    tokens = slice(*stored.cu_seqlens[place : place + 2])
    pieces = read_pieces(stored.input_ids[tokens], stored.labels[tokens], files, decoder)
    files_seen = [piece.file for piece in pieces if piece.kind is PieceKind.image]
    if max((number for number in files_seen if number is not None), default=-1) >= len(images):
        held = f"has tokens of more than its {len(images)} images"
        raise DamagedShard(f"{stored.where}: {held}; run `packer verify`")
    return SampleView(
        sample_id=stored.sample_ids[place],
        source=about["source"],
        counts={name: about[name] for name in (*COUNT_COLUMNS, "seq_len")},
        vision_load=about[f"num_{manifest.limits.vision_unit}"],
        pieces=tuple(
            replace(piece, kind=images[piece.file].kind)
            if piece.kind is PieceKind.image and piece.file is not None
            else piece
            for piece in pieces
        ),
        images=images,
        audio_seconds=audio_seconds,
        extras={name: values[place] for name, values in stored.extras.items()},
    )


def _image_view(stored: StoredGroup, manifest: Manifest, number: int, plan: ImagePlan) -> ImageView:
    height, width = stored.image_sizes[number].tolist()
    num_frames, rate = int(stored.image_frames[number]), float(stored.image_rates[number])
    name = stored.image_names[number] if stored.image_names else ""
    data: bytes | None = None
    thumbnail: Thumbnail | str
    try:
        if manifest.format == "refs":
            # a link was allowed or refused when the build was made
            root = open_folder(manifest.data_root or "", follow_links=True)
            frames = frame_paths(name)
            data = pack_frames(map(root.read, frames)) if frames else root.read(name)
        else:
            data = bytes(stored.images[number])
        thumbnail = make_thumbnail(data, is_video=num_frames > 0)
    except OSError as error:
        reason = error.strerror or error
        thumbnail = f"cannot be read under {manifest.data_root} ({reason}); restore it"
    problem = ""
    if isinstance(thumbnail, str):
        problem = thumbnail
    elif (size := (thumbnail.full_width, thumbnail.full_height)) != (width, height):
        now = f"is {size[0]} x {size[1]} now"
        problem = f"{now}, but was counted as {width} x {height}; build again"
    return ImageView(
        name=name,
        width=width,
        height=height,
        num_patches=plan.num_patches,
        num_tokens=plan.num_image_tokens,
        num_bytes=None if data is None else len(data),
        problem=problem,
        thumbnail=None if isinstance(thumbnail, str) else thumbnail,
        num_frames=num_frames,
        rate=rate,
    )


def _plan_of(stored: StoredGroup, number: int, manifest: Manifest) -> ImagePlan:
    height, width = stored.image_sizes[number].tolist()
    if num_frames := int(stored.image_frames[number]):
        facts = VideoFacts(width, height, num_frames, float(stored.image_rates[number]))
        return plan_video(cast("VideoRule", manifest.model.video), facts)
    same = stored.image_samples == stored.image_samples[number]
    several = int((same & (stored.image_frames == 0)).sum())
    return plan_image(manifest.model.vision, width, height, several)


# --- pictures: damaged files are what a person looks for, so an error is a value here ---


def make_thumbnail(data: bytes, *, is_video: bool = False) -> Thumbnail | str:
    """The thumbnail of an image or a video's first frame, or in one line why there is none."""
    try:
        if is_video and not is_frame_archive(data):
            return _shrunk(first_frame(io.BytesIO(data)))
        if is_video:
            data = unpack_frames(data)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            quiet_decoders()
            with Image.open(io.BytesIO(data)) as image:
                return _shrunk(ImageOps.exif_transpose(image))
    except (SampleProblem, DataError) as error:
        return first_line(error)
    except Exception as error:  # of any type: decoders raise what they like
        return fault_of(error).detail if data else "the file is empty"


def _shrunk(upright: Image.Image) -> Thumbnail:
    full_width, full_height = upright.size
    has_alpha = upright.has_transparency_data
    picture = upright.convert("RGBA" if has_alpha else "RGB")
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    buffer = io.BytesIO()
    kind = "png" if has_alpha else "jpeg"
    picture.save(buffer, kind, **({} if has_alpha else {"quality": JPEG_QUALITY}))
    return Thumbnail(
        uri=f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}",
        width=picture.width,
        height=picture.height,
        full_width=full_width,
        full_height=full_height,
    )
