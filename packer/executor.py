"""Run a function over many tasks on local processes: results in order, a bounded number in flight.

Order is what makes a build independent of the number of workers; the bound is what keeps its memory flat.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeVar

from balance.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

IN_FLIGHT_PER_WORKER = 2


def default_workers() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_ordered(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    workers: int,
) -> Iterator[Result]:
    """`function(task)` for every task, yielded in the order of the tasks.

    With one worker everything runs in this process. At most `IN_FLIGHT_PER_WORKER` tasks per worker are read ahead.
    Raises DataError when a worker process dies.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    # spawn: a forked child would inherit the tokenizer's and Arrow's threads in an unknown state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_die_with_parent) as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                pending.append(pool.submit(function, task))
                if len(pending) >= workers * IN_FLIGHT_PER_WORKER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process died (often: out of memory);"
                " run the same command again with fewer --workers to continue"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _die_with_parent() -> None:
    """Watch the parent from a thread: a killed build must leave no process behind that still writes into its output."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
