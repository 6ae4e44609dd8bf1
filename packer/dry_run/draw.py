"""Records drawn for a dry run, counted where a temporary build is staged.

Each record is as likely as any other, wherever it is in a file. Windows at equal distances over the
bytes of a part's files are drawn, so that files whose records are sorted are seen from the first to
the last kind. What no reader can begin in the middle of is read from its beginning, and records at
equal distances are counted.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from math import ceil, inf
from pathlib import Path

from isobatch.balance.rng import PARTS, random_bits
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.staging import Staging
from isobatch.packer.partitions.cut import MIN_BYTES, records_of_parts
from isobatch.packer.partitions.decide import count_of_part
from isobatch.packer.partitions.reports import Tell
from isobatch.packer.sources.base import FilePiece
from isobatch.packer.sources.dataset import Dataset
from isobatch.packer.sources.detect import Part

SHARE = 0.02
"""Of a dataset's records, which are drawn."""
LEAST, MOST = 2048, 1 << 16
"""Records that are drawn at least, if there are so many, and about at most."""
WINDOWS, WINDOW_RECORDS = 256, 16
"""Windows of a part at most, and records of one at least."""
BATCH, BATCHES = 256, 8
"""Records that are counted together, about, and batches of a part at least."""
MOST_PIECES = 1 << 17
"""Pieces that files are cut into, about: more take long to list."""
BATCH_NUMBERS = 1 << 12
"""Numbers of batches that a job has."""
READ_SECONDS = 0.3
"""Time for which a part is read to see how long a record takes."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Records next to each other, of a part of the dataset."""

    part: Part
    """It has their pieces alone."""
    share: float
    """Of the part's records, about: what the pieces hold."""
    step: float = 1.0
    """One of so many chunks is counted."""
    phase: float = 0.0
    """Where the first of them is, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawJob:
    """Windows of a part that one process counts; plain values, for other processes."""

    config: BuildConfig
    part: int
    windows: tuple[_Window, ...]
    place: int
    """Number of the job."""
    chunk: int
    """Records of a chunk, of which some are counted."""
    batch: int
    folder: str
    """Where what is counted is staged."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Records in memory, as a chunk."""

    rows: list[RawRecord]

    def records(self) -> Iterator[RawRecord]:
        return iter(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBatch:
    """Records that were counted together."""

    part: int
    number: int
    """Of the staged file."""
    share: float
    """Of the part's records, about."""
    num_rows: int
    seconds: float
    cpu_seconds: float
    ready_at: float
    """Time of the clock at which the process was ready to count."""
    cpu_until_ready: float


def draw(dataset: Dataset, config: BuildConfig, folder: Path, times: float) -> list[DrawJob]:
    """What to count of the dataset, in its order; `times` as much as is usual."""
    records = records_of_parts(dataset)
    remaining = inf if config.limit is None else config.limit
    parts, sizes = [], []
    for part, number in zip(dataset.parts, records, strict=True):
        limit = min(remaining, inf if part.limit is None else part.limit)
        parts.append(part if limit == inf else replace(part, limit=int(limit)))
        sizes.append(min(number, limit))
        remaining -= sizes[-1]
    number = min(times * max(SHARE * sum(sizes), LEAST), MOST)
    share = number / max(sum(sizes), 1.0)
    jobs: list[DrawJob] = []
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if size < 1:
            continue
        wanted = max(share * size, times * LEAST / len(parts))
        chunk = max(WINDOW_RECORDS, int(wanted / WINDOWS))
        phase = int(random_bits(1, config.seed, PARTS, epoch=3, place=number)[0]) / 2**64
        # half of it and more is as soon read as a part of that
        windows = [_Window(part, 1.0)]
        if 2 * wanted < size:
            windows = _windows(part, wanted / size, chunk / size, phase)
        count = min(len(windows), max(BATCHES, round(wanted / BATCH)))
        # what is drawn of one window is divided, and what is drawn of several is not
        batch = 2 * BATCH if count > 1 else ceil(min(BATCH, wanted / BATCHES))
        for first in range(count):
            jobs.append(
                DrawJob(
                    config=config,
                    part=number,
                    windows=tuple(windows[first::count]),
                    place=len(jobs),
                    chunk=chunk,
                    batch=batch,
                    folder=str(folder),
                )
            )
    return jobs


def _windows(part: Part, share: float, least: float, phase: float) -> list[_Window]:
    """Windows that hold this share of a part, each `least` of it or more."""
    whole = [_Window(part, 1.0, 1 / share, phase)]
    infos = part.open().files()
    total = sum(info.size for info in infos)
    width = max(least * total, MIN_BYTES)
    gap = width / share
    if part.limit is not None or width > total / 2:
        return whole

    def drawn(piece: FilePiece, start: int) -> tuple[int, float]:
        """Window that a piece is in, or -1, and one of how many of its chunks is counted."""
        if piece.size <= 2 * width:  # by its middle, so that small ones are as likely as large ones
            window, place = divmod(start + piece.size / 2 - phase * gap, gap)
            return (int(window) + 1 if place < width else -1), 1.0
        first, last = (ceil((at - phase * gap) / gap) for at in (start, start + piece.size))
        return (first, piece.size / (width * (last - first))) if first < last else (-1, 1.0)

    files = [FilePiece(info.name, size=info.size) for info in infos]
    starts = [0, *accumulate(file.size for file in files)]
    # those that a window may reach into
    chosen = [
        (file, start)
        for file, start in zip(files, starts, strict=False)
        if drawn(file, start)[0] >= 0
        # one that is cut may have pieces in a window that begins before it
        or (file.size > 2 * width and (start - phase * gap) % gap < width)
    ]
    size = max(width, sum(file.size for file, _ in chosen) / MOST_PIECES)
    source = _only(part, tuple(file for file, _ in chosen)).open()
    pieces = source.cut(int(size))
    if pieces is None:
        return whole
    start_of = {file.name: start for file, start in chosen}
    windows: dict[int, list[FilePiece]] = {}
    large: list[_Window] = []
    for piece in pieces:
        window, step = drawn(piece, start_of[piece.name])
        start_of[piece.name] += piece.size
        if step > 1:
            large.append(_Window(_only(part, (piece,)), piece.size / total, step, phase))
        elif window >= 0 and (piece := source.aligned(piece)).size:
            windows.setdefault(window, []).append(piece)
    joined = [
        _Window(_only(part, tuple(of)), sum(piece.size for piece in of) / total)
        for of in windows.values()
    ]
    return [*joined, *large]


def _only(part: Part, pieces: tuple[FilePiece, ...]) -> Part:
    return replace(part, located=replace(part.located, pieces=pieces))


# --- in a process that counts ---


def count_drawn(job: DrawJob, _tell: Tell) -> list[DrawnBatch]:
    """Count and stage the records of a job."""
    first = job.place * BATCH_NUMBERS
    part = job.windows[0].part
    count_of_part(job.config, part, _Rows([]), first)  # loads the tokenizer
    ready_at, cpu_until_ready = time.time(), time.process_time()
    staging = Staging(Path(job.folder))
    shares: list[float] = []
    measured: list[tuple[int, float, float]] = []
    records = chain.from_iterable(_records(window, job.chunk, shares) for window in job.windows)
    for number, chunk in enumerate(_in_rows(records, job.batch), first):
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        counted = count_of_part(job.config, part, chunk, number)
        staging.save(number, counted)
        times = time.perf_counter() - seconds, time.process_time() - cpu_seconds
        measured.append((len(counted.table), *times))
    num_rows = sum(rows for rows, *_ in measured)
    return [
        DrawnBatch(
            part=job.part,
            number=first + place,
            share=sum(shares) * rows / max(num_rows, 1),
            num_rows=rows,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            ready_at=ready_at,
            cpu_until_ready=cpu_until_ready,
        )
        for place, (rows, seconds, cpu_seconds) in enumerate(measured)
    ]


def _records(window: _Window, size: int, shares: list[float]) -> Iterator[RawRecord]:
    """The records that are counted of a window, whose share of the part's is appended."""
    seen = taken = 0
    for chunk in _chunks(window, size):
        seen += 1
        if int(seen / window.step + window.phase) > taken:
            taken += 1
            yield from chunk.records()
    if taken == 0 and seen and window.part.located.pieces is None:  # chunks are large: else none
        taken = 1
        chosen = int(window.phase * seen)
        for chunk in islice(_chunks(window, size), chosen, chosen + 1):
            yield from chunk.records()
    shares.append(window.share * taken / max(seen, 1))


def _chunks(window: _Window, size: int) -> Iterator[Chunk]:
    part = window.part
    chunks = part.open().chunks(size, lambda _: None)
    # a tar is a chunk, however large
    if part.limit is None and (window.step == 1 or part.located.layout != "tar"):
        return chunks
    return _in_rows(islice((row for chunk in chunks for row in chunk.records()), part.limit), size)


def _in_rows(records: Iterator[RawRecord], size: int) -> Iterator[Chunk]:
    while rows := list(islice(records, size)):
        yield _Rows(rows)


# --- reading alone ---


def reading_seconds(part: Part, num_records: int) -> tuple[float, float]:
    """(seconds, CPU seconds) in which one process reads a record, by the first ones."""
    records = (
        row for chunk in part.open().chunks(num_records, lambda _: None) for row in chunk.records()
    )
    next(records, None)  # what comes before it is not read for each
    begun, cpu_begun = time.perf_counter(), time.process_time()
    number = 0
    for _ in records:
        number += 1
        if time.perf_counter() - begun > READ_SECONDS:
            break
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return seconds / max(number, 1), cpu_seconds / max(number, 1)
