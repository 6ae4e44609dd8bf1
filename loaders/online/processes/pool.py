"""`WorkerPool`: processes that count records and transform micro-batches.

For datasets and functions in Python, which hold the interpreter's lock: in threads they run one at
a time. Workers are spawned, so nothing of this process's threads, locks or CUDA is copied. A thread
per worker hands it one task at a time; what training waits for goes first.
"""

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import connection as connections
from multiprocessing import resource_tracker, util
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from isobatch.common.errors import Cancelled, ConfigError, DataError, IsobatchError, first_line
from isobatch.common.types import IntArray
from isobatch.counting.record_counter import CountedRecords
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.online.per_rank.streams import StreamRecords
from isobatch.loaders.online.processes import messages
from isobatch.loaders.online.processes.worker import Reply, WorkerSetup, run
from isobatch.loaders.online.records import Records
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.loaders.transforms import SampleSeeds
from isobatch.shards.stored_group import StoredGroup

AHEAD = 2
"""Tasks of measuring for each worker: one in work, one that waits."""
TASK_S, FIRST_RECORDS, MIN_RECORDS = 0.4, 8, 4
"""Seconds that counting the records of a task should take, how many there are before that is known,
and at least. A task of 4 costs a millisecond per record, one of 32 a quarter of that.
"""
LOOK_S = 1.0
"""Between two looks whether a worker is there, if nothing else says that it ended."""
STOP_S = 1.0
"""For workers to finish what they are at when a loader is closed; then they are killed."""
NAME = "isobatch worker"
MADE_AGAIN = 78
"""Exit status of a worker whose script makes the loader again."""
NAMED = 8
"""Records and samples of a task that a message names."""
_AS_THREADS = "or leave out processes=, as threads need no copy"

Counted = tuple[CountedRecords, int]
"""Records, and the bytes of a row of their arrays."""


class WorkerPool:
    """`size` workers, with a dataset and a counter each. Of no use in a fork of this process."""

    def __init__(self, setup: WorkerSetup, size: int) -> None:
        """ConfigError if `setup` cannot be sent to them."""
        parcel = _packed(setup)
        self._size, self._queue = size, _Queue()
        self._workers: list[_Worker] = []
        # called before multiprocessing waits for processes at exit, and not in a fork
        self._finalizer = util.Finalize(self, _stop, (self._queue, self._workers), exitpriority=1)
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # starting it clears the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:  # workers inherit the mask, until they answer signals themselves
            for number in range(1, size + 1):
                connection, other_end = context.Pipe()
                name, arguments = f"{NAME} {number}", (other_end, number, size)
                process = context.Process(target=run, args=arguments, name=name, daemon=True)
                process.start()
                other_end.close()  # else this process would not notice that the worker ended
                self._workers.append(_Worker(process, connection, parcel))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for worker in self._workers:
            serve = partial(_serve, self._queue, worker)
            threading.Thread(target=serve, name=NAME, daemon=True).start()

    def records_per_task(self, most: int, left: int) -> int:
        """How many of `left` records to count together, at most `most`.

        By the time that others took, and fewer at the end, where workers wait for the last one.
        """
        record_s = self._queue.record_s
        number = FIRST_RECORDS if record_s is None else int(TASK_S / max(record_s, 1e-6))
        return min(most, max(MIN_RECORDS, min(number, left // (AHEAD * self._size))))

    def count(
        self, chunks: Iterable[IntArray], records: Records, *, is_awaited: bool
    ) -> Iterator[Counted]:
        """Chunks of records counted, in order; `is_awaited`: by training, so before others.

        Chunks are asked for when workers can take them. Raises what counting raises; DataError if
        a worker has ended; Cancelled after `close`.
        """
        waiting: deque[Future[Counted]] = deque()
        try:
            for chunk in chunks:
                # a stream is read here, once and in order
                items = records.take_items(chunk) if isinstance(records, StreamRecords) else None
                what = f"it read the records {_names(chunk.tolist())}"
                task = _Task("count", (chunk, items), what, len(chunk), Future())
                self._queue.put(task, is_awaited=is_awaited)
                waiting.append(task.future)
                if len(waiting) >= AHEAD * self._size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def make(
        self, raw: StoredGroup, totals: StepTotals, seeds: SampleSeeds, are_padded: bool
    ) -> MicroBatch:
        """As `make_batch`. Raises as `count`."""
        what = f"it decoded the samples {_names(raw.sample_ids)}"
        task = _Task("make", (raw, totals, seeds, are_padded), what, 0, Future())
        self._queue.put(task, is_awaited=True)
        batch: MicroBatch = task.future.result()
        return batch

    def cancel(self) -> None:
        """End what training waits for, but for tasks that workers are at."""
        self._queue.cancel()

    def close(self) -> None:
        """End the workers, in a second if they are busy. Safe to call twice."""
        self._finalizer()


def require_processes(size: int) -> None:
    """ConfigError if this process cannot have worker processes."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise ConfigError(
            f"processes={size} in a DataLoader's worker, which may have no processes; make the "
            "loader where training runs, or leave out processes="
        )
    if getattr(process, "_inheriting", False):  # its script is imported just now
        if process.name.startswith(NAME):
            raise SystemExit(MADE_AGAIN)  # the first process says why
        raise ConfigError(_made_again())


def _made_again() -> str:
    return (
        "processes=: each worker imports your script, which makes the loader again; put "
        'what the script does under `if __name__ == "__main__":`'
    )


class _Task(NamedTuple):
    """Something for one worker to do."""

    name: str
    """Method of `Worker`."""
    args: tuple[Any, ...]
    what: str
    """For messages."""
    num_records: int
    future: Future[Any]


class _Queue:
    """Tasks that no worker has taken, shared by the threads of all workers."""

    def __init__(self) -> None:
        self.record_s: float | None = None
        """Seconds that a record takes a worker, as far as is known."""
        self.num_open = 0
        """Workers that have opened the dataset."""
        self._changed = threading.Condition()
        self._awaited, self._ahead = deque[_Task](), deque[_Task]()
        self._ended: Exception | None = None  # why no task is taken any more

    def put(self, task: _Task, *, is_awaited: bool) -> None:
        with self._changed:
            if self._ended is not None:
                raise self._ended
            (self._awaited if is_awaited else self._ahead).append(task)
            self._changed.notify()

    def take(self) -> _Task | None:
        """The next task when there is one; None at the end."""
        with self._changed:
            while self._ended is None:
                if tasks := self._awaited or self._ahead:
                    task = tasks.popleft()
                    if task.future.set_running_or_notify_cancel():
                        return task
                else:
                    self._changed.wait()
        return None

    def note_time(self, seconds: float, num_records: int) -> None:
        """Note what a task took: the mean, of late ones mostly."""
        if num_records:
            record_s = seconds / num_records
            before = record_s if self.record_s is None else self.record_s
            self.record_s = 0.75 * before + 0.25 * record_s

    def cancel(self) -> None:
        """Drop the tasks that training waits for."""
        with self._changed:
            for task in self._awaited:
                task.future.cancel()
            self._awaited.clear()

    def end(self, why: Exception) -> None:
        """Take no task any more; the first reason holds."""
        with self._changed:
            if self._ended is None:
                self._ended = why
            for task in (*self._awaited, *self._ahead):
                if task.future.set_running_or_notify_cancel():
                    task.future.set_exception(self._ended)
            self._awaited.clear()
            self._ahead.clear()
            self._changed.notify_all()

    def fail(self, task: _Task | None, why: Exception) -> None:
        """End by what became of a task's worker."""
        self.end(why)
        if task is not None:
            task.future.set_exception(self._ended)


class _Worker:
    """A process, from this side."""

    def __init__(
        self, process: SpawnProcess, connection: connections.Connection, setup: messages.Parcel
    ) -> None:
        self.process, self._connection = process, connection
        self._setup: messages.Parcel | None = setup

    def open(self) -> Reply:
        """Send the setup; EOFError or OSError if the process has ended."""
        setup, self._setup = self._setup, None  # it may be the whole dataset
        assert setup is not None
        messages.send(self._connection, setup)
        return self._reply()

    def run(self, task: _Task) -> Reply:
        """What becomes of a task; EOFError or OSError if the process has ended."""
        try:
            parcel = messages.pack((task.name, task.args))
        except Exception as error:  # of items of a stream
            why = f"{type(error).__name__}: {first_line(error)}"
            return Reply(
                None,
                DataError(f"what {task.what} needs cannot be sent to it ({why}); {_AS_THREADS}"),
            )
        messages.send(self._connection, parcel)
        return self._reply()

    def close(self) -> None:
        """Let the process end when its task is done."""
        self._connection.close()

    def death(self, what: str) -> IsobatchError:
        """How the process ended, during `what`."""
        self.process.join(LOOK_S)
        status = self.process.exitcode
        if status == MADE_AGAIN:
            return ConfigError(_made_again())
        how = "closed its connection" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            how = f"was killed by {name}" + " (often: out of memory)" * (name == "SIGKILL")
        return DataError(
            f"{self.process.name} (process {self.process.pid}) {how} while {what}; mend the "
            "dataset or use fewer processes=, and resume from the last state"
        )

    def _reply(self) -> Reply:
        ends: list[Any] = [self._connection, self.process.sentinel]
        # a process that was forked meanwhile may hold the other ends open
        while not (ready := connections.wait(ends, LOOK_S)) and self.process.is_alive():
            pass
        if self._connection not in ready and not self._connection.poll():
            raise EOFError
        reply: Reply = messages.receive(self._connection)
        return reply


def _serve(queue: _Queue, worker: _Worker) -> None:
    """Give a worker one task after another."""
    task, what = None, "it opened the dataset"
    try:
        if (error := worker.open().error) is not None:
            queue.end(_cannot_open(error))
            return
        queue.num_open += 1
        while (task := queue.take()) is not None:
            what = task.what
            reply = worker.run(task)
            queue.note_time(reply.seconds, task.num_records)
            if reply.error is None:
                task.future.set_result(reply.result)
            else:
                task.future.set_exception(reply.error)
            del reply
            task = None  # nothing is kept alive while waiting for the next
    except (EOFError, OSError):
        queue.fail(task, worker.death(what))
    finally:
        worker.close()


def _stop(queue: _Queue, workers: list[_Worker]) -> None:
    queue.end(Cancelled("the loader was closed"))
    deadline = time.monotonic() + STOP_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _cannot_open(error: BaseException) -> Exception:
    """What a worker's error means, where this process could open the dataset."""
    if isinstance(error, IsobatchError):
        return error
    why = f"{type(error).__name__}: {first_line(error)}"
    return ConfigError(
        f"a worker process cannot open the dataset ({why}); define classes and functions in a "
        f"module, not in a notebook, {_AS_THREADS}"
    )


def _packed(setup: WorkerSetup) -> messages.Parcel:
    """What all workers are sent; ConfigError names what cannot be."""
    try:
        return messages.pack(setup)
    except Exception as error:  # whatever an object's own __reduce__ raises
        why = error
    named: dict[str, Any] = {"dataset": setup.dataset}
    for name in ("transform", "encode", "processor"):
        named[name] = getattr(setup.packing, name)
    for name in ("image_transform", "batch_transform"):
        named[name] = getattr(setup.config, name)
    name, value = next(((k, v) for k, v in named.items() if not _can_go(v)), ("options", setup))
    kind = getattr(value, "__qualname__", type(value).__name__)
    attributes = getattr(value, "__dict__", {})
    if wrong := [f"{k} (a {type(v).__name__})" for k, v in attributes.items() if not _can_go(v)]:
        kind += f" with {wrong[0]}"
    raise ConfigError(
        f"{name}, {kind}, cannot be sent to worker processes ({first_line(why)}); define it at the "
        f"top of a module, and open files and connections when they are used, {_AS_THREADS}"
    )


def _can_go(value: Any) -> bool:
    try:
        messages.pack(value)
    except Exception:
        return False
    return True


def _names(names: Sequence[object]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(str, names[:NAMED])) + more
