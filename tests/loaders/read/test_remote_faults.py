"""What goes wrong between a store and a loader: every group arrives intact, or an error names its
shard in time.
"""

import contextlib
import random
import re
import time

import pytest

from isobatch.common.errors import DamagedShard, DataError
from isobatch.loaders.read.build import StorageOptions, open_build
from isobatch.loaders.read.cache import Cache
from isobatch.loaders.read.range_reader import RangeReader
from isobatch.loaders.read.remote import RemoteShards
from isobatch.shards.manifest import read_manifest
from support.builds.remote_builds import client, is_as_written, upload, use
from support.builds.shard_fixture import (
    INDEX_SCHEMA,
    SHARD_GROUPS,
    group_samples,
    make_samples,
    write_build,
)
from support.servers import FaultyProxy

pytestmark = pytest.mark.server

GROUPS = group_samples(make_samples(120))
SECOND_SHARD = len(GROUPS) - SHARD_GROUPS
"""Groups in it; it is the last."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("build") / "build", GROUPS)


@pytest.fixture
def url(s3, folder, tmp_path, monkeypatch):
    use(monkeypatch, s3)
    return upload(s3, folder, tmp_path.name)


@pytest.fixture
def proxy(s3, url, monkeypatch):
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        yield proxy


@pytest.fixture
def opened(tmp_path):
    """Opens a build with a cache of the test's own; closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_it(url, **options):
            options = {"cache_dir": tmp_path / "cache", "timeout_s": 30.0, **options}
            return stack.enter_context(
                contextlib.closing(open_build(url, options=StorageOptions(**options)))
            )

        yield open_it


def of_shards(fault):
    """The fault in requests for shards only."""
    return lambda path: fault(path) if "shard-" in path else ""


def of_index(fault):
    """The fault in requests for the index only."""
    return lambda path: fault(path) if "index" in path else ""


def first_times(fault, times):
    """The fault in the first requests of all."""
    left = [times]

    def once(path):
        left[0] -= 1
        return fault if left[0] >= 0 else ""

    return once


def at_random(fault, share):
    """The fault in a share of the requests."""
    rng = random.Random(0)
    return lambda path: fault if rng.random() < share else ""


FAULTS = {
    "cut in the middle of the body": lambda: first_times("cut", 4),
    "30 % answered 503": lambda: at_random("503", 0.3),
    "200 ms stalls": lambda: first_times("slow", 6),
    "no more bytes in the middle of a body": lambda: of_shards(first_times("stall", 2)),
    "bits flipped on the way, again and again": lambda: of_shards(first_times("flip", 4)),
    "bits of the index flipped on the way": lambda: of_index(first_times("flip", 2)),
    "too many requests": lambda: first_times("429", 2),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("name", FAULTS)
def test_what_passes_leaves_every_group_intact(url, proxy, opened, name, ahead):
    proxy.fault = FAULTS[name]()
    build = opened(url, timeout_s=6.0 if "no more" in name else 30.0)
    numbers = range(len(GROUPS)) if ahead else range(0, len(GROUPS), 3)
    if ahead:
        build.shards.prefetch(numbers)
    assert all(is_as_written(build.read(number), GROUPS[number]) for number in numbers)


LASTING = {
    "stall": (DataError, "not read within 2 s"),
    "503": (DataError, r"not read within 2 s \(last: the store fails \(503 Made503\)"),
    "cut": (DataError, "not read within 2 s"),
    "403": (DataError, r"access denied \(Made403\): check AWS_ACCESS_KEY_ID"),
    "404": (DamagedShard, "is missing; copy or build it again"),
    "flip": (DamagedShard, "another checksum than the index says"),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("fault", LASTING)
def test_what_does_not_pass_is_an_error_that_names_the_shard_in_time(
    url, proxy, opened, fault, ahead
):
    build = opened(url, timeout_s=2.0)
    assert is_as_written(build.read(0), GROUPS[0])
    proxy.fault = of_shards(lambda path: fault)
    kind, expected = LASTING[fault]
    started = time.monotonic()
    if ahead:
        build.shards.prefetch(range(len(GROUPS)))
    with pytest.raises(kind, match=rf"^shard-00001\.arrow, group 27: .*{expected}") as error:
        build.read(27)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 20
    assert is_as_written(build.read(0), GROUPS[0])  # from the cache
    proxy.fault = lambda path: ""
    assert is_as_written(build.read(27), GROUPS[27])  # the next try is a new one


def damaged(content):
    copy = bytearray(content)
    copy[len(copy) // 2] ^= 1
    return bytes(copy)


DAMAGES = {
    "flipped": (
        damaged,
        r"group \d+: .*its bytes have another checksum than the index says; run `packer verify`",
    ),
    "cut": (
        lambda content: content[: len(content) // 2],
        r"group \d+: .*(the manifest says \d+ bytes|ends before)",
    ),
    "longer": (
        lambda content: content + b"\0",
        r"group \d+: .*has \d+ bytes, the manifest says \d+ bytes",
    ),
    "deleted": (None, r"group \d+: .*shards/shard-00001\.arrow: is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_others_are_read(
    s3, url, folder, opened, tmp_path, damage
):
    change, expected = DAMAGES[damage]
    key = f"{tmp_path.name}/shards/shard-00001.arrow"
    if change is None:
        client(s3).delete(key)
    else:
        client(s3).put(key, change((folder / "shards/shard-00001.arrow").read_bytes()))
    build = opened(url, timeout_s=2.0)
    for ahead in (range(len(GROUPS)), range(0)):
        errors = []
        build.shards.prefetch(ahead)
        for number, group in enumerate(GROUPS):
            try:
                assert is_as_written(build.read(number), group)
            except DamagedShard as error:
                errors.append(str(error))
        assert errors

        assert all(re.match(f"shard-00001.arrow, {expected}", error) for error in errors), errors
        assert len(errors) == (1 if damage == "flipped" else SECOND_SHARD), errors


def test_a_flipped_index_and_a_flipped_manifest_are_refused(s3, url, folder, opened, tmp_path):
    store, name = client(s3), f"{tmp_path.name}/index.arrow"
    store.put(name, damaged((folder / "index.arrow").read_bytes()))
    message = r"/index.arrow: its bytes have another checksum than the manifest says; run `packer"
    for cache_bytes in (1 << 30, 0):
        with pytest.raises(DamagedShard, match=message):
            opened(url, cache_bytes=cache_bytes, timeout_s=1.0).read(0)
    assert not [path for path in (tmp_path / "cache").rglob("*/*") if path.is_file()]


@pytest.fixture
def batched(monkeypatch):
    """Writes a build whose index has several record batches."""
    for module in ("isobatch.shards.index", "support.builds.shard_fixture"):
        monkeypatch.setattr(f"{module}.BATCH_ROWS", 4)
    return write_build


@pytest.mark.parametrize("version", [2, 3])
def test_a_flipped_bit_in_a_cached_index_is_found_and_fetched_again(
    s3, batched, tmp_path, monkeypatch, version
):
    use(monkeypatch, s3)
    url = upload(s3, batched(tmp_path / "batched", GROUPS, version=version), tmp_path.name)
    manifest = read_manifest(tmp_path / "batched")
    names = [name for name in INDEX_SCHEMA.names if name != "sample_ids"]

    def content():
        store = RangeReader(url)
        cache = Cache(tmp_path / "cache", "build", 1 << 30)
        shards = RemoteShards(store, manifest, cache)
        index = [shards.index.column(name).tolist() for name in names]
        shards.close()
        return index

    whole, rng = content(), random.Random(0)
    cached = {path: path.read_bytes() for path in (tmp_path / "cache" / "build").iterdir()}
    assert len(cached) == (1 if version == 2 else -(-len(GROUPS) // 4))
    for number in range(100):
        path = rng.choice([*cached])
        damaged = bytearray(cached[path])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged if number % 10 else damaged[: len(damaged) // 2])
        assert content() == whole
        assert path.read_bytes() == cached[path]


def test_a_damaged_file_of_the_cache_is_fetched_again(url, opened, tmp_path):
    def read():
        build = opened(url)
        assert is_as_written(build.read(5), GROUPS[5])
        build.close()  # now it is in the cache

    read()
    (path,) = (tmp_path / "cache").glob("*/00000/5")
    whole = path.read_bytes()
    for wrong in (damaged(whole), b"short"):
        path.write_bytes(wrong)
        read()
        assert path.read_bytes() == whole
