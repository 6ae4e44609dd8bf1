"""Ctrl-C while a program's modules still load: one line instead of a traceback.

Loading takes half a second, and Python's own answer is a traceback from wherever it was.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def quit_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the process at once, with one line, inside a `with`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # a shell ignores Ctrl-C for what it runs in the background
            signal.signal(number, _quit)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _quit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # pressed again: still one line
    # an exception would come out of the middle of an import, perhaps as another one
    if os.environ.get("RANK", "0") == "0":  # one line, not one of each rank of torchrun's
        os.write(2, b"error: stopped\n")
    os._exit(128 + number)  # by the shells' convention: 130 or 143
