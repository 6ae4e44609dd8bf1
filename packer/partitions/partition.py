"""One partition of a build: counted, grouped and written, on whatever machine.

Its bytes depend on the job alone, so a partition that is packed twice gives the same files twice.
Each stage leaves its artefact in the work folder: a stopped partition goes on where it was.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from isobatch.balance.grouping import compile_ahead
from isobatch.common.consoles import foreign
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import Groups, IntArray, Limits
from isobatch.counting.pack_block import PackOptions
from isobatch.counting.records.extras import Kinds
from isobatch.counting.records.fields import NeverRead, add_columns, add_described
from isobatch.counting.sample_counter import CountSettings
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.count_dataset import count_dataset
from isobatch.packer.count.counted_samples import CountedSamples
from isobatch.packer.count.mixture_sampling import (
    copies_per_sample,
    copy_rows,
    left_out,
    part_numbers,
)
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.count.remainder import save_remainder
from isobatch.packer.count.staging import (
    Staging,
    has_videos,
    split_staged,
    staged_extras,
    staged_kinds,
    staged_never_read,
)
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.group import Grouping, group_counts, group_within
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import count_rejected, nothing_to_pack, require_few
from isobatch.packer.sources.dataset import Dataset
from isobatch.packer.write.write_shards import (
    ShardTask,
    WriteConfig,
    index_part,
    plan_shards,
    sample_bytes,
    write_shard,
)
from isobatch.shards.index import IndexFigures, join_parts, read_lost, read_shard_file
from isobatch.shards.stored_group import ExtraTypes
from isobatch.shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    reject_rows,
    write_table,
)

COMPILES = "compiling kernels, once per machine"
MOST_GROUPS = 1 << 24
"""Groups of a partition at most, for their numbers in the keys of tars."""
ROWS_NAME = "rows.arrow"
"""Index rows and sample ids of a partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What is decided once for all partitions; None: by the samples of the only one."""

    limits: Limits | None = None
    limits_explained: tuple[str, ...] = ()
    videos: bool | None = None
    """Whether shards have columns for videos."""
    extras: ExtraTypes | None = None
    copies: tuple[int, ...] | None = None
    """Samples of each part of the dataset that go in, copies included."""

    @classmethod
    def from_json(cls, text: str) -> "Decisions":
        """The decisions of a text of `to_json`."""
        values = json.loads(text)
        values["limits"] = Limits(**values["limits"])
        return cls(**values)

    def to_json(self) -> str:
        """All of them as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionJob:
    """One partition to pack; plain values, for other processes and machines."""

    config: BuildConfig
    dataset: Dataset
    number: int | None
    """None: the only one."""
    work: str
    """Folder for what is unfinished, and for the tables; of several partitions, one for theirs."""
    out: str
    """Folder or URI that the shards go to."""
    key: str = ""
    """Of the results, `Results`."""
    decisions: Decisions = field(default_factory=Decisions)
    most_bytes: int | None = None
    """Bytes of samples that are written at most, for an estimate; None: all."""
    is_checked_later: bool = False
    """Whether somebody else says that there are too many rejected samples, for all partitions."""
    leaves: bool = False
    """Whether samples of its least filled groups are left over."""
    remainder_of: tuple[tuple[int, int], ...] = ()
    """Partitions of whose remainder it is made, and the position of the first record of each."""

    @property
    def place(self) -> int:
        """Number among all partitions, from 0."""
        return self.number or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPartition:
    """What is known of a packed partition without reading it."""

    num_read: int
    num_repeated: int
    remainder: list[int] = field(default_factory=list)
    """Samples of each part of the dataset that it leaves over; empty if none, as of versions before
    that left none.
    """
    is_remainder: bool = False
    """Whether it is what other partitions have left over, and its positions begin at the first."""
    index: IndexFigures
    shards: list[dict[str, Any]]
    """Entries of the manifest."""
    limits: dict[str, Any]
    limits_explained: list[str]
    extras: ExtraTypes
    has_videos: bool
    never_read: dict[str, NeverRead]
    """Part of the dataset -> keys of its records that nothing reads."""

    @property
    def num_samples(self) -> int:
        """Samples in its groups, and those that it leaves over."""
        return self.index.sums["num_samples"] + sum(self.remainder)

    @classmethod
    def from_json(cls, text: str) -> "PackedPartition":
        """The partition of a file that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"index": IndexFigures(**values["index"])})

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPartition:
    """What other partitions need to know of a counted one."""

    usable: list[int]
    """Samples of each part of the dataset that can be used."""
    kinds: Kinds
    """Kinds of the values of kept columns."""

    @property
    def num_samples(self) -> int:
        """Samples that can be used."""
        return sum(self.usable)


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counted and rejected samples."""

    table: pa.Table
    """One row per sample that goes into groups, copies included."""
    parts: IntArray
    """Number of the dataset's part that each row comes from."""
    rejected: pa.Table
    num_read: int
    num_repeated: int
    remainder: list[int]
    """Samples of each part of the dataset that are left over."""


class Partition:
    """The stages of one partition."""

    def __init__(
        self,
        job: PartitionJob,
        model: ModelPreset,
        tokenizer: ChatTokenizer,
        progress: StageProgress,
        samples: CountedSamples | None = None,
    ) -> None:
        """`samples`: what the dataset's records are counted as, if somebody has counted them."""
        self.job, self.config, self.dataset = job, job.config, job.dataset
        self.model, self.tokenizer, self.progress = model, tokenizer, progress
        self.work = Path(job.work)
        self.staging = Staging(self.work / "staging")
        self._samples = samples
        self.grouping: Grouping | None = None
        """All groups, once they are made."""

    def pack(self) -> PackedPartition:
        """All stages. DataError if it is the only partition and nothing can be packed."""
        counts = self._counts()
        grouping, counts = self._group(counts)
        self.grouping = grouping
        if self.job.most_bytes is not None:
            running = np.cumsum(grouping.groups.sum(sample_bytes(counts.table)))
            number = 1 + int(np.searchsorted(running, self.job.most_bytes))
            chosen = grouping.groups.take(np.arange(min(number, len(running))))
            grouping = replace(grouping, groups=chosen)
        num_shards = self._write(grouping, counts)
        return self._finish(grouping, counts, num_shards)

    def counts(self) -> tuple[pa.Table, pa.Table]:
        """Only count, copies included: leaves counts.parquet and rejected.parquet; -> both."""
        counts = self._counts()
        return counts.table, counts.rejected

    def count(self) -> CountedPartition:
        """Only count; `pack` goes on from there."""
        self._stage()
        table, _, records_per_part = split_staged(self.staging.samples)
        parts = part_numbers(table.column("position").to_numpy(), records_per_part)
        usable = np.bincount(parts, minlength=len(self.dataset.parts)).tolist()
        kinds = staged_kinds(self.staging.samples) if self.config.kept_columns else {}
        return CountedPartition(usable=usable, kinds=kinds)

    def _stage(self) -> None:
        """Count what is not counted yet."""
        if self.staging.samples.exists():
            return
        if self._samples is None:
            count_dataset(
                self.dataset,
                count_settings(self.config, self.model, self.tokenizer),
                self.staging,
                self.progress,
                may_be_empty=self.job.is_checked_later,
            )
        else:
            self.progress.console.print(
                foreign(self._samples.note), highlight=False, soft_wrap=True
            )
            self._samples.stage(self.staging, self.progress)

    def _counts(self) -> _Counts:
        """The counts with copies; leaves counts.parquet and rejected.parquet."""
        self._stage()
        dataset, seed = self.dataset, self.config.seed
        # before the tables: what a wrong name costs is then said at once
        _ = self._extras
        table, rejected, records_per_part = split_staged(self.staging.samples)
        parts = part_numbers(table.column("position").to_numpy(), records_per_part)
        copies = copies_per_sample(dataset, parts, seed, self.job.decisions.copies)
        dropped = reject_rows(table, left_out(dataset, parts, copies))
        counts = _Counts(
            # what is left over are copies already, with the ids of their partitions
            table=table if self.job.remainder_of else copy_rows(table, copies),
            parts=np.repeat(parts, copies),
            rejected=pa.concat_tables([rejected, dropped]),
            num_read=sum(records_per_part),
            num_repeated=int(np.maximum(copies - 1, 0).sum()),
            remainder=[],
        )
        self._records_per_part = records_per_part
        write_table(counts.table, self.work / COUNTS_NAME)
        self._reject([counts.rejected], counts.num_read, num_left=len(counts.table))
        return counts

    @cached_property
    def _extras(self) -> ExtraTypes:
        """Types of the kept columns. ConfigError if one has no value in any sample."""
        if self.job.decisions.extras is not None:
            return self.job.decisions.extras
        if not (keep := self.config.kept_columns):
            return {}
        types = staged_extras(self.staging.samples, keep)
        if missing := [name for name in keep if name not in types]:
            self.staging.remove()  # it is of no use to a build with other columns
            raise no_values(missing, self.dataset)
        return types

    @cached_property
    def _has_videos(self) -> bool:
        decided = self.job.decisions.videos
        if decided:
            return True
        has = has_videos(self.staging.samples)
        if has and decided is not None:
            raise DataError(
                "the new data has videos, and no sample of the build has: pack it as a build of its"
                " own, and give both to the loader"
            )
        return has

    def _never_read(self) -> dict[str, NeverRead]:
        """What nothing reads, by part: keys of records, and columns that records come without."""
        dataset = self.dataset
        names = [part.name for part in dataset.parts]
        by_part = staged_never_read(self.staging.samples, names, self._records_per_part)
        for part in dataset.parts:
            columns = by_part.pop(part.name, {})
            if part.located.pieces != ():
                add_columns(columns, part.open().unread_columns(), self.config.kept_columns)
            add_described(columns, part.located.unread)
            by_part |= {part.name: columns} if columns else {}
        return by_part

    def _reject(self, tables: list[pa.Table], num_read: int, num_left: int = 1) -> None:
        """Write rejected.parquet; DataError if too many are, or no sample is left."""
        table = pa.concat_tables(tables).sort_by("position")
        write_table(table, self.work / REJECTED_NAME)
        rejected = count_rejected([table])
        if num_left == 0 and self.job.decisions.limits is None:
            raise nothing_to_pack(rejected)
        if self.job.is_checked_later:
            return
        require_few(rejected, num_read, self.config.max_rejected, self.work / REJECTED_NAME)

    def _group(self, counts: _Counts) -> tuple[Grouping, _Counts]:
        """The groups, and the counts without what is left over."""
        decisions = self.job.decisions
        arrays = counts_arrays(counts.table)
        with self.progress.stage("group", None) as stage:
            compile_ahead.finish(lambda: self.progress.note(COMPILES))
            if decisions.limits is None:
                grouping = group_counts(
                    arrays,
                    self.config.group_options,
                    vision_unit=self.model.vision_unit,
                    context_len=self.model.context_len,
                    predictor=FlopsModel.of(self.model) if self.model.has_dimensions else None,
                )
            else:
                lines = list(decisions.limits_explained)
                options = self.config.group_options
                grouping = group_within(
                    arrays, decisions.limits, options, lines, leave=self.job.leaves
                )
            stage.count(len(counts.table))
        tables = [counts.rejected, reject_rows(counts.table, grouping.over)]
        self._reject(tables, counts.num_read, num_left=len(grouping.groups))
        if len(grouping.remainder):
            grouping, counts = self._leave(grouping, counts)
        self._write_groups(grouping.groups, counts)
        return grouping, counts

    def _leave(self, grouping: Grouping, counts: _Counts) -> tuple[Grouping, _Counts]:
        """Save the remainder; -> groups and counts without it."""
        chosen = grouping.remainder
        left_over = counts.table.take(pa.array(chosen))
        save_remainder(self.staging, left_over, counts.parts[chosen], self.work, self.job.place)
        stays = np.ones(len(counts.table), bool)
        stays[chosen] = False
        new_row = np.cumsum(stays) - 1
        sizes = np.bincount(counts.parts[chosen], minlength=len(self.dataset.parts)).tolist()
        table = counts.table.filter(pa.array(stays))
        counts = replace(counts, table=table, parts=counts.parts[stays], remainder=sizes)
        groups = Groups(new_row[grouping.groups.samples], grouping.groups.offsets)
        over = [(int(new_row[row]), reason, detail) for row, reason, detail in grouping.over]
        write_table(counts.table, self.work / COUNTS_NAME)
        return replace(grouping, groups=groups, over=over), counts

    def _write_groups(self, groups: Groups, counts: _Counts) -> None:
        table = groups_table(groups, counts_arrays(counts.table))
        write_table(table, self.work / GROUPS_NAME)

    def _write(self, grouping: Grouping, counts: _Counts) -> int:
        """Write the shards and return their number."""
        (self.staging.folder / "index").mkdir(exist_ok=True)
        groups = grouping.groups
        in_shards = sample_bytes(counts.table, with_media=self.config.format != "refs")
        ranges = plan_shards(groups, in_shards, shard_bytes=self.config.shard_mb << 20)
        tasks = self._write_tasks(groups, counts, ranges)
        workers = min(self.config.workers, len(ranges))
        with self.progress.stage("write", len(ranges)) as stage:
            for shard in map_ordered(write_shard, tasks, workers=workers):
                stage.advance(1)
                first, last = ranges[shard]
                stage.count(int(groups.offsets[last] - groups.offsets[first]))
        return len(ranges)

    def _write_tasks(
        self, groups: Groups, counts: _Counts, ranges: list[tuple[int, int]]
    ) -> Iterator[ShardTask]:
        config = WriteConfig(
            work=str(self.work),
            out=self.job.out,
            partition=self.job.number,
            data_roots=tuple(part.data_root for part in self.dataset.parts),
            has_videos=self._has_videos,
            pad_each_to=self.config.pad_each_to,
            packing=PackOptions(
                format=self.config.format,
                follow_links=self.config.follow_links,
                image_token_id=self.tokenizer.image_token_id,
                audio_token_id=self.tokenizer.audio_token_id,
                video_token_id=self.tokenizer.video_token_id,
                extras=self._extras,
            ),
        )
        positions = counts.table.column("position").to_numpy()
        sample_ids = counts.table.column("sample_id")
        num_bytes = sample_bytes(counts.table)
        for shard, (first, last) in enumerate(ranges):
            start, stop = groups.offsets[first], groups.offsets[last]
            rows = groups.samples[start:stop]
            yield ShardTask(
                config=config,
                shard=shard,
                first_group=self.job.place * MOST_GROUPS + first,
                offsets=groups.offsets[first : last + 1] - start,
                rows=rows,
                positions=positions[rows],
                sample_ids=sample_ids.take(pa.array(rows)).to_pylist(),
                parts=counts.parts[rows],
                num_bytes=num_bytes[rows],
            )

    def _finish(self, grouping: Grouping, counts: _Counts, num_shards: int) -> PackedPartition:
        """Write the final tables and the index rows."""
        parts = [index_part(self.work, shard) for shard in range(num_shards)]
        lost = [row for part in parts for row in read_lost(part)]
        dropped = reject_rows(counts.table, [*grouping.over, *lost])
        self._reject([counts.rejected, dropped], counts.num_read)
        if lost:
            groups = _without(grouping.groups, [row for row, _, _ in lost])
            self._write_groups(groups, counts)
        rows = self.staging.folder / ROWS_NAME
        index = join_parts(parts, rows, pad_each_to=self.config.pad_each_to)
        return PackedPartition(
            num_read=counts.num_read,
            num_repeated=counts.num_repeated,
            remainder=counts.remainder,
            index=index,
            shards=[shard_entry(part) for part in parts],
            limits=grouping.limits.to_json(),
            limits_explained=grouping.limits_explained,
            extras=self._extras,
            has_videos=self._has_videos,
            never_read=self._never_read(),
        )


def tokenizer_place(config: BuildConfig) -> str:
    """Folder or Hub id of a build's tokenizer: the demo brings its own."""
    return config.tokenizer_source or str(demo_tokenizer_path())


def count_settings(
    config: BuildConfig, model: ModelPreset, tokenizer: ChatTokenizer
) -> CountSettings:
    """How a build counts."""
    return CountSettings(
        model=model,
        tokenizer=tokenizer_place(config),
        chat_template=config.chat_template,
        template_date=tokenizer.template_date,
        keep_columns=config.kept_columns,
        map=config.map,
        reading=config.reading,
        decode_images=config.check_images == "decode",
        follow_links=config.follow_links,
        chunk_records=config.chunk_records,
        limit=config.limit,
        workers=config.workers,
    )


def no_values(missing: list[str], dataset: Dataset) -> ConfigError:
    """The error for kept columns without a value in any sample."""
    has = ", ".join(sorted(columns_of(dataset)))
    names = ", ".join(missing)
    return ConfigError(
        f"--keep-columns: no usable record has a value in {names}; the records have {has}"
    )


def columns_of(dataset: Dataset) -> set[str]:
    """Columns that the first records of any part have."""
    names = set[str]()
    for part in dataset.parts:
        own, columns = part.open().columns(), part.located.columns
        names |= own if columns is None else own | {columns.ours(name) for name in own}
    return names


def shard_entry(part: Path) -> dict[str, Any]:
    """A shard as the manifest lists it."""
    with pa.memory_map(str(part)) as source:
        sizes = pa.ipc.open_file(source).read_all().column("num_samples").to_numpy()
    counts = {"num_groups": len(sizes), "num_samples": int(np.sum(sizes, dtype=np.int64))}
    return {**read_shard_file(part).to_json(), **counts}


def _without(groups: Groups, lost: list[int]) -> Groups:
    """The groups without some samples, and without groups that are then empty."""
    keep = ~np.isin(groups.samples, lost)
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)[keep]
    sizes = np.bincount(group_of, minlength=len(groups))
    offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
    return Groups(groups.samples[keep], offsets)
