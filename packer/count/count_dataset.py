"""The counting stage: chunks counted on processes, staged in order.

Chunks are numbered through all parts, and each leaves a file of that number. So whatever counts
them, and however often it is stopped, the staged samples are the same.
"""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from isobatch.counting.sample_counter import CountJob, CountSettings, count_chunk
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.count.staging import Staging, count_staged
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.base import OnBytes, RecordChunk, cut
from isobatch.packer.sources.dataset import Dataset, no_records
from isobatch.shards.folders import is_uri

QUICK_BYTES = 1 << 20
"""Bytes of records that this process counts alone: a second, as long as processes take to start."""


def count_dataset(
    dataset: Dataset,
    settings: CountSettings,
    staging: Staging,
    progress: StageProgress,
    *,
    may_be_empty: bool = False,
) -> None:
    """Count all parts of a dataset into `staging.samples`. DataError when there are no records."""
    staging.prepare()
    sources = [part.open() for part in dataset.parts]
    total = sum(piece.size for source in sources for piece in source.pieces())
    records_per_part = [0] * len(dataset.parts)
    num_chunks = 0
    with progress.stage("count", total) as stage:
        jobs = _jobs(dataset, settings, staging, stage.advance)
        tasks = ((job, str(staging.folder)) for job in jobs)
        # (chunk, part of the dataset), in order
        workers = 1 if is_quick(dataset, settings, total) else settings.workers
        for number, part in map_ordered(_count_here, tasks, workers=workers):
            num_chunks += 1
            num_records = count_staged(staging.part(number))
            records_per_part[part] += num_records
            stage.count(num_records)
    if sum(records_per_part) == 0 and not may_be_empty:
        raise no_records(dataset)
    staging.merge(range(num_chunks), records_per_part)


def is_quick(dataset: Dataset, settings: CountSettings, total: float) -> bool:
    """Whether this process has counted everything before another one could begin."""
    places = {place for part in dataset.parts for place in (part.data_root, part.located.folder)}
    is_remote = any(map(is_uri, places))
    return total <= QUICK_BYTES and not (is_remote or settings.decode_images or settings.map)


def _jobs(
    dataset: Dataset, settings: CountSettings, staging: Staging, on_bytes: OnBytes
) -> Iterator[CountJob]:
    remaining = settings.limit
    number = 0
    for place, part in enumerate(dataset.parts):
        if part.located.pieces == ():
            continue
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
