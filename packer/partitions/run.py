"""Partitions on processes of this machine, or on a Ray cluster.

A task packs one partition and brings it where all find it, so this process gets figures only. On
Ray, a task whose node dies runs again elsewhere, and what it brings twice is the same. RAY_ADDRESS
(`auto` on a node of one) or an earlier `ray.init` joins a cluster, else Ray starts here with
`workers` cores.
"""

import fcntl
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import pyarrow as pa

from isobatch.common.errors import ConfigError, DataError, IsobatchError, first_line
from isobatch.common.types import IntArray
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import ModelPreset
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.process_pool import HEAR_S, map_ordered, tell_leader
from isobatch.packer.count.remainder import NAMES as REMAINDER_NAMES
from isobatch.packer.count.remainder import Remainder, read_remainder
from isobatch.packer.partitions.partition import (
    CountedPartition,
    PackedPartition,
    Partition,
    PartitionJob,
    tokenizer_place,
)
from isobatch.packer.partitions.reports import PartitionReport, Reporter, Tell
from isobatch.packer.partitions.results import Results
from isobatch.packer.progress import StageProgress
from isobatch.shards.tables import COUNTS_NAME, REJECTED_NAME, read_table, write_table

Job = TypeVar("Job")
Result = TypeVar("Result")

WINDOW_PER_CORE = 2
"""Tasks that Ray has at a time: its cores stay busy, and its scheduler's memory is bounded."""
MOST_TRIES = 20
"""Times that Ray runs a task whose process or node died: one that always does must end."""


def run_jobs(
    function: Callable[[Job, Tell], Result],
    jobs: Sequence[Job],
    on_report: Tell = lambda _: None,
    *,
    executor: str,
    workers: int,
) -> Iterator[tuple[int, Result]]:
    """(place, `function(job, tell)`) of every job, as they finish; jobs have a `config`.

    `on_report` gets here what `function` tells. DataError if a worker or Ray fails.
    """
    if executor == "ray":
        single = [_with_workers(job, 1) for job in jobs]
        yield from _on_ray(function, single, on_report, workers)
        return
    at_once = max(1, min(len(jobs), workers))
    inside = max(1, workers // at_once)
    tasks = (_with_workers(job, inside) for job in jobs)
    call = partial(_call, function, on_report if at_once == 1 else tell_leader)
    yield from enumerate(map_ordered(call, tasks, workers=at_once, on_message=on_report))


def _call(function: Callable[[Job, Tell], Result], tell: Tell, job: Job) -> Result:
    return function(job, tell)


def pack_partition(job: PartitionJob, tell: Tell) -> PackedPartition:
    """Pack a partition and bring its results, unless they are there already."""
    results, number = Results(job.out, job.key), job.place
    packed = results.read(number)
    if packed is None:
        with _remainder(job, results) as remainder, _alone(job, tell, 0.5, remainder) as partition:
            packed = results.read(number)  # of another process on this machine
            if packed is None:
                packed = partition.pack()
                if remainder is not None:
                    packed = _as_remainder(packed, partition.work, remainder.positions)
                results.publish(number, packed, partition.work)
    tell(PartitionReport(number, 1.0, packed.num_samples))
    return packed


def count_partition(job: PartitionJob, tell: Tell) -> CountedPartition:
    """Only count a partition: `pack_partition` goes on from there, in the same work folder."""
    results, number = Results(job.out, job.key), job.place
    counted = results.read_counted(number)
    if counted is None:
        with _alone(job, tell, 1.0) as partition:
            counted = partition.count()
            results.save_counted(number, counted)
    tell(PartitionReport(number, 1.0, counted.num_samples))
    return counted


def _with_workers(job: Any, workers: int) -> Any:
    return replace(job, config=replace(job.config, workers=workers))


def load_tools(config: BuildConfig) -> tuple[ModelPreset, ChatTokenizer]:
    """The model and the tokenizer of a build."""
    place = tokenizer_place(config)
    return _load(config.model or DEMO_MODEL, place, config.chat_template, config.template_date)


@lru_cache(maxsize=1)
def _load(
    model: str, tokenizer: str, template: str | None, date: str | None
) -> tuple[ModelPreset, ChatTokenizer]:
    preset = find_model(model)
    return preset, ChatTokenizer.for_model(preset, tokenizer, template, date)


@contextmanager
def _remainder(job: PartitionJob, results: Results) -> Iterator[Remainder | None]:
    """What the partitions of a job for that have left over."""
    if not job.remainder_of:
        yield None
        return
    # content of files may be too much for temporary ones, and a killed run's goes with its work
    work = Path(job.work)
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folders = [
            (number, first, stack.enter_context(results.opened(number, REMAINDER_NAMES, work)))
            for number, first in job.remainder_of
        ]
        yield read_remainder(folders, job.dataset, list(job.decisions.copies or ()))


def _as_remainder(packed: PackedPartition, work: Path, positions: IntArray) -> PackedPartition:
    """A packed partition of samples that others have read; gives its tables their positions."""
    for name in (COUNTS_NAME, REJECTED_NAME):
        table = read_table(work / name)
        place = table.schema.get_field_index("position")
        column = pa.array(positions[table.column(place).to_numpy()], pa.int64())
        write_table(table.set_column(place, table.schema.field(place), column), work / name)
    return replace(packed, num_read=0, num_repeated=0, never_read={}, is_remainder=True)


@contextmanager
def _alone(
    job: PartitionJob, tell: Tell, counting: float, remainder: Remainder | None = None
) -> Iterator[Partition]:
    """The partition in a work folder of this machine, when no other process works there.

    It tells how far it is; `counting` is the part of its work that counting is.
    """
    work = Path(job.work, gethostname(), f"{job.place:05d}")
    with alone_in(work):
        model, tokenizer = load_tools(job.config)
        progress = StageProgress()
        samples = None if remainder is None else remainder.samples
        partition = Partition(replace(job, work=str(work)), model, tokenizer, progress, samples)
        is_counted = partition.staging.samples.exists()
        progress.on_change = Reporter(job.place, tell, 0.0 if is_counted else counting)
        yield partition


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in here with this folder; makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- Ray ---


def _on_ray(
    function: Callable[[Job, Tell], Result], jobs: Sequence[Job], on_report: Tell, workers: int
) -> Iterator[tuple[int, Result]]:
    ray = connect_ray(workers)
    task = ray.remote(num_cpus=1, max_retries=MOST_TRIES, scheduling_strategy="SPREAD")(_guarded)
    window = max(workers, int(ray.cluster_resources().get("CPU", 1))) * WINDOW_PER_CORE
    places: dict[Any, int] = {}
    waiting = iter(enumerate(jobs))
    news = _News(ray, on_report)
    try:
        while True:
            for place, job in islice(waiting, window - len(places)):
                places[task.remote(function, pickle.dumps(job), os.getcwd(), news.board)] = place
            if not places:
                return
            done, _ = ray.wait(list(places), timeout=HEAR_S)
            news.hear()
            for reference in done:
                result = ray.get(reference)
                if isinstance(result, bytes):
                    raise pickle.loads(result)
                yield places.pop(reference), result
    except IsobatchError:
        raise
    except Exception as error:  # Ray wraps whatever happened on a node in types of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"packing on Ray failed: {reason[-1]}") from None
    finally:
        for reference in places:
            ray.cancel(reference, force=True)


def connect_ray(workers: int) -> Any:
    """Ray, connected to a cluster. ConfigError if it is not installed."""
    try:
        import ray  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install ray") from None
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        # without an address Ray would look for one that some earlier cluster has left behind
        joins = os.environ.get("RAY_ADDRESS")
        place: dict[str, Any] = {} if joins else {"address": "local", "num_cpus": workers}
        try:
            ray.init(**place, **quiet)
        except Exception as error:
            what = f"Ray cannot join RAY_ADDRESS={joins}" if joins else "Ray cannot start"
            raise DataError(f"{what}: {first_line(error)}") from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # our own progress says what is done
    return ray


class _News:
    """What tasks tell, as it comes; an actor next to this process has it meanwhile."""

    def __init__(self, ray: Any, on_report: Tell) -> None:
        here = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
        actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=near)(_Board)
        self._ray, self._on_report = ray, on_report
        self.board = actor.remote()
        self._coming = self.board.take.remote()

    def hear(self) -> None:
        """Pass on what has come."""
        if self._ray.wait([self._coming], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):  # of an actor that died: others follow
                for report in self._ray.get(self._coming):
                    self._on_report(report)
            self._coming = self.board.take.remote()


class _Board:
    """The actor."""

    def __init__(self) -> None:
        self._latest: dict[int, PartitionReport] = {}

    def tell(self, report: PartitionReport) -> None:
        self._latest[report.place] = report

    def take(self) -> list[PartitionReport]:
        taken, self._latest = self._latest, {}
        return list(taken.values())


def _guarded(function: Callable[[Any, Tell], Any], job: bytes, folder: str, board: Any) -> Any:
    """The result, or an error of ours as bytes: Ray gives back others in types of its own.

    `folder`: current where the command was given, by which relative paths are found.
    """
    import ray  # noqa: PLC0415 - an extra

    node = ray.get_runtime_context().get_node_id()
    with suppress(OSError):  # a node may lack it
        os.chdir(folder)
    try:
        return function(
            pickle.loads(job), lambda report: board.tell.remote(replace(report, node=node))
        )
    except IsobatchError as error:
        return pickle.dumps(error)
    except OSError as error:  # a full disk, a folder that this node does not have
        return pickle.dumps(DataError(f"a node cannot pack: {first_line(error)}"))
