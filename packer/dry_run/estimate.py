"""A small build of drawn records, and what the whole one would be.

The drawn records are counted, staged, grouped and written by the functions of a build, in a
temporary folder. They go into groups as often as makes a partition of a usual size, since few
samples fill groups less. Some of these groups are written.
"""

import time
from dataclasses import asdict, dataclass, replace
from math import ceil
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.balance.grouping import compile_ahead
from isobatch.balance.grouping.caps import GroupOptions, over_limits
from isobatch.balance.metrics import fill
from isobatch.common.types import FloatArray, IntArray, Limits
from isobatch.counting.records.reject_reasons import BY_CHOICE
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.count_dataset import is_quick
from isobatch.packer.count.mixture_sampling import copies_per_sample
from isobatch.packer.count.process_pool import default_workers
from isobatch.packer.count.staging import split_staged, staged_extras
from isobatch.packer.dry_run.draw import DrawnBatch, count_drawn, draw, reading_seconds
from isobatch.packer.dry_run.forecast import Drawn
from isobatch.packer.group import group_counts
from isobatch.packer.partitions.cut import Cut, cut_dataset
from isobatch.packer.partitions.decide import decide_limits
from isobatch.packer.partitions.partition import (
    COMPILES,
    ROWS_NAME,
    Decisions,
    PackedPartition,
    Partition,
    PartitionJob,
    count_settings,
    no_values,
)
from isobatch.packer.partitions.run import run_jobs
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import count_rejected, nothing_to_pack
from isobatch.packer.sources.dataset import no_records
from isobatch.packer.write.write_shards import sample_bytes
from isobatch.shards.folders import naming_full_disk
from isobatch.shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    read_table,
)

POPULATION = 1 << 16
"""Samples that are grouped at most: more do not fill groups better."""
WRITTEN_BYTES = 64 << 20
"""Bytes of samples that are written, about."""
WIDEST, MOST_TIMES = 0.08, 5.0
"""Half of a 95 % interval for which more is drawn, and how much more at most."""
CLUSTER = (16, 64, 256, 1024)
"""Workers of a cluster that a time is shown for, where there are as many partitions."""
BUSY = 0.8
"""Share of its time that counting computes, where nothing disturbs it."""
FEW = 64
"""Samples that are grouped first, so that the compiler's time is told apart."""
TOO_LONG, TOO_LARGE = "longer_than_max_seq_len", "more_than_max_vision"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersTime:
    """What a number of workers would take."""

    workers: int
    seconds: float
    core_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a build would give and take."""

    num_drawn: int
    """Records that were counted."""
    num_batches: int
    """Batches of them; intervals are by the spread between these."""
    num_read: int
    num_repeated: int
    num_packed: int
    num_rejected: int
    rejected: dict[str, int]
    """Reason -> samples, most frequent first."""
    num_groups: int
    fill: float
    limits: Limits
    limits_explained: list[str]
    num_bytes: int
    num_partitions: int
    stages: dict[str, float]
    """Stage -> seconds of one process for the whole dataset."""
    startup_seconds: float
    """Seconds for processes, tokenizer and compiler, whatever the dataset."""
    seconds: float
    """Seconds of the whole command, with its own workers."""
    cpu_seconds: float
    workers: list[WorkersTime]
    """One, those of the command, and those of clusters that the partitions are enough for."""
    intervals: dict[str, float]
    """Figure -> half of its 95 % interval, as a share of it; groups only if their caps are sure."""
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"limits": self.limits.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Drawn records that are counted and staged."""

    drawn: Drawn
    ends: IntArray
    """Where each batch ends among the staged samples."""
    samples: pa.Table
    rejected: pa.Table
    ready_seconds: float
    """Until a process could count."""
    ready_cpu: float
    is_alone: bool
    """Whether that was this process."""
    merge_seconds: float

    def in_batches(self, rows: pa.Table, values: Any = None) -> FloatArray:
        """Number, or sum of values, of rows of each batch."""
        return np.bincount(self.batch_of(rows), values, len(self.ends)).astype(float)

    def batch_of(self, rows: pa.Table) -> IntArray:
        """Batch of each row."""
        positions = rows.column("position").to_numpy()
        return np.asarray(np.searchsorted(self.ends, positions, "right"))

    def with_loads(self, loads: dict[str, FloatArray]) -> Drawn:
        """The batches, with the sums of these over their samples."""
        sums = {name: self.in_batches(self.samples, of) for name, of in loads.items()}
        return replace(self.drawn, loads=sums)

    @property
    def interval(self) -> float:
        """Half of the widest 95 % interval of tokens, vision and bytes, as a share."""
        names = ("seq_len", "num_image_patches", "num_vit_tokens")
        loads = {name: self.samples.column(name).to_numpy() for name in names}
        loads["bytes"] = sample_bytes(self.samples)
        sure = self.with_loads(loads).intervals()
        return max(sure[name] for name in loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """What came of the samples that were grouped."""

    copies: list[int]
    """Samples of each part of the dataset that went into groups, copies included."""
    limits: Limits
    limits_explained: list[str]
    num_samples: int
    """In groups."""
    num_groups: int
    fill: float
    full_by: str
    """The load that groups are full of: `tokens` or `vision`."""
    load: float
    """Sum of that."""
    written: float
    """Bytes of the samples that were written, as `sample_bytes` has them."""
    shard_bytes: int
    table_bytes: float
    """For all samples in groups."""
    seconds: dict[str, float]
    """Stage -> seconds."""
    cpu_seconds: dict[str, float]
    caps_seconds: tuple[float, float]
    """(seconds, CPU seconds) of grouping that more samples would not add to."""


def estimate_build(
    config: BuildConfig, progress: StageProgress, *, price: float | None = None
) -> Estimate:
    """What a build would give and take; leaves nothing. Errors as of the build.

    `price`: of a core for an hour.
    """
    begun = time.process_time()
    with TemporaryDirectory(prefix="packer-dry-run-") as folder, naming_full_disk(folder):
        local = replace(
            config,
            out=f"{folder}/out",
            data_root=None if config.is_demo else config.data_root,
            executor="local",
            workers=min(config.workers, default_workers()),
            partitions=None,
            fetch_annotations=False,
        )
        return _Trial(config, Builder(local), progress, begun).estimate(price)


class _Trial:
    """A small build of drawn records."""

    def __init__(
        self, asked: BuildConfig, builder: Builder, progress: StageProgress, begun: float
    ) -> None:
        """`begun`: CPU seconds that the process has taken until here."""
        self.asked, self.builder, self.progress = asked, builder, progress
        self.config = builder.config
        (builder.out / "shards").mkdir(parents=True)
        self.dataset = builder.find()
        self.begun = self.startup = self.startup_cpu = begun
        self.are_caps_sure = True
        self.notes: list[str] = []

    def estimate(self, price: float | None) -> Estimate:
        """All figures."""
        config = self.config
        cut = cut_dataset(self.dataset, config.partition_samples, config.seed, limit=config.limit)
        counted = self._count(1)
        if counted.interval > WIDEST:
            counted = self._count(min((counted.interval / WIDEST) ** 2, MOST_TIMES))
        samples, rejected, ends = counted.samples, counted.rejected, counted.ends
        packed = self._pack(cut, counted)
        loads = _loads(samples, packed.limits, with_media=config.format != "refs")
        weights = self._weights(counted, packed.copies)
        drawn = counted.with_loads({name: of * weights for name, of in loads.items()})

        # samples and groups
        whole, sure = drawn.totals(), drawn.intervals()
        usable, wanted = drawn.wanted()
        surplus = np.rint(usable) - wanted
        reasons = {name: whole[name] for name in (TOO_LONG, TOO_LARGE)}
        reasons["not_drawn"] = np.maximum(surplus, 0).sum()
        for reason in rejected.column("reason").unique().to_pylist():
            rows = rejected.filter(pc.equal(rejected.column("reason"), reason))
            reasons[reason] = drawn.in_parts(counted.in_batches(rows)).sum()
        num_read, num_packed = round(whole["num_rows"]), round(whole["num_packed"])
        num_repeated = int(np.maximum(-surplus, 0).sum())
        self._note_rejected(reasons, num_read)
        if (computing := whole["cpu_seconds"] / max(whole["seconds"], 1e-9)) < BUSY:
            self.notes.append(
                f"counting computed {computing:.0%} of its time, and waited else, for other"
                " programs on this machine or for storage: times on a free machine may be that much"
                " less"
            )

        # bytes and times
        scale = num_packed / packed.num_samples
        bytes_scale = whole["num_bytes"] / packed.written
        reading, reading_cpu = self._reading(drawn)
        scales = {"group": scale, "write": bytes_scale, "tables": scale}
        stages = {"read": reading, "count": whole["seconds"]}
        stages |= {name: packed.seconds[name] * of for name, of in scales.items()}
        caps_seconds, caps_cpu = packed.caps_seconds
        stages["group"] -= caps_seconds * (scale - 1)
        merging = counted.merge_seconds * num_read / ends[-1]
        stages["tables"] += merging
        cpu_seconds = reading_cpu + whole["cpu_seconds"] + merging
        cpu_seconds += sum(packed.cpu_seconds[name] * of for name, of in scales.items())
        cpu_seconds -= caps_cpu * (scale - 1)
        num_bytes = round(packed.shard_bytes * bytes_scale + packed.table_bytes * scale)
        self._note_start(counted, len(cut.partitions), ceil(num_bytes / (config.shard_mb << 20)))
        cpu_seconds += self.startup_cpu
        times = self._times(stages, len(cut.partitions), price)
        counting = sure["seconds"] * stages["count"] + sure["num_bytes"] * stages["write"]
        return Estimate(
            num_drawn=int(ends[-1]),
            num_batches=len(ends),
            num_read=num_read,
            num_repeated=num_repeated,
            num_packed=num_packed,
            num_rejected=num_read + num_repeated - num_packed,
            rejected={
                reason: round(number)
                for reason, number in sorted(reasons.items(), key=lambda pair: -pair[1])
                if round(number)
            },
            num_groups=round(packed.num_groups * whole[packed.full_by] / packed.load),
            fill=packed.fill,
            limits=packed.limits,
            limits_explained=packed.limits_explained,
            num_bytes=num_bytes,
            num_partitions=len(cut.partitions),
            stages=stages,
            startup_seconds=self.startup,
            seconds=times[0].seconds,
            cpu_seconds=cpu_seconds,
            workers=times,
            intervals={
                "num_packed": sure["num_packed"],
                "num_bytes": sure["num_bytes"],
                "seconds": counting / (sum(stages.values()) + self.startup),
                **({"num_groups": sure[packed.full_by]} if self.are_caps_sure else {}),
            },
            notes=self.notes,
        )

    def _count(self, times: float) -> _Counted:
        """Draw, count and stage, `times` as much as is usual."""
        staging, config = self.builder.staging, self.config
        staging.remove()
        staging.prepare()
        jobs = draw(self.dataset, config, staging.folder, times)
        begun, cpu_begun = time.time(), time.process_time()
        batches: list[DrawnBatch] = []
        is_alone = min(len(jobs), config.workers) <= 1
        with self.progress.stage("draw", len(jobs), unit="records") as stage:
            for _, of in run_jobs(count_drawn, jobs, executor="local", workers=config.workers):
                batches += of
                stage.advance(1)
                stage.count(sum(batch.num_rows for batch in of))
        if not batches:
            raise no_records(self.dataset)
        ready = min(batches, key=lambda batch: batch.ready_at)
        num_rows = np.array([batch.num_rows for batch in batches])
        parts = np.array([batch.part for batch in batches])
        merging = time.perf_counter()
        records = np.bincount(parts, num_rows, len(self.dataset.parts)).astype(int).tolist()
        staging.merge([batch.number for batch in batches], records)
        samples, rejected, _ = split_staged(staging.samples)
        merging = time.perf_counter() - merging
        if len(samples) == 0:
            raise nothing_to_pack(count_rejected([rejected]))
        names = ("num_rows", "seconds", "cpu_seconds")
        counted = _Counted(
            drawn=Drawn(
                dataset=self.dataset,
                parts=parts,
                shares=np.array([batch.share for batch in batches]),
                usable=np.zeros(len(batches)),
                costs={
                    name: np.array([getattr(of, name) for of in batches], float) for name in names
                },
            ),
            ends=np.cumsum(num_rows),
            samples=samples,
            rejected=rejected,
            ready_seconds=ready.ready_at - begun,
            # a process of its own has done nothing else before
            ready_cpu=ready.cpu_until_ready - cpu_begun * is_alone,
            is_alone=is_alone,
            merge_seconds=merging,
        )
        usable = counted.in_batches(samples)
        return replace(counted, drawn=replace(counted.drawn, usable=usable))

    def _note_start(self, counted: _Counted, num_partitions: int, num_shards: int) -> None:
        """Add what it takes until processes count, and those that write."""
        config, builder = self.config, self.builder
        begun = self.begun * counted.is_alone
        seconds, cpu_seconds = counted.ready_seconds + begun, counted.ready_cpu + begun
        settings = count_settings(config, builder.model, builder.tokenizer)
        size = sum(piece.size for part in self.dataset.parts for piece in part.open().pieces())
        is_single = num_partitions == 1
        if config.workers == 1 or (is_single and is_quick(self.dataset, settings, size)):
            self.startup += counted.ready_seconds
            self.startup_cpu += counted.ready_cpu
        else:
            self.startup += seconds
            self.startup_cpu += cpu_seconds * config.workers
        # shards of a single partition are written by other processes than have counted
        if is_single and (writers := min(config.workers, num_shards)) > 1:
            self.startup += seconds
            self.startup_cpu += cpu_seconds * writers

    def _pack(self, cut: Cut, counted: _Counted) -> _Packed:
        """Group the drawn samples, as often as a partition has them, and write some groups."""
        config, builder, drawn, samples = self.config, self.builder, counted.drawn, counted.samples
        begun, cpu_begun = time.perf_counter(), time.process_time()
        compile_ahead.finish(lambda: self.progress.note(COMPILES))
        few = counts_arrays(samples.slice(0, FEW))
        group_counts(
            few, GroupOptions(), vision_unit=builder.model.vision_unit, context_len=1 << 31
        )
        self.startup += time.perf_counter() - begun
        self.startup_cpu += time.process_time() - cpu_begun
        decisions = Decisions()
        has_cap = config.max_seq_len is not None and config.memory_gib is None
        if len(cut.partitions) > 1 and not (has_cap and config.max_vision is not None):
            begun = time.perf_counter()
            with self.progress.stage("caps", None) as stage:
                decisions = decide_limits(cut, config, stage.count)
            self.startup += time.perf_counter() - begun
            self.startup_cpu += (time.perf_counter() - begun) * config.workers
        elif not (has_cap or drawn.is_whole):
            self.are_caps_sure = False
            self.notes.append(
                f"caps are by the {len(samples):,} drawn samples, and those of the build by all: a"
                " longer one may make larger and fewer groups. Give --max-seq-len to be sure"
            )
        keep = config.kept_columns
        extras = staged_extras(builder.staging.samples, keep) if keep else {}
        if missing := [name for name in keep if name not in extras]:
            if drawn.is_whole:
                raise no_values(missing, self.dataset)
            self.notes.append(f"no drawn record has a value in {', '.join(missing)}")
        _, wanted = drawn.wanted()
        most = min(POPULATION, config.partition_samples) / max(wanted.sum(), 1)
        copies = np.rint(wanted * min(1.0, most)).astype(int).tolist()
        job = PartitionJob(
            config=replace(config, workers=1),
            dataset=self.dataset,
            number=None,
            work=str(builder.out),
            out=str(builder.out),
            decisions=replace(decisions, extras=extras, copies=tuple(copies)),
            most_bytes=WRITTEN_BYTES,
            is_checked_later=True,
        )
        progress = StageProgress()
        partition = Partition(job, builder.model, builder.tokenizer, progress)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        result = partition.pack()
        seconds, cpu_seconds = progress.seconds, progress.cpu_seconds
        for times, took in (
            (seconds, time.perf_counter() - begun),
            (cpu_seconds, time.process_time() - cpu_begun),
        ):
            times["tables"] = took - times["group"] - times["write"]
        return self._measured(partition, result, seconds, cpu_seconds)

    def _weights(self, counted: _Counted, copies: list[int]) -> FloatArray:
        """How often each drawn sample went into groups, against the mean of its part.

        Caps are by those that did, so nothing is known of others.
        """
        parts = counted.drawn.parts[counted.batch_of(counted.samples)]
        times = copies_per_sample(self.dataset, parts, self.config.seed, copies)
        size = len(copies)
        means = np.bincount(parts, times, size) / np.maximum(np.bincount(parts, minlength=size), 1)
        return times / np.maximum(means[parts], 1e-9)

    def _measured(
        self,
        partition: Partition,
        result: PackedPartition,
        seconds: dict[str, float],
        cpu_seconds: dict[str, float],
    ) -> _Packed:
        """The figures of a packed partition of which some groups are written."""
        out, limits = self.builder.out, Limits(**result.limits)
        grouping, counts = partition.grouping, read_table(out / COUNTS_NAME)
        if grouping is None or len(grouping.groups) == 0:
            raise nothing_to_pack(count_rejected([read_table(out / REJECTED_NAME)]))
        groups, arrays = grouping.groups, counts_arrays(counts)
        loads = {"tokens": limits.llm_load(arrays), "vision": limits.vision_load(arrays)}
        sums = {name: int(of[groups.samples].sum()) for name, of in loads.items()}
        caps = {"tokens": limits.max_seq_len, "vision": max(limits.max_vision, 1)}
        full_by = max(sums, key=lambda name: sums[name] / caps[name])
        written = groups.take(np.arange(result.index.num_groups)).samples
        if lost := len(written) - result.index.sums["num_samples"]:
            self.notes.append(f"{lost:,} of {len(written):,} samples could not be written")
        # the index and the sample ids are what the rows have
        tables = [(out / name).stat().st_size for name in (COUNTS_NAME, GROUPS_NAME)]
        rows_size = (out / "staging" / ROWS_NAME).stat().st_size
        per_written = len(groups.samples) / max(len(written), 1)
        in_shards = sample_bytes(counts, with_media=self.config.format != "refs")
        return _Packed(
            copies=list(partition.job.decisions.copies or ()),
            limits=limits,
            limits_explained=result.limits_explained,
            num_samples=len(groups.samples),
            num_groups=len(groups),
            fill=fill(groups, loads["tokens"], limits.max_seq_len),
            full_by=full_by,
            load=max(sums[full_by], 1),
            written=int(in_shards[written].sum()),
            shard_bytes=sum(shard["size"] for shard in result.shards),
            table_bytes=sum(tables) + rows_size * per_written,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            caps_seconds=grouping.caps_seconds,
        )

    def _reading(self, drawn: Drawn) -> tuple[float, float]:
        """(seconds, CPU seconds) in which one process reads all records."""
        total = np.zeros(2)
        for part, number in zip(
            self.dataset.parts, drawn.in_parts(drawn.costs["num_rows"]), strict=True
        ):
            if number:
                total += np.array(reading_seconds(part, self.config.chunk_records)) * number
        return float(total[0]), float(total[1])

    def _note_rejected(self, reasons: dict[str, float], num_read: int) -> None:
        bad = sum(number for reason, number in reasons.items() if reason not in BY_CHOICE)
        if bad > self.config.max_rejected * num_read:
            self.notes.append(
                f"the build would stop: {bad / num_read:.1%} of the samples cannot be used, more"
                f" than --max-rejected {self.config.max_rejected:g} allows"
            )

    def _times(
        self, stages: dict[str, float], num_partitions: int, price: float | None
    ) -> list[WorkersTime]:
        """The command's own workers, then one, and clusters."""
        jobs = self.asked.share[1] if self.asked.share else 1
        cluster = [number for number in CLUSTER if number < num_partitions]
        numbers = [self.asked.workers * jobs, 1, *cluster, *[num_partitions] * bool(cluster)]
        rows = []
        for workers in dict.fromkeys(numbers):
            seconds = self.startup + elapsed(stages, workers, num_partitions)
            hours = workers * seconds / 3600
            cost = None if price is None else hours * price
            rows.append(WorkersTime(workers=workers, seconds=seconds, core_hours=hours, cost=cost))
        return rows


def elapsed(stages: dict[str, float], workers: int, num_partitions: int) -> float:
    """Seconds of all stages on some workers, of which each has one core.

    A partition is read, grouped and finished by one process, and counted and written by all that
    it has.

    >>> times = {"read": 1.0, "count": 7.0, "group": 2.0, "write": 4.0, "tables": 0.0}
    >>> elapsed(times, 1, 1), elapsed(times, 4, 1), elapsed(times, 2, 2), elapsed(times, 2, 3)
    (14.0, 5.0, 7.0, 9.333333333333334)
    """
    at_once = min(workers, num_partitions)
    inside = workers // at_once
    work = max(stages["read"], (stages["read"] + stages["count"]) / inside)
    work += stages["group"] + stages["write"] / inside + stages["tables"]
    return work / num_partitions * ceil(num_partitions / at_once)


def _loads(samples: pa.Table, limits: Limits, *, with_media: bool) -> dict[str, FloatArray]:
    """What each drawn sample adds to the build's sums, those over the caps nothing but that."""
    counts = counts_arrays(samples)
    over = dict(zip((TOO_LONG, TOO_LARGE), over_limits(counts, limits), strict=True))
    fits = np.ones(len(samples))
    loads = {}
    for reason, rows in over.items():
        loads[reason] = np.zeros(len(samples))
        loads[reason][rows] = 1
        fits[rows] = 0
    return loads | {
        "num_packed": fits,
        "tokens": limits.llm_load(counts) * fits,
        "vision": limits.vision_load(counts) * fits,
        "num_bytes": sample_bytes(samples, with_media=with_media) * fits,
    }
