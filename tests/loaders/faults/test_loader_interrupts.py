"""Ctrl-C while a store stalls, and a full cache disk: real processes that end cleanly, with nothing
left of them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from support import child_env
from support.builds.remote_builds import upload, use
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.loading.fault_runs import members, of_shards
from support.ranks import launch
from support.servers import FaultyProxy

pytestmark = pytest.mark.server

PLACE = "loader-interrupts"
START_S = 120
"""For a cold, shared machine to import torch, in the DataLoader's worker once more; then the run is
killed.
"""
LET_GO_S = 30
"""The stall would take ten minutes."""
INTERPRETER_S = 60
"""For the end of an interpreter that has imported torch: seconds of computing, 15 on a busy
machine.
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("build") / "build", group_samples(make_samples(60)))


@pytest.fixture(scope="module")
def url(s3, build):
    return upload(s3, build, PLACE)


PROGRAM = """
import atexit, sys
# registered first, so called last: then only the interpreter is left
atexit.register(print, "let go", flush=True)
import torch
from torch.utils.data import DataLoader
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import StorageOptions
from isobatch.loaders.integrations.torch_dataset import StepDataset
url, cache, workers, *_ = sys.argv[1:]
torch.set_num_threads(1)
print("begins", flush=True)
loader = StreamingLoader(
    url, dp_rank=0, dp_world_size=1, workers=int(workers),
    storage=StorageOptions(cache_dir=cache, timeout_s=600),
)
if "DataLoader" in sys.argv:
    loader = DataLoader(
        StepDataset(loader), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
for _ in loader:
    pass
"""
WAYS = {
    "no workers": (["0"], of_shards("stall")),
    "two threads": (["2"], of_shards("stall")),
    "while it opens": (["2"], lambda path: "stall"),
    "a worker process": (["1", "DataLoader"], of_shards("stall")),
}


@contextlib.contextmanager
def running(*arguments):
    """A process that iterates, in a session of its own; killed at the end with all that it has
    started.
    """
    command = [sys.executable, "-c", PROGRAM, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True, env=child_env()) as child:
        killing = threading.Timer(START_S, end_session, [child.pid])
        killing.start()
        try:
            yield child
        finally:
            killing.cancel()
            end_session(child.pid)


def end_session(session):
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_during_a_stall_ends_all_at_once(s3, url, tmp_path, monkeypatch, way):
    options, fault = WAYS[way]
    with contextlib.closing(FaultyProxy(s3.endpoint, fault)) as proxy:
        use(monkeypatch, s3, proxy.endpoint)
        with running(url, str(tmp_path / "cache"), *options) as child:
            # the proxy's port may be one that a loader of another test still asks, and an interrupt
            # during an import may be lost in a library
            assert child.stdout.readline() == "begins\n"
            while not any(fault(path) and PLACE in path for path, _ in list(proxy.requests)):
                assert child.poll() is None, child.stderr.read()
                time.sleep(0.01)
            os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all processes of the run
            interrupted = time.monotonic()
            assert child.stdout.readline() == "let go\n"
            assert time.monotonic() - interrupted < LET_GO_S
            _, said = child.communicate(timeout=INTERPRETER_S)
            assert child.returncode == -signal.SIGINT
            # one traceback, also where it came while an error was handled, as in exists()
            assert said.count("Traceback") - said.count("During handling of the above") == 1
            assert said.splitlines()[-1] == "KeyboardInterrupt"
            while left := members(
                child.pid
            ):  # multiprocessing's tracker ends when it hears that the run has
                assert time.monotonic() - interrupted < INTERPRETER_S, left
                time.sleep(0.01)


FULL = """
import sys, warnings
from support.ranks import mount_disk
mount_disk(*sys.argv[4:])
import torch
from support.loading.contents import content
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import StorageOptions
def steps(url, **options):
    options |= {"workers": 2, "pixel_dtype": torch.uint8}
    loader = StreamingLoader(url, dp_rank=0, dp_world_size=1, **options)
    found = [content(step) for step in loader], loader.stats().cache_hits
    loader.close()
    return found
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    expected, _ = steps(sys.argv[1])
    for _ in range(2):
        given, hits = steps(sys.argv[2], storage=StorageOptions(cache_dir=sys.argv[3]))
        assert given == expected
print(hits > 0, *(str(one.message) for one in said if one.category is RuntimeWarning), sep="\\n")
"""


def test_a_cache_disk_that_fills_up_midway_is_said_once_per_loader_and_changes_nothing(
    s3, build, url, small_disk, tmp_path, monkeypatch
):
    disk, _ = small_disk("150k")
    use(monkeypatch, s3)
    program = tmp_path / "program.py"
    program.write_text(FULL)
    found = launch(1, tmp_path / "printed", program, build, url, disk / "cache", disk, "150k")
    assert found.returncode == 0, found.stderr
    hits, *said = found.stdout.splitlines()
    assert hits == "True"  # what was stored before the disk was full
    full = f"cache {disk}/cache: No space left on device; going on without storing more in it. "
    assert [line.startswith(full) for line in said] == [True, True]
