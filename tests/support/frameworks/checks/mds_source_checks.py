"""MDS datasets by mosaicml-streaming, packed; `test_trainers_datasets.py` runs these in its
environment.
"""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, read_samples
from support.builds.raw_data import good_records, write_dataset
from support.builds.remote_builds import upload, use
from support.frameworks.sharding_datasets import without_torchvision_operators

without_torchvision_operators()
from streaming import (  # noqa: E402 - imports torchvision
    CSVWriter,
    JSONWriter,
    MDSWriter,
    StreamingDataset,
    TSVWriter,
    XSVWriter,
)
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

COLUMNS = {"id": "str", "conversations": "json", "images": "list[jpeg]"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Records of JSON with JPEG images, and their build."""
    folder = tmp_path_factory.mktemp("raw")
    rows = good_records(folder, 80)
    for row in rows:
        images = row.pop("image", [])
        row["images"] = [images] if isinstance(images, str) else images
        for number, name in enumerate(row["images"]):
            path = folder / name
            jpeg = path.with_suffix(".jpg")
            Image.open(path).convert("RGB").save(jpeg, quality=70)
            row["images"][number] = str(jpeg.relative_to(folder))
    write_dataset(folder, rows)
    build(folder, folder / "out")
    return folder, rows


def pictures(folder, row):
    # opened by name, so that MDSWriter copies the files
    return [Image.open(folder / name) for name in row["images"]]


def write(raw, out, columns=COLUMNS, **options):
    folder, rows = raw
    with MDSWriter(out=str(out), columns=columns, size_limit="150kb", **options) as writer:
        for row in rows:
            writer.write({**row, "images": pictures(folder, row)})
    return out


def packed(place, out, **changes):
    build(place, out, **changes)
    return {row["sample_id"]: row for row in read_samples(out)}


def theirs(place):
    clean_stale_shared_memory()
    return list(StreamingDataset(local=str(place), shuffle=False, batch_size=1))


def same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, row in ours.items():
        for column in ("input_ids", "labels", "images", "image_widths", "image_heights"):
            assert row[column] == expected[name][column], (name, column)


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz", "bz2", "br:5", "snappy"])
def test_a_build_is_that_of_the_same_records_as_json(raw, tmp_path, compression):
    place = write(raw, tmp_path / "mds", compression=compression, hashes=["xxh64"])
    assert len(json.loads((place / "index.json").read_text())["shards"]) > 3
    expected = {row["sample_id"]: row for row in read_samples(raw[0] / "out")}
    same(packed(place, tmp_path / "ours", chunk_records=7), expected)
    # and what the library gives: unpacked shards next to the packed ones, or in their place
    for sample in theirs(place):
        files = expected[sample["id"]]["images"]
        assert len(sample["images"]) == len(files)
        for image, file in zip(sample["images"], files, strict=True):
            assert np.array_equal(np.array(image), np.array(Image.open(io.BytesIO(file))))
    same(packed(place, tmp_path / "again"), expected)


def write_lines(writer, rows, out, **options):
    """Shards of lines, whose images are names under the data root."""
    columns = dict.fromkeys(("id", "image", "question", "answer"), "str") | {"score": "float"}
    if writer is XSVWriter:
        options["separator"] = "|"
    options |= {"size_limit": 1000, "hashes": ["md5", "sha256", "xxh64"]}
    with writer(out=str(out), columns=columns, **options) as opened:
        for row in rows:
            opened.write(row)
    return out


def lines_of(source, root):
    """Records with an image by name and a number, also as lines.json under the root."""
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*.jpg"))[:30]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, root / name)
    rows = [
        {"id": f"s{n}", "image": name, "question": f"Was f\u00fcr {n}?", "answer": "so " * n + "."}
        | {"score": n / 2}
        for n, name in enumerate(names)
    ]
    (root / "lines.json").write_text(json.dumps(rows))
    return rows


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("writer", [JSONWriter, XSVWriter, CSVWriter, TSVWriter])
def test_shards_of_lines_are_the_same_records_as_json(raw, tmp_path, writer, compression):
    folder = tmp_path / "root"
    rows = lines_of(raw[0], folder)
    place = write_lines(writer, rows, tmp_path / "mds", compression=compression)
    assert len(json.loads((place / "index.json").read_text())["shards"]) > 2
    expected = packed(folder / "lines.json", tmp_path / "json", data_root=str(folder))
    assert len(expected) == len(rows) == 30
    # under the data root, as their images are
    place = place.rename(folder / f"{writer.__name__}-{compression}")
    options = {"data_root": str(folder), "chunk_records": 7}
    same(packed(place, tmp_path / "ours", **options), expected)
    assert [{**row} for row in theirs(place)] == rows
    same(packed(place, tmp_path / "again", **options), expected)
    (never,) = read_manifest(tmp_path / "ours").values["never_read"].values()
    assert never.keys() == {"score", "xxh64 of index.json"}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["data", "meta", "mds"])
def test_a_shard_with_another_hash_is_one_line(raw, tmp_path, kind, compression):
    rows = [
        {"id": f"s{n}", "image": "x.jpg", "question": "?", "answer": "!" * 60} for n in range(30)
    ]
    if kind == "mds":
        place = write(raw, tmp_path / "mds", compression=compression, hashes=["sha1"])
    else:
        rows = [{**row, "score": 0.5} for row in rows]
        place = write_lines(JSONWriter, rows, tmp_path / "mds", compression=compression)
    entry = json.loads((place / "index.json").read_text())["shards"][1]
    file = f"{'zip' if compression else 'raw'}_{'data' if kind == 'mds' else kind}"
    shard = place / entry[file]["basename"]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=rf"{shard.name}: its (md5|sha1) is not that of index.json"):
        packed(place, tmp_path / "out")


def test_the_loader_without_a_build_reads_them(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = write(raw, tmp_path / "mds" / "train", compression="zstd")
    options = {"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "workers": 0}
    found = {}
    for dataset in (place.parent, raw[0] / "annotations.json"):
        loader = BalancedLoader(str(dataset), **options, dp_rank=0, dp_world_size=1)
        for step in loader:
            for batch in step:
                borders = batch.cu_seqlens.tolist()
                for n, name in enumerate(batch.sample_ids):
                    ids = batch.input_ids.ravel()[borders[n] : borders[n + 1]].tolist()
                    found.setdefault(name, []).append(ids)
        loader.close()
    assert len(found) == len(raw[1])
    assert all(len(ids) == 2 and ids[0] == ids[1] for ids in found.values())


def test_encodings_are_read_and_what_is_not_is_named(tmp_path):
    picture = Image.fromarray(np.arange(30 * 40 * 3, dtype=np.uint8).reshape(30, 40, 3))
    png = io.BytesIO()
    picture.save(png, format="PNG")
    kinds = {
        "pil": picture, "png": picture, "bytes": png.getvalue(),
        "list[pil]": [picture], "list[png]": [picture],
    }  # fmt: skip
    for number, (encoding, image) in enumerate(kinds.items()):
        columns = {"id": "int", "image": encoding, "question": "str", "answer": "bytes"}
        columns |= {"tokens": "ndarray", "about": "pkl", "score": "float32", "source": "str"}
        out = tmp_path / str(number)
        with MDSWriter(out=str(out), columns=columns) as writer:
            writer.write(
                {"id": 7, "image": image, "question": "What?", "answer": b"A cat.", "score": 0.5}
                | {"tokens": np.arange(3), "about": {"any": "thing"}, "source": "here"}
            )
        (row,) = packed(out, tmp_path / f"out{number}").values()
        assert row["sample_id"] == "7"
        found = Image.open(io.BytesIO(row["images"][0]))
        assert np.array_equal(np.array(found), np.array(picture))
        never = read_manifest(tmp_path / f"out{number}").values["never_read"]
        (keys,) = never.values()
        assert {key.removeprefix(".") for key in keys} == {"tokens", "about", "score"}


def test_what_is_damaged_is_one_line(raw, tmp_path):
    place = write(raw, tmp_path / "mds", compression="zstd")
    shard = place / "shard.00001.mds.zstd"
    whole = shard.read_bytes()
    for number, (data, message) in enumerate(
        [(whole[:-10], "cut short or another"), (b"\0" * 9 + whole[9:], "cannot be unpacked")]
    ):
        shard.write_bytes(data)
        with pytest.raises(DataError, match=f"shard.00001.mds.zstd.*{message}"):
            packed(place, tmp_path / f"out{number}")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard.00001.mds.*No such file"):
        packed(place, tmp_path / "out")
    index = json.loads((place / "index.json").read_text())
    index["shards"][0]["format"] = "other"
    (place / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="format 'other', version 2; read are shards of mds, j"):
        packed(place, tmp_path / "out")


def test_a_damaged_sample_is_rejected_and_the_others_are_read(raw, tmp_path):
    place = write(raw, tmp_path / "mds")
    shard = place / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    begin = int.from_bytes(data[4:8], "little")
    data[begin : begin + 4] = b"\xff\xff\xff\x7f"
    shard.write_bytes(data)
    assert len(packed(place, tmp_path / "out")) == len(raw[1]) - 1


@pytest.mark.server
@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2", "br", "snappy"])
def test_shards_in_a_bucket_are_read_there(raw, s3, tmp_path, monkeypatch, compression):
    use(monkeypatch, s3)
    place = write(
        raw, tmp_path / "mds" / "train", compression=compression, hashes=["sha1", "xxh64"]
    )
    uri = upload(s3, place.parent, f"{tmp_path.name}/mds")
    expected = {row["sample_id"]: row for row in read_samples(raw[0] / "out")}
    same(packed(uri, tmp_path / "out", chunk_records=7), expected)
    same(packed(place.parent, tmp_path / "local", chunk_records=7), expected)
    assert len({totals_of(tmp_path / name) for name in ("out", "local")}) == 1
    if compression in (None, "zstd"):
        name = sorted(path.name for path in place.glob("shard.00001.*"))[0]
        data = bytearray((place / name).read_bytes())
        data[-3] ^= 1
        (place / name).write_bytes(data)
        uri = upload(s3, place.parent, f"{tmp_path.name}/damaged")
        with pytest.raises(DataError, match=rf"s3://.*{name}: its sha1 is not that of index.json"):
            packed(uri, tmp_path / "no")


def totals_of(build):
    """Groups, samples, tokens of a build."""
    return tuple(read_manifest(build).values["totals"].items())


@pytest.mark.server
@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("writer", [JSONWriter, XSVWriter, CSVWriter, TSVWriter])
def test_shards_of_lines_in_a_bucket_are_read_there(
    raw, s3, tmp_path, monkeypatch, writer, compression
):
    use(monkeypatch, s3)
    root = tmp_path / "root"
    rows = lines_of(raw[0], root)
    place = write_lines(writer, rows, root / "mds", compression=compression)
    assert len(json.loads((place / "index.json").read_text())["shards"]) > 2
    uri = upload(s3, root, tmp_path.name)
    expected = packed(root / "lines.json", tmp_path / "json", data_root=str(root))
    assert len(expected) == len(rows) == 30
    ours = packed(f"{uri}/mds", tmp_path / "ours", data_root=uri, chunk_records=7)
    same(ours, expected)
    (never,) = read_manifest(tmp_path / "ours").values["never_read"].values()
    assert never.keys() == {"score", "xxh64 of index.json"}


def test_splits_are_folders(raw, tmp_path):
    for split in ("train", "val"):
        write(raw, tmp_path / "mds" / split)
    expected = {row["sample_id"]: row for row in read_samples(raw[0] / "out")}
    same(packed(f"{tmp_path / 'mds'}@val", tmp_path / "out"), expected)
    with pytest.raises(ConfigError, match="has the splits train, val, and no 'best'"):
        packed(f"{tmp_path / 'mds'}@best", tmp_path / "no")
