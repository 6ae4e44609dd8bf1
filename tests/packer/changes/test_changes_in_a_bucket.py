"""Builds in a bucket that grow, merge and shrink: the same bytes as in a folder, nothing more."""

import contextlib
import shutil
from collections import Counter

import pytest

from isobatch.common.errors import DataError
from isobatch.loaders import StreamingLoader
from isobatch.packer.changes import add as add_module
from isobatch.packer.changes import remove as remove_module
from isobatch.packer.changes.merge import merge_builds
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames
from isobatch.packer.changes.target import Target
from isobatch.packer.upload import Publisher
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet
from support.builds.remote_builds import client, upload, use
from support.growing.halves import add, pack

pytestmark = pytest.mark.server
GONE = SampleNames(ids=tuple(f"id-{number:03d}" for number in range(0, 150, 10)))


@pytest.fixture
def build_in_bucket(s3, first_builds, tmp_path, monkeypatch):
    use(monkeypatch, s3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    return upload(s3, first_builds["arrow"], f"{tmp_path.name}/first")


def listed(s3, uri, but=("report.html",)):
    """Name -> content of all objects of a build."""
    prefix = uri.removeprefix(f"{s3.uri}/")
    store = client(s3)
    names = [meta["path"] for meta in store.list(f"{prefix}/").collect()]
    return {
        name.removeprefix(f"{prefix}/"): bytes(store.get(name).bytes())
        for name in names
        if not name.endswith(but)
    }


def in_folder(out):
    return {name: (out / name).read_bytes() for name in digests(out) if name != "report.html"}


def test_it_grows_and_shrinks_as_in_a_folder(s3, build_in_bucket, first_builds, halves, tmp_path):
    folder = shutil.copytree(first_builds["arrow"], tmp_path / "folder")
    with contextlib.closing(StreamingLoader(build_in_bucket)) as loader:
        steps = iter(loader)
        seen = Counter(name for batch in next(steps) for name in batch.sample_ids)
        add(halves, build_in_bucket)
        seen += Counter(name for step in steps for batch in step for name in batch.sample_ids)
    assert len(seen) == read_manifest(first_builds["arrow"]).num_packed
    add(halves, folder)
    assert listed(s3, build_in_bucket) == in_folder(folder)
    assert not add(halves, build_in_bucket).is_new
    for place in (build_in_bucket, str(folder)):
        remove_samples(place, GONE, quiet(), workers=1)
    assert listed(s3, build_in_bucket) == in_folder(folder)
    require_intact(verify_build(build_in_bucket, quiet(), workers=2, absent=GONE))
    with contextlib.closing(StreamingLoader(build_in_bucket)) as loader:
        seen = Counter(name for step in loader for batch in step for name in batch.sample_ids)
    assert len(seen) == read_manifest(folder).num_packed
    assert not list((tmp_path / "home").rglob("*.parquet"))


def test_builds_of_folders_and_buckets_merge_alike(s3, build_in_bucket, halves, tmp_path):
    other = pack(halves, tmp_path / "other", "new", keep_columns=("score",))
    uploaded = upload(s3, other, f"{tmp_path.name}/other")
    out = f"{s3.uri}/{tmp_path.name}/merged"
    merge_builds([build_in_bucket, uploaded], out, quiet())
    mixed = f"{s3.uri}/{tmp_path.name}/mixed"
    merge_builds([build_in_bucket, str(other)], mixed, quiet())
    folder = tmp_path / "folder"
    merge_builds([build_in_bucket, uploaded], str(folder), quiet())
    assert listed(s3, out) == listed(s3, mixed) == in_folder(folder)
    require_intact(verify_build(out, quiet(), workers=2))


def test_a_change_that_another_machine_began_is_named(
    s3, build_in_bucket, halves, tmp_path, monkeypatch
):
    begun = {"host": "elsewhere", "work_folder": "/there", "token": "1"}
    key = f"{build_in_bucket.removeprefix(s3.uri + '/')}/building.json"
    client(s3).put(key, str(begun).replace("'", '"').encode())
    with pytest.raises(DataError, match=r"unfinished build of elsewhere.*or add --discard"):
        add(halves, build_in_bucket)
    assert add(halves, build_in_bucket, discard=True).is_new
    assert "building.json" not in listed(s3, build_in_bucket)


def test_a_change_by_another_machine_at_the_same_time_is_neither_lost_nor_said_to_be_done(
    s3, build_in_bucket, halves, tmp_path, monkeypatch
):
    old = read_manifest(build_in_bucket)
    add(halves, build_in_bucket, work_dir=str(tmp_path / "one"))
    grown = listed(s3, build_in_bucket)
    # the other machine had read the manifest before
    for change in (
        lambda: add(halves, build_in_bucket, "first", limit=20, work_dir=str(tmp_path / "two")),
        lambda: remove_samples(build_in_bucket, GONE, quiet(), workers=1),
    ):
        with monkeypatch.context() as patch:
            for module in (add_module, remove_module):
                patch.setattr(module, "read_manifest", lambda place: old)
            with pytest.raises(DataError, match="was changed meanwhile by another machine"):
                change()
        assert listed(s3, build_in_bucket) == grown


def test_a_run_killed_after_the_manifest_leaves_no_mark(s3, build_in_bucket, halves, monkeypatch):
    def killed(target, manifest):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Target, "clean", killed)
        with pytest.raises(KeyboardInterrupt):
            add(halves, build_in_bucket)
    assert "building.json" in listed(s3, build_in_bucket)
    assert not add(halves, build_in_bucket).is_new
    assert "building.json" not in listed(s3, build_in_bucket)


def test_the_first_command_again_leaves_what_others_are_adding(
    s3, build_in_bucket, halves, tmp_path
):
    prefix = build_in_bucket.removeprefix(s3.uri + "/")
    begun = b'{"host": "elsewhere", "work_folder": "/there", "token": "1"}'
    client(s3).put(f"{prefix}/building.json", begun)
    client(s3).put(f"{prefix}/staging/partitions/key/00001/partition.json", b"{}")
    before = listed(s3, build_in_bucket)
    pack(halves, build_in_bucket, keep_columns=("score",))
    assert listed(s3, build_in_bucket) == before


@pytest.mark.parametrize("moment", ["sweep", "publish"])
def test_a_removal_that_ended_early_is_ended_by_the_same_command(
    s3, build_in_bucket, first_builds, tmp_path, monkeypatch, moment
):
    folder = shutil.copytree(first_builds["arrow"], tmp_path / "folder")
    remove_samples(str(folder), GONE, quiet(), workers=1)
    killed = []
    whose = Target if moment == "sweep" else Publisher
    method = getattr(whose, moment)

    def kill_once(self, *arguments):
        # the first sweep is of a change that begins, the second of one that is over
        killed.append(1)
        if len(killed) == (2 if moment == "sweep" else 1):
            raise KeyboardInterrupt
        return method(self, *arguments)

    monkeypatch.setattr(whose, moment, kill_once)
    with pytest.raises(KeyboardInterrupt):
        remove_samples(build_in_bucket, GONE, quiet(), workers=1)
    remove_samples(build_in_bucket, GONE, quiet(), workers=1)
    assert listed(s3, build_in_bucket) == in_folder(folder)


def test_a_change_that_was_refused_blocks_no_other(arrow_build, build_in_bucket, halves):
    for place in (str(arrow_build), build_in_bucket):
        with pytest.raises(DataError, match="no sample would be left"):
            remove_samples(place, SampleNames(sources=("first",)), quiet(), workers=1)
        assert add(halves, place).is_new
