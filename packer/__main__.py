"""Where the `packer` command begins, and `python -m packer`: a Ctrl-C while its modules load is one
line too.

Loading them takes half a second, in which Python's own answer to Ctrl-C is a traceback from
wherever it was.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Load the command, and run it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # a shell ignores Ctrl-C for what it runs in the background
            signal.signal(number, leave)
    from packer.cli import main as run  # noqa: PLC0415 - this is what takes long

    for number, handler in before.items():
        signal.signal(number, handler)
    run()


def leave(_number: int, _frame: FrameType | None) -> None:
    """Signal handler: end at once. An exception would come out of the middle of an import, perhaps
    as another one.
    """
    os.write(2, b"error: stopped\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":  # not in a worker process, which loads this file too
    main()
