"""A cache disk without room: the loader goes on without the cache, and says so once."""

import os

import pytest

from support.builds.remote_builds import upload, use
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import launch

pytestmark = pytest.mark.server


@pytest.fixture
def url(s3, tmp_path, monkeypatch):
    use(monkeypatch, s3)
    return upload(
        s3, write_build(tmp_path / "build", group_samples(make_samples(120))), tmp_path.name
    )


PROGRAM = """
import sys, warnings
from support.ranks import mount_disk
mount_disk(*sys.argv[3:])
from support.builds.remote_builds import is_as_written
from support.builds.shard_fixture import SHARD_GROUPS, group_samples, make_samples
from isobatch.loaders.read.build import StorageOptions, open_build
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    build = open_build(sys.argv[1], options=StorageOptions(cache_dir=sys.argv[2]))
    groups = group_samples(make_samples(120))
    for _ in range(2):
        build.shards.prefetch(range(0, len(groups), 2))
        assert all(is_as_written(build.read(number), group) for number, group in enumerate(groups))
        build.shards.cache.close()  # all is stored that can be
print(len(said), *(str(one.message) for one in said), build.shards.cache_hits)
"""


@pytest.mark.parametrize(
    "size", ["100k", "400k"]
)  # less than the index with its folders, and less than the groups
def test_a_full_cache_disk_is_said_once_and_changes_nothing(url, small_disk, tmp_path, size):
    disk, _ = small_disk(size)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = launch(1, tmp_path / "printed", program, url, disk / "cache", disk, size)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(
        f"1 cache {disk}/cache: No space left on device; going on without storing"
    )
    if size == "400k":
        assert not found.stdout.endswith(" 0\n")  # what was stored before is used
    assert os.listdir(disk) == []  # it was the child's alone
