"""All partitions of a dataset, packed by this process and others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from isobatch.common.errors import DataError
from isobatch.packer.config import BuildConfig
from isobatch.packer.format_text import counted
from isobatch.packer.partitions.cut import Cut, without_pieces
from isobatch.packer.partitions.decide import decide_by_counts
from isobatch.packer.partitions.partition import (
    REMAINDER_GROUPS,
    CountedPartition,
    Decisions,
    PackedPartition,
    PartitionJob,
)
from isobatch.packer.partitions.reports import PartitionReport, Tally, Tell
from isobatch.packer.partitions.results import Results
from isobatch.packer.partitions.run import count_partition, pack_partition, run_jobs
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.dataset import Dataset
from isobatch.shards.tables import REJECTED_NAME, read_table

REMAINDER = "remainder"
"""Stage of what partitions leave over."""
PER_REMAINDER = 256
"""Partitions at most whose remainders are packed as one, by one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """The partitions of a dataset, and where their results go."""

    config: BuildConfig
    dataset: Dataset
    cut: Cut
    results: Results
    work: str
    """Folder for what is unfinished."""
    progress: StageProgress
    first: int | None
    """Number of the first partition; None: there is only one, which has none."""

    def pack(self, decisions: Decisions, *, count_first: bool) -> str:
        """Pack what is not packed yet; -> what others have still to do, empty if nothing.

        `count_first`: count all before one is grouped, for what depends on the counts of all.
        Partitions of other shares (`--partitions`) are left to these.
        """
        jobs = self._jobs(decisions)
        first, step = self.config.share or (0, 1)
        mine = range(first, len(jobs), step)
        if count_first:
            self._run("count", count_partition, [jobs[place] for place in mine], len(mine))
            found = [self.results.read_counted(job.place) for job in jobs]
            known = [of for of in found if of is not None]
            if len(known) < len(found):
                missing = len(found) - len(known)
                return (
                    f"counted; {missing:,} of {len(found):,} partitions are not counted yet, and"
                    " shares or kept columns need all: run this command again after the others"
                )
            decided = decide_by_counts(decisions, self.config, self.dataset, known)
            jobs = [replace(job, decisions=of) for job, of in zip(jobs, decided, strict=True)]
        missing_numbers = set(self._missing())
        todo = [jobs[place] for place in mine if jobs[place].place in missing_numbers]
        self._run("pack", pack_partition, todo, len(mine))
        if not (others := self._missing()):
            return ""
        return (
            f"packed: {counted(len(mine), 'partitions')}; not yet: {len(others):,} of all"
            f" {len(jobs):,}: whoever finishes last completes the build"
        )

    def finish(self, decisions: Decisions) -> list[PackedPartition]:
        """Pack what they have left over, after `pack`; -> all. DataError if one is gone."""
        packed = self._read(self._partitions)
        if not self._remainders:
            return packed
        missing = set(self.results.missing(self._remainders))
        jobs = [job for job in self._remainder_jobs(decisions, packed) if job.place in missing]
        self._run(REMAINDER, pack_partition, jobs, len(self._remainders))
        return packed + self._read(self._remainders)

    def _read(self, numbers: range) -> list[PackedPartition]:
        packed = [self.results.read(number) for number in numbers]
        known = [of for of in packed if of is not None]
        if len(known) < len(packed):
            raise DataError(
                f"{self.results.out}: a packed partition is gone; run the same command again"
            )
        return known

    def rejected(self) -> Iterator[pa.Table]:
        """The rejected samples of each."""
        for number in self.numbers:
            with self.results.opened(number, [REJECTED_NAME]) as folder:
                yield read_table(folder / REJECTED_NAME)

    @property
    def numbers(self) -> range:
        """Numbers of the partitions, and then of what they leave over."""
        return range(self._partitions.start, self._partitions.stop + len(self._remainders))

    @property
    def _partitions(self) -> range:
        first = self.first or 0
        return range(first, first + len(self.cut.partitions))

    @property
    def _remainders(self) -> range:
        number, start = len(self.cut.partitions), self._partitions.stop
        return range(start, start + (-(-number // PER_REMAINDER) if number > 1 else 0))

    def _remainder_jobs(
        self, decisions: Decisions, packed: list[PackedPartition]
    ) -> Iterator[PartitionJob]:
        """A job for each run of partitions, all of about equal length."""
        firsts = np.cumsum([0, *(of.num_read for of in packed)]).tolist()
        borders = np.linspace(0, len(packed), len(self._remainders) + 1).astype(int).tolist()
        extras = next((of.extras for of in packed if of.extras), {})
        for number, (start, stop) in zip(self._remainders, pairwise(borders), strict=True):
            leaving = [place for place in range(start, stop) if packed[place].remainder]
            sizes = np.zeros(len(self.dataset.parts), np.int64)
            for place in leaving:
                sizes += packed[place].remainder
            yield PartitionJob(
                config=self.config,
                dataset=without_pieces(self.dataset),
                number=number,
                work=self.work,
                out=self.results.out,
                key=self.results.key,
                decisions=replace(decisions, extras=extras, copies=tuple(sizes.tolist())),
                is_checked_later=True,
                remainder_of=tuple((self._partitions[place], firsts[place]) for place in leaving),
            )

    def _jobs(self, decisions: Decisions) -> list[PartitionJob]:
        return [
            PartitionJob(
                config=self.config,
                dataset=dataset,
                number=None if self.first is None else number,
                work=self.work,
                out=self.results.out,
                key=self.results.key,
                decisions=decisions,
                is_checked_later=True,
                leave=REMAINDER_GROUPS if self._remainders else 0,
            )
            for number, dataset in zip(self._partitions, self.cut.partitions, strict=True)
        ]

    def _missing(self) -> list[int]:
        return self.results.missing(self._partitions)

    def _run(
        self,
        name: str,
        function: Callable[[PartitionJob, Tell], CountedPartition | PackedPartition],
        jobs: list[PartitionJob],
        number: int,
    ) -> None:
        """Run a stage for some of `number` partitions, of which the others are done."""
        config, look = self.config, None
        if config.share and name != REMAINDER:
            self.results.sign()
            look = self.results.seen
        run = partial(run_jobs, executor=config.executor, workers=config.workers)
        with self.progress.stage(name, number) as stage:
            tally = Tally(stage, number, before=number - len(jobs), look=look)
            for place, packed in run(function, jobs, tally.hear):
                tally.hear(PartitionReport(jobs[place].place, 1.0, packed.num_samples))
