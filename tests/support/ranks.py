"""Ranks for tests: processes that meet over gloo on this machine, forked from one that has imported
what they need.

So a rank is there in milliseconds; importing torch and transformers by itself takes longer than
most tests. The process that is forked runs nothing else: no lock can be held by a thread that its
children do not have.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import forkserver, reduction, resource_tracker, util
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = (
    "isobatch.engine.dispatching.dispatch",
    "isobatch.engine.runtime.models.transformers_models",
    "isobatch.engine.runtime.pipeline",
    "isobatch.engine.train.cli",
    "loaders",
    "isobatch.engine.cli",
    "isobatch.packer.cli",
    "pandas",
    "peft",
    "tensorboard.summary.writer",
    "torch.distributed.checkpoint",
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.llava.modeling_llava",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.trainer_pt_utils",
    "support.preloaded",
)
"""What most ranks import; a module that is not installed is left out."""

NEW_MOUNTS, NEW_USER, PRIVATE = 0x0002_0000, 0x1000_0000, 0x0004_4000
"""CLONE_NEWNS, CLONE_NEWUSER, and MS_REC | MS_PRIVATE of Linux."""

context = mp.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))


def preload():
    """Import what ranks do, for `fork_server`."""
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)


def fork_server(leaving=()):
    """Fork the process that ranks are forked from, instead of starting it: from a process without
    threads that has imported what they do. It closes the files `leaving`.
    """

    plain = util.spawnv_passfds

    def forked(path, arguments, files):
        pid = os.fork()
        if pid:
            return pid
        try:
            util.spawnv_passfds = plain  # what it spawns itself is started, not forked
            faulthandler.cancel_dump_traceback_later()
            # it ends when nobody has the other end of its pipe any more
            for file in (*leaving, *_other_end(files[-1])):
                os.close(file)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            exec(arguments[-1], {})
        finally:
            os._exit(1)

    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", forked):
        _start_server()


def _other_end(file):
    """Open files that are the same pipe."""
    for other in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if other != file and os.path.samestat(os.fstat(other), os.fstat(file)):
                yield other


class _Errors:
    """This process's stderr, for a rank: pytest's own file while a test runs."""

    def __getstate__(self):
        return reduction.DupFd(2)

    def __setstate__(self, file):
        os.dup2(file.detach(), 2)


def _start_server():
    """Ranks are told what is on the path; the process that they are forked from is not."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def meet(folder, rank, world_size):
    """Be a rank: over gloo, on one core."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )


def on_ranks(world_size, folder, work, *arguments):
    """Run `work(*arguments)` on all ranks; the first failure of any is raised. A folder for each
    call.
    """
    spawn(_work, (world_size, folder, work, arguments), nprocs=world_size)


def spawn(work, args=(), nprocs=1):
    """As `torch.multiprocessing.spawn`, for code that starts its ranks with that."""
    _start_server()
    mp.start_processes(_spawned, (_Errors(), work, args), nprocs, start_method="forkserver")


def _spawned(rank, _errors, work, arguments):
    work(rank, *arguments)


def process(work, *arguments):
    """One that will run `work(*arguments)`, forked as ranks are; not started."""
    return context.Process(target=_run, args=(_Errors(), work, arguments))


def _run(_errors, work, arguments):
    work(*arguments)


def _work(rank, world_size, folder, work, arguments):
    meet(folder, rank, world_size)
    work(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(folder: Path, world_size: int, work, *arguments, most_s: float = 90.0):
    """Run `work(say, *arguments)` on all ranks; -> what each said, by rank; None of one that was
    killed.
    """
    ranks = [
        process(_say, str(folder), rank, world_size, work, arguments) for rank in range(world_size)
    ]
    _join(_begun(ranks), most_s)
    return what_they_said(folder, world_size)


def what_they_said(folder: Path, world_size: int):
    """What `run_ranks` returned for this folder."""
    files = [folder / f"said{rank}" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _say(folder, rank, world_size, work, arguments):
    meet(folder, rank, world_size)
    said = {}
    work(said, *arguments)
    Path(folder, f"said{rank}").write_text(json.dumps(said))
    os._exit(0)  # at once, as a crashed rank does: connections are closed


def launch(
    world_size: int, folder: Path, script: Path | str, *arguments: object, most_s: float = 120.0
):
    """Run a script, or a module given by name, on all ranks as torchrun does; -> as
    `subprocess.run`.

    Sooner by what torchrun takes to import everything for itself and for each rank. `folder`: for
    what they print.
    """
    ranks = start(world_size, folder, script, *arguments)
    _join(ranks, most_s)
    status = max((process.exitcode for process in ranks), key=abs)
    printed = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([str(script), *map(str, arguments)], status, *printed)


def start(world_size: int, folder: Path, script: Path | str, *arguments: object):
    """Begin what `launch` runs; -> the ranks' processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    told |= {
        "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "test",
    }  # by which Lightning knows that all ranks run
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(script), *map(str, arguments)]
    ranks = [
        process(_launched, str(folder), command, told | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in range(world_size)
    ]
    return _begun(ranks)


def mount_disk(folder, size, *, flags=0):
    """For a program that `start` runs: from here on it sees a new disk of that size at `folder`, as
    after `unshare --mount --map-root-user`; nobody else does.

    `flags`: of Linux's mount.
    """
    # a process with a second thread stays where it is; that of the timer is on its way out
    faulthandler.cancel_dump_traceback_later()
    deadline = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare, NEW_USER | NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call(libc.mount, b"none", b"/", None, PRIVATE, None)
    _call(libc.mount, b"none", str(folder).encode(), b"tmpfs", flags, f"size={size}".encode())


def _call(function, *arguments):
    if function(*map(_argument, arguments)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _argument(value):
    return ctypes.c_ulong(value) if isinstance(value, int) else value


def kill_once(ranks, is_time, most_s: float = 60.0):
    """Kill all ranks that were started as soon as `is_time()`."""
    deadline = time.monotonic() + most_s
    try:
        while not is_time():
            assert all(rank.is_alive() for rank in ranks), "the run ended by itself"
            assert time.monotonic() < deadline, "its time did not come"
            time.sleep(0.005)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _launched(folder, command, told):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ |= {name: str(value) for name, value in told.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    sys.argv = command
    if not command[0].endswith(".py"):
        runpy.run_module(command[0], run_name="__main__")
        return
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _begun(ranks):
    _start_server()
    for process in ranks:
        process.start()
    return ranks


def _join(ranks, most_s):
    """Until all have ended; who has not by then is killed."""
    until = time.monotonic() + most_s
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join()
    assert not late, f"ranks {late} did not end"
