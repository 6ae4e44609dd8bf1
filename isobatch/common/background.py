"""One piece of work in a daemon thread: `in_background`."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
