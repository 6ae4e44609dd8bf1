"""`packer build`: the stages in order, each leaving its artefact, so that a stopped build goes on where it was.

count -> caps and groups -> shards -> index and manifest. What a killed build has finished (parts of the count, whole
shards) is found again and not done twice; the result is the same, byte for byte, as that of an undisturbed build.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from balance.errors import ConfigError, DataError
from balance.presets import ModelPreset, load_model, model_to_dict
from balance.records import COUNT_COLUMNS, Groups, Limits
from packer.config import DEMO_MODEL, BuildConfig
from packer.count import CountTask, sample_counter
from packer.demo import demo_tokenizer_path, write_demo
from packer.executor import map_ordered
from packer.group import Grouping, group_counts
from packer.progress import StageProgress
from packer.record import RawRecord
from packer.shards.index import merge_index, read_lost
from packer.shards.manifest import MANIFEST_NAME, describe_file, hash_json, read_manifest, write_manifest
from packer.sources.dataset import Dataset, find_dataset
from packer.sources.json_records import read_json_records
from packer.staging import merge_parts, part_path, part_sizes, write_part
from packer.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    read_table,
    reject_rows,
    split_staged,
    write_table,
)
from packer.text import ChatTokenizer
from packer.write import WriteTask, index_part, plan_shards, shard_name, write_shard

INDEX_NAME = "index.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSummary:
    """What a build did, for the last lines that a person reads."""

    out: Path
    already_complete: bool
    totals: dict[str, int]
    rejected: dict[str, Rejection]
    """Reason -> how many samples and the first of them."""
    limits: Limits
    added_tokens: dict[str, int]
    id_conflicts: dict[str, tuple[int, int]]
    """Token -> (id that the tokenizer's config declares, id that it has)."""
    seconds: dict[str, float]
    """Stage -> time."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The samples that were rejected for one reason."""

    number: int
    first: str
    """Id of the first of them, and the particulars."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One chunk to count."""

    task: CountTask
    chunk: int
    records: list[RawRecord]
    part: Path


class Builder:
    """One build into one output directory."""

    def __init__(self, config: BuildConfig, progress: StageProgress) -> None:
        self.config = config
        self.progress = progress
        self.out = Path(config.out)
        self.staging = self.out / "staging"
        self.model: ModelPreset = load_model(config.model or DEMO_MODEL)
        self._tokenizer_path = config.tokenizer or str(demo_tokenizer_path())
        self.tokenizer = ChatTokenizer.load(
            self._tokenizer_path, self.model.image_markup, chat_template=config.chat_template
        )

    # -- the two commands ---------------------------------------------------------------------------------------------

    def build(self, *, overwrite: bool = False) -> BuildSummary:
        """All stages, up to the manifest. Raises DataError when nothing can be packed or the output is another
        build."""
        if overwrite:
            _clear(self.out)
        elif (self.out / MANIFEST_NAME).exists():
            return self._summary(self._finished_manifest(), already_complete=True)
        dataset = self._open()
        counts, rejected = self._count(dataset)
        grouping = self._group(counts, rejected)
        shards = self._write(dataset, grouping, counts)
        return self._finish(dataset, grouping, counts, rejected, shards)

    def count(self) -> tuple[pa.Table, pa.Table]:
        """Only count: leaves counts.parquet and rejected.parquet; -> both."""
        if (self.out / MANIFEST_NAME).exists():
            raise ConfigError(f"{self.out} holds a finished build: choose another --out")
        dataset = self._open()
        counts, rejected = self._count(dataset)
        write_table(rejected, self.out / REJECTED_NAME)
        shutil.rmtree(self.staging)
        return counts, rejected

    # -- identity -----------------------------------------------------------------------------------------------------

    def settings(self, dataset_name: str) -> dict[str, Any]:
        """What decides the bytes of a build, without paths of this machine."""
        return {
            "dataset": dataset_name,
            "format": self.config.format,
            "shard_mb": self.config.shard_mb,
            "image_check": "header and tail; PNG checksums when written",
            **asdict(self.config.group_options),
        }

    def _finished_manifest(self) -> dict[str, Any]:
        manifest = read_manifest(self.out)
        settings = self.settings(manifest["config"].get("dataset", ""))
        same = manifest["config"] == settings and manifest["model"] == json.loads(json.dumps(model_to_dict(self.model)))
        if not same or manifest["tokenizer"]["hash"] != self.tokenizer.hash:
            raise DataError(
                f"{self.out} is a finished build with other settings: choose another --out, or add --overwrite"
            )
        return manifest

    def _open(self) -> Dataset:
        """Find the dataset and make sure that what is staged belongs to this very build."""
        dataset = self._demo() if self.config.is_demo else self._find()
        self.staging.mkdir(parents=True, exist_ok=True)
        state = dataset.annotations.stat()
        identity = {
            "settings": self.settings(dataset.name),
            "model": model_to_dict(self.model),
            "tokenizer": self.tokenizer.hash,
            "annotations": [str(dataset.annotations.resolve()), state.st_size, state.st_mtime_ns],
            "data_root": str(dataset.data_root.resolve()),
            "chunk_records": self.config.chunk_records,
        }
        marker = self.staging / "build.json"
        if not marker.exists():
            marker.write_text(json.dumps(identity, indent=1), "utf-8")
        elif json.loads(marker.read_text("utf-8")) != json.loads(json.dumps(identity)):
            raise DataError(
                f"{self.out} holds an unfinished build of other data or settings: finish that one,"
                " choose another --out, or add --overwrite"
            )
        return dataset

    def _find(self) -> Dataset:
        root = Path(self.config.data_root) if self.config.data_root else None
        return find_dataset(self.config.dataset, root, fetch=self.config.fetch_annotations)

    def _demo(self) -> Dataset:
        folder = Path(self.config.data_root) if self.config.data_root else self.out / "source"
        if not (folder / "annotations.json").exists():
            with self.progress.stage("draw", None, unit="demo samples") as stage:
                write_demo(folder)
                stage.count(1000)
        return Dataset(name="demo", annotations=folder / "annotations.json", data_root=folder)

    # -- stages -------------------------------------------------------------------------------------------------------

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
            tokenizer=self._tokenizer_path,
            chat_template=self.config.chat_template,
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
            yield _Job(task, chunk, [] if part.exists() else batch, part)
            chunk += 1

    def _group(self, table: pa.Table, rejected: pa.Table) -> Grouping:
        if len(table) == 0:
            raise _nothing_to_pack(rejected)
        with self.progress.stage("group", None) as stage:
            counts = counts_arrays(table)
            grouping = group_counts(
                counts,
                self.config.group_options,
                vision_unit=self.model.vision_unit,
                context_len=self.model.context_len,
            )
            stage.count(len(counts))
        if len(grouping.groups) == 0:
            raise _nothing_to_pack(pa.concat_tables([rejected, reject_rows(table, grouping.over)]))
        write_table(groups_table(grouping.groups, counts), self.out / GROUPS_NAME)
        return grouping

    def _write(self, dataset: Dataset, grouping: Grouping, counts: pa.Table) -> int:
        for folder in (self.out / "shards", self.staging / "index"):
            folder.mkdir(exist_ok=True)
        plan = plan_shards(
            grouping.groups,
            counts.column("seq_len").to_numpy(),
            counts.column("image_bytes").to_numpy() * (self.config.format != "refs"),
            shard_bytes=self.config.shard_mb << 20,
        )
        tasks = (
            WriteTask(
                shard=shard,
                first_group=first,
                groups=grouping.groups.take(np.arange(first, last)),
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
                stage.count(int(grouping.groups.offsets[last] - grouping.groups.offsets[first]))
        return len(plan)

    def _finish(
        self, dataset: Dataset, grouping: Grouping, table: pa.Table, rejected: pa.Table, num_shards: int
    ) -> BuildSummary:
        with self.progress.stage("finish", None, unit="shards") as stage:
            parts = [index_part(self.out, shard) for shard in range(num_shards)]
            lost = [row for part in parts for row in read_lost(part)]
            rejected = pa.concat_tables([rejected, reject_rows(table, [*grouping.over, *lost])])
            write_table(rejected.sort_by("position"), self.out / REJECTED_NAME)
            groups = _without(grouping.groups, [row for row, _, _ in lost])
            if lost:
                write_table(groups_table(groups, counts_arrays(table)), self.out / GROUPS_NAME)
            index = merge_index(parts, self.out / INDEX_NAME)
            manifest = self._manifest(
                dataset, grouping, index, len(table) - len(grouping.over) + len(rejected) - len(lost)
            )
            write_manifest(self.out, manifest)
            shutil.rmtree(self.staging)
            stage.count(num_shards)
        return self._summary(manifest, already_complete=False)

    def _manifest(self, dataset: Dataset, grouping: Grouping, index: pa.Table, num_read: int) -> dict[str, Any]:
        settings = self.settings(dataset.name)
        sums = {
            name: int(np.sum(index.column(name).to_numpy(), dtype=np.int64)) for name in ("num_samples", *COUNT_COLUMNS)
        }
        num_packed = sums.pop("num_samples")
        totals = {
            "num_read": num_read,
            "num_packed": num_packed,
            "num_rejected": num_read - num_packed,
            "num_groups": len(index),
            **sums,
        }
        return {
            "isobatch_version": version("isobatch"),
            "format": self.config.format,
            "config": settings,
            "config_hash": hash_json([settings, model_to_dict(self.model), self.tokenizer.hash]),
            "model": model_to_dict(self.model),
            "tokenizer": {
                "hash": self.tokenizer.hash,
                "image_token_id": self.tokenizer.image_token_id,
                "vocab_size": self.tokenizer.vocab_size,
                "added_tokens": self.tokenizer.added_tokens,
            },
            "limits": asdict(grouping.limits),
            "seed": self.config.seed,
            "order": asdict(grouping.order),
            "totals": totals,
            "shards": self._describe_shards(index),
            "files": [describe_file(self.out, name) for name in (INDEX_NAME, COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)],
            **({"data_root": str(dataset.data_root.resolve())} if self.config.format == "refs" else {}),
        }

    def _describe_shards(self, index: pa.Table) -> list[dict[str, Any]]:
        shard = index.column("shard").to_numpy()
        samples = index.column("num_samples").to_numpy()
        num_shards = int(shard.max()) + 1
        num_groups = np.bincount(shard, minlength=num_shards)
        num_samples = np.bincount(shard, weights=samples, minlength=num_shards).astype(int)
        return [
            {
                **describe_file(self.out, shard_name(number, self.config.format)),
                "num_groups": int(num_groups[number]),
                "num_samples": int(num_samples[number]),
            }
            for number in range(num_shards)
        ]

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


def summarise_rejected(rejected: pa.Table) -> dict[str, Rejection]:
    """Reason -> rejected samples, most frequent first."""
    reasons = rejected.column("reason").to_pylist()
    summary = {}
    for reason, number in Counter(reasons).most_common():
        first = rejected.slice(reasons.index(reason), 1).to_pylist()[0]
        summary[reason] = Rejection(number, f"{first['sample_id']}: {first['detail']}")
    return summary


def _nothing_to_pack(rejected: pa.Table) -> DataError:
    reasons = [f"{r.number} {reason}, first {r.first}" for reason, r in summarise_rejected(rejected).items()]
    return DataError(f"nothing to pack: all {len(rejected)} samples were rejected ({'; '.join(reasons)})")


def _count_chunk(job: _Job) -> Path:
    if job.records:
        write_part(job.part, sample_counter(job.task).count(job.records))
    return job.part


def _without(groups: Groups, lost: list[int]) -> Groups:
    """The groups without some samples, and without groups that are then empty."""
    keep = ~np.isin(groups.samples, lost)
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)[keep]
    sizes = np.bincount(group_of, minlength=len(groups))
    sizes = sizes[sizes > 0]
    return Groups(groups.samples[keep], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _clear(out: Path) -> None:
    """Remove what a build made, and only that: --overwrite must not delete a folder that was given by mistake."""
    known = {
        MANIFEST_NAME,
        INDEX_NAME,
        COUNTS_NAME,
        GROUPS_NAME,
        REJECTED_NAME,
        "shards",
        "staging",
        "report.html",
        "source",
    }
    if not out.exists():
        return
    strangers = sorted(path.name for path in out.iterdir() if path.name not in known)
    if strangers:
        raise ConfigError(
            f"--overwrite: {out} also holds {', '.join(strangers[:5])}, which no build made; nothing was removed"
        )
    # the manifest first: without it the rest is an unfinished build, whatever happens now
    (out / MANIFEST_NAME).unlink(missing_ok=True)
    for name in known:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
