"""Ctrl-C and SIGTERM at any moment of a program: one line and an exit status.

While modules load, and after the work is done, a signal ends the process at once: an exception
would come out of the middle of an import, or of Python's own end, as a traceback. In between it is
raised as KeyboardInterrupt, so that the work cleans up (`StopSignals`).
"""

import atexit
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAME_PRESS_S = 1.0
"""Interrupts that come within this time of one are the same wish."""
AGAIN_S = 0.05
"""Time after which an interrupt that was lost is raised again."""


def quit_on_interrupt() -> None:
    """End the process at once, with one line, by Ctrl-C and SIGTERM from here on."""
    _set_handlers(_quit)


def _quit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # pressed again: still one line
    if os.environ.get("RANK", "0") == "0":  # one line, not one of each rank of torchrun's
        os.write(2, b"error: stopped\n")
    os._exit(128 + number)  # by the shells' convention: 130 or 143


def _set_handlers(handler: Any) -> None:
    """Set a handler for both signals, but for those that this process was told to ignore.

    A shell ignores Ctrl-C for what it runs in the background.
    """
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignals:
    """Raises KeyboardInterrupt for SIGINT and SIGTERM while a program works.

    Pressed twice at once counts once: what a second one raises in the middle of cleaning up,
    perhaps nobody can catch. One that is raised inside a destructor or a callback, where Python
    drops what is raised, is raised again.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        """The signals, in order."""
        self._again = 0.0
        self._before = sys.unraisablehook
        # what is registered first runs last: signals end nothing once only memory is left to free
        atexit.register(_set_handlers, signal.SIG_IGN)

    def begin(self) -> None:
        """Raise what comes from here on."""
        sys.unraisablehook = self._drop
        signal.signal(signal.SIGALRM, self._raise_lost)
        _set_handlers(self._raise)

    def end(self, *, has_line: bool) -> None:
        """Raise no more: a signal ends the process at once, with a line unless it has one."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._before
        _set_handlers(signal.SIG_DFL if has_line else _quit)

    def hold(self) -> None:
        """Ignore what comes until `end`: a line is being printed."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        _set_handlers(_ignore)
        # CPython ends by SIGINT, whatever the status, after a KeyboardInterrupt has come out of any
        # exec of a text, as of dataclasses and numba, also a caught one; until the next such exec
        exec("")

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        if time.monotonic() >= self._again:
            self._again = time.monotonic() + SAME_PRESS_S
            raise KeyboardInterrupt

    def _raise_lost(self, _number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _drop(self, lost: Any) -> None:
        """What Python calls with an exception that it cannot raise."""
        if self.came and isinstance(lost.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._before(lost)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, it can be told from what a shell has set."""
