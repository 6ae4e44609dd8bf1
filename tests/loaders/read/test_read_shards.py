"""Reading groups: what was written comes back, nothing is copied, damage is named, few shards stay
open.
"""

from itertools import chain

import numpy as np
import pyarrow as pa
import pytest

from isobatch.common.errors import DamagedShard
from isobatch.loaders.read import build as storage
from isobatch.loaders.read import local
from support.builds.shard_fixture import FORMATS, group_samples, make_samples, write_build


def open_build(root):
    build = storage.open_build(root)
    return build, build.manifest


@pytest.mark.parametrize("format", FORMATS)
def test_a_group_comes_back_as_it_was_written(tmp_path, format):
    groups = group_samples(make_samples(120))
    reader, manifest = open_build(write_build(tmp_path / "build", groups, format))
    assert len(manifest.shards) > 1
    for number, group in enumerate(groups):
        raw = reader.read(number)
        assert raw.sample_ids == tuple(sample.sample_id for sample in group)
        assert raw.input_ids.tolist() == [*chain(*(sample.input_ids for sample in group))]
        assert raw.labels.tolist() == [*chain(*(sample.labels for sample in group))]
        assert np.diff(raw.cu_seqlens).tolist() == [len(sample.input_ids) for sample in group]
        assert [bytes(image) for image in raw.images] == [
            *chain(*(sample.images for sample in group))
        ]
        assert raw.image_sizes.tolist() == [[h, w] for sample in group for w, h in sample.sizes]
        assert raw.image_samples.tolist() == [
            place for place, s in enumerate(group) for _ in s.images
        ]


def test_arrow_images_are_views_into_the_mapped_file(tmp_path):
    reader, _ = open_build(write_build(tmp_path / "build", group_samples(make_samples(20))))
    before = pa.total_allocated_bytes()
    groups = [reader.read(number) for number in range(5)]
    assert sum(image.nbytes for raw in groups for image in raw.images) > 10_000
    assert pa.total_allocated_bytes() - before < 1_000


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_or_cut_shard_is_named(tmp_path, format):
    build = write_build(tmp_path / "build", group_samples(make_samples(20)), format)
    shard = next((build / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedShard, match=rf"{shard.name}: has \d+ bytes, the manifest says"):
        open_build(build)[0].read(0)
    shard.unlink()
    with pytest.raises(DamagedShard, match=f"{shard.name}: is missing"):
        open_build(build)[0].read(0)


@pytest.mark.parametrize("format", FORMATS)
def test_overwritten_bytes_give_one_line_or_the_same_group(tmp_path, format):
    build = write_build(tmp_path / "build", group_samples(make_samples(8)), format)
    shard = next((build / "shards").iterdir())
    rng = np.random.default_rng(0)
    messages = []
    content = shard.read_bytes()
    for _ in range(60):
        damaged = bytearray(content)
        at = int(rng.integers(0, len(content) - 200))
        damaged[at : at + 200] = rng.bytes(200)
        shard.write_bytes(damaged)
        try:
            open_build(build)[0].read(0)
        except DamagedShard as error:
            messages.append(str(error))
    assert messages
    assert all(shard.name in message and "\n" not in message for message in messages)


def test_the_shard_unused_for_longest_is_closed_and_its_views_stay_valid(tmp_path, monkeypatch):
    build = write_build(tmp_path / "build", group_samples(make_samples(300), max_tokens=80))
    reader, manifest = open_build(build)
    assert len(manifest.shards) >= 4
    opened, plain = [], local._MappedFile
    monkeypatch.setattr(local, "MAX_OPEN", 2)
    monkeypatch.setattr(local, "_MappedFile", lambda path: opened.append(path.name) or plain(path))
    shards = local.LocalShards(manifest)
    for shard in (0, 1, 0, 2, 0, 1):
        size = manifest.shards[shard].size
        assert len(shards._open(shard).content) == size
        assert len(shards._opened) <= 2
    assert [int(name[6:11]) for name in opened] == [0, 1, 2, 1]
    monkeypatch.setattr(local, "MAX_OPEN", 1)
    first = reader.read(0)
    before = [bytes(image) for image in first.images], first.input_ids.tolist()
    reader.read(99)
    assert ([bytes(image) for image in first.images], first.input_ids.tolist()) == before
