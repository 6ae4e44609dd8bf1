"""All partitions of a dataset, packed by this process and others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from isobatch.common.errors import DataError
from isobatch.packer.config import BuildConfig
from isobatch.packer.format_text import counted
from isobatch.packer.partitions.cut import Cut
from isobatch.packer.partitions.decide import decide_by_counts
from isobatch.packer.partitions.partition import (
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

    def packed(self) -> list[PackedPartition]:
        """All of them, after `pack`. DataError if one is gone."""
        packed = [self.results.read(number) for number in self.numbers]
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
        """Numbers of the partitions."""
        first = self.first or 0
        return range(first, first + len(self.cut.partitions))

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
            )
            for number, dataset in zip(self.numbers, self.cut.partitions, strict=True)
        ]

    def _missing(self) -> list[int]:
        return self.results.missing(self.numbers)

    def _run(
        self,
        name: str,
        function: Callable[[PartitionJob, Tell], CountedPartition | PackedPartition],
        jobs: list[PartitionJob],
        number: int,
    ) -> None:
        """Run a stage for some of `number` partitions, of which the others are done."""
        config, look = self.config, None
        if config.share:
            self.results.sign()
            look = self.results.seen
        run = partial(run_jobs, executor=config.executor, workers=config.workers)
        with self.progress.stage(name, number) as stage:
            tally = Tally(stage, number, before=number - len(jobs), look=look)
            for place, packed in run(function, jobs, tally.hear):
                tally.hear(PartitionReport(jobs[place].place, 1.0, packed.num_samples))
