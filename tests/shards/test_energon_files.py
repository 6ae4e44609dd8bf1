"""Builds for Energon, without Energon: tars of a sample per group, their index and `.nv-meta`."""

import json
import re
import shutil
import tarfile
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import webdataset
import yaml

from isobatch.loaders import StreamingLoader
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.verify import verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, digests, quiet, read_index
from support.builds.raw_data import good_records, write_dataset

NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and suffix of a member, as megatron-energon 7.4.1 splits them (webdataset/config.py)."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    return write_dataset(folder, good_records(folder, 60))


@pytest.fixture(scope="module")
def built(raw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for form in ("energon", "arrow"):
        build(raw, folder / form, format=form, shard_mb=1, max_seq_len=1500)
    return folder


@pytest.fixture
def out(built, tmp_path):
    return shutil.copytree(built / "energon", tmp_path / "out")


def test_our_loader_gives_what_it_gives_of_arrow_shards(built):
    ours, theirs = (
        [batch for step in StreamingLoader(built / form, workers=0) for batch in step]
        for form in ("energon", "arrow")
    )
    for batch, expected in zip(ours, theirs, strict=True):
        assert batch.sample_ids == expected.sample_ids
        for name in ("input_ids", "labels", "cu_seqlens", "pixel_values", "image_sizes"):
            assert np.array_equal(getattr(batch, name), getattr(expected, name))


def test_the_index_of_a_tar_has_one_range_per_group_with_members_of_one_key(built):
    place = built / "energon"
    index = read_index(place).to_pylist()
    shards = read_manifest(place).shards
    assert len(shards) > 1
    keys = []
    for number, shard in enumerate(shards):
        begins = np.fromfile(place / f"{shard.name}.idx", "<u8").tolist()
        rows = [row for row in index if row["shard"] == number]
        assert begins[:-1] == [row["offset"] for row in rows]
        assert begins[-1] == rows[-1]["offset"] + rows[-1]["length"]
        with tarfile.open(place / shard.name) as tar:
            members = [(member.offset, NAME.match(member.name)[1]) for member in tar]
        for start, end in pairwise(begins):
            (key,) = {key for offset, key in members if start <= offset < end}
            keys.append(key)
    assert keys == [f"g{number:09d}" for number in range(len(index))]


def test_the_metadata_count_groups_and_put_all_shards_into_training(built):
    meta = built / "energon" / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    shards = [shard.name for shard in read_manifest(built / "energon").shards]
    per_shard = Counter(read_index(built / "energon").column("shard").to_pylist())
    assert counts == {name: per_shard[number] for number, name in enumerate(shards)}
    split = yaml.safe_load((meta / "split.yaml").read_text())
    assert split == {"split_parts": {"train": shards, "val": [], "test": []}, "exclude": []}
    kinds = {
        name: yaml.safe_load((meta / name).read_text())["__class__"]
        for name in ("dataset.yaml", "stored_order.yaml")
    }
    assert kinds == {"dataset.yaml": "BalancedGroups", "stored_order.yaml": "CrudeWebdataset"}


def test_the_loads_are_those_of_the_index(built):
    index = read_index(built / "energon")
    tokens = sum(
        index.column(f"num_{kind}_tokens").to_numpy().astype(int)
        for kind in ("image", "text", "audio")
    )
    loads = np.load(built / "energon" / ".nv-meta" / "loads.npy")
    assert loads.T.tolist() == [index.column("num_image_patches").to_pylist(), tokens.tolist()]


def test_the_webdataset_library_gives_a_sample_per_group(built):
    urls = sorted(str(path) for path in (built / "energon" / "shards").glob("*.tar"))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    index = read_index(built / "energon").to_pylist()
    assert len(samples) == len(index)
    for sample, row in zip(samples, index, strict=True):
        names = [name for name in sample if name.endswith(".json")]
        assert [json.loads(sample[name])["sample_id"] for name in names] == row["sample_ids"]


@pytest.mark.thorough
def test_any_number_of_processes_writes_the_same_bytes(raw, built, tmp_path):
    build(raw, tmp_path / "out", format="energon", shard_mb=1, max_seq_len=1500, workers=2)
    assert digests(tmp_path / "out") == digests(built / "energon")


def test_inspect_shows_a_group(built):
    (view, expected) = (inspect_group(built / form, 0) for form in ("energon", "arrow"))
    assert [sample.sample_id for sample in view.samples] == [
        sample.sample_id for sample in expected.samples
    ]
    assert sum(len(sample.images) for sample in view.samples) > 0


def problems(out):
    return verify_build(out, quiet(), workers=2).problems


def test_verify_finds_what_does_not_fit_the_groups(out):
    assert not problems(out)
    info = out / ".nv-meta" / ".info.json"
    values = json.loads(info.read_text())
    name = next(iter(values["shard_counts"]))
    values["shard_counts"][name] += 1
    info.write_text(json.dumps(values))
    np.save(out / ".nv-meta" / "loads.npy", np.zeros((3, 2)))
    (out / ".nv-meta" / "split.yaml").unlink()
    found = problems(out)
    assert any(re.match(rf"\.nv-meta/\.info\.json: {name} has \d+ samples, the", x) for x in found)
    assert ".nv-meta/loads.npy: is not of these groups; copy or build it again" in found
    assert any(each.startswith(".nv-meta/split.yaml: cannot be read") for each in found)
    index = out / f"{name}.idx"
    index.write_bytes(index.read_bytes()[:-1])
    assert any(each.startswith(f"{name}.idx: ") for each in problems(out))


def test_splits_of_the_users_own_are_no_damage(out):
    split = out / ".nv-meta" / "split.yaml"
    names = yaml.safe_load(split.read_text())["split_parts"]["train"]
    split.write_text(yaml.safe_dump({"split_parts": {"train": names[1:], "val": names[:1]}}))
    assert not problems(out)
