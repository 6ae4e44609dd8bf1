"""A build directory in any of the three formats, written from the contract in docs/design.md
alone.
"""

from __future__ import annotations

import copy
import io
import json
import tarfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image

from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import ModelPreset, load_model, model_to_dict

FORMATS = ("arrow", "webdataset", "refs")
IMAGE_TOKEN, VOCAB_SIZE = 3, 64
SHARD_GROUPS = 25
PNG = b"\x89PNG"
LISTS = pa.list_(pa.int32())
PATHS = pa.list_(pa.string())
BATCH_ROWS = 65_536
VERSION = 3


@dataclass
class Sample:
    sample_id: str
    input_ids: list[int]
    labels: list[int]
    images: list[bytes] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height)
    counts: dict[str, int] = field(default_factory=dict)


def make_samples(count: int, seed: int = 0, model: str = "tiny") -> list[Sample]:
    """Samples with 0 to 2 drawn images, a prompt without labels, and an answer with labels that can
    be learned.
    """
    return copy.deepcopy(_drawn_samples(count, seed, model))


@cache  # many tests ask for the same
def _drawn_samples(count: int, seed: int, model: str) -> list[Sample]:
    rng = np.random.default_rng(seed)
    preset = load_model(model)
    return [_make_sample(f"sample-{number:05d}", preset, rng) for number in range(count)]


def _make_sample(sample_id: str, preset: ModelPreset, rng: np.random.Generator) -> Sample:
    sizes = [(int(w), int(h)) for w, h in rng.integers(30, 160, size=(rng.choice([0, 1, 1, 2]), 2))]
    plans = [plan_image(preset.vision, *size) for size in sizes]
    ids = [1]
    for plan in plans:
        ids += [2, *[IMAGE_TOKEN] * plan.num_image_tokens, 4]
    ids += rng.integers(8, VOCAB_SIZE, size=rng.integers(2, 12)).tolist()
    start = int(rng.integers(8, VOCAB_SIZE))
    answer = [
        8 + (start + step) % (VOCAB_SIZE - 8) for step in range(int(rng.integers(3, 16)))
    ]  # counts upwards
    num_image_tokens = sum(plan.num_image_tokens for plan in plans)
    counts = {
        "num_image_patches": sum(plan.num_patches for plan in plans),
        "num_vit_tokens": sum(plan.num_vit_tokens for plan in plans),
        "num_image_tokens": num_image_tokens,
        "num_text_tokens": len(ids) + len(answer) - num_image_tokens,
        "num_audio_tokens": 0,
        "num_loss_tokens": len(answer),
    }
    return Sample(
        sample_id,
        ids + answer,
        [-100] * len(ids) + answer,
        [draw_image(size, rng) for size in sizes],
        sizes,
        counts,
    )


def draw_image(size: tuple[int, int], rng: np.random.Generator) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize(size).save(buffer, "PNG" if rng.random() < 0.5 else "JPEG")
    return buffer.getvalue()


def group_samples(samples: list[Sample], max_tokens: int = 160) -> list[list[Sample]]:
    """Groups of neighbours of up to `max_tokens` tokens, in rough path order."""
    groups: list[list[Sample]] = [[]]
    for sample in samples:
        if groups[-1] and sum(len(s.input_ids) for s in [*groups[-1], sample]) > max_tokens:
            groups.append([])
        groups[-1].append(sample)
    return sorted(
        groups,
        key=lambda group: (_total(group, "num_image_patches"), _total(group, "num_text_tokens")),
    )


def write_build(
    root: Path,
    groups: list[list[Sample]],
    format: str = "arrow",
    model: str = "tiny",
    version: int | None = None,
) -> Path:
    """Write a finished build of `groups`, which stand in path order, into the new directory
    `root`.

    `version`: of the format, VERSION if None. Version 2 is that of builds from before audio: one
    index with the sample ids, and no columns for clips.
    """
    version = VERSION if version is None else version
    (root / "shards").mkdir(parents=True)
    writer = {"arrow": _write_arrow, "refs": _write_arrow, "webdataset": _write_tar}[format]
    rows: list[dict[str, Any]] = []
    shards = []
    for first in range(0, len(groups), SHARD_GROUPS):
        part = groups[first : first + SHARD_GROUPS]
        name = f"shards/shard-{len(shards):05d}.{'tar' if format == 'webdataset' else 'arrow'}"
        images = root / "images" if format == "refs" else None
        places = writer(root / name, first, part, images, has_audio=version > 2)
        content = (root / name).read_bytes()
        rows += [
            _index_row(len(shards), place, content, group)
            for place, group in zip(places, part, strict=True)
        ]
        shards.append(
            {**_describe(root, name), "num_groups": len(part), "num_samples": sum(map(len, part))}
        )
    files = [write_index(root / "index.arrow", rows, INDEX_SCHEMA, batched=False)]
    if version > 2:
        files = [
            write_index(root / "index.arrow", rows, narrow_schema(rows))
            | {"types": {column.name: str(column.type) for column in narrow_schema(rows)}},
            write_index(root / "sample_ids.arrow", rows, IDS_SCHEMA),
        ]
    manifest = {
        "format_version": version,
        "isobatch_version": "0",
        "format": format,
        "config": {},
        "config_hash": "",
        "model": model_to_dict(load_model(model)),
        "tokenizer": {
            "hash": "",
            "image_token_id": IMAGE_TOKEN,
            "vocab_size": VOCAB_SIZE,
            "added_tokens": {},
        },
        "limits": {
            "max_seq_len": 4096,
            "max_vision": 4096,
            "min_seq_len": 0,
            "min_vision": 0,
        },
        "seed": 0,
        "totals": {
            "num_groups": len(groups),
            "num_packed": sum(map(len, groups)),
            "num_rejected": 0,
            "num_loss_tokens": sum(row["num_loss_tokens"] for row in rows),
        },
        "shards": shards,
        "files": files,
        **({"data_root": str(root / "images")} if format == "refs" else {}),
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def write_index(
    path: Path, rows: list[dict[str, Any]], schema: pa.Schema, *, batched: bool = True
) -> dict[str, Any]:
    """Write rows in record batches of BATCH_ROWS; -> the file's entry in the manifest."""
    table, batches = pa.Table.from_pylist(rows, schema=schema).combine_chunks(), []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in table.to_batches(BATCH_ROWS):
            writer.write_batch(batch)
            length = pa.ipc.get_record_batch_size(batch)
            batches.append({"offset": sink.tell() - length, "length": length})
    content = path.read_bytes()
    for batch in batches:
        message = content[batch["offset"] : batch["offset"] + batch["length"]]
        batch["xxh3_64"] = xxhash.xxh3_64_hexdigest(message)
    return _describe(path.parent, path.name) | ({"batches": batches} if batched else {})


COUNTS = (
    "image_patches",
    "vit_tokens",
    "image_tokens",
    "text_tokens",
    "audio_tokens",
    "loss_tokens",
)
INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("checksum", pa.uint64()),
        ("num_samples", pa.int32()),
        *[(f"num_{name}", pa.int32()) for name in COUNTS],
        ("sample_ids", pa.list_(pa.string())),
    ]
)
"""Of version 2; in version 3 the ids are in a file of their own."""
IDS_SCHEMA = pa.schema([INDEX_SCHEMA.field("sample_ids")])


def narrow_schema(rows: list[dict[str, Any]]) -> pa.Schema:
    """Of version 3: each column in the narrowest unsigned type that holds its values."""
    types = []
    for name in INDEX_SCHEMA.names[:-1]:
        largest = max((row[name] for row in rows), default=0)
        bits = next(bits for bits in (8, 16, 32, 64) if largest < 2**bits)
        types.append((name, getattr(pa, f"uint{bits}")()))
    return pa.schema(types)


def _index_row(
    shard: int, place: tuple[int, int], content: bytes, group: list[Sample]
) -> dict[str, Any]:
    return {
        "shard": shard,
        "offset": place[0],
        "length": place[1],
        "checksum": xxhash.xxh3_64_intdigest(content[place[0] : sum(place)]),
        "num_samples": len(group),
        **{f"num_{name}": _total(group, f"num_{name}") for name in COUNTS},
        "sample_ids": [sample.sample_id for sample in group],
    }


def _write_arrow(
    path: Path,
    first: int,
    groups: list[list[Sample]],
    image_root: Path | None,
    *,
    has_audio: bool,
) -> list[tuple[int, int]]:
    images = (
        ("images", pa.list_(pa.binary()))
        if image_root is None
        else ("image_paths", pa.list_(pa.string()))
    )
    schema = pa.schema(
        [
            ("sample_id", pa.string()),
            ("input_ids", LISTS),
            ("labels", LISTS),
            images,
            ("image_widths", LISTS),
            ("image_heights", LISTS),
            *(_audio_columns(image_root) if has_audio else ()),
        ]
    )
    places = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for group in groups:
            rows = [_arrow_row(sample, image_root) for sample in group]
            # the file's magic and schema are only written with the first batch, and are no part of
            # it
            start = max(sink.tell(), len(b"ARROW1\0\0") + len(schema.serialize()))
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
            places.append((start, sink.tell() - start))
    return places


def _audio_columns(image_root: Path | None) -> list[tuple[str, pa.DataType]]:
    files = ("audios", pa.list_(pa.binary())) if image_root is None else ("audio_paths", PATHS)
    return [files, ("audio_lengths", LISTS)]


def _arrow_row(sample: Sample, image_root: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "input_ids": sample.input_ids,
        "labels": sample.labels,
        "image_widths": [width for width, _ in sample.sizes],
        "image_heights": [height for _, height in sample.sizes],
        "audios": [],
        "audio_paths": [],
        "audio_lengths": [],
    }
    if image_root is None:
        return {**row, "images": sample.images}
    names = [f"{sample.sample_id}/{place}.img" for place in range(len(sample.images))]
    for name, content in zip(names, sample.images, strict=True):
        (image_root / name).parent.mkdir(parents=True, exist_ok=True)
        (image_root / name).write_bytes(content)
    image_root.mkdir(exist_ok=True)
    return {**row, "image_paths": names}


def _write_tar(
    path: Path, first: int, groups: list[list[Sample]], image_root: None, *, has_audio: bool
) -> list[tuple[int, int]]:
    places = []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, group in enumerate(groups, start=first):
            start = archive.offset
            for place, sample in enumerate(group):
                _add_members(archive, f"g{number:09d}-s{place:05d}", sample)
            places.append((start, archive.offset - start))
    return places


def _add_members(archive: tarfile.TarFile, key: str, sample: Sample) -> None:
    names = [
        f"{place}.{'png' if data.startswith(PNG) else 'jpg'}"
        for place, data in enumerate(sample.images)
    ]
    about = {
        "sample_id": sample.sample_id,
        **sample.counts,
        "image_widths": [width for width, _ in sample.sizes],
        "image_heights": [height for _, height in sample.sizes],
        "images": names,
    }
    members = {
        "json": json.dumps(about).encode(),
        "input_ids.npy": _npy(sample.input_ids),
        "labels.npy": _npy(sample.labels),
        **dict(zip(names, sample.images, strict=True)),
    }
    for name, content in members.items():
        info = tarfile.TarInfo(f"{key}.{name}")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def _npy(values: list[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype=np.int32))
    return buffer.getvalue()


def _describe(root: Path, name: str) -> dict[str, Any]:
    content = (root / name).read_bytes()
    return {"name": name, "size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def _total(group: list[Sample], column: str) -> int:
    return sum(sample.counts[column] for sample in group)
