"""The default grouping's kernels, compiled or loaded while data is read.

On a machine where nobody has grouped yet, they take 3 to 4 s of a core. They go to numba's cache,
from which the process that groups then loads them, in .4 s that a thread spends while files are
written and other processes count. Without a cache it compiles them itself.
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from isobatch.balance.grouping.best_fit import fill_groups
from isobatch.balance.grouping.even_out import divide_each, group_balanced
from isobatch.balance.kernels import are_compiled, has_cache, load_compiler
from isobatch.common.types import Limits

KERNELS = (fill_groups, divide_each)
MOST_S = 120.0
"""Time after which the other process is given up."""
PROGRAM = f"from {__name__} import compile_all; compile_all()"

_process: subprocess.Popen[bytes] | None = None
_thread: threading.Thread | None = None


def begin() -> None:
    """Begin to compile what is in no cache yet."""
    global _process  # noqa: PLW0603  one is enough
    if _process is None and has_cache(KERNELS) and not are_compiled(KERNELS):
        path = os.pathsep.join(filter(None, sys.path))
        with suppress(OSError):
            # in a session of its own: Ctrl-C is for this process, whose end ends the other
            _process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )


def load() -> None:
    """Begin to load what is in the cache, beside what this process does next."""
    global _thread  # noqa: PLW0603
    if _thread is None and _process is None and are_compiled(KERNELS):
        # a process that ends, by Ctrl-C twice perhaps, does not wait for it
        _thread = threading.Thread(target=_load_all, name="isobatch-kernels", daemon=True)
        _thread.start()


def finish(say: Callable[[], None]) -> None:
    """Wait for what has begun; `say` is called if something is still to be compiled."""
    global _process, _thread
    process, _process = _process, None
    thread, _thread = _thread, None
    if thread is not None:
        thread.join()
        return
    if process is None:
        if not are_compiled(KERNELS):
            say()
        return
    if process.poll() is None:
        say()
        load_compiler()
    with process, suppress(subprocess.TimeoutExpired):
        try:
            process.wait(MOST_S)
        finally:
            process.kill()


def compile_all() -> None:
    """Compile all of them; ends with standard input."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # it takes a twentieth, for a process that lives for seconds
    _group_a_few()


def _load_all() -> None:
    with suppress(Exception):  # the process ends, or grouping itself will say what is wrong
        _group_a_few()


def _group_a_few() -> None:
    """Group a few samples, for which all kernels are needed."""
    limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    group_balanced(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)


def _end_with_parent() -> None:
    os.read(0, 1)  # not by `sys.stdin`, whose lock a process must get to end
    os._exit(1)
