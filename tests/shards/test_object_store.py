"""Raw data and builds in servers of S3, Google and Azure: the bytes of those on disk, nothing lost
by a kill, one line per mistake.
"""

import contextlib
import errno
import json
import pickle
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions.partition import Partition
from isobatch.packer.upload import work_folder
from isobatch.packer.verify import verify_build
from isobatch.packer.write.energon_files import META, META_NAMES
from isobatch.shards.folders import open_folder, open_object_folder
from isobatch.shards.manifest import TAR_FORMATS
from isobatch.shards.object_folder import HEAD_BYTES, ObjectFolder
from support import ranks
from support.builds.command import run_packer
from support.builds.packed import build, digests, quiet
from support.builds.raw_data import good_records, options, record, write_dataset
from support.builds.remote_builds import IN_EVERY_STORE, use
from support.servers import StallingProxy
from support.stores.mistakes import MISTAKES

pytestmark = pytest.mark.server


@pytest.fixture
def place(store, monkeypatch, tmp_path):
    """A URI of the test's own, reachable with the environment's credentials."""
    use(monkeypatch, store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_roots()
    yield f"{store.uri}/{tmp_path.name}"
    forget_roots()


def forget_roots():
    for function in (open_folder, open_object_folder):
        function.cache_clear()


def upload(folder: Path, uri: str) -> str:
    bucket = open_object_folder(uri)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: bucket.put(str(path.relative_to(folder)), path), paths))
    return uri


def download(uri: str, folder: Path) -> Path:
    """Everything under a URI."""
    root = open_folder(uri)
    hidden = META_NAMES if root.has_folder(META) else ()  # a listing leaves them out
    for name in [*(info.name for info in root.files()), *hidden]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(root.read(name))
    return folder


def processes(store):
    """Of a build: two in one store; to start them takes most of a test's time."""
    return 2 if store.scheme == "s3" else 1


def without_report(found):
    return {name: digest for name, digest in found.items() if name != "report.html"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "raw"
    return write_dataset(folder, good_records(folder, 40))


@pytest.fixture(scope="module")
def local(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "out"
    build(dataset, out, shard_mb=1)
    return out


@pytest.fixture
def requests(monkeypatch):
    """Key and range of all GET requests."""
    seen = []
    plain = ObjectFolder._get

    def get(self, key, options):
        seen.append((key, options.get("range")))
        return plain(self, key, options)

    monkeypatch.setattr(ObjectFolder, "_get", get)
    return seen


@IN_EVERY_STORE
def test_a_large_file_reads_like_one_on_disk_wherever_one_jumps(place):
    data = np.random.default_rng(0).bytes(9 << 20)
    root = open_object_folder(place)
    root.put("big", data)
    rng = np.random.default_rng(1)
    with root.open("big") as file:
        assert file.seek(0, 2) == len(data)
        for _ in range(60):
            start, length = (
                int(rng.integers(len(data))),
                int(rng.choice([1, 64, 70_000, 1 << 20, 3 << 20])),
            )
            file.seek(start)
            assert file.read(length) == data[start : start + length]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(1 << 20), b"")) == data
        with pytest.raises(OSError, match="before the beginning"):
            file.seek(-1)


def test_the_header_of_an_image_costs_one_request(place, requests):
    root = open_object_folder(place)
    root.put("small", b"x" * 1000)
    root.put("large", b"x" * (HEAD_BYTES + 1000))
    with root.open("small") as file:
        file.seek(-64, 2)
        assert len(file.read(64)) == 64
    assert len(requests) == 1
    with root.open("large") as file:  # beginning, end, beginning: two
        for start in (0, HEAD_BYTES + 900, 0):
            file.seek(start)
            assert len(file.read(100)) == 100
    assert len(requests) == 3


def test_a_long_file_streams_in_constant_memory_with_few_requests(place, requests):
    root = open_object_folder(place)
    root.put("long", bytes(96 << 20))
    tracemalloc.start()
    try:
        with root.open("long") as file:
            assert sum(len(block) for block in iter(lambda: file.read(1 << 20), b"")) == 96 << 20
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    assert len(requests) < 20


@IN_EVERY_STORE
def test_a_file_that_is_replaced_while_it_is_read_is_an_error_and_not_a_mixture(place):
    root = open_object_folder(place)
    root.put("big", bytes(4 << 20))
    with root.open("big") as file:
        assert file.read(10) == bytes(10)
        root.put("big", b"x" * (4 << 20))
        file.seek(3 << 20)
        with pytest.raises(OSError, match="replaced while it was read"):
            file.read(10)


@IN_EVERY_STORE
def test_ranges_empty_files_and_odd_names(place):
    root = open_object_folder(place)
    root.put("a b#c?%20ü日.jpg", b"0123456789")
    root.put("empty", b"")
    name = "a b#c?%20ü日.jpg"
    assert [info.name for info in root.files()] == [name, "empty"]
    assert root.read(name, 2, 3) == b"234"
    assert root.read(f".//{name}", 8) == b"89"
    assert root.read(name, 8, 100) == b"89"
    assert root.read(name, 50, 1) == b""
    assert root.read("empty") == b"" == root.open("empty").read()
    assert root.info("empty").size == 0
    assert root.info(name).version != root.info("empty").version
    assert pickle.loads(pickle.dumps(root)).read(name) == b"0123456789"


@IN_EVERY_STORE
@pytest.mark.parametrize(
    ("name", "number"),
    [("none.jpg", errno.ENOENT), ("../x", errno.EINVAL), ("a\nb", errno.EINVAL), ("\udc80", 22)],
)
def test_what_is_wrong_with_one_file_is_an_oserror(place, name, number):
    root = open_folder(place)
    for call in (root.open, root.read, root.info):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what tells
            call(name)
        assert caught.value.errno == number


def test_a_listing_goes_on_behind_its_first_page(place):
    bucket = open_object_folder(place)
    names = [f"many/{number:04d}.txt" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(
                lambda name: bucket.put(name, b"x"),
                [*names, "other/x.txt", "many/.hidden", "top.txt"],
            )
        )
    assert [info.name for info in bucket.files("many")] == names
    assert bucket.names() == ["top.txt"]
    assert (bucket.has_folder("many"), bucket.has_folder("man"), bucket.has_folder("top.txt")) == (
        True,
        False,
        False,
    )
    bucket.delete([*names, "not there"])
    assert [info.name for info in bucket.files()] == ["other/x.txt", "top.txt"]


@pytest.mark.parametrize(
    ("store", "shard_format"),
    [
        *(("s3", name) for name in ("arrow", "webdataset", "energon", "refs")),
        *(("gcs", "arrow"), ("azure", "arrow")),
    ],
    indirect=["store"],
)
def test_a_build_into_a_bucket_has_the_bytes_of_one_on_disk(
    place, store, dataset, tmp_path, shard_format
):
    # of tars each would import webdataset, and with that torch
    workers = 1 if shard_format in TAR_FORMATS else processes(store)
    build(dataset, tmp_path / "out", format=shard_format, shard_mb=1)
    summary = build(dataset, place, format=shard_format, shard_mb=1, workers=workers)
    found = digests(download(place, tmp_path / "down"))
    assert without_report(found) == digests(tmp_path / "out")
    assert "report.html" in found
    assert summary.out == place
    assert not work_folder(place, None).exists()
    assert not verify_build(place, quiet(), workers=2).problems


@IN_EVERY_STORE
def test_raw_data_in_a_bucket_give_the_same_build_as_on_disk(
    place, store, dataset, local, tmp_path
):
    raw = upload(dataset, f"{place}/raw")
    build(raw, tmp_path / "out", shard_mb=1, workers=processes(store))
    assert digests(tmp_path / "out") == digests(local)


def test_a_missing_image_in_a_bucket_is_rejected_as_on_disk(place, tmp_path):
    rows = [record(number) for number in range(30)] + [record(30, ["images/none.jpg"])]
    raw = upload(write_dataset(tmp_path / "raw", rows), f"{place}/raw")
    summary = build(raw, tmp_path / "out")
    assert {reason: entry.number for reason, entry in summary.rejected.items()} == {
        "missing_image": 1
    }


@IN_EVERY_STORE
def test_a_finished_build_is_known_without_local_state_and_other_settings_are_refused(
    place, dataset
):
    build(dataset, place)
    before = {info.name: info.version for info in open_folder(place).files()}
    assert build(dataset, place).already_complete
    assert {info.name: info.version for info in open_folder(place).files()} == before
    with pytest.raises(DataError, match=f"{place} is a finished build of other data or settings"):
        build(dataset, place, seed=1)
    assert build(dataset, place, work_dir=str(work_folder(place, "elsewhere"))).already_complete


def test_overwrite_removes_only_what_a_build_made(place, dataset, tmp_path):
    build(dataset, place, shard_mb=1, format="energon")
    Builder(BuildConfig(**options(dataset, place, seed=1)), quiet()).build(overwrite=True)
    build(dataset, tmp_path / "out", seed=1)
    assert without_report(digests(download(place, tmp_path / "down"))) == digests(tmp_path / "out")
    open_object_folder(place).put("thesis.txt", b"years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        Builder(BuildConfig(**options(dataset, place)), quiet()).build(overwrite=True)
    assert {"thesis.txt", "manifest.json"} <= {info.name for info in open_folder(place).files()}


@IN_EVERY_STORE
def test_two_work_folders_do_not_build_into_one_place(place, dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Partition, "_group", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(dataset, place)
    with pytest.raises(
        DataError, match=f"{place} holds the unfinished build of .*work folder {tmp_path}"
    ):
        build(dataset, place, work_dir=str(tmp_path / "other"))
    build(dataset, place)
    assert "building.json" not in {info.name for info in open_folder(place).files()}


def test_counts_alone_go_to_a_bucket_too(place, dataset):
    Builder(BuildConfig(**options(dataset, place)), quiet()).count()
    assert [info.name for info in open_folder(place).files()] == [
        "counts.parquet",
        "rejected.parquet",
    ]


PROGRAM = """
import io, json, sys
if __name__ == "__main__":  # its workers load this file too
    from rich.console import Console
    from isobatch.packer.build import Builder
    from isobatch.packer.config import BuildConfig
    from isobatch.packer.progress import StageProgress
    config = BuildConfig(**json.loads(sys.argv[1]))
    Builder(config, StageProgress(Console(file=io.StringIO()))).build()
"""


@pytest.mark.parametrize(
    ("store", "sent_bytes"),
    # in the first shards, and behind one
    [("s3", 600_000), ("s3", 2_500_000), ("gcs", 2_500_000), ("azure", 2_500_000)],
    indirect=["store"],
)
def test_a_build_killed_while_it_uploads_goes_on_and_ends_as_if_undisturbed(
    place, store, dataset, local, tmp_path, monkeypatch, sent_bytes
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    values = json.dumps(options(dataset, place, shard_mb=1, workers=processes(store)))
    with contextlib.closing(StallingProxy(store.endpoint, sent_bytes)) as proxy:
        with monkeypatch.context() as patch:
            use(patch, store, proxy.endpoint)
            (child,) = ranks.start(1, tmp_path / "printed", program, values)
        assert proxy.stalled.wait(60)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    before = {info.name: info.version for info in open_folder(place).files("shards")}
    assert (sent_bytes > 2_000_000) <= len(before) < len(list((local / "shards").iterdir()))
    assert work_folder(place, None).exists()
    build(dataset, place, shard_mb=1)
    assert without_report(digests(download(place, tmp_path / "down"))) == digests(local)


def test_a_shard_that_was_lost_or_cut_in_the_bucket_is_written_again(
    place, dataset, local, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Builder, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(dataset, place, shard_mb=1)
    bucket = open_object_folder(place)
    first, second, *others = [info.name for info in bucket.files("shards")]
    bucket.delete([first])
    bucket.put(second, b"cut")
    kept = {name: bucket.info(name) for name in others}
    build(dataset, place, shard_mb=1)
    assert {name: bucket.info(name) for name in others} == kept
    assert without_report(digests(download(place, tmp_path / "down"))) == digests(local)


def test_verify_finds_a_flipped_a_missing_and_a_foreign_object_in_one_reading(
    place, local, requests
):
    bucket = open_object_folder(upload(local, place))
    requests.clear()
    assert not verify_build(place, quiet(), workers=2).problems
    ends = {}
    for key, (start, end) in [(key, window or (0, 1)) for key, window in requests]:
        assert start == ends.get(key, 0)  # each goes on where the last one ended
        ends[key] = end
    assert len(ends) == len(list(bucket.files()))
    shard, other = [info.name for info in bucket.files("shards")][:2]
    data = bytearray(bucket.read(shard))
    data[len(data) // 2] ^= 1
    bucket.put(shard, bytes(data))
    bucket.put("shards/who.tar", b"?")
    bucket.delete([other, "groups.parquet"])
    problems = verify_build(place, quiet(), workers=2).problems
    assert [problem.split(":")[0] for problem in problems] == [
        shard,
        other,
        "groups.parquet",
        "shards/who.tar",
    ]


def test_the_commands_take_uris(place, dataset, capsys, monkeypatch):
    tokenizer = options(dataset, place)["tokenizer"]
    arguments = ["--dataset", dataset, "--model", "tiny", "--tokenizer", tokenizer, "--out", place]
    status, out, _ = run_packer(capsys, monkeypatch, "build", *arguments)
    assert status == 0
    assert f"report    {place}/report.html" in out
    assert f"check     packer verify {place}" in out
    assert run_packer(capsys, monkeypatch, "verify", place)[0] == 0
    before = open_folder(place).info("report.html")
    status, out, _ = run_packer(capsys, monkeypatch, "report", place, "--dp", "2", "--json")
    assert json.loads(out)["dp_world_size"] == 2
    assert open_folder(place).info("report.html") == before
    open_object_folder(place).delete(["counts.parquet"])
    status, _, err = run_packer(capsys, monkeypatch, "report", place)
    assert (status, err.count("\n")) == (1, 1)
    assert f"no counts.parquet in {place}:" in err


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(
    ("store", "role"),
    [
        *(("s3", role) for role in ("--out", "--dataset", "--data-root", "verify", "report")),
        *(("gcs", "--out"), ("azure", "--out"), ("gcs", "verify"), ("azure", "verify")),
    ],
    indirect=["store"],
)
def test_a_place_that_cannot_be_used_is_one_line(
    place, store, dataset, tmp_path, capsys, monkeypatch, mistake, role
):
    change, bucket, expected = MISTAKES[mistake]
    for name, value in change(store).items():
        monkeypatch.setenv(name, value)
    uri = f"{store.scheme}://{bucket}/{tmp_path.name}"
    values = {"--dataset": dataset, "--data-root": dataset, "--out": tmp_path / "out", role: uri}
    arguments = [role, uri]
    if role.startswith("--"):
        tokenizer = options(dataset, uri)["tokenizer"]
        named = [text for pair in values.items() for text in pair]
        arguments = ["build", *named, "--model", "tiny", "--tokenizer", tokenizer, "--workers", "1"]
    started = time.monotonic()
    status, out, err = run_packer(capsys, monkeypatch, *arguments)
    assert (status, out) == (1, "")
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {uri}: ")
    assert expected[store.scheme] in lines[0]
    assert "Traceback" not in err
    assert time.monotonic() - started < 30
    assert not (tmp_path / "cache").exists()


def test_who_may_only_read_can_verify_and_report_but_not_write(
    place, s3, dataset, capsys, monkeypatch
):
    build(dataset, place)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.reader_key)
    forget_roots()
    assert run_packer(capsys, monkeypatch, "verify", place)[0] == 0
    status, out, err = run_packer(capsys, monkeypatch, "report", place)
    assert (status, err) == (0, "")
    assert "Isobatch" in out
    with pytest.raises(DataError, match="right to write and delete"):
        build(dataset, f"{place}/other")


def test_without_credentials_the_variables_are_named(place, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        ObjectFolder(place).names()
