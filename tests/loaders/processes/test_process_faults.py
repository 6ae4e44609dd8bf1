"""Worker processes that end, loaders that are stopped, and what cannot be sent to a worker."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader
from support import ROOT
from support.workers.worker_records import ARRAYS, Killed, Nested, Numbers, encode

MOST_S = 60
ENDS_S = 10
"""Within which processes must be gone, on a busy machine."""
GUARD = 'if __name__ == "__main__":\n    train()\n'
SCRIPT = """
import sys
from isobatch.loaders import BalancedLoader
from support.workers.worker_records import ARRAYS, Numbers, encode

def train():
    loader = BalancedLoader(
        Numbers(4000, 0.02), encode=encode, processes=1, prefetch_bytes=1 << 14, **ARRAYS
    )
    for number, step in enumerate(loader):
        if number == 2:
            pids = [worker.process.pid for worker in loader._pool._workers]
            print(*pids, flush=True)

"""


def shared_files(pids):
    """The files of /dev/shm that processes have; others come and go on a busy machine."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line}


def is_running(pid):
    """Whether a process is there, and no zombie whose parent is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_end(pids):
    deadline = time.monotonic() + ENDS_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def start(folder, text):
    script = folder / "train.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_no_process_and_no_memory(tmp_path, number):
    with start(tmp_path, SCRIPT + GUARD) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1
        shared = shared_files([process.pid, *pids])
        # Ctrl-C comes to all processes of a terminal, others to the one that was started
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=MOST_S)
    assert process.returncode == -number
    assert said.count("Traceback") == (number == signal.SIGINT)
    assert not wait_for_end(pids)
    assert not any(file.exists() for file in shared)


def test_a_killed_worker_is_named_at_once():
    loader = BalancedLoader(Killed(), encode=encode, processes=2, **ARRAYS)
    pids = [worker.process.pid for worker in loader._pool._workers]
    shared = shared_files(pids)
    with pytest.raises(DataError, match=r"killed by SIGKILL .* while it read the records .*30"):
        for _ in loader:
            pass
    with pytest.raises(DataError, match="SIGKILL"):  # nor later
        next(iter(loader))
    loader.close()
    assert not wait_for_end(pids)
    assert not any(file.exists() for file in shared)


def test_a_worker_that_is_killed_while_training_waits():
    loader = BalancedLoader(Numbers(400, 0.05), encode=encode, processes=1, **ARRAYS)
    steps = iter(loader)
    next(steps)
    (worker,) = loader._pool._workers
    killed_s = []

    def kill():
        os.kill(worker.process.pid, signal.SIGKILL)
        killed_s.append(time.monotonic())

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(DataError, match=r"isobatch worker 1 .* was killed by SIGKILL"):
        for _ in steps:
            pass
    assert time.monotonic() - killed_s[0] < ENDS_S
    loader.close()


def test_closing_ends_busy_workers():
    loader = BalancedLoader(Numbers(4000, 0.5), encode=encode, processes=1, **ARRAYS)
    pids = [worker.process.pid for worker in loader._pool._workers]
    begun = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - begun < ENDS_S
    assert not wait_for_end(pids)


def test_a_loader_that_nobody_holds_ends_its_workers():
    loader = BalancedLoader(Numbers(), encode=encode, processes=1, **ARRAYS)
    pids = [worker.process.pid for worker in loader._pool._workers]
    del loader
    gc.collect()
    assert not wait_for_end(pids)


def test_a_script_without_a_guard_gets_one_line(tmp_path):
    with start(tmp_path, SCRIPT + "train()\n") as process:
        _, said = process.communicate(timeout=MOST_S)
    assert process.returncode == 1
    assert said.count("Traceback") == 1  # of the script itself
    assert 'put what the script does under `if __name__ == "__main__":`' in said.splitlines()[-1]


def test_processes_in_a_worker_of_a_data_loader_are_refused():
    inner = torch.utils.data.DataLoader(Nested(1), num_workers=1, batch_size=None)
    assert [*inner] == [
        "processes=1 in a DataLoader's worker, which may have no processes; make the loader where "
        "training runs, or leave out processes="
    ]


class Locked(Numbers):
    """Has what cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_sent_is_named():
    options = {"encode": encode, **ARRAYS, "processes": 1}
    cases = {
        "dataset, Locked with lock (a lock), cannot be sent": (Locked(), {}),
        "transform, test_what_cannot_be_sent_is_named.<locals>.<lambda>, cannot": (
            Numbers(),
            {"transform": lambda row: row},
        ),
        "batch_transform, test_what_cannot": (Numbers(), {"batch_transform": lambda *each: each}),
        "processes is -1; it must be at least 0": (Numbers(), {"processes": -1}),
    }
    for line, (dataset, changes) in cases.items():
        with pytest.raises(ConfigError) as caught:
            BalancedLoader(dataset, **options | changes)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


class Unknown(Numbers):
    """Its module cannot be imported by a worker, as that of a notebook."""


Unknown.__module__ = "__main__"


def test_a_class_that_workers_cannot_import_is_named(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Unknown", Unknown, raising=False)
    loader = BalancedLoader(Unknown(), encode=encode, processes=1, **ARRAYS)
    with pytest.raises(ConfigError, match=r"cannot open the dataset .*Unknown.* in a module, not"):
        next(iter(loader))
    loader.close()
