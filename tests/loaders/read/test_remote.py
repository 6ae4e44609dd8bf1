"""Builds in a real S3 server: the same groups as on disk, few requests, one line per mistake,
nothing that hangs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.read import build as read_build
from isobatch.loaders.read.build import StorageOptions, open_build, open_builds
from support import child_env
from support.builds.remote_builds import IN_EVERY_STORE, client, is_as_written, upload, use
from support.builds.shard_fixture import FORMATS, group_samples, make_samples, write_build
from support.servers import FaultyProxy
from support.stores.mistakes import MISTAKES

pytestmark = pytest.mark.server

GROUPS = group_samples(make_samples(160))


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("builds")
    return {format: write_build(folder / format, GROUPS, format) for format in FORMATS}


@pytest.fixture
def environment(s3, monkeypatch):
    use(monkeypatch, s3)


@pytest.fixture
def opened(tmp_path, environment):
    """Opens a build with a cache of the test's own; closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_it(url, image_root=None, **options):
            options.setdefault("cache_dir", tmp_path / "cache")
            build = open_build(url, image_root=image_root, options=StorageOptions(**options))
            return stack.enter_context(contextlib.closing(build))

        yield open_it


def all_intact(build):
    return all(is_as_written(build.read(number), group) for number, group in enumerate(GROUPS))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 30])
def test_groups_come_as_they_were_written(s3, builds, opened, tmp_path, format, cache_bytes):
    build = opened(upload(s3, builds[format], tmp_path.name), cache_bytes=cache_bytes)
    assert all_intact(build)
    assert all_intact(build)
    build.close()  # now all is in the cache
    again = opened(build.manifest.place, cache_bytes=cache_bytes)
    assert all_intact(again)
    assert (again.shards.cache_hits == len(GROUPS)) == (cache_bytes == 1 << 30)


def test_images_of_a_refs_build_come_from_a_bucket(s3, builds, opened, tmp_path):
    images = upload(s3, builds["refs"] / "images", f"{tmp_path.name}/images")
    for url in (upload(s3, builds["refs"], tmp_path.name), builds["refs"]):
        for _ in range(2):  # from the store, then from the cache
            build = opened(url, image_root=images)
            assert all_intact(build)
            build.close()
    stored = list((tmp_path / "cache").glob("*/media-*/*"))
    assert stored
    for path in stored:
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    assert all_intact(opened(builds["refs"], image_root=images))
    name = next(f"{sample.sample_id}/0.img" for sample in GROUPS[-1] if sample.images)
    client(s3).delete(f"{tmp_path.name}/images/{name}")
    with pytest.raises(
        DataError, match=rf"sample '{name[:12]}' \(shard-.*, group .*{name} is missing"
    ):
        all_intact(opened(builds["refs"], image_root=images, cache_bytes=0))


def test_neighbours_that_are_asked_for_together_are_one_request(
    s3, builds, opened, tmp_path, monkeypatch
):
    url = upload(s3, builds["arrow"], tmp_path.name)
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        build = opened(url)
        build.read(0)
        proxy.requests.clear()
        build.shards.prefetch(range(len(GROUPS)))
        assert all_intact(build)
        assert len(proxy.requests) == len(build.manifest.shards)
        proxy.requests.clear()
        build.shards.prefetch(range(len(GROUPS)))
        assert all_intact(build)
        assert proxy.requests == []


def test_many_threads_read_at_once(s3, builds, opened, tmp_path):
    build = opened(upload(s3, builds["webdataset"], tmp_path.name))
    numbers = [*range(len(GROUPS))] * 3
    with ThreadPoolExecutor(8) as pool:
        pool.submit(build.shards.prefetch, range(0, len(GROUPS), 2))
        found = [*pool.map(build.read, numbers)]
    assert all(
        is_as_written(raw, GROUPS[number]) for raw, number in zip(found, numbers, strict=True)
    )


def test_the_index_is_fetched_when_it_is_read_and_once_per_machine(
    s3, opened, tmp_path, monkeypatch
):
    for module in ("isobatch.shards.index", "support.builds.shard_fixture"):
        monkeypatch.setattr(f"{module}.BATCH_ROWS", 4)
    url = upload(s3, write_build(tmp_path / "batched", GROUPS), tmp_path.name)
    sizes = [len(group) for group in GROUPS]
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)

        def requests():
            names = [path.rpartition("/")[2] for path, _ in proxy.requests]
            return names.count("index.arrow"), names.count("sample_ids.arrow")

        build = opened(url)
        assert requests() == (0, 0)
        build.index.column("num_samples", np.array([5, 9]))
        assert requests() == (2, 0)
        with ThreadPoolExecutor(4) as pool:
            readers = [*pool.map(lambda _: opened(url).index, range(4))]
            assert all(
                column.tolist() == sizes
                for column in pool.map(lambda index: index.column("num_samples"), readers)
            )
        assert requests() == (-(-len(GROUPS) // 4), 0)
        assert build.index.sample_ids(9) == tuple(sample.sample_id for sample in GROUPS[9])
        assert requests()[1] == 1


def test_another_build_at_the_same_place_has_an_index_of_its_own(
    s3, builds, opened, tmp_path, monkeypatch
):
    url = upload(s3, builds["arrow"], tmp_path.name)
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: opened(url).read(0), range(4)))
        assert sum(path.endswith("index.arrow") for path, _ in proxy.requests) == 1
        others = group_samples(make_samples(40, seed=1))
        upload(s3, write_build(tmp_path / "others", others), tmp_path.name)
        assert is_as_written(opened(url).read(0), others[0])


def test_a_table_of_the_build_can_be_opened(s3, builds, opened, tmp_path):
    build = opened(upload(s3, builds["arrow"], tmp_path.name))
    whole = (builds["arrow"] / "index.arrow").read_bytes()
    assert build.shards.open_file("index.arrow").read() == whole
    (cached,) = (tmp_path / "cache").glob("*/index.arrow")
    cached.write_bytes(whole[:-1] + b"x")
    assert build.shards.open_file("index.arrow").read() == whole
    assert cached.read_bytes() == whole
    with pytest.raises(DataError, match=r"lists no counts\.parquet"):
        build.shards.open_file("counts.parquet")


@IN_EVERY_STORE
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_place_that_cannot_be_used_is_one_line(store, tmp_path, monkeypatch, mistake):
    change, bucket, expected = MISTAKES[mistake]
    for name, value in change(store).items():
        monkeypatch.setenv(name, value)
    uri = f"{store.scheme}://{bucket}/nothing"
    started = time.monotonic()
    with pytest.raises(DataError) as error:
        open_build(uri, options=StorageOptions(cache_dir=tmp_path))
    assert str(error.value).startswith(uri)
    assert expected[store.scheme] in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 45


@IN_EVERY_STORE
def test_a_place_without_a_build_is_one_line(store, tmp_path, monkeypatch):
    use(monkeypatch, store)
    uri = f"{store.uri}/nothing"
    with pytest.raises(
        DataError, match=rf"^{uri}: no manifest.json, so no finished build"
    ) as error:
        open_build(uri, options=StorageOptions(cache_dir=tmp_path))
    assert "\n" not in str(error.value)


def test_without_credentials_the_variables_are_named(environment, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(
        DataError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ):
        open_build("s3://packed/x", options=StorageOptions(cache_dir=tmp_path))


def test_a_build_on_a_web_server(builds, opened, tmp_path):
    command = [sys.executable, "-u", "-c", RANGE_SERVER, str(builds["arrow"].parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            build = opened(f"{url}/arrow")
            build.shards.prefetch(range(5))
            assert all_intact(build)
            with pytest.raises(DataError, match=f"^{url}/none: no manifest"):
                opened(f"{url}/none")
        finally:
            server.kill()


RANGE_SERVER = """
import http.server, os, re, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        path = sys.argv[1] + self.path
        if not os.path.isfile(path):
            self.send_response(404); self.send_header("Content-Length", "0"); self.end_headers()
            return
        content = open(path, "rb").read()
        window = re.match(r"bytes=(\\d+)-(\\d+)", self.headers.get("Range", ""))
        start, end = (int(window[1]), int(window[2]) + 1) if window else (0, len(content))
        self.send_response(206 if window else 200)
        if window:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(content[start:end])
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port)
server.serve_forever()
"""


def test_a_forked_process_is_told_what_to_do(s3, builds, opened, tmp_path):
    url = upload(s3, builds["arrow"], tmp_path.name)
    opened(url)
    receive, send = os.pipe()
    if os.fork() == 0:
        try:
            opened(url)
        except ConfigError as error:
            os.write(send, str(error).encode())
        os._exit(0)
    os.close(send)
    assert b"multiprocessing_context='spawn'" in os.read(receive, 10_000)
    os.wait()


PROGRAM = """
import sys, threading
from isobatch.loaders.read import build as read_build
from isobatch.loaders.read.build import StorageOptions, open_build, open_builds
build = open_build(sys.argv[1], options=StorageOptions(cache_dir=sys.argv[2]))
build.shards.prefetch(range(1, len(build.index)))
print("ready", flush=True)
if sys.argv[3] == "wait":
    build.read(0)
"""


@pytest.mark.parametrize("way", ["exit", "wait"])
def test_a_process_ends_at_once_while_requests_stall(s3, builds, tmp_path, monkeypatch, way):
    url = upload(s3, builds["arrow"], tmp_path.name)
    with contextlib.closing(
        FaultyProxy(s3.endpoint, lambda path: "stall" if "shard-" in path else "")
    ) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        command = [sys.executable, "-c", PROGRAM, url, str(tmp_path / "cache"), way]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_env()
        )
        assert child.stdout.readline() == "ready\n"
        started = time.monotonic()
        if way == "wait":
            while not any(
                "shard-" in path and tmp_path.name in path for path, _ in list(proxy.requests)
            ):
                assert time.monotonic() - started < 30
            child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert time.monotonic() - started < 25
        assert ("KeyboardInterrupt" in err) == (way == "wait")
        assert child.returncode == (0 if way == "exit" else -signal.SIGINT)


def test_cancelling_wakes_readers_and_what_is_asked_afterwards_is_answered(
    s3, builds, opened, tmp_path, monkeypatch
):
    url = upload(s3, builds["arrow"], tmp_path.name)
    stalled = threading.Event()
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        build = opened(url)
        build.index.row(0, "length")  # fetched now
        proxy.fault = lambda path: stalled.set() or "stall"
        build.shards.prefetch(range(10))
        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(build.read, number) for number in (3, 28)]
            assert stalled.wait(60)
            deadline = time.monotonic() + 60
            while wait(reading, timeout=0.1).not_done:
                assert time.monotonic() < deadline
                build.cancel()  # a reader that comes only now asks again
            for future in reading:
                with pytest.raises(DataError, match="closed while"):
                    future.result()
        proxy.fault = lambda path: ""
        assert all_intact(build)


def test_closing_does_not_wait_for_a_stalled_request_and_wakes_its_reader(
    s3, builds, opened, tmp_path, monkeypatch
):
    url = upload(s3, builds["arrow"], tmp_path.name)
    stalled = threading.Event()
    with contextlib.closing(FaultyProxy(s3.endpoint)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        build = opened(url)
        proxy.fault = lambda path: stalled.set() or "stall"
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(build.read, 3)
            assert stalled.wait(60)
            started = time.monotonic()
            build.close()
            with pytest.raises(DataError, match="closed"):
                reading.result(30)
            assert time.monotonic() - started < 45
    with pytest.raises(ConfigError, match="is closed"):
        build.read(4)


@pytest.mark.parametrize("mistake", ["missing", "another model"])
def test_builds_are_closed_when_a_later_one_cannot_be_used(
    s3, builds, environment, tmp_path, monkeypatch, mistake
):
    url, other = upload(s3, builds["arrow"], f"{tmp_path.name}/first"), f"{s3.bucket}/nowhere"
    if mistake == "another model":
        folder = write_build(tmp_path / "other", GROUPS, model="llava_1_5")
        other = upload(s3, folder, f"{tmp_path.name}/other").removeprefix("s3://")
    opened, plain = [], read_build.open_build
    monkeypatch.setattr(
        read_build,
        "open_build",
        lambda *args, **kw: opened.append(plain(*args, **kw)) or opened[-1],
    )
    with pytest.raises((ConfigError, DataError), match=r"nowhere|another model"):
        open_builds([url, f"s3://{other}"], options=StorageOptions(cache_bytes=0))
    assert len(opened) == (1 if mistake == "missing" else 2)
    for build in opened:
        with pytest.raises(ConfigError, match="is closed"):
            build.read(0)
