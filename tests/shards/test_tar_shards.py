"""The stock `webdataset` library, with no code of ours, reads what we write."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from PIL import Image

from support.builds.packed import build, read_index, read_samples
from support.builds.raw_data import good_records, write_dataset


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    write_dataset(folder, good_records(folder, 30))
    for shard_format in ("arrow", "webdataset"):
        build(folder, folder / shard_format, format=shard_format)
    return folder


def test_every_sample_is_found_with_the_same_tokens_and_images_as_in_arrow_shards(builds):
    expected = {sample["sample_id"]: sample for sample in read_samples(builds / "arrow")}
    urls = sorted(str(path) for path in (builds / "webdataset" / "shards").glob("*.tar"))
    seen = []
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        about = json.loads(sample["json"])
        want = expected[about["sample_id"]]
        seen.append(about["sample_id"])
        assert np.load(io.BytesIO(sample["input_ids.npy"])).tolist() == want["input_ids"]
        assert np.load(io.BytesIO(sample["labels.npy"])).tolist() == want["labels"]
        assert [sample[name] for name in about["images"]] == want["images"]
        assert about["image_widths"] == want["image_widths"]
    assert seen == [sample["sample_id"] for sample in read_samples(builds / "arrow")]


def test_the_library_decodes_images_and_arrays_by_their_names(builds):
    urls = sorted(str(path) for path in (builds / "webdataset" / "shards").glob("*.tar"))
    decoded = [
        s for s in webdataset.WebDataset(urls, shardshuffle=False).decode("pil") if "0.png" in s
    ]
    assert decoded
    for sample in decoded:
        assert isinstance(sample["0.png"], Image.Image)
        assert isinstance(sample["input_ids.npy"], np.ndarray)


def test_a_group_is_one_byte_range_of_whole_members(builds):
    out = builds / "webdataset"
    data = (out / "shards" / "shard-00000.tar").read_bytes()
    for group, entry in enumerate(read_index(out).to_pylist()):
        part = data[entry["offset"] : entry["offset"] + entry["length"]]
        with tarfile.open(fileobj=io.BytesIO(part + bytes(1024))) as tar:
            keys = [name.split(".")[0] for name in tar.getnames()]
            ids = [
                json.load(tar.extractfile(m))["sample_id"]
                for m in tar.getmembers()
                if m.name.endswith(".json")
            ]
        assert ids == entry["sample_ids"]
        assert {key.split("-")[0] for key in keys} == {f"g{group:09d}"}


def test_refs_shards_hold_paths_and_no_pixels(builds):
    build(builds, builds / "refs", format="refs")
    rows = {row["id"]: row for row in json.loads((builds / "annotations.json").read_text())}
    shard = builds / "refs" / "shards" / "shard-00000.arrow"
    with pa.memory_map(str(shard)) as source:
        samples = pa.ipc.open_file(source).read_all().to_pylist()
    for sample in samples:
        image = rows[sample["sample_id"]].get("image", [])
        assert sample["image_paths"] == ([image] if isinstance(image, str) else image)
    assert shard.stat().st_size < (builds / "arrow" / "shards" / "shard-00000.arrow").stat().st_size
