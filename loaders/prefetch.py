"""Prefetching: `Prefetcher` makes coming steps in threads, in order.

For the loader; knows nothing of batches. Threads, not processes: decoding and resizing release the
GIL, and nothing is copied. They also ask for the next step, so the training thread plans nothing.
Quick steps are left to the training thread: Python threads that never wait halve one another's
speed.

Bounded: at most `max_bytes` of work is done or in progress, but at least one step, and at most
STEPS_PER_WORKER steps per thread. The first step is given when its own parts are done. Threads end
with `close`, at exit, and when the prefetcher, to which they hold no reference, is collected.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Subject = TypeVar("Subject")
Result = TypeVar("Result")

STEPS_PER_WORKER = 4
"""Two for each thread to work on, and as many done: steps differ in size."""
JOIN_S = 30.0
"""Limit of waiting for parts in progress when closing, above storage's own limits."""
SIGNAL_S = 1.0
"""Longest wait: a signal that comes just before a wait begins is heard when it ends."""
CANCEL_AGAIN_S = 0.2
"""Time after which parts that still wait are cancelled again."""


class PrefetchTask(NamedTuple, Generic[Subject, Result]):
    """The work of one step."""

    subject: Subject
    """Object that is returned with the results."""
    parts: Sequence[Callable[[], Result]]
    """Functions to run in any order, each once, in any thread."""
    num_bytes: int
    """Approximate size of the results."""
    is_quick: bool = False
    """Whether its parts neither wait nor decode: the consumer's thread makes it when it is due."""


class Prefetcher(Generic[Subject, Result]):
    """Iterating gives each task's subject and results, in order.

    A part's error is raised where its step was due. `workers=0` runs everything in the caller's
    thread, when it is asked for. Not for several consumers at a time. `cancel` is called when
    closing: it wakes parts that wait for a store, so that none of them is waited for long.
    """

    def __init__(
        self,
        tasks: Iterator[PrefetchTask[Subject, Result]],
        *,
        workers: int,
        max_bytes: int,
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks, self._num_workers = tasks, workers
        self._queue = _Queue(tasks, max_bytes, max_steps=STEPS_PER_WORKER * workers)
        self._threads = [
            # daemons: for others the interpreter would wait before `weakref.finalize` stops them
            threading.Thread(target=self._queue.work, name=f"isobatch-{worker}", daemon=True)
            for worker in range(workers)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._queue, self._threads, cancel)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[tuple[Subject, list[Result]]]:
        return self

    def __next__(self) -> tuple[Subject, list[Result]]:
        if not self._finalizer.alive:
            raise StopIteration
        if os.getpid() != self._queue.pid:
            raise RuntimeError("this iterator's threads ended with a fork; make a new iterator")
        try:
            if self._num_workers == 0:
                return _run(next(self._tasks))
            return self._queue.get()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads and drop what they made; waits for at most one part per thread."""
        self._finalizer()


@dataclass(slots=True)
class _Slot(Generic[Subject, Result]):
    """A step in progress."""

    task: PrefetchTask[Subject, Result]
    taken: int = 0
    """Parts that a thread has taken."""
    results: dict[int, Result] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether all results are there, or an error and all before it; or whether it is quick."""
        if self.task.is_quick:
            return True
        first_error = min(self.errors, default=len(self.task.parts))
        return all(part in self.results for part in range(first_error))


class _Queue(Generic[Subject, Result]):
    """State that threads and consumer share."""

    def __init__(
        self, tasks: Iterator[PrefetchTask[Subject, Result]], max_bytes: int, max_steps: int
    ) -> None:
        self._tasks, self._max_bytes, self._max_steps = tasks, max_bytes, max_steps
        self.pid = os.getpid()
        # held while a thread takes a part or asks for the next step, never during a part's work
        self._pulling = threading.Lock()
        self._changed = threading.Condition()
        self._slots: deque[_Slot[Subject, Result]] = deque()  # steps not yet given, oldest first
        self._num_bytes = 0  # of all slots
        self._ended: BaseException | None = None  # why no step follows those in the slots
        self._closed = False
        # whether a quick step was next: then threads wait, and the consumer asks for the next ones
        self._is_paused = False

    def work(self) -> None:
        """What each thread does: one part after another."""
        while True:
            with self._pulling:
                taken = self._take()
            if taken is None:
                return
            slot, part = taken
            try:
                result, error = slot.task.parts[part](), None
            except BaseException as raised:
                result, error = None, raised
            with self._changed:
                if error is not None:
                    slot.errors[part] = error
                else:
                    slot.results[part] = result  # type: ignore[assignment]
                self._changed.notify_all()
            del slot, taken, result, error  # nothing is kept alive while waiting for the next part

    def get(self) -> tuple[Subject, list[Result]]:
        """The oldest step's results when they are there; or its first error, or StopIteration."""
        with self._changed:
            while not (self._slots and self._slots[0].is_due):
                if self._is_paused and not self._slots:
                    self._add(next(self._tasks))
                    continue
                if not self._slots and self._ended is not None:
                    raise self._ended
                if self._closed:
                    raise StopIteration
                self._changed.wait(SIGNAL_S)
            slot = self._slots.popleft()
            self._num_bytes -= slot.task.num_bytes
            if not self._is_paused:
                self._changed.notify_all()
        if slot.task.is_quick:
            return _run(slot.task)
        if slot.errors:
            raise slot.errors[min(slot.errors)]
        return slot.task.subject, [slot.results[part] for part in range(len(slot.task.parts))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self) -> tuple[_Slot[Subject, Result], int] | None:
        """A part of the newest step, or of the next one within the limits; None at the end."""
        with self._changed:
            slot = self._slots[-1] if self._slots else None
        while slot is None or slot.taken == len(slot.task.parts) or slot.task.is_quick:
            slot = self._pull()
            if slot is None:
                return None
        slot.taken += 1
        return slot, slot.taken - 1

    def _pull(self) -> _Slot[Subject, Result] | None:
        """The next step, once the limits allow it."""
        if self._closed or self._ended is not None:
            return None
        try:
            task = next(self._tasks)
        except BaseException as error:
            with self._changed:
                self._ended = error
                self._changed.notify_all()
            return None
        with self._changed:
            while self._slots and not self._closed and self._is_full(task.num_bytes):
                self._changed.wait()
            if self._closed:
                return None
            slot = self._add(task)
            while self._is_paused and not self._closed:
                self._changed.wait()
            # of several steps the consumer has added one that is not quick
            return None if self._closed else self._slots[-1] if self._slots else slot

    def _add(self, task: PrefetchTask[Subject, Result]) -> _Slot[Subject, Result]:
        slot = _Slot(task)
        self._slots.append(slot)
        self._num_bytes += task.num_bytes
        was_paused, self._is_paused = self._is_paused, task.is_quick
        if not (was_paused and self._is_paused):
            self._changed.notify_all()  # a step without any part is done already
        return slot

    def _is_full(self, num_bytes: int) -> bool:
        return len(self._slots) >= self._max_steps or self._num_bytes + num_bytes > self._max_bytes


def _run(task: PrefetchTask[Subject, Result]) -> tuple[Subject, list[Result]]:
    return task.subject, [part() for part in task.parts]


def _stop(
    queue: _Queue[Any, Any], threads: Sequence[threading.Thread], cancel: Callable[[], None]
) -> None:
    if os.getpid() != queue.pid:
        return  # a forked copy has none of the threads, and a lock that one held is never free
    queue.close()
    cancel()
    deadline = time.monotonic() + JOIN_S
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(CANCEL_AGAIN_S)
        if time.monotonic() > deadline:
            return
        cancel()  # again: a thread may have been about to ask the store
