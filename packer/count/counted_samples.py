"""Records that somebody else reads and counts, for a build: `CountedSamples`.

For loading without a build, which has counted them already. Grouping, writing and all files are
those of `packer build`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from isobatch.counting.records.extras import kinds_in
from isobatch.counting.records.record import Chunk
from isobatch.counting.sample_counter import EXTRA_KINDS, Counted
from isobatch.packer.count.staging import Staging
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.base import Located, OnBytes, Source
from isobatch.packer.sources.dataset import Dataset
from isobatch.packer.sources.detect import Part
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
    chunks: Iterator[tuple[pa.RecordBatch, Mapping[str, bytes | memoryview]]]
    """Staged rows, and the blobs that they name; a blob may come more than once."""
    note: str
    """What is counted again, for the user."""

    def stage(self, staging: Staging, progress: StageProgress) -> None:
        """Write all rows and blobs where a count leaves them, from the beginning."""
        saved, number = set[str](), -1
        staging.prepare()
        with progress.stage("count", sum(self.part_sizes)) as stage:
            for number, (rows, blobs) in enumerate(self.chunks):
                for name in blobs.keys() - saved:
                    (staging.blobs / name).write_bytes(blobs[name])
                saved |= blobs.keys()
                staging.save(number, Counted(_with_kinds(rows), b""))
                stage.advance(len(rows))
                stage.count(len(rows))
        staging.merge(range(number + 1), self.part_sizes)


def _with_kinds(rows: pa.RecordBatch) -> pa.Table:
    """Staged rows with the kinds of their kept columns."""
    table = pa.Table.from_batches([rows])
    if EXTRAS not in table.column_names:
        return table
    texts = filter(None, table.column(EXTRAS).to_pylist())
    return table.replace_schema_metadata({EXTRA_KINDS: json.dumps(kinds_in(texts))})
