"""Libraries of C that decode sounds, kept from writing to the terminal.

libsndfile's copy of mpg123 comments on damaged MP3 files, and has no switch for that. What is wrong
is in the error that is raised, which names the file. File descriptor 2 is not sent elsewhere: that
would hide what Python writes meanwhile.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


class _Stream:
    """C's `stderr`, a variable that Python's `sys.stderr` does not use."""

    def __init__(self) -> None:
        program = ctypes.CDLL(None)
        program.fopen.restype = ctypes.c_void_p
        self._variable = ctypes.c_void_p.in_dll(program, "stderr")
        self._own = self._variable.value
        self._null = program.fopen(os.devnull.encode(), b"w")
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._variable.value = self._own

    def enter(self) -> None:
        """Send it to nowhere, if it is not there already."""
        with self._lock:
            self._users += 1
            self._variable.value = self._null or self._own

    def leave(self) -> None:
        """Send it to the terminal again when the last one leaves."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._variable.value = self._own


@cache
def _stream() -> _Stream | None:
    try:
        return _Stream()
    except (AttributeError, OSError, TypeError, ValueError):  # not a C library with this name
        return None


@contextmanager
def quiet_sounds() -> Iterator[None]:
    """Drop what C code writes to its `stderr` meanwhile, of which Python's is no part.

    In all threads; nothing is done where the C library has no such variable.
    """
    stream = _stream()
    if stream is None:
        yield
        return
    stream.enter()
    try:
        yield
    finally:
        stream.leave()
