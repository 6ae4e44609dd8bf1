"""Counting on Ray Data: the same chunks and bytes as on local processes.

Chunks are sent in windows of a bounded number, and come back as tables in order. Only this process
writes the staging folder, so the nodes share nothing but the raw data and this package. RAY_ADDRESS
or an earlier `ray.init` joins a cluster, else Ray starts here with `workers` cores.
"""

import logging
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from isobatch.common.errors import ConfigError, DataError, IsobatchError
from isobatch.counting.sample_counter import Counted, CountJob, count_chunk
from isobatch.packer.count.staging import Staging

WINDOW_PER_WORKER = 8
"""Chunks in flight per worker: they keep it busy while a window ends, and bound memory."""


def count_on_ray(
    jobs: Iterator[CountJob], staging: Staging, *, workers: int
) -> Iterator[tuple[int, int]]:
    """(chunk, part) of every job, in order, once staged. DataError if a node fails."""
    ray = _connect(workers)
    parallel = max(workers, int(ray.cluster_resources().get("CPU", 1)))
    while window := list(islice(jobs, parallel * WINDOW_PER_WORKER)):
        waiting = [job for job in window if job.chunk is not None]
        counted = _count(ray, waiting) if waiting else iter(())
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


def _count(ray: Any, jobs: list[CountJob]) -> Iterator[Counted]:
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
