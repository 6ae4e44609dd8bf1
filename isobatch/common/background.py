"""Work in daemon threads: `in_background`, `end_with_parent`."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection
from typing import TypeVar

LOOK_S = 1.0
"""Between two looks whether the parent is there, if nothing else says that it ended."""

Result = TypeVar("Result")


def in_background(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Start `function` in a thread of that name; its result, or what it raises.

    A daemon: the interpreter would wait for other threads when it ends, and the function may wait
    for another rank.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def end_with_parent() -> None:
    """Let this process exit when its parent ends, also if that was killed, in the middle of work.

    Nothing then writes into what another run goes on with.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        # a fork of the parent may hold the other end open, so the number is looked at too
        while os.getppid() == parent.pid and not connection.wait([parent.sentinel], LOOK_S):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
