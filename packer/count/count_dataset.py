"""The counting stage: chunks counted on processes or on Ray, staged in order.

Chunks are numbered through all parts, and each leaves a file of that number. So whatever counts
them, and however often it is stopped, the staged samples are the same.

To Ray Data, chunks are sent in windows of a bounded number, and come back as tables in order. Only
this process writes the staging folder, so the nodes share nothing but the raw data and this
package. RAY_ADDRESS or an earlier `ray.init` joins a cluster, else Ray starts here with `workers`
cores.
"""

import logging
import pickle
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from isobatch.common.errors import ConfigError, DataError, IsobatchError
from isobatch.counting.sample_counter import Counted, CountJob, CountSettings, count_chunk
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.count.staging import Staging, count_staged
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.base import OnBytes, RecordChunk, cut
from isobatch.packer.sources.dataset import Dataset, no_records

WINDOW_PER_WORKER = 8
"""Chunks in flight per worker: they keep it busy while a window ends, and bound memory."""


def count_dataset(
    dataset: Dataset, settings: CountSettings, staging: Staging, progress: StageProgress
) -> None:
    """Count all parts of a dataset into `staging.samples`. DataError when there are no records."""
    staging.prepare()
    sources = [part.open() for part in dataset.parts]
    total = sum(info.size for source in sources for info in source.files())
    records_per_part = [0] * len(dataset.parts)
    num_chunks = 0
    with progress.stage("count", total) as stage:
        jobs = _jobs(dataset, settings, staging, stage.advance)
        if settings.executor == "ray":
            finished = _count_on_ray(jobs, staging, workers=settings.workers)
        else:
            tasks = ((job, str(staging.folder)) for job in jobs)
            finished = map_ordered(_count_here, tasks, workers=settings.workers)
        # (chunk, part of the dataset), in order
        for number, part in finished:
            num_chunks += 1
            num_records = count_staged(staging.part(number))
            records_per_part[part] += num_records
            stage.count(num_records)
    if sum(records_per_part) == 0:
        raise no_records(dataset)
    staging.merge(num_chunks, records_per_part)


def _jobs(
    dataset: Dataset, settings: CountSettings, staging: Staging, on_bytes: OnBytes
) -> Iterator[CountJob]:
    remaining = settings.limit
    number = 0
    for place, part in enumerate(dataset.parts):
        limits = [limit for limit in (remaining, part.limit) if limit is not None]
        chunks = part.open().chunks(settings.chunk_records, on_bytes)
        if limits:  # read here, for only reading counts records
            records = chain.from_iterable(chunk.records() for chunk in chunks)
            chunks = cut(islice(records, min(limits)), settings.chunk_records)
        for chunk in chunks:
            yield CountJob(
                settings=settings,
                number=number,
                part=place,
                source=part.name,
                data_root=part.data_root,
                chunk=None if staging.part(number).exists() else chunk,
            )
            number += 1
            if remaining is not None and isinstance(chunk, RecordChunk):
                remaining -= len(chunk.positions)
        if remaining == 0:
            return


def _count_here(task: tuple[CountJob, str]) -> tuple[int, int]:
    """Count and stage one chunk; -> (chunk, part of the dataset)."""
    job, folder = task
    if job.chunk is not None:
        Staging(Path(folder)).save(job.number, count_chunk(job))
    return job.number, job.part


# --- Ray ---


def _count_on_ray(
    jobs: Iterator[CountJob], staging: Staging, *, workers: int
) -> Iterator[tuple[int, int]]:
    """(chunk, part) of every job, in order, once staged. DataError if a node fails."""
    ray = _connect(workers)
    parallel = max(workers, int(ray.cluster_resources().get("CPU", 1)))
    while window := list(islice(jobs, parallel * WINDOW_PER_WORKER)):
        waiting = [job for job in window if job.chunk is not None]
        counted = _count_window(ray, waiting) if waiting else iter(())
        for job in window:
            if job.chunk is not None:
                staging.save(job.number, next(counted))
            yield job.number, job.part


def _connect(workers: int) -> Any:
    try:
        import ray  # noqa: PLC0415 - an extra, needed only here
        import ray.data  # noqa: PLC0415
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install 'isobatch[ray]'") from None
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            ray.init(**quiet)  # joins the cluster of RAY_ADDRESS, which knows its own cores
        except Exception:
            ray.init(address="local", num_cpus=workers, **quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)  # our own progress says what is done
    return ray


def _count_window(ray: Any, jobs: list[CountJob]) -> Iterator[Counted]:
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    rows = [{"job": pickle.dumps(job)} for job in jobs]
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(_count_row)
    try:
        for row in done.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            with pa.ipc.open_stream(row["table"]) as reader:
                yield Counted(reader.read_all(), row["blob"])
    except IsobatchError:
        raise
    except Exception as error:  # Ray wraps whatever happened on a node in types of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"counting on Ray failed: {reason[-1]}") from None


def _count_row(row: dict[str, Any]) -> dict[str, Any]:
    try:
        counted = count_chunk(pickle.loads(row["job"]))
    except IsobatchError as error:
        return {"error": pickle.dumps(error), "table": b"", "blob": b""}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, counted.table.schema) as writer:
        writer.write_table(counted.table)
    return {"error": b"", "table": sink.getvalue().to_pybytes(), "blob": counted.blob}
