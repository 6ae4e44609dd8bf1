"""Damaged files met by a whole loader, of a build or of the cache: every byte is right, or one line
names the file.

What is right is what a run without damage gives. Once the file is restored, the rest of the samples
comes, exactly.
"""

import hashlib
import json
import random
import re

import pytest

from isobatch.common.errors import DamagedShard, IsobatchError
from support.builds.remote_builds import client, upload, use
from support.builds.shard_fixture import FORMATS
from support.loading.contents import content
from support.loading.fault_runs import GROUPS, NAMED, WAYS, fails, flipped, gives

pytestmark = pytest.mark.server

DAMAGES = {
    "flipped": (flipped, ".*its bytes have another checksum than the index says"),
    "truncated": (
        lambda content: content[: len(content) // 2],
        r".*(the manifest says \d+ bytes|ends before)",
    ),
    "deleted": (None, r".*shards/shard-00001\.\w+: is missing"),
}


@pytest.fixture
def prefix(s3, tmp_path, monkeypatch):
    """A place in the bucket for this test alone."""
    use(monkeypatch, s3)
    return tmp_path.name


@pytest.mark.parametrize(("format", "workers"), WAYS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_damaged_midway_is_named_and_the_run_goes_on_when_it_is_restored(
    s3, builds, load, expected, prefix, damage, format, workers
):
    url = upload(s3, builds[format], f"{prefix}/{format}")
    name = f"shards/shard-00001.{'tar' if format == 'webdataset' else 'arrow'}"
    key, whole = f"{prefix}/{format}/{name}", (builds[format] / name).read_bytes()
    change, message = DAMAGES[damage]
    loader = load(url, workers=workers, cache_bytes=0, timeout_s=2.0)
    if change is None:
        client(s3).delete(key)
    else:
        client(s3).put(key, change(whole))
    message = rf"^shard-00001\.\w+, group \d+: {message}"
    state, given = fails(loader, loader, expected, DamagedShard, message, 10)
    client(s3).put(key, whole)
    loader.load_state_dict(state)
    assert gives(loader, expected, given)


@pytest.mark.parametrize("format", FORMATS)
def test_wrong_bytes_in_the_cache_are_fetched_again(urls, proxy, load, expected, tmp_path, format):
    loader = load(urls[format])
    assert gives(loader, expected)
    loader.close()  # now all is in the cache
    stored = [
        path
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and path.parent.name != "cache"
    ]
    assert len(stored) > len(GROUPS)
    for number, path in enumerate(stored):
        whole = path.read_bytes()
        path.write_bytes(flipped(whole) if number % 2 else whole[: len(whole) // 2])
    loader = load(urls[format])
    assert gives(loader, expected)
    loader.close()
    proxy.requests.clear()
    assert gives(load(urls[format]), expected)
    assert [path.rpartition("/")[2] for path, _ in proxy.requests] == ["manifest.json"]


@pytest.mark.parametrize("cache_bytes", [0, 60_000])
def test_a_cache_without_room_for_the_build_changes_nothing(
    urls, proxy, load, expected, cache_bytes
):
    for _ in range(2):
        assert gives(load(urls["arrow"], cache_bytes=cache_bytes), expected)


def test_a_cache_folder_that_is_in_the_way_is_said_and_changes_nothing(
    urls, proxy, load, expected, tmp_path
):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="Not a directory; going on without storing") as said:
        assert gives(load(urls["arrow"], cache_dir=tmp_path / "file" / "cache"), expected)
    assert len([one for one in said if "going on" in str(one.message)]) == 1


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_flipped_index_is_refused_before_the_first_step(s3, builds, proxy, load, tmp_path, place):
    folder = copied(builds["arrow"], tmp_path / "build")
    path = folder / "index.arrow"
    whole = path.read_bytes()
    for damaged, message in (
        (flipped(whole), "(record batch 0: )?its bytes have another checksum than the manifest"),
        (whole[:-100], r"has \d+ bytes, the manifest says"),
    ):
        path.write_bytes(damaged)
        url = folder if place == "local" else upload(s3, folder, tmp_path.name)
        loader = load(url, timeout_s=2.0)
        fails(loader, loader, [], DamagedShard, rf"^\S*index\.arrow: {message}", 10)


def test_a_flipped_manifest_is_refused_or_changes_nothing(builds, load, expected, tmp_path):
    folder = copied(builds["arrow"], tmp_path / "build")
    whole = sealed((folder / "manifest.json").read_bytes())
    messages = []
    for at in random.Random(0).sample(range(len(whole)), 100):
        (folder / "manifest.json").write_bytes(flipped(whole, at))
        try:
            loader = load(folder)
        except IsobatchError as error:
            messages.append(str(error))
        else:  # the name under which the manifest keeps its own checksum
            assert b"content_hash" not in flipped(whole, at)
            assert gives(loader, expected)
    assert len(messages) > 90
    assert all(re.match(r"\S+/manifest\.json: ", one) and "\n" not in one for one in messages), (
        messages
    )


def test_a_shard_cut_under_a_running_local_loader_is_an_error_and_no_crash(
    builds, load, expected, tmp_path
):
    folder = copied(builds["arrow"], tmp_path / "build")
    loader = load(folder, workers=0)
    steps = iter(loader)
    seen = [content(next(steps)) for _ in expected[1:]]
    cut = {path: path.read_bytes() for path in (folder / "shards").iterdir()}
    for path in cut:
        with path.open("r+b") as file:
            file.truncate(10)
    message = (
        NAMED + r"the shard was cut to 10 bytes while it was read, the manifest says \d+ bytes"
    )
    state, _ = fails(loader, steps, [], DamagedShard, message, 5)
    for path, whole in cut.items():
        path.write_bytes(whole)
    loader.load_state_dict(state)
    assert gives(loader, expected, len(seen))


def copied(folder, target):
    for path in folder.rglob("*"):
        if path.is_file():
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())
    return target


def sealed(manifest):
    """The manifest with the checksum of its own content, as `packer` writes it."""
    values = json.loads(manifest)
    plain = json.dumps(values, sort_keys=True, ensure_ascii=False).encode()
    return json.dumps(values | {"content_hash": hashlib.sha256(plain).hexdigest()}).encode()
