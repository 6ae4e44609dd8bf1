"""`packer build`: counts -> caps and groups -> shards -> index and manifest.

Each stage leaves its artefact, so a stopped build resumes where it was: finished parts of the count
and whole shards are not repeated. The bytes are those of an undisturbed build.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa

from isobatch.balance.grouping import compile_ahead
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import Limits
from isobatch.counting.records.user_map import ALL_COLUMNS, load_map
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.folder.find_model import find_model
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_rules import ProcessorRule
from isobatch.packer.build_dir import (
    DEMO_FOLDER,
    TABLE_NAMES,
    BuildIdentity,
    clear,
    locked,
    unfinished_other,
)
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.counted_samples import CountedSamples
from isobatch.packer.count.staging import Staging
from isobatch.packer.demo.dataset import DEMO_SAMPLES
from isobatch.packer.demo.kept_demo import place_demo
from isobatch.packer.partitions.cut import Cut, cut_dataset, cut_from_json, cut_to_json
from isobatch.packer.partitions.decide import decide_limits, needs_counts
from isobatch.packer.partitions.join import join_build, packed_parts
from isobatch.packer.partitions.pack_all import PartitionRun
from isobatch.packer.partitions.partition import (
    ROWS_NAME,
    Decisions,
    PackedPartition,
    Partition,
    PartitionJob,
    columns_of,
    tokenizer_place,
)
from isobatch.packer.partitions.results import Results
from isobatch.packer.partitions.run import alone_in
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import (
    BuildSummary,
    Rejection,
    count_rejected,
    nothing_to_pack,
    require_few,
)
from isobatch.packer.sources.columns import parse_columns
from isobatch.packer.sources.dataset import DEMO, Dataset, demo_dataset, find_dataset, require_all
from isobatch.packer.upload import Publisher
from isobatch.packer.write.energon_files import META_NAMES
from isobatch.shards.folders import is_uri, naming_full_disk
from isobatch.shards.index import merge_index, read_rows
from isobatch.shards.manifest import (
    is_complete,
    read_manifest,
    tables_on_disk,
    write_manifest,
)
from isobatch.shards.tables import REJECTED_NAME, read_row_groups

Result = TypeVar("Result")

CUT_NAME, DECISIONS_NAME = "cut.json", "decisions.json"


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
        _ = config.group_options, config.share  # what is wrong with it is said before counting
        self.progress = progress or StageProgress()
        self.publisher = Publisher(config.out, config.work_dir) if is_uri(config.out) else None
        self.out = self.publisher.folder if self.publisher else Path(config.out)
        """Folder where the build works."""
        self.staging = Staging(self.out / "staging")
        try:
            self.model = find_model(config.model or DEMO_MODEL)
            self.tokenizer = ChatTokenizer.for_model(
                self.model, tokenizer_place(config), config.chat_template, config.template_date
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

    def build(self, *, overwrite: bool = False) -> BuildSummary | None:
        """Run all stages up to the manifest; None if other shares of the partitions are missing.

        DataError if nothing can be packed.
        """
        config = self.config
        is_complete(config.out)  # raises for a wrong place before anything is made or removed
        if config.grouping == "fit":
            compile_ahead.begin()
            compile_ahead.load()
        with self.dataset(overwrite=overwrite) as dataset:
            if is_complete(config.out):
                return self._finished(dataset)
            results = Results(self.place, self.identity.key(dataset))
            cut = self.cut(dataset, results)
            self.identity.is_cut = len(cut.partitions) > 1
            self._claim(dataset, results)
            if self._samples is None and not self.staging.samples.exists():
                self.note_surprises(dataset)
            (self.out / "shards").mkdir(exist_ok=True)
            if config.executor == "local" and len(cut.partitions) == 1 and not config.share:
                packed = [self._only(dataset).pack()]
                rows = read_rows(self.staging.folder / ROWS_NAME)
                merge_index([rows], [packed[0].index], [len(packed[0].shards)], self.out)
                return self._finish(dataset, packed)
            try:
                return self._build_partitions(dataset, cut, results)
            except (OSError, DataError):
                # a share on another machine may have completed it, and removed what it is made of
                if not (config.share and is_complete(config.out)):
                    raise
            return self._finished(dataset)

    def count(self) -> tuple[pa.Table, pa.Table]:
        """Only count: leaves counts.parquet and rejected.parquet, and returns both."""
        if is_complete(self.config.out):
            raise ConfigError(f"{self.config.out} holds a finished build: choose another --out")
        with self.dataset() as dataset:
            self._claim(dataset, Results(self.place, self.identity.key(dataset)))
            self.note_surprises(dataset)
            tables = self._only(dataset).counts()
            if self.publisher:
                self.publisher.upload_tables()
            else:
                self.staging.remove()
            return tables

    def _only(self, dataset: Dataset) -> Partition:
        """The only partition of a small dataset, which works in the build's own folder."""
        job = PartitionJob(
            config=self.config,
            dataset=dataset,
            number=None,
            work=str(self.out),
            out=self.place,
        )
        return Partition(job, self.model, self.tokenizer, self.progress, self._samples)

    @property
    def place(self) -> str:
        """Folder or URI that the shards go to."""
        return self.publisher.uri if self.publisher else str(self.out.absolute())

    # --- several partitions, or another executor ---

    def cut(self, dataset: Dataset, results: Results) -> Cut:
        """The dataset in partitions."""
        if self._samples is not None:
            return Cut((dataset,), ())
        config = self.config
        if (text := results.read_text(CUT_NAME)) is not None:
            return cut_from_json(dataset, text)
        return cut_dataset(dataset, config.partition_samples, config.seed, limit=config.limit)

    def run_of(
        self, dataset: Dataset, cut: Cut, results: Results, first: int | None
    ) -> PartitionRun:
        """The partitions of a cut, which have numbers from `first` on."""
        return PartitionRun(
            config=self.config,
            dataset=dataset,
            cut=cut,
            results=results,
            work=str(self.out.absolute() / "staging" / "work"),
            progress=self.progress,
            first=first,
        )

    def _build_partitions(
        self, dataset: Dataset, cut: Cut, results: Results
    ) -> BuildSummary | None:
        config, is_cut = self.config, len(cut.partitions) > 1
        run = self.run_of(dataset, cut, results, 0 if is_cut else None)
        decisions = self._decisions(results, cut)
        others = run.pack(decisions, count_first=is_cut and needs_counts(config, dataset))
        if config.share and is_complete(config.out):
            return self._finished(dataset)
        if others:
            self.progress.note(others)
            return None
        with alone_in(self.staging.folder):
            if not is_complete(config.out):
                return self._join(run, decisions)
        return self._finished(dataset)

    def _decisions(self, results: Results, cut: Cut) -> Decisions:
        """What holds for all partitions; saved, so that it is decided once."""
        if len(cut.partitions) == 1:
            return Decisions()
        if (text := results.read_text(DECISIONS_NAME)) is None:
            results.save_text(CUT_NAME, cut_to_json(cut))
            with self.progress.stage("caps", None) as stage:
                decisions = decide_limits(cut, self.config, stage.count)
            results.save_text(DECISIONS_NAME, decisions.to_json())
            return decisions
        return Decisions.from_json(text)

    def _join(self, run: PartitionRun, decisions: Decisions) -> BuildSummary:
        """Make the build of the packed partitions."""
        packed = run.finish(decisions)
        # in a folder of this process, for another share may do the same
        with TemporaryDirectory(dir=self.staging.folder) as folder:
            join_build(packed_parts(run.results, run.numbers(packed), packed), Path(folder))
            for name in TABLE_NAMES:
                os.replace(Path(folder, name), self.out / name)
        rejected = self._rejected()
        num_read = sum(of.num_read for of in packed)
        if not sum(of.index.num_groups for of in packed):
            raise nothing_to_pack(rejected)
        require_few(rejected, num_read, self.config.max_rejected, self.out / REJECTED_NAME)
        return self._finish(run.dataset, packed, run.results)

    @contextmanager
    def dataset(self, *, overwrite: bool = False) -> Iterator[Dataset]:
        """The dataset, with the output locked; a wrong dataset leaves no output folder."""
        if not self._is_drawn:
            self._find()
        if overwrite and self.config.share:
            would = "each job would remove the work of the others"
            raise ConfigError(f"--overwrite with --partitions: {would}")
        with (
            locked(self.out, with_others=self.config.share is not None),
            naming_full_disk(self.out),
        ):
            if overwrite:
                if self.publisher:
                    self.publisher.clear()
                clear(self.out)
            yield self.find()

    @property
    def _is_drawn(self) -> bool:
        return self.config.is_demo and self._samples is None

    def find(self) -> Dataset:
        """The dataset; the demo is drawn where it is not there yet."""
        return self._demo() if self._is_drawn else self._find()

    def _claim(self, dataset: Dataset, results: Results) -> None:
        self.identity.claim(self.staging.folder, dataset)
        if self.publisher:
            if results.are_others_there():
                raise unfinished_other(self.place)
            self.publisher.claim(results.key if self.config.share else None)

    def _finished(self, dataset: Dataset) -> BuildSummary:
        """The summary of an earlier run's build; DataError if that is another build."""
        manifest = self.identity.require_same(self.config.out, dataset)
        with tables_on_disk(read_manifest(self.config.out), [REJECTED_NAME]) as folder:
            rejected = count_rejected(read_row_groups(folder / REJECTED_NAME))
        summary = self._summary(manifest, rejected, already_complete=True)
        if self.publisher:
            if not self.publisher.is_held_by_others():
                Results(self.place, "").remove()
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
                place_demo(folder)
                stage.count(DEMO_SAMPLES)
        return self._keeping(demo_dataset(folder))

    def note_surprises(self, dataset: Dataset) -> None:
        """Say before the work what a user may not expect of columns, model and chat template."""
        keep = () if self.config.map else self.config.kept_columns
        columns = columns_of(dataset) if keep else set[str]()
        for name in (name for name in keep if name not in columns):
            note = f"note: no {name!r} (--keep-columns) in the first records, which have"
            self.progress.note(f"{note} {', '.join(sorted(columns))}")
        if isinstance(self.model.vision, ProcessorRule):
            unknown = "so caps and balance go by LLM tokens, and no time is predicted"
            self.progress.note(f"note: {self.model.description}, {unknown}")
        if day := self.tokenizer.template_date:
            self.progress.note(f"note: the chat template writes a date: {day} (--template-date)")

    def _finish(
        self, dataset: Dataset, packed: list[PackedPartition], results: Results | None = None
    ) -> BuildSummary:
        """Write the manifest, when all that it names is there."""
        num_shards = sum(len(of.shards) for of in packed)
        with self.progress.stage("finish", None, unit="shards") as stage:
            manifest = self.identity.manifest(self.out, dataset, packed)
            rejected = self._rejected()
            write_manifest(self.out, manifest)
            if self.publisher:
                names = [file["name"] for file in manifest["files"]]
                self.publisher.publish(
                    [*names, *META_NAMES] if self.config.format == "energon" else names
                )
                if results is not None:
                    results.remove()
                self.publisher.forget()
            else:
                self.staging.remove()
            stage.count(num_shards)
        return self._summary(manifest, rejected, already_complete=False)

    def _rejected(self) -> dict[str, Rejection]:
        return count_rejected(read_row_groups(self.out / REJECTED_NAME))

    def _summary(
        self, manifest: dict[str, Any], rejected: dict[str, Rejection], *, already_complete: bool
    ) -> BuildSummary:
        return BuildSummary(
            out=self.config.out,
            already_complete=already_complete,
            totals=manifest["totals"],
            rejected=rejected,
            limits=Limits(**manifest["limits"]),
            added_tokens=manifest["tokenizer"]["added_tokens"],
            id_conflicts=self.tokenizer.id_conflicts,
            never_read=manifest.get("never_read", {}),
            seconds=dict(self.progress.seconds),
        )
