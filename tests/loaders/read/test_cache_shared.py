"""Processes of one machine that read a remote build through one small cache, and are killed while
they do.
"""

import time

import pytest

from isobatch.loaders.read.build import StorageOptions, open_build
from support.builds.remote_builds import is_as_written, upload, use
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.loading.cache_files import on_disk
from support.ranks import start

pytestmark = pytest.mark.server

SAMPLES = 100
LIMIT = 250_000
"""Less than half of the build."""

READER = f"""
import random, sys
from support.builds.remote_builds import is_as_written
from support.builds.shard_fixture import group_samples, make_samples
from isobatch.loaders.read.build import StorageOptions, open_build
groups = group_samples(make_samples({SAMPLES}))
build = open_build(sys.argv[1], options=StorageOptions(cache_dir=sys.argv[2], cache_bytes={LIMIT}))
rng = random.Random(int(sys.argv[3]))
for done in range(int(sys.argv[4])):
    numbers = rng.sample(range(len(groups)), 6)
    build.shards.prefetch(numbers[:4])
    for number in numbers:
        assert is_as_written(build.read(number), groups[number])
    if done == 2:
        print("reading", flush=True)
"""


def printed(folder):
    file = folder / "stdout"
    return file.read_text() if file.exists() else ""


def test_all_bytes_are_right_and_the_limit_holds_through_kills(s3, tmp_path, monkeypatch):
    use(monkeypatch, s3)
    groups = group_samples(make_samples(SAMPLES))
    url = upload(s3, write_build(tmp_path / "build", groups), tmp_path.name)
    cache = tmp_path / "cache"
    (tmp_path / "reader.py").write_text(READER)
    folders = [tmp_path / name for name in ("first", "second", "third")]
    children = [
        start(1, folder, tmp_path / "reader.py", url, cache, seed, times)[0]
        for seed, (folder, times) in enumerate(zip(folders, (40, 40, 1_000_000), strict=True))
    ]
    try:
        deadline = time.monotonic() + 60
        while [printed(folder) for folder in folders] != ["reading\n"] * 3:
            assert time.monotonic() < deadline
        while any(child.is_alive() for child in children[:2]):
            assert on_disk(cache) <= LIMIT
            assert time.monotonic() < deadline
        assert [child.exitcode for child in children] == [0, 0, None]
    finally:
        for child in children:
            child.kill()
            child.join()
    build = open_build(url, options=StorageOptions(cache_dir=cache, cache_bytes=LIMIT))
    assert all(is_as_written(build.read(number), group) for number, group in enumerate(groups))
    build.close()
    assert build.shards.cache_hits > 0
    assert on_disk(cache) <= LIMIT
    assert not [*cache.rglob(".tmp-*")]
    assert {path.name for path in cache.iterdir()} == {
        "size",
        build.manifest.hash[:32],
        f".{build.manifest.hash[:32]}-index.arrow-0.lock",
    }
