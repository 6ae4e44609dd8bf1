"""A build of records that somebody else reads and counts: `CountedBuilder`.

For loading without a build, which has counted them already. Grouping, writing and all files are
those of `packer build`; only what leads to the staged samples differs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from isobatch.counting.records.extras import kinds_in
from isobatch.counting.records.record import Chunk
from isobatch.counting.sample_counter import EXTRA_KINDS, Counted, CountSettings
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.sources.base import Located, OnBytes, Source
from isobatch.packer.sources.dataset import Dataset, Part
from isobatch.packer.upload import save_html
from isobatch.shards.folders import is_uri
from isobatch.shards.stored_group import EXTRAS


class _MemorySource(Source):
    """Records in memory: they are in no file, and nothing here reads them."""

    def chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """No chunks: the records are counted already."""
        return iter(())

    def columns(self) -> set[str]:
        """Columns that were to be kept."""
        return set(self.located.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryPart(Part):
    def open(self) -> Source:
        """A source without files."""
        return _MemorySource(self.located, self.name, self.data_root)


def dataset_in_memory(name: str) -> Dataset:
    """What a build of records in memory is made of; their paths are absolute ones."""
    part = _MemoryPart(name=name, located=Located("memory", "/", ()), data_root="/")
    return Dataset(name=name, parts=(part,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSamples:
    """The records of a dataset as they are counted, in its order."""

    dataset: Dataset
    part_sizes: list[int]
    """Records of each part."""
    chunks: Iterator[tuple[pa.RecordBatch, dict[str, bytes]]]
    """Staged rows, and the blobs that they name; a blob may come more than once."""
    note: str
    """What is counted again, for the user."""


class CountedBuilder(Builder):
    """Builds from `CountedSamples`, always from the beginning."""

    def __init__(
        self, config: BuildConfig, progress: StageProgress, samples: CountedSamples
    ) -> None:
        super().__init__(config, progress)
        self._samples = samples

    def run(self) -> None:
        """Replace what is in the folder, if a build made it, by the build and its report."""
        self.build(overwrite=True)
        if not is_uri(self.config.out):  # at a URI the build has written it
            save_html(make_report(self.config.out), self.config.out)

    def _find(self) -> Dataset:
        return self._keeping(self._samples.dataset)

    def _demo(self) -> Dataset:
        return self._find()

    def _count_records(self, dataset: Dataset, settings: CountSettings) -> None:
        samples = self._samples
        staging = self.staging
        saved = set[str]()
        self._note(samples.note)
        staging.prepare()
        number = -1
        with self.progress.stage("count", sum(samples.part_sizes)) as stage:
            for number, (rows, blobs) in enumerate(samples.chunks):
                for name in blobs.keys() - saved:
                    (staging.blobs / name).write_bytes(blobs[name])
                saved |= blobs.keys()
                staging.save(number, Counted(_with_kinds(rows), b""))
                stage.advance(len(rows))
                stage.count(len(rows))
        staging.merge(number + 1, samples.part_sizes)


def _with_kinds(rows: pa.RecordBatch) -> pa.Table:
    """Staged rows with the kinds of their kept columns."""
    table = pa.Table.from_batches([rows])
    if EXTRAS not in table.column_names:
        return table
    texts = filter(None, table.column(EXTRAS).to_pylist())
    return table.replace_schema_metadata({EXTRA_KINDS: json.dumps(kinds_in(texts))})
