"""Kernels compiled by one process at a time: `install`, for all processes of a test run.

In a clean clone numba's cache is empty, and all of them want the same kernels at the same time.
Without this each compiled them for itself, which took a fifth of the run, and processes that saved
two signatures of a kernel at once lost one of them. Ends with the process, however it ends.
"""

import fcntl
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

_held: set[Path] = set()


def install():
    """Let this process compile, or load, a kernel only while no other one does."""
    plain = Dispatcher.compile

    @wraps(plain)
    def compile_alone(self, signature):
        if isinstance(self._cache, NullCache):
            return plain(self, signature)
        # numba's own lock first: nobody waits for a file's lock with another thread holding that
        with global_compiler_lock, _alone(Path(self._cache.cache_path, f"{self.__name__}.lock")):
            return plain(self, signature)

    Dispatcher.compile = compile_alone


@contextmanager
def _alone(path):
    if path in _held:  # a kernel that calls itself
        yield
        return
    with path.open("w") as file:
        # of the process, so that none that it forks keeps it
        fcntl.lockf(file, fcntl.LOCK_EX)
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
