"""`packer merge`: one build of several, with the samples of all and links to their shards."""

import contextlib
import os
import shutil

import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader
from isobatch.packer.changes.merge import merge_builds
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet
from support.growing.halves import FIRST, NEW, add, by_sample, pack, samples_of


@pytest.fixture(params=["arrow", "webdataset", "refs"])
def two(request, first_builds, halves, shared):
    """Builds of both halves in a format."""
    name = request.param

    def make(folder):
        pack(halves, folder / "out", "new", format=name, keep_columns=("score",))

    return first_builds[name], shared(f"second build {name}", make) / "out"


def test_a_merged_build_has_the_samples_of_all_and_links_to_their_shards(two, tmp_path):
    out = tmp_path / "out"
    manifest = merge_builds([str(place) for place in two], str(out), quiet())
    totals = manifest.values["totals"]
    assert (totals["num_read"], totals["num_packed"]) == (FIRST + NEW, FIRST + NEW - 2)
    require_intact(verify_build(out, quiet(), workers=1))
    contents = by_sample(two[0]) | by_sample(two[1])
    assert by_sample(out) == contents
    assert samples_of(out) == contents.keys()
    positions = [
        row["position"]
        for name in ("counts", "rejected")
        for row in pq.read_table(out / f"{name}.parquet").to_pylist()
    ]
    assert sorted(positions) == list(range(FIRST + NEW))
    shards = [place / shard.name for place in two for shard in read_manifest(place).shards]
    for source, shard in zip(shards, manifest.shards, strict=True):
        assert os.path.samefile(source, out / shard.name)
    # again: the same bytes, or nothing to do
    before = digests(out)
    merge_builds([str(place) for place in two], str(out), quiet())
    assert digests(out) == before


def test_a_state_of_the_first_build_resumes_in_the_merged_one(two, tmp_path):
    with contextlib.closing(StreamingLoader(two[0])) as loader:
        steps = iter(loader)
        seen = [name for batch in next(steps) for name in batch.sample_ids]
        state = loader.state_dict()
    merge_builds([str(place) for place in two], str(tmp_path / "out"), quiet())
    with contextlib.closing(StreamingLoader(tmp_path / "out", added="now")) as loader:
        with pytest.warns(UserWarning, match="they come now"):
            loader.load_state_dict(state)
        rest = [name for step in loader for batch in step for name in batch.sample_ids]
    assert sorted(seen + rest) == sorted(samples_of(tmp_path / "out"))


def test_a_merged_build_can_grow_and_be_merged_again(first_builds, halves, tmp_path):
    grown = shutil.copytree(first_builds["arrow"], tmp_path / "grown")
    add(halves, grown)
    other = pack(halves, tmp_path / "other", "new", keep_columns=("score",), seed=5)
    out = merge_builds([str(grown), str(other)], str(tmp_path / "out"), quiet())
    assert out.num_packed == read_manifest(grown).num_packed + read_manifest(other).num_packed
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1))


def test_energons_files_are_of_all_builds(halves, tmp_path):
    parts = [
        str(pack(halves, tmp_path / part, part, format="energon")) for part in ("first", "new")
    ]
    merge_builds(parts, str(tmp_path / "out"), quiet())
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1))
    with pytest.raises(ConfigError, match="is a build for Energon"):
        add(halves, tmp_path / "out")
    with pytest.raises(ConfigError, match="is a build for Energon"):
        remove_samples(str(tmp_path / "out"), SampleNames(ids=("id-003",)), quiet(), workers=1)


def test_builds_that_cannot_be_one_are_refused(first_builds, halves, tmp_path):
    arrow, tars = str(first_builds["arrow"]), str(first_builds["webdataset"])
    other = str(pack(halves, tmp_path / "other", keep_columns=("score",), max_seq_len=1024))
    out = str(tmp_path / "out")
    for places, problem in (
        ([arrow], "two builds or more"),
        ([arrow, tars], "another format"),
        ([arrow, other], "another limits"),
        ([arrow, arrow], "are the same"),
    ):
        with pytest.raises(ConfigError, match=problem):
            merge_builds(places, out, quiet())
    copied = shutil.copytree(arrow, tmp_path / "copied")
    add(halves, copied)
    with pytest.raises(ConfigError, match="share shards"):
        merge_builds([arrow, str(copied)], out, quiet())
    second = pack(halves, tmp_path / "second", "new", keep_columns=("score",), seed=1)
    with pytest.raises(DataError, match="is a finished build of other data"):
        merge_builds([str(second), str(copied)], arrow, quiet())
