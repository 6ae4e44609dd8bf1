"""`packer inspect`: one group of a finished build as a person wants to see it.

Reads the manifest, one row of the index, the tables' rows, and the group's bytes; the build may be
of any size. Of one at a URI the index and the tables are fetched. `packer.inspect.terminal` shows
the result on a terminal, `packer.inspect.html` as a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from balance.errors import ConfigError, DamagedShard, DataError, first_line
from balance.media.audio_tokens import plan_audio
from balance.media.image_tokens import plan_image
from balance.presets import ModelPreset, model_from_dict
from balance.types import COUNT_COLUMNS, Limits
from packer.build_dir import INDEX_NAME
from packer.demo.dataset import demo_tokenizer_path
from packer.inspect._thumbnails import Thumbnail, make_thumbnail
from packer.inspect.token_text import Kind, load_decoder, read_pieces
from packer.inspect.view import GroupView, ImageView, SampleView
from packer.sources.dataset import DEMO
from shards.folders import on_disk, open_folder
from shards.manifest import read_manifest
from shards.stored_group import IndexRow, StoredSample, read_index_row, read_stored
from shards.tables import COUNTS_NAME, GROUPS_NAME


def inspect_group(
    out: Path | str,
    group: int | None = None,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
) -> GroupView:
    """Group `group` (row of the index; None: the middle of the path) of the build at `out`, a
    folder or URI.

    `tokenizer` must be the build's own; without it the demo's text can be read, and of others the
    token ids. DataError for an unfinished or damaged build, ConfigError for a group that it does
    not have or another tokenizer. A missing or damaged image is said where it would be shown.
    """
    place = str(out)
    manifest = read_manifest(place)
    number, why = _choose(group, manifest["totals"]["num_groups"])
    model = model_from_dict(manifest["model"])
    source = tokenizer or _demo_tokenizer(manifest)
    decoder = None
    if source is not None:
        decoder = load_decoder(source, model, manifest["tokenizer"], chat_template=chat_template)
    with on_disk(place, (INDEX_NAME, GROUPS_NAME, COUNTS_NAME)) as folder:
        row = read_index_row(folder / INDEX_NAME, number)
        counted = _counted(folder, number, row)
    shard = manifest["shards"][row.shard]["name"]
    stored = read_stored(open_folder(place, follow_links=True), shard, row, manifest["format"])
    limits = Limits(**manifest["limits"])
    pairs = zip(stored, counted, strict=True)
    samples = tuple(
        _sample_view(sample, about, model, manifest, decoder) for sample, about in pairs
    )
    return GroupView(
        group=number,
        num_groups=manifest["totals"]["num_groups"],
        why=why,
        shard=shard,
        num_bytes=row.length,
        limits=limits,
        counts=row.counts | {"seq_len": sum(sample.counts["seq_len"] for sample in samples)},
        vision_load=row.counts[f"num_{limits.vision_unit}"],
        samples=samples,
        tokenizer=source or "",
    )


def _choose(group: int | None, num_groups: int) -> tuple[int, str]:
    if group is None:
        # groups are in path order, which is by vision load: the middle one is as large as a group
        # commonly is
        return num_groups // 2, "the middle of the path, which goes by vision load"
    if not 0 <= group < num_groups:
        raise ConfigError(f"--group {group}: this build has groups 0 to {num_groups - 1:,}")
    return group, ""


def _demo_tokenizer(manifest: dict[str, Any]) -> str | None:
    """The tokenizer that a demo build takes when none is given, if this build took it."""
    if manifest["config"]["dataset"] != DEMO:
        return None
    path = str(demo_tokenizer_path())
    try:
        load_decoder(path, model_from_dict(manifest["model"]), manifest["tokenizer"])
    except ConfigError:
        return None
    return path


def _counted(out: Path, group: int, row: IndexRow) -> list[dict[str, Any]]:
    """The rows of the counts table that the group holds, in its order."""
    samples = _take(out / GROUPS_NAME, np.array([group]), ["samples"])[0]["samples"]
    rows = _take(
        out / COUNTS_NAME, np.array(samples), ["sample_id", "source", *COUNT_COLUMNS, "seq_len"]
    )
    if tuple(about["sample_id"] for about in rows) != row.sample_ids:
        raise DamagedShard(
            f"{out}: {GROUPS_NAME} and {INDEX_NAME} hold other samples in group {group}; build again"
        )
    return rows


def _take(
    path: Path, rows: np.ndarray[Any, np.dtype[np.int64]], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of a Parquet table, in the order asked for; reads only the row groups that hold them."""
    try:
        with pq.ParquetFile(path) as file:
            sizes = [
                file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)
            ]
            ends = np.cumsum(sizes)
            holders = np.searchsorted(ends, rows, side="right")
            found: dict[int, dict[str, Any]] = {}
            for holder in np.unique(holders).tolist():
                inside = rows[holders == holder]
                part = file.read_row_group(holder, columns=list(columns))
                places = pa.array(inside - (ends[holder] - sizes[holder]))
                found |= zip(inside.tolist(), part.take(places).to_pylist(), strict=True)
    except FileNotFoundError:
        raise DataError(f"no {path.name} in {path.parent}; build it again") from None
    except (pa.ArrowException, OSError, IndexError) as error:
        raise DamagedShard(
            f"{path}: not readable ({first_line(error)}); run `packer verify`"
        ) from None
    return [found[row] for row in rows.tolist()]


def _sample_view(
    stored: StoredSample,
    about: dict[str, Any],
    model: ModelPreset,
    manifest: dict[str, Any],
    decoder: Tokenizer | None,
) -> SampleView:
    images = tuple(_image_view(stored, k, model, manifest) for k in range(len(stored.image_sizes)))
    clips = (
        [plan_audio(model.audio, n, model.audio.sampling_rate) for n in stored.audio_lengths]
        if model.audio
        else []
    )
    ids = manifest["tokenizer"]
    files = {
        Kind.image: (ids["image_token_id"], [image.num_tokens for image in images]),
        Kind.audio: (ids["audio_token_id"], [clip.num_audio_tokens for clip in clips]),
    }
    return SampleView(
        sample_id=stored.sample_id,
        source=about["source"],
        counts={name: about[name] for name in (*COUNT_COLUMNS, "seq_len")},
        vision_load=about[f"num_{manifest['limits']['vision_unit']}"],
        pieces=read_pieces(stored.input_ids, stored.labels, files, decoder),
        images=images,
        audio_seconds=tuple(clip.num_samples / model.audio.sampling_rate for clip in clips)
        if model.audio
        else (),
    )


def _image_view(
    stored: StoredSample, place: int, model: ModelPreset, manifest: dict[str, Any]
) -> ImageView:
    width, height = stored.image_sizes[place]
    name = stored.image_names[place] if stored.image_names else ""
    data: bytes | None = None
    thumbnail: Thumbnail | str
    if stored.images is not None:
        data = stored.images[place]
        thumbnail = make_thumbnail(data)
    else:
        root = manifest["data_root"]
        try:
            # a link was allowed or refused when the build was made
            data = open_folder(root, follow_links=True).read(name)
            thumbnail = make_thumbnail(data)
        except OSError as error:
            thumbnail = f"cannot be read under {root} ({error.strerror or error}); restore it"
    plan = plan_image(model.vision, width, height)
    return ImageView(
        name=name,
        width=width,
        height=height,
        num_patches=plan.num_patches,
        num_tokens=plan.num_image_tokens,
        num_bytes=None if data is None else len(data),
        problem=thumbnail if isinstance(thumbnail, str) else _change(thumbnail, width, height),
        thumbnail=None if isinstance(thumbnail, str) else thumbnail,
    )


def _change(thumbnail: Thumbnail, width: int, height: int) -> str:
    """What is wrong with an image that can be decoded."""
    found = thumbnail.full_width, thumbnail.full_height
    if found == (width, height):
        return ""
    return f"is {found[0]} x {found[1]} now, but was counted as {width} x {height}; build again"
