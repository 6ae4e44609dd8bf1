"""`packer build`: the stages in order, each leaving its artefact, so that a stopped build goes on where it was.

count -> caps and groups -> shards -> index and manifest. What a killed build has finished (parts of the count, whole
shards) is found again and not done twice; the result is the same, byte for byte, as that of an undisturbed build.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from balance.cost import CostModel
from balance.errors import ConfigError, DataError
from balance.presets import load_model
from balance.records import Groups, Limits
from packer.config import DEMO_MODEL, BuildConfig
from packer.count import CountTask, sample_counter
from packer.demo import DEMO_SAMPLES, demo_tokenizer_path, write_demo
from packer.executor import map_ordered
from packer.group import Grouping, group_counts
from packer.output import DEMO_FOLDER, INDEX_NAME, BuildIdentity, clear, locked
from packer.progress import StageProgress
from packer.record import RawRecord
from packer.shards.index import merge_index, read_lost
from packer.shards.manifest import MANIFEST_NAME, write_manifest
from packer.sources.dataset import Dataset, find_dataset
from packer.sources.json_records import read_json_records
from packer.staging import merge_parts, part_path, part_sizes, write_part
from packer.summary import BuildSummary, nothing_to_pack, summarise_rejected
from packer.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    read_table,
    reject_rows,
    source_numbers,
    split_staged,
    write_table,
)
from packer.text import ChatTokenizer
from packer.write import WriteTask, index_part, plan_shards, write_shard


@dataclass(frozen=True, slots=True)
class _Job:
    """One chunk to count; no records when its part is already there."""

    task: CountTask
    records: list[RawRecord]
    part: Path


class Builder:
    """One build into one output directory."""

    def __init__(self, config: BuildConfig, progress: StageProgress) -> None:
        self.config = config
        self.progress = progress
        self.out = Path(config.out)
        self.staging = self.out / "staging"
        self.model = load_model(config.model or DEMO_MODEL)
        self.tokenizer_path = config.tokenizer or str(demo_tokenizer_path())
        self.tokenizer = ChatTokenizer.load(
            self.tokenizer_path, self.model.image_markup, chat_template=config.chat_template
        )
        self.identity = BuildIdentity(config, self.model, self.tokenizer)

    def build(self, *, overwrite: bool = False) -> BuildSummary:
        """All stages, up to the manifest. DataError when nothing can be packed, or the output is another build's."""
        if not self.config.is_demo:
            self._find()  # a wrong path must not leave an output directory behind, or clear one
        with locked(self.out):
            if overwrite:
                clear(self.out)
            dataset = self._demo() if self.config.is_demo else self._find()
            if (self.out / MANIFEST_NAME).exists():
                return self._summary(self.identity.require_same(self.out, dataset), already_complete=True)
            self.identity.claim(self.staging, dataset)
            counts, rejected = self._count(dataset)
            grouping = self._group(counts, rejected)
            num_shards = self._write(dataset, grouping, counts)
            return self._finish(dataset, grouping, counts, rejected, num_shards)

    def count(self) -> tuple[pa.Table, pa.Table]:
        """Only count: leaves counts.parquet and rejected.parquet; -> both."""
        if (self.out / MANIFEST_NAME).exists():
            raise ConfigError(f"{self.out} holds a finished build: choose another --out")
        if not self.config.is_demo:
            self._find()
        with locked(self.out):
            dataset = self._demo() if self.config.is_demo else self._find()
            self.identity.claim(self.staging, dataset)
            counts, rejected = self._count(dataset)
            write_table(rejected, self.out / REJECTED_NAME)
            shutil.rmtree(self.staging)
            return counts, rejected

    def _find(self) -> Dataset:
        root = Path(self.config.data_root) if self.config.data_root else None
        return find_dataset(self.config.dataset, root, fetch=self.config.fetch_annotations)

    def _demo(self) -> Dataset:
        folder = Path(self.config.data_root) if self.config.data_root else self.out / DEMO_FOLDER
        annotations = folder / "annotations.json"
        if not annotations.exists():
            with self.progress.stage("draw", None, unit="demo samples") as stage:
                write_demo(folder)
                stage.count(DEMO_SAMPLES)
        return Dataset(name="demo", annotations=annotations, data_root=folder)

    def _count(self, dataset: Dataset) -> tuple[pa.Table, pa.Table]:
        samples = self.staging / "samples.arrow"
        if not samples.exists():
            self._count_parts(dataset, samples)
        counts, rejected = split_staged(samples)
        write_table(counts, self.out / COUNTS_NAME)
        return counts, rejected

    def _count_parts(self, dataset: Dataset, samples: Path) -> None:
        (self.staging / "parts").mkdir(exist_ok=True)
        task = CountTask(
            source=dataset.name,
            data_root=str(dataset.data_root),
            model=self.model,
            tokenizer=self.tokenizer_path,
            chat_template=self.config.chat_template,
            decode_images=self.config.check_images == "decode",
        )
        parts = []
        with self.progress.stage("count", dataset.annotations.stat().st_size) as stage:
            records = read_json_records(dataset.annotations, on_bytes=stage.advance)
            for part in map_ordered(_count_chunk, self._jobs(task, records), workers=self.config.workers):
                parts.append(part)
                stage.count(part_sizes(part)[0])
        if not parts:
            raise DataError(f"{dataset.annotations}: holds no records")
        merge_parts(parts, samples)
        shutil.rmtree(self.staging / "parts")

    def _jobs(self, task: CountTask, records: Iterator[RawRecord]) -> Iterator[_Job]:
        chunk = 0
        while batch := list(islice(records, self.config.chunk_records)):
            part = part_path(self.staging, chunk)
            yield _Job(task, [] if part.exists() else batch, part)
            chunk += 1

    def _group(self, table: pa.Table, rejected: pa.Table) -> Grouping:
        if len(table) == 0:
            raise nothing_to_pack(rejected)
        with self.progress.stage("group", None) as stage:
            counts = counts_arrays(table)
            grouping = group_counts(
                counts,
                self.config.group_options,
                vision_unit=self.model.vision_unit,
                context_len=self.model.context_len,
                cost=CostModel.of(self.model) if self.model.has_dimensions else None,
                sources=source_numbers(table),
            )
            stage.count(len(counts))
        if len(grouping.groups) == 0:
            raise nothing_to_pack(pa.concat_tables([rejected, reject_rows(table, grouping.over)]))
        write_table(groups_table(grouping.groups, counts), self.out / GROUPS_NAME)
        return grouping

    def _write(self, dataset: Dataset, grouping: Grouping, counts: pa.Table) -> int:
        """Write the shards; -> how many."""
        for folder in (self.out / "shards", self.staging / "index"):
            folder.mkdir(exist_ok=True)
        groups = grouping.groups
        plan = plan_shards(
            groups,
            counts.column("seq_len").to_numpy(),
            counts.column("image_bytes").to_numpy() * (self.config.format != "refs"),
            shard_bytes=self.config.shard_mb << 20,
        )
        tasks = (
            WriteTask(
                shard=shard,
                first_group=first,
                groups=groups.take(np.arange(first, last)),
                format=self.config.format,
                out=str(self.out),
                data_root=str(dataset.data_root),
                image_token_id=self.tokenizer.image_token_id,
            )
            for shard, (first, last) in enumerate(plan)
        )
        with self.progress.stage("write", len(plan)) as stage:
            for shard in map_ordered(write_shard, tasks, workers=min(self.config.workers, len(plan))):
                stage.advance(1)
                first, last = plan[shard]
                stage.count(int(groups.offsets[last] - groups.offsets[first]))
        return len(plan)

    def _finish(
        self, dataset: Dataset, grouping: Grouping, counts: pa.Table, rejected: pa.Table, num_shards: int
    ) -> BuildSummary:
        """Index, final tables and manifest."""
        with self.progress.stage("finish", None, unit="shards") as stage:
            parts = [index_part(self.out, shard) for shard in range(num_shards)]
            lost = [row for part in parts for row in read_lost(part)]
            num_read = len(counts) + len(rejected)
            rejected = pa.concat_tables([rejected, reject_rows(counts, [*grouping.over, *lost])])
            write_table(rejected.sort_by("position"), self.out / REJECTED_NAME)
            if lost:
                groups = _without(grouping.groups, [row for row, _, _ in lost])
                write_table(groups_table(groups, counts_arrays(counts)), self.out / GROUPS_NAME)
            index = merge_index(parts, self.out / INDEX_NAME)
            manifest = self.identity.manifest(self.out, dataset, grouping, index, num_read)
            write_manifest(self.out, manifest)
            shutil.rmtree(self.staging)
            stage.count(num_shards)
        return self._summary(manifest, already_complete=False)

    def _summary(self, manifest: dict[str, Any], *, already_complete: bool) -> BuildSummary:
        return BuildSummary(
            out=self.out,
            already_complete=already_complete,
            totals=manifest["totals"],
            rejected=summarise_rejected(read_table(self.out / REJECTED_NAME)),
            limits=Limits(**manifest["limits"]),
            added_tokens=manifest["tokenizer"]["added_tokens"],
            id_conflicts=self.tokenizer.id_conflicts,
            seconds=dict(self.progress.seconds),
        )


def _count_chunk(job: _Job) -> Path:
    if job.records:
        write_part(job.part, sample_counter(job.task).count(job.records))
    return job.part


def _without(groups: Groups, lost: list[int]) -> Groups:
    """The groups without some samples, and without groups that are then empty."""
    keep = ~np.isin(groups.samples, lost)
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)[keep]
    sizes = np.bincount(group_of, minlength=len(groups))
    return Groups(groups.samples[keep], np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64))
