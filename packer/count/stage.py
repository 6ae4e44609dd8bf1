"""The counting stage: a dataset's parts, cut into chunks, counted on processes or on a cluster,
staged in order.

Chunks are numbered through all parts, and each leaves a file of that number; so whatever counts
them, and however often it is stopped, the staged samples are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from balance.errors import DataError
from packer.count.pool import map_ordered
from packer.count.sample_counter import Counted, CountTask, sample_counter
from packer.count.staging import Staging, part_sizes
from packer.progress import StageProgress
from packer.records.record import RawRecord
from packer.sources.base import Chunk, cut
from packer.sources.dataset import Dataset, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob:
    """One chunk to count."""

    task: CountTask
    number: int
    part: int
    """Which part of the dataset it is of."""
    source: str
    data_root: str
    chunk: Chunk | None
    """None when its rows are already there."""
    blob_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountPlan:
    """How a dataset is counted."""

    task: CountTask
    chunk_records: int
    limit: int | None
    executor: str
    workers: int


def count_dataset(
    dataset: Dataset, plan: CountPlan, staging: Staging, progress: StageProgress
) -> None:
    """Count all parts of a dataset into `staging.samples`. DataError when there are no records."""
    staging.prepare()
    sources = [part.open() for part in dataset.parts]
    total = sum(info.size for source in sources for info in source.files())
    records_per_part = [0] * len(dataset.parts)
    num_chunks = 0
    with progress.stage("count", total) as stage:
        for number, part in _run(_jobs(dataset, plan, staging, stage.advance), plan, staging):
            num_chunks += 1
            num_records, _ = part_sizes(staging.part(number))
            records_per_part[part] += num_records
            stage.count(num_records)
    if sum(records_per_part) == 0:
        names = ", ".join(
            f"{part.located.folder}/{part.located.names[0]}" for part in dataset.parts
        )
        raise DataError(f"{names}: holds no records")
    staging.merge(num_chunks, records_per_part)


def count_job(job: CountJob) -> Counted:
    """The rows of a chunk that is still to count."""
    assert job.chunk is not None
    return sample_counter(job.task).count(
        job.chunk.records(), job.source, job.data_root, job.blob_name
    )


def _jobs(
    dataset: Dataset, plan: CountPlan, staging: Staging, on_bytes: Callable[[int], None]
) -> Iterator[CountJob]:
    left = plan.limit
    number = 0
    for place, part in enumerate(dataset.parts):
        limit = min((limit for limit in (left, part.limit) if limit is not None), default=None)
        records = _Counter()
        for chunk in _chunks(part, plan.chunk_records, limit, records, on_bytes):
            yield CountJob(
                task=plan.task,
                number=number,
                part=place,
                source=part.name,
                data_root=part.data_root,
                chunk=None if staging.part(number).exists() else chunk,
                blob_name=staging.blob_name(number),
            )
            number += 1
        left = None if left is None else left - records.count
        if left == 0:
            return


@dataclass(slots=True)
class _Counter:
    """Counts what passes."""

    count: int = 0

    def through(self, records: Iterator[RawRecord]) -> Iterator[RawRecord]:
        for record in records:
            self.count += 1
            yield record


def _chunks(
    part: Part,
    num_records: int,
    limit: int | None,
    counter: _Counter,
    on_bytes: Callable[[int], None],
) -> Iterator[Chunk]:
    """The chunks of a part; with a limit they are read here, for only reading tells how many
    records they hold.
    """
    chunks = part.open().chunks(num_records, on_bytes)
    if limit is None:
        return chunks
    records = islice(chain.from_iterable(chunk.records() for chunk in chunks), limit)
    return cut(counter.through(records), num_records)


def _run(jobs: Iterator[CountJob], plan: CountPlan, staging: Staging) -> Iterator[tuple[int, int]]:
    """(chunk, part of the dataset) of every job, in order, when its rows are staged."""
    if plan.executor == "ray":
        from packer.count.ray_pool import count_on_ray  # noqa: PLC0415 - an extra, needed only here

        yield from count_on_ray(jobs, staging, workers=plan.workers)
        return
    folder = str(staging.folder)
    yield from map_ordered(_count_here, ((job, folder) for job in jobs), workers=plan.workers)


def _count_here(task: tuple[CountJob, str]) -> tuple[int, int]:
    """Count a chunk and stage its rows from this process."""
    job, folder = task
    if job.chunk is not None:
        Staging(Path(folder)).save(job.number, count_job(job))
    return job.number, job.part
