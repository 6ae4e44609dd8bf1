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
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

from isobatch.common.errors import ConfigError, DataError, IsobatchError, first_line
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import ModelPreset
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.partitions.partition import (
    CountedPartition,
    PackedPartition,
    Partition,
    PartitionJob,
    tokenizer_place,
)
from isobatch.packer.partitions.results import Results
from isobatch.packer.progress import StageProgress

Job = TypeVar("Job")
Result = TypeVar("Result")

WINDOW_PER_CORE = 2
"""Tasks that Ray has at a time: its cores stay busy, and its scheduler's memory is bounded."""
MOST_TRIES = 20
"""Times that Ray runs a task whose process or node died: one that always does must end."""


def run_jobs(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, executor: str, workers: int
) -> Iterator[tuple[int, Result]]:
    """(place, `function(job)`) of every job, as they finish; jobs have a `config`.

    DataError if a worker or Ray fails.
    """
    if executor == "ray":
        yield from _on_ray(function, [_with_workers(job, 1) for job in jobs], workers)
        return
    at_once = max(1, min(len(jobs), workers))
    inside = max(1, workers // at_once)
    tasks = (_with_workers(job, inside) for job in jobs)
    yield from enumerate(map_ordered(function, tasks, workers=at_once))


def pack_partition(job: PartitionJob) -> PackedPartition:
    """Pack a partition and bring its results, unless they are there already."""
    results, number = Results(job.out, job.key), job.place
    if (packed := results.read(number)) is not None:
        return packed
    with _alone(job) as partition:
        packed = results.read(number)  # of another process on this machine
        if packed is None:
            packed = partition.pack()
            results.publish(number, packed, partition.work)
    return packed


def count_partition(job: PartitionJob) -> CountedPartition:
    """Only count a partition: `pack_partition` goes on from there, in the same work folder."""
    results, number = Results(job.out, job.key), job.place
    if (counted := results.read_counted(number)) is not None:
        return counted
    with _alone(job) as partition:
        counted = partition.count()
        results.save_counted(number, counted)
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
def _alone(job: PartitionJob) -> Iterator[Partition]:
    """The partition in a work folder of this machine, when no other process works there."""
    work = Path(job.work, gethostname(), f"{job.place:05d}")
    with alone_in(work):
        model, tokenizer = load_tools(job.config)
        yield Partition(replace(job, work=str(work)), model, tokenizer, StageProgress())


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
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int
) -> Iterator[tuple[int, Result]]:
    ray = connect_ray(workers)
    task = ray.remote(num_cpus=1, max_retries=MOST_TRIES, scheduling_strategy="SPREAD")(_guarded)
    window = max(workers, int(ray.cluster_resources().get("CPU", 1))) * WINDOW_PER_CORE
    places: dict[Any, int] = {}
    waiting = iter(enumerate(jobs))
    try:
        while True:
            for place, job in waiting:
                places[task.remote(function, pickle.dumps(job), os.getcwd())] = place
                if len(places) >= window:
                    break
            if not places:
                return
            done, _ = ray.wait(list(places))
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
        raise ConfigError("--executor ray needs Ray: pip install 'isobatch[ray]'") from None
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


def _guarded(function: Callable[[Any], Any], job: bytes, folder: str) -> Any:
    """The result, or an error of ours as bytes: Ray gives back others in types of its own.

    `folder`: current where the command was given, by which relative paths are found.
    """
    with suppress(OSError):  # a node may lack it
        os.chdir(folder)
    try:
        return function(pickle.loads(job))
    except IsobatchError as error:
        return pickle.dumps(error)
    except OSError as error:  # a full disk, a folder that this node does not have
        return pickle.dumps(DataError(f"a node cannot pack: {first_line(error)}"))
