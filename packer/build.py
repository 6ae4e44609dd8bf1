"""`packer build`: counts -> caps and groups -> shards -> index and manifest.

Each stage leaves its artefact, so a stopped build resumes where it was: finished parts of the count
and whole shards are not repeated. The bytes are those of an undisturbed build.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from isobatch.common.consoles import foreign
from isobatch.common.errors import ConfigError
from isobatch.common.types import Groups, IntArray, Limits
from isobatch.counting.pack_block import PackOptions
from isobatch.counting.records.fields import NeverRead, add_columns, add_described
from isobatch.counting.records.user_map import ALL_COLUMNS, load_map
from isobatch.counting.sample_counter import CountSettings
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.flops import FlopsModel
from isobatch.models.folder.find_model import find_model
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_rules import ProcessorRule
from isobatch.packer.build_dir import DEMO_FOLDER, BuildIdentity, clear, locked
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.count_dataset import count_dataset
from isobatch.packer.count.counted_samples import CountedSamples
from isobatch.packer.count.mixture_sampling import (
    copies_per_sample,
    copy_rows,
    left_out,
    part_numbers,
)
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.count.staging import (
    Staging,
    has_videos,
    split_staged,
    staged_extras,
    staged_never_read,
)
from isobatch.packer.demo.dataset import DEMO_SAMPLES, demo_tokenizer_path, write_demo
from isobatch.packer.group import Grouping, group_counts
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import (
    BuildSummary,
    count_rejected,
    nothing_to_pack,
    require_few,
)
from isobatch.packer.sources.columns import parse_columns
from isobatch.packer.sources.dataset import DEMO, Dataset, demo_dataset, find_dataset, require_all
from isobatch.packer.upload import Publisher
from isobatch.packer.write.energon_files import META_NAMES
from isobatch.packer.write.write_shards import (
    ShardTask,
    WriteConfig,
    index_part,
    plan_shards,
    sample_bytes,
    write_shard,
)
from isobatch.shards.folders import is_uri, naming_full_disk, on_disk
from isobatch.shards.index import merge_index, read_lost
from isobatch.shards.manifest import is_complete, write_manifest
from isobatch.shards.stored_group import EXTRAS, ExtraTypes
from isobatch.shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    read_table,
    reject_rows,
    write_table,
)


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
    extras: ExtraTypes
    """Kept columns and their types."""
    never_read: dict[str, NeverRead]
    """Part of the dataset -> keys of its records that nothing reads."""


class Builder:
    """One build into a folder, or through a work folder into an object store."""

    def __init__(
        self,
        config: BuildConfig,
        progress: StageProgress | None = None,
        samples: CountedSamples | None = None,
    ) -> None:
        """`samples`: what the dataset's records are counted as, if somebody has counted them."""
        self.config, self._samples = config, samples
        if config.map is not None:
            load_map(config.map)  # for its errors
        self._group_options = config.group_options  # what is wrong with it is said before counting
        self.progress = progress or StageProgress()
        self.publisher = Publisher(config.out, config.work_dir) if is_uri(config.out) else None
        self.out = self.publisher.folder if self.publisher else Path(config.out)
        """Folder where the build works."""
        self.staging = Staging(self.out / "staging")
        self.tokenizer_path = config.tokenizer_source or str(demo_tokenizer_path())
        try:
            self.model = find_model(config.model or DEMO_MODEL)
            self.tokenizer = ChatTokenizer.for_model(
                self.model, self.tokenizer_path, config.chat_template, config.template_date
            )
        except ConfigError as error:  # what else a known dataset lacks is said with it
            fetch = config.fetch_annotations
            require_all(config.dataset, config.data_root, error, fetch=fetch)
            raise
        if isinstance(self.model.vision, ProcessorRule):
            token_id = open_processor(self.model.vision.description).token_id
            if token_id != self.tokenizer.image_token_id:
                gives = f"{self.model.image_markup.token} the id {self.tokenizer.image_token_id}"
                raise ConfigError(
                    f"--tokenizer gives {gives}, the processor of {self.model.name} {token_id}; use"
                    " the model's own"
                )
        self.identity = BuildIdentity(config, self.model, self.tokenizer)

    def build(self, *, overwrite: bool = False) -> BuildSummary:
        """Run all stages up to the manifest. DataError if nothing can be packed."""
        is_complete(self.config.out)  # raises for a wrong place before anything is made or removed
        with self._dataset(overwrite=overwrite) as dataset:
            if is_complete(self.config.out):
                return self._finished(dataset)
            self._claim(dataset)
            counts = self._count(dataset)
            grouping = self._group(counts)
            num_shards = self._write(dataset, grouping, counts)
            return self._finish(dataset, grouping, counts, num_shards)

    def count(self) -> tuple[pa.Table, pa.Table]:
        """Only count: leaves counts.parquet and rejected.parquet, and returns both."""
        if is_complete(self.config.out):
            raise ConfigError(f"{self.config.out} holds a finished build: choose another --out")
        with self._dataset() as dataset:
            self._claim(dataset)
            counts = self._count(dataset)
            if self.publisher:
                self.publisher.upload_tables()
            else:
                self.staging.remove()
            return counts.table, counts.rejected

    @contextmanager
    def _dataset(self, *, overwrite: bool = False) -> Iterator[Dataset]:
        """The dataset, with the output locked; a wrong dataset leaves no output folder."""
        is_drawn = self.config.is_demo and self._samples is None
        if not is_drawn:
            self._find()
        with locked(self.out), naming_full_disk(self.out):
            if overwrite:
                if self.publisher:
                    self.publisher.clear()
                clear(self.out)
            yield self._demo() if is_drawn else self._find()

    def _claim(self, dataset: Dataset) -> None:
        self.identity.claim(self.staging.folder, dataset)
        if self.publisher:
            self.publisher.claim()

    def _finished(self, dataset: Dataset) -> BuildSummary:
        """The summary of an earlier run's build; DataError if that is another build."""
        manifest = self.identity.require_same(self.config.out, dataset)
        with on_disk(self.config.out, [REJECTED_NAME]) as folder:
            rejected = read_table(folder / REJECTED_NAME)
        summary = self._summary(manifest, rejected, already_complete=True)
        if self.publisher:
            self.publisher.forget()
        else:  # the run that wrote the manifest may have been killed before it did
            self.staging.remove()
        return summary

    def _find(self) -> Dataset:
        config = self.config
        if self._samples is not None:
            return self._keeping(self._samples.dataset)
        dataset = find_dataset(
            config.dataset,
            config.data_root,
            fetch=config.fetch_annotations,
            columns=parse_columns(config.columns),
        )
        roots = {part.data_root for part in dataset.parts}
        if config.format == "refs" and len(roots) > 1:
            has = f"the mixture has {len(roots)} data roots"
            raise ConfigError(f"--format refs: {has}, and shards can refer to one only")
        return self._keeping(dataset)

    def _keeping(self, dataset: Dataset) -> Dataset:
        """The dataset, of which the kept columns are read too."""
        keep = self.config.kept_columns
        if self.config.map is not None:
            keep = (*keep, ALL_COLUMNS)
        return dataset.keeping(keep, self.config.seed)

    def _demo(self) -> Dataset:
        if self.publisher and self.config.format == "refs" and not self.config.data_root:
            raise ConfigError(
                "--format refs: the demo's pictures need a place that stays: give --data-root"
            )
        folder = Path(self.config.data_root) if self.config.data_root else self.out / DEMO_FOLDER
        if not (folder / "annotations.json").exists():
            self.identity.require_named(self.config.out, DEMO)
            with self.progress.stage("draw", None, unit="demo samples") as stage:
                write_demo(folder)
                stage.count(DEMO_SAMPLES)
        return self._keeping(demo_dataset(folder))

    def _count(self, dataset: Dataset) -> _Counts:
        """Count what is not counted yet; leaves counts.parquet and rejected.parquet."""
        config = self.config
        if not self.staging.samples.exists():
            self._note_surprises(dataset)
            settings = CountSettings(
                model=self.model,
                tokenizer=self.tokenizer_path,
                chat_template=config.chat_template,
                template_date=self.tokenizer.template_date,
                keep_columns=config.kept_columns,
                map=config.map,
                reading=config.reading,
                decode_images=config.check_images == "decode",
                follow_links=config.follow_links,
                chunk_records=config.chunk_records,
                limit=config.limit,
                executor=config.executor,
                workers=config.workers,
            )
            if self._samples is None:
                count_dataset(dataset, settings, self.staging, self.progress)
            else:
                self._note(self._samples.note)
                self._samples.stage(self.staging, self.progress)
        extras = self._extras(dataset)
        table, rejected, records_per_part = split_staged(self.staging.samples)
        parts = part_numbers(table.column("position").to_numpy(), records_per_part)
        copies = copies_per_sample(dataset, parts, config.seed)
        dropped = reject_rows(table, left_out(dataset, parts, copies))
        counts = _Counts(
            table=copy_rows(table, copies),
            parts=np.repeat(parts, copies),
            rejected=pa.concat_tables([rejected, dropped]),
            num_read=sum(records_per_part),
            num_repeated=int(np.maximum(copies - 1, 0).sum()),
            extras=extras,
            never_read=self._never_read(dataset, records_per_part),
        )
        write_table(counts.table, self.out / COUNTS_NAME)
        self._reject([counts.rejected], counts.num_read, num_left=len(counts.table))
        return counts

    def _note_surprises(self, dataset: Dataset) -> None:
        """Say before the work what a user may not expect of columns, model and chat template."""
        keep = () if self.config.map else self.config.kept_columns
        columns = _columns(dataset) if keep else set[str]()
        for name in (name for name in keep if name not in columns):
            note = f"note: no {name!r} (--keep-columns) in the first records, which have"
            self._note(f"{note} {', '.join(sorted(columns))}")
        if isinstance(self.model.vision, ProcessorRule):
            unknown = "so caps and balance go by LLM tokens, and no time is predicted"
            self._note(f"note: {self.model.description}, {unknown}")
        if day := self.tokenizer.template_date:
            self._note(f"note: the chat template writes a date: {day} (--template-date)")

    def _note(self, text: str) -> None:
        self.progress.console.print(foreign(text), highlight=False, soft_wrap=True)

    def _extras(self, dataset: Dataset) -> ExtraTypes:
        """Types of the kept columns. ConfigError if one has no value in any sample."""
        if not (keep := self.config.kept_columns):
            return {}
        types = staged_extras(self.staging.samples, keep)
        if missing := [name for name in keep if name not in types]:
            self.staging.remove()  # it is of no use to a build with other columns
            raise ConfigError(
                f"--keep-columns: no usable record has a value in {', '.join(missing)}; the "
                f"records have {', '.join(sorted(_columns(dataset)))}"
            )
        return types

    def _never_read(self, dataset: Dataset, num_records: list[int]) -> dict[str, NeverRead]:
        """What nothing reads, by part: keys of records, and columns that records come without."""
        names = [part.name for part in dataset.parts]
        by_part = staged_never_read(self.staging.samples, names, num_records)
        for part in dataset.parts:
            columns = by_part.pop(part.name, {})
            add_columns(columns, part.open().unread_columns(), self.config.kept_columns)
            add_described(columns, part.located.unread)
            by_part |= {part.name: columns} if columns else {}
        return by_part

    def _reject(self, tables: list[pa.Table], num_read: int, num_left: int = 1) -> pa.Table:
        """Write rejected.parquet and return its rows; DataError if too many, or no sample left."""
        rejected = pa.concat_tables(tables).sort_by("position")
        write_table(rejected, self.out / REJECTED_NAME)
        if num_left == 0:
            raise nothing_to_pack(rejected)
        require_few(rejected, num_read, self.config.max_rejected, self.out / REJECTED_NAME)
        return rejected

    def _group(self, counts: _Counts) -> Grouping:
        with self.progress.stage("group", None) as stage:
            grouping = group_counts(
                counts_arrays(counts.table),
                self._group_options,
                vision_unit=self.model.vision_unit,
                context_len=self.model.context_len,
                predictor=FlopsModel.of(self.model) if self.model.has_dimensions else None,
            )
            stage.count(len(counts.table))
        tables = [counts.rejected, reject_rows(counts.table, grouping.over)]
        self._reject(tables, counts.num_read, num_left=len(grouping.groups))
        self._write_groups(grouping.groups, counts)
        return grouping

    def _write_groups(self, groups: Groups, counts: _Counts) -> None:
        table = groups_table(groups, counts_arrays(counts.table))
        write_table(table, self.out / GROUPS_NAME)

    def _write(self, dataset: Dataset, grouping: Grouping, counts: _Counts) -> int:
        """Write the shards and return their number."""
        for folder in (self.out / "shards", self.staging.folder / "index"):
            folder.mkdir(exist_ok=True)
        groups = grouping.groups
        in_shards = sample_bytes(counts.table, with_media=self.config.format != "refs")
        ranges = plan_shards(groups, in_shards, shard_bytes=self.config.shard_mb << 20)
        tasks = self._write_tasks(dataset, groups, counts, ranges)
        workers = min(self.config.workers, len(ranges))
        with self.progress.stage("write", len(ranges)) as stage:
            for shard in map_ordered(write_shard, tasks, workers=workers):
                stage.advance(1)
                first, last = ranges[shard]
                stage.count(int(groups.offsets[last] - groups.offsets[first]))
        return len(ranges)

    def _write_tasks(
        self, dataset: Dataset, groups: Groups, counts: _Counts, ranges: list[tuple[int, int]]
    ) -> Iterator[ShardTask]:
        config = WriteConfig(
            out=str(self.out),
            uri=self.publisher.uri if self.publisher else None,
            data_roots=tuple(part.data_root for part in dataset.parts),
            has_videos=has_videos(self.staging.samples),
            pad_each_to=self.config.pad_each_to,
            packing=PackOptions(
                format=self.config.format,
                follow_links=self.config.follow_links,
                image_token_id=self.tokenizer.image_token_id,
                audio_token_id=self.tokenizer.audio_token_id,
                video_token_id=self.tokenizer.video_token_id,
                extras=counts.extras,
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
                first_group=first,
                offsets=groups.offsets[first : last + 1] - start,
                rows=rows,
                positions=positions[rows],
                sample_ids=sample_ids.take(pa.array(rows)).to_pylist(),
                parts=counts.parts[rows],
                num_bytes=num_bytes[rows],
            )

    def _finish(
        self, dataset: Dataset, grouping: Grouping, counts: _Counts, num_shards: int
    ) -> BuildSummary:
        """Write the index, the final tables and the manifest."""
        with self.progress.stage("finish", None, unit="shards") as stage:
            parts = [index_part(self.out, shard) for shard in range(num_shards)]
            lost = [row for part in parts for row in read_lost(part)]
            dropped = reject_rows(counts.table, [*grouping.over, *lost])
            rejected = self._reject([counts.rejected, dropped], counts.num_read)
            if lost:
                groups = _without(grouping.groups, [row for row, _, _ in lost])
                self._write_groups(groups, counts)
            index = merge_index(parts, self.out)
            counted = counts.num_read, counts.num_repeated
            manifest = self.identity.manifest(self.out, dataset, grouping, index, parts, counted)
            manifest |= {EXTRAS: counts.extras} if counts.extras else {}
            manifest |= {"never_read": counts.never_read} if counts.never_read else {}
            manifest |= {"has_videos": True} if has_videos(self.staging.samples) else {}
            write_manifest(self.out, manifest)
            if self.publisher:
                names = [file["name"] for file in manifest["files"]]
                self.publisher.publish(
                    [*names, *META_NAMES] if self.config.format == "energon" else names
                )
            else:
                self.staging.remove()
            stage.count(num_shards)
        return self._summary(manifest, rejected, already_complete=False)

    def _summary(
        self, manifest: dict[str, Any], rejected: pa.Table, *, already_complete: bool
    ) -> BuildSummary:
        return BuildSummary(
            out=self.config.out,
            already_complete=already_complete,
            totals=manifest["totals"],
            rejected=count_rejected(rejected),
            limits=Limits(**manifest["limits"]),
            added_tokens=manifest["tokenizer"]["added_tokens"],
            id_conflicts=self.tokenizer.id_conflicts,
            never_read=manifest.get("never_read", {}),
            seconds=dict(self.progress.seconds),
        )


def _columns(dataset: Dataset) -> set[str]:
    """Columns that the first records of any part have."""
    return {name for part in dataset.parts for name in part.open().columns()}


def _without(groups: Groups, lost: list[int]) -> Groups:
    """The groups without some samples, and without groups that are then empty."""
    keep = ~np.isin(groups.samples, lost)
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)[keep]
    sizes = np.bincount(group_of, minlength=len(groups))
    offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
    return Groups(groups.samples[keep], offsets)
