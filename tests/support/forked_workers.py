"""Workers of pytest-xdist, forked from a process that has imported what they are about to run.

By itself each would import torch, transformers and all tests, which takes 10 s of a core, in a
clean clone 19 s, and 6 s more for the process that its ranks are forked from. That is done once.
"""

import atexit
import faulthandler
import gc
import os
import sys
import threading
import traceback
import warnings
from collections import deque
from contextlib import suppress
from types import ModuleType

import pytest
from _pytest.pathlib import import_path
from execnet import gateway_io
from execnet.gateway_base import Popen2IO


def start(config, count):
    """Fork so many workers, for xdist to find when it starts its own; later ones start as usual."""
    _import_tests(config)
    gc.collect()
    gc.freeze()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # all at once: xdist has a thread for each worker that it talks to
    waiting, pipes = deque(), []
    for _ in range(count):
        waiting.append(_fork(pipes))
    plain = gateway_io.create_io

    def create_io(spec, execmodel):
        if spec.popen and not spec.python and waiting:
            return _ForkedIO(*waiting.popleft(), execmodel)
        return plain(spec, execmodel)

    gateway_io.create_io = create_io


def _import_tests(config):
    """Under the names that pytest gives them; what fails is left to the workers, who say so."""
    given = [config.invocation_params.dir / each.partition("::")[0] for each in config.args]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in given:
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                if file.name in ("__main__.py", "conftest.py"):
                    continue
                _import(file, config)
        if ranks := _ranks():
            ranks.preload()


def _import(file, config):
    try:
        import_path(
            file,
            mode=config.getoption("importmode"),
            root=config.rootpath,
            consider_namespace_packages=False,
        )
    except (Exception, pytest.skip.Exception):
        # pytest leaves the part of it that ran, which a worker would take for all of it
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == str(file):
                del sys.modules[name]


def _ranks():
    """The module that starts ranks, if any of the tests does."""
    return sys.modules.get("support.ranks")


def _fork(pipes):
    """-> a worker's process id, its stdin and its stdout."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    pipes += [theirs_in, ours_out, ours_in, theirs_out]
    pid = os.fork()
    if not pid:
        status = 1
        try:
            _work(os.dup(theirs_in), os.dup(theirs_out), pipes)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for end in (theirs_in, theirs_out):
        os.close(end)
        pipes.remove(end)
    return pid, ours_out, ours_in


def _work(stdin, stdout, pipes):
    """Be what `python -c` with execnet's first line is, and end as that does."""
    for end in pipes:
        os.close(end)
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    faulthandler.cancel_dump_traceback_later()
    if ranks := _ranks():
        ranks.fork_server(leaving=(stdin, stdout))
    for number, end in enumerate((stdin, stdout)):
        os.dup2(end, number)
        os.close(end)
    with open(0, closefd=False) as first:
        exec(eval(first.readline()), vars(main))
    threading._shutdown()
    atexit._run_exitfuncs()


class _ForkedIO(Popen2IO):
    """What execnet has of a process that it started."""

    def __init__(self, pid, stdin, stdout, execmodel):
        self.pid = pid
        super().__init__(os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), execmodel)

    def wait(self):
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, 9)
