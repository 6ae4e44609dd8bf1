"""A function over many tasks on local processes: results in order, bounded.

The order makes a build independent of the number of workers; the bound limits its memory.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar

from isobatch.common.background import end_with_parent
from isobatch.common.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

IN_FLIGHT_PER_WORKER = 2
HEAR_S = 0.5
"""Between two looks at what workers tell."""

_leader: "connection.Connection | None" = None
"""Of a worker: the pipe to the process that has started it."""


def default_workers() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_ordered(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    workers: int,
    on_message: Callable[[Any], None] = lambda _: None,
) -> Iterator[Result]:
    """`function(task)` for every task, yielded in the order of the tasks.

    With one worker everything runs in this process. At most `IN_FLIGHT_PER_WORKER` tasks per worker
    are read ahead. Raises DataError when a worker process dies. `on_message` gets what workers
    `tell_leader`, here, while a result is waited for.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    # spawn: a forked child would inherit the tokenizer's and Arrow's threads in an unknown state
    context = multiprocessing.get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    os.set_blocking(told.fileno(), False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(told,))

    def next_result() -> Result:
        first = pending.popleft()
        is_done = False
        while not is_done:
            is_done = bool(wait([first], HEAR_S).done)
            while heard.poll():  # also what was told before the result, if nobody had time before
                on_message(heard.recv())
        return first.result()

    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with _uninterrupted() as came:  # a worker may start here
                pending.append(pool.submit(function, task))
            _deliver(came)
            if len(pending) >= workers * IN_FLIGHT_PER_WORKER:
                yield next_result()
        while pending:
            yield next_result()
    except BrokenProcessPool:
        hint = "run the same command again with fewer --workers to continue"
        raise DataError(f"a worker process died (often: out of memory); {hint}") from None
    finally:
        # Python 3.11 would hang if futures were cancelled one by one while a worker dies, or if a
        # second Ctrl-C came in the middle of this.
        with _uninterrupted() as came:
            pool.shutdown(cancel_futures=True)
        heard.close()
        told.close()
        # A caller that left early stops already: what is raised then, nobody can catch.
        if sys.exc_info()[0] is not GeneratorExit:
            _deliver(came)


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Delay Ctrl-C and SIGTERM; gives the list of those that came.

    A terminal sends Ctrl-C to all processes. Workers that start in here inherit the mask: only this
    process answers, and stops them. Other threads receive signals too, so a mask is not enough.
    """
    came: list[int] = []
    # multiprocessing would start it with the first worker, and clear the mask then
    resource_tracker.ensure_running()
    handlers = {}
    # no other thread may set handlers, or runs them
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, lambda number, _: came.append(number))
        yield came
    finally:
        # first: what has waited belongs to the list too
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)


def _deliver(came: list[int]) -> None:
    """Let the handler of the first signal that came act now."""
    if came:
        signal.raise_signal(came[0])


def tell_leader(message: Any) -> None:
    """Give a worker's message of less than 4,000 bytes to the process that has started it.

    Such a message is in the pipe as a whole or not at all, so no lock is needed that a killed
    worker could keep. A full pipe takes none.
    """
    if _leader is not None:
        with suppress(OSError):
            _leader.send(message)


def _begin(leader: connection.Connection) -> None:
    global _leader  # noqa: PLW0603  a worker has one
    _leader = leader
    end_with_parent()
