"""What a worker process does: `run`, one task after another.

It opens the dataset and a counter of its own, and answers until its parent closes the connection or
is no more.
"""

import os
import pickle
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection as connections
from multiprocessing import util
from typing import Any, NamedTuple

import numpy as np
import torch

from isobatch.common.background import end_with_parent
from isobatch.common.errors import DataError, IsobatchError, first_line
from isobatch.common.types import IntArray
from isobatch.counting.record_counter import BrokenRecord, CountedRecords
from isobatch.loaders.batch.collate import make_batch
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.online._open_counter import open_counter
from isobatch.loaders.online._place_records import open_records
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.processes import messages
from isobatch.loaders.online.records import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What workers open, the same for all."""

    dataset: Any
    """None of a stream, which only the parent reads."""
    packing: PackingConfig
    config: LoaderConfig
    as_files: bool
    """Whether records give pictures as files."""


class Reply(NamedTuple):
    """What became of a task."""

    result: Any
    error: BaseException | None = None
    seconds: float = 0.0
    """That it took."""


class Worker:
    """The tasks."""

    def __init__(self, setup: WorkerSetup, number: int, size: int) -> None:
        """Of `size` workers this is `number`, from 1."""
        packing, config = setup.packing, setup.config
        self._config = config
        if setup.dataset is None:
            self._records = Records([], packing.transform, as_files=setup.as_files)
        else:
            self._records = open_records(setup.dataset, packing, config, shows=False)
            self._records.as_files = setup.as_files
        self._counter = open_counter(packing, config, self._records.places)
        self._counter.name_blobs(number, size + 1)  # the parent's counter has the others
        # now, not with the first task: what counting imports
        self._counter.count(np.zeros(1, np.int64), [BrokenRecord("")])

    def count(self, samples: IntArray, items: list[Any] | None) -> tuple[CountedRecords, int]:
        """Count records, of a stream its `items`; -> them, and bytes of a row of their arrays."""
        records, counter = self._records, self._counter
        values = records.take(samples) if items is None else records.transformed(items)
        counted = counter.count(samples, values)
        # as views they travel next to the pickle
        blobs = {name: memoryview(blob) for name, blob in counted.blobs.items()}
        return replace(counted, blobs=blobs), counter.row_bytes

    def make(self, *args: Any) -> MicroBatch:
        """Decode a group: a micro-batch; `args` are those of `make_batch` after the config."""
        return make_batch(self._counter.model, self._config, *args)


def run(connection: connections.Connection, number: int, size: int) -> None:
    """Open what comes first, then answer tasks."""
    end_with_parent()
    # after what multiprocessing itself leaves to do at exit
    util.Finalize(None, _leave, exitpriority=-1)
    _leave_signals_to_parent()
    torch.set_num_threads(1)  # there are as many processes as are wanted
    try:
        setup: WorkerSetup = messages.receive(connection)
        seed = setup.config.seed, setup.config.ranks()[0], number
        _seed(np.random.SeedSequence(seed))
        worker = Worker(setup, number, size)
        del setup
        reply = Reply(None)
    except BaseException as error:
        reply = Reply(None, _sendable(error))
    with suppress(EOFError, OSError):  # the parent has ended, or wants no more
        messages.send(connection, messages.pack(reply))
        while reply.error is None:
            task, args = messages.receive(connection)
            messages.send(connection, _answer(worker, task, args))
            del args


def _answer(worker: Worker, task: str, args: Any) -> messages.Parcel:
    begun = time.perf_counter()
    try:
        result = getattr(worker, task)(*args)
        return messages.pack(Reply(result, seconds=time.perf_counter() - begun))
    except BaseException as error:  # also SystemExit, of the user's code
        return messages.pack(Reply(None, _sendable(error)))


def _sendable(error: BaseException) -> BaseException:
    """The error, or one in its place that can be pickled; of a mistake, with where it was made."""
    where = "".join(traceback.format_exception(error))
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
        if not isinstance(copy, Exception):
            raise TypeError
    except Exception:
        copy = DataError(f"{type(error).__name__}: {first_line(error)}")
    if not isinstance(copy, IsobatchError):
        copy.add_note(f"in a worker process:\n{where}")
    return copy


def _seed(sequence: np.random.SeedSequence) -> None:
    """Random numbers that differ from worker to worker, as a DataLoader's do."""
    words = sequence.generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])  # of the user's code
    torch.manual_seed(int(words[2]))


def _leave() -> None:
    """Exit at once: the interpreter would take most of a second, and `close` waits for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_signals_to_parent() -> None:
    """A terminal sends Ctrl-C, and a scheduler SIGTERM, to all processes: the parent answers.

    Functions, since programs that a dataset starts would inherit that signals are ignored. Until
    now they were blocked.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
