"""Partitions packed by machines that share a bucket: a Ray cluster whose nodes die, and jobs."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isobatch.common.errors import DataError
from isobatch.packer.count.remainder import read_remainder
from isobatch.packer.partitions import run
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.folders import open_folder, open_object_folder
from support.builds.packed import build, digests, quiet
from support.builds.raw_data import (
    CUT,
    options,
    write_partitioned,
)

pytestmark = pytest.mark.server

CLUSTER = """
import json, random, sys, threading
from ray.cluster_utils import Cluster

def main():
    import ray
    from rich.console import Console
    from isobatch.packer import progress
    from isobatch.packer.build import Builder
    from isobatch.packer.config import BuildConfig

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    ended, draw, killed, totals = threading.Event(), random.Random(), [], []
    progress.LINE_S = 0.0
    told = progress.StageProgress(Console(file=sys.stdout, width=200))

    def pack():
        try:
            totals.append(Builder(BuildConfig(**json.loads(sys.argv[1])), told).build().totals)
        finally:
            ended.set()

    packing = threading.Thread(target=pack)
    packing.start()
    # here, for Ray begins a node in the main thread alone
    while len(killed) < 5 and not ended.wait(draw.uniform(0.3, 2)):
        victim = nodes.pop(draw.randrange(len(nodes)))
        killed.append(victim)
        cluster.remove_node(victim, allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1))
    packing.join()
    print("packed", totals[0]["num_packed"], "killed", len(killed), flush=True)
    ray.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def place(s3, monkeypatch, tmp_path):
    """A URI of the test's own."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for function in (open_folder, open_object_folder):
        function.cache_clear()
    yield f"s3://{s3.bucket}/{tmp_path.name}"
    for function in (open_folder, open_object_folder):
        function.cache_clear()


def upload(folder: Path, uri: str) -> str:
    bucket = open_object_folder(uri)
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(folder)), path)
    return uri


def found_at(uri: str, folder: Path) -> dict[str, str]:
    """Digests of all that is at a URI, but the report."""
    root = open_folder(uri)
    names = [info.name for info in root.files()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: (folder / name).write_bytes(root.read(name)), names))
    return {name: digest for name, digest in digests(folder).items() if name != "report.html"}


def test_jobs_with_work_folders_of_their_own_complete_a_build_in_a_bucket(
    raw, packed, place, tmp_path, monkeypatch
):
    source = upload(raw, f"{place}/raw")
    out = f"{place}/out"
    copies = []

    def read(folders, *others):
        copies.extend(folder for *_, folder in folders)
        return read_remainder(folders, *others)

    monkeypatch.setattr(run, "read_remainder", read)
    for share in (2, 1, 2, 3):
        work = str(tmp_path / f"machine-{share}")
        summary = build(source, out, partitions=f"{share}/3", work_dir=work, **CUT)
        assert (summary is not None) == (share == 3)
        with pytest.raises(DataError, match=r"unfinished build|finished build of other data"):
            build(source, out, partitions="1/3", work_dir=work, seed=3, **CUT)
    # what is left over may be large, so its copies are where a job works
    assert copies
    assert all(copy.is_relative_to(tmp_path / "machine-3") for copy in copies)
    assert not any(copy.exists() for copy in copies)
    found, expected = found_at(out, tmp_path / "down"), digests(packed)
    assert {*found} == {*expected}
    # the manifest names the dataset by its place
    different = {name for name in found if found[name] != expected[name]}
    assert different <= {"manifest.json"} | {f"{name}.parquet" for name in ("counts", "rejected")}
    require_intact(verify_build(out, quiet(), workers=2))


def test_packed_partitions_of_other_options_are_not_mixed_in(raw, place, tmp_path):
    out = f"{place}/out"
    work = {"work_dir": str(tmp_path / "machine")}
    assert build(raw, out, partitions="1/3", **work, **CUT) is None
    with pytest.raises(DataError, match=f"{out} holds an unfinished build of other data"):
        build(raw, out, seed=7, **work, **CUT)
    changed = write_partitioned(tmp_path / "changed")
    with pytest.raises(DataError, match="holds an unfinished build of other data"):
        build(changed, out, partitions="2/3", work_dir=str(tmp_path / "other"), **CUT)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install ray",
)
def test_nodes_of_a_ray_cluster_that_die_change_no_byte(raw, place, tmp_path):
    source = upload(raw, f"{place}/raw")
    out = f"{place}/out"
    expected = tmp_path / "expected"
    build(source, expected, **CUT)
    values = options(source, out, executor="ray", work_dir=str(tmp_path / "work"), **CUT)
    program = tmp_path / "cluster.py"
    program.write_text(CLUSTER)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with contextlib.suppress(KeyError):
        del environment["RAY_ADDRESS"]
    ran = subprocess.run(
        [sys.executable, program, json.dumps(values)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert re.search("packed 2598 killed [1-5]", ran.stdout)
    nodes = re.findall(r"^pack +\d of 3 partitions, (\d) nodes?, ", ran.stdout, re.MULTILINE)
    assert set(map(int, nodes)) <= {1, 2, 3}  # none, if all were quicker than a report
    assert re.search(r"^pack +3 of 3 partitions, 2,598 samples, ", ran.stdout, re.MULTILINE)
    assert re.search(r"^remainder +1 of 1 partitions, ", ran.stdout, re.MULTILINE)
    assert found_at(out, tmp_path / "down") == digests(expected)
