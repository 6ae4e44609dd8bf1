"""Records counted and packed by number, in any order: `RecordCounter`.

For loading without a build; `packer build` counts chunks of files by the same `SampleCounter`, and
packs by the same `pack_block`, so samples are those of a build.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isobatch.common.types import COUNT_COLUMNS, BoolArray, IntArray
from isobatch.counting.columns import Columns
from isobatch.counting.pack_block import CountedBlock, PackOptions, pack_block
from isobatch.counting.records.fields import NeverRead, never_read
from isobatch.counting.records.reading import DEFAULT_READING, Reading
from isobatch.counting.records.record import RawRecord
from isobatch.counting.sample_counter import CountSettings, SampleCounter
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.presets import ModelPreset
from isobatch.shards.stored_group import EMPTY_GROUP, PackedBlock, PackedFiles, StoredGroup

MEMORY_SOURCE = "record"
"""Source of records in memory that name none."""


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """A record that cannot be used."""

    index: int
    """Of the dataset."""
    sample_id: str
    source: str
    reason: str
    """Key of `counting.records.reject_reasons.REASONS`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRecords:
    """Some records, counted and tokenised; records that cannot be used have no costs."""

    indices: IntArray
    """Of the dataset, shape (records,)."""
    counts: NDArray[np.int32]
    """Columns of `Counts`, shape (records, len(COUNT_COLUMNS))."""
    usable: BoolArray
    sources: list[str]
    """Source of each record."""
    rejected: list[RejectedSample]
    table: pa.RecordBatch
    """As the packer stages it."""
    blobs: Mapping[str, bytes | memoryview]
    """Content of files that came with the records, by the names that the table has for them."""
    never_read: dict[str, NeverRead] = field(default_factory=dict)
    """Part of the dataset -> keys of its usable records that nothing reads."""

    encoded: Sequence[Any] = ()
    """What the caller has made of each record, if anything."""
    encoded_bytes: int = 0
    """Memory of that."""

    @property
    def has_videos(self) -> bool:
        """Whether a file is a video."""
        frames = pc.struct_field(pc.list_flatten(self.table.column("images")), "num_frames")
        return bool(frames.fill_null(0).to_numpy(zero_copy_only=False).any())

    @property
    def num_bytes(self) -> int:
        """Memory of tokens, files and arrays."""
        return sum(map(len, self.blobs.values())) + int(self.table.nbytes) + self.encoded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlaces:
    """Where the records of a dataset come from that is named by its place."""

    sources: list[tuple[str, str]]
    """Name and data root of each part of the dataset."""
    parts: IntArray
    """Part of each record, by its number."""
    suffixes: dict[int, str]
    """Number of a record -> what its id gets, where an earlier one has the same."""
    unread: dict[str, NeverRead]
    """Name of a part -> columns that its records come without."""


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that cannot be read."""

    why: str
    reason: str = "unreadable_record"
    """Key of `counting.records.reject_reasons.REASONS`."""
    value: Any = None
    """What is known of it."""


class _BlobsInMemory:
    """The blobs of several `CountedRecords`, by name."""

    def __init__(self, blobs: Mapping[str, bytes | memoryview]) -> None:
        self._blobs = blobs

    def read(self, name: str, offset: int, size: int, /) -> memoryview:
        """A range of bytes."""
        return memoryview(self._blobs[name])[offset : offset + size]


class RecordCounter:
    """Counts records for one model and tokenizer, and packs the counted ones."""

    chunk_records = 128
    """Records that are counted together: few, because each may have images of some megabytes."""
    row_bytes = 0
    empty_group = EMPTY_GROUP

    def __init__(  # noqa: PLR0913 - options by name
        self,
        model: ModelPreset,
        *,
        tokenizer: str,
        chat_template: str | None = None,
        template_date: str | None = None,
        data_root: str | None = None,
        keep_columns: tuple[str, ...] = (),
        renaming: Columns | None = None,
        columns: tuple[str, ...] = (),
        places: RecordPlaces | None = None,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        """Options as of `packer build`; `tokenizer` is a folder or Hub id.

        `places`: where the records are from; those in memory are of the source "record", their
        paths begin at `data_root`, and `renaming` gives them our names. `columns` are the names as
        texts, which the identity has.
        """
        self.model, self.tokenizer_source = model, tokenizer
        self._numbers, self._places, self._renaming = count(), places, renaming
        self._sources = [(MEMORY_SOURCE, "/")] if places is None else places.sources
        self._counter = SampleCounter(
            CountSettings(
                model=model,
                tokenizer=tokenizer,
                chat_template=chat_template,
                template_date=template_date,
                keep_columns=keep_columns,
                reading=reading,
                base=str(Path(data_root or ".").resolve()) if places is None else None,
            )
        )
        self.tokenizer: ChatTokenizer = self._counter.tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.image_token_id = self.tokenizer.image_token_id
        rules = blake2b(repr(model).encode(), digest_size=8).hexdigest()
        self.identity = f"{model.name} {rules} {self.tokenizer.hash[:16]}"
        self.identity += f" {columns}" if columns else ""
        if options := reading.identity():
            drawn = {"seed": reading.seed} if reading.answers == "drawn" else {}
            self.identity += f" {options | drawn}"
        """Changes whenever the same record could be counted otherwise."""
        self._packing = PackOptions(
            format="arrow",
            follow_links=False,
            image_token_id=self.image_token_id,
            audio_token_id=self.tokenizer.audio_token_id,
            video_token_id=self.tokenizer.video_token_id,
            extras=dict.fromkeys(keep_columns, "json"),
        )

    def count(self, indices: IntArray, values: Sequence[Any]) -> CountedRecords:
        """Count records, given with their indices."""
        parts = self._parts(indices)
        table, blobs = self.stage(indices, values, parts)
        if self._places is not None:
            table = _with_suffixes(table, indices, self._places.suffixes)
        reasons = table.column("reason").to_pylist()
        columns = [table.column(name).fill_null(0).to_numpy() for name in COUNT_COLUMNS]
        ids, sources, details = (
            table.column(name).to_pylist() for name in ("sample_id", "source", "detail")
        )
        rows = zip(indices.tolist(), ids, sources, reasons, details, strict=True)
        rejected = [RejectedSample(*row) for row in rows if row[3] is not None]
        return CountedRecords(
            indices=indices,
            counts=np.stack(columns, axis=1).astype(np.int32),
            usable=np.array([reason is None for reason in reasons], np.bool_),
            sources=sources,
            rejected=rejected,
            table=table,
            blobs=blobs,
            never_read=self._never_read(table, parts),
        )

    def name_blobs(self, first: int, step: int) -> None:
        """Name blobs by these numbers from now on, which no other counter of the dataset has."""
        self._numbers = count(first, step)

    def unread_columns(self) -> dict[str, NeverRead]:
        """Part of the dataset -> columns that its records come without."""
        return {} if self._places is None else dict(self._places.unread)

    def _never_read(self, table: pa.RecordBatch, parts: IntArray) -> dict[str, NeverRead]:
        if table.column("unread").null_count == len(table):  # nearly always, and quicker to see
            return {}
        of_sources = {
            self._sources[part][0]: never_read_in(table.filter(pa.array(parts == part)))
            for part in np.unique(parts).tolist()
        }
        return {name: paths for name, paths in of_sources.items() if paths}

    def _parts(self, indices: IntArray) -> IntArray:
        """Part of the dataset that each record is from."""
        return np.zeros_like(indices) if self._places is None else self._places.parts[indices]

    def stage(
        self, indices: IntArray, values: Sequence[Any], parts: IntArray
    ) -> tuple[pa.RecordBatch, dict[str, bytes]]:
        """Rows as the packer stages them, in order, and the blobs that they name."""
        records = [
            value if isinstance(value, RawRecord) else self._raw(index, value)
            for index, value in zip(indices.tolist(), values, strict=True)
        ]
        tables, blobs, order = [], {}, np.argsort(parts, kind="stable")
        for part in np.unique(parts).tolist():
            name = str(next(self._numbers))  # of its own, so that records of several may be joined
            chosen = [records[place] for place in order[parts[order] == part].tolist()]
            source, root = self._sources[part]
            counted = self._counter.count(chosen, source, root, name)
            tables += counted.table.combine_chunks().to_batches()
            blobs[name] = counted.blob
        return pa.concat_batches(tables).take(pa.array(np.argsort(order))), blobs

    def _raw(self, index: int, value: Any) -> RawRecord:
        if isinstance(value, BrokenRecord):
            return RawRecord(index, value.value, value.why, value.reason)
        if self._renaming is None or not isinstance(value, Mapping):
            return RawRecord(index, value)
        return RawRecord(index, self._renaming.apply(value), renamed=self._renaming.renamed)

    def group(
        self, parts: Sequence[tuple[CountedRecords, IntArray]], order: IntArray
    ) -> tuple[StoredGroup, list[RejectedSample]]:
        """The usable records at these rows as a group, and those that changed since.

        `order`: their indices, and maybe others, in the order of the group. A changed record is
        left out: its files are not those that were counted.
        """
        batches = [counted.table.take(pa.array(rows)) for counted, rows in parts]
        joined = np.concatenate([counted.indices[rows] for counted, rows in parts])
        row_of = {index: row for row, index in enumerate(joined.tolist())}
        rows = np.array([row_of[index] for index in order.tolist() if index in row_of])
        staged, indices = pa.concat_batches(batches).take(pa.array(rows)), joined[rows]
        ids = staged.column("sample_id").to_pylist()
        group = CountedBlock(
            samples=staged,
            sample_ids=ids,
            data_roots=[self._sources[part][1] for part in self._parts(indices).tolist()],
            group_offsets=np.array([0, len(ids)]),
        )
        blobs = _BlobsInMemory({k: v for counted, _ in parts for k, v in counted.blobs.items()})
        block, lost = pack_block(group, self._packing, blobs)
        sources = staged.column("source").to_pylist()
        root = "/" if self._places is None else ""  # that names of records in memory lack
        changed = [
            RejectedSample(int(indices[row]), ids[row], sources[row], why.reason, root + why.detail)
            for row, why in lost.items()
        ]
        return _stored_group(block), changed


def never_read_in(rows: pa.RecordBatch) -> NeverRead:
    """What these counted records have that was never read."""
    paths, values = rows.column("unread"), rows.column("unread_values")
    if paths.null_count == len(paths):  # nearly always, and quicker to see
        return {}
    encoded = paths.dictionary_encode()  # numbers in the order of appearance
    numbers = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
    _, firsts, counts = np.unique(numbers, return_index=True, return_counts=True)
    texts = encoded.dictionary.to_pylist()
    examples = values.take(pa.array(firsts)).to_pylist()
    return never_read(zip(texts, counts.tolist(), examples, strict=False))


def _with_suffixes(
    table: pa.RecordBatch, indices: IntArray, suffixes: dict[int, str]
) -> pa.RecordBatch:
    """Ids that are those of earlier records too, told apart."""
    endings = [suffixes.get(index, "") for index in indices.tolist()]
    if not any(endings):
        return table
    place = table.schema.get_field_index("sample_id")
    ids = table.column(place).to_pylist()
    columns = table.columns
    columns[place] = pa.array([name + ending for name, ending in zip(ids, endings, strict=True)])
    return pa.record_batch(columns, schema=table.schema)


def _stored_group(block: PackedBlock) -> StoredGroup:
    """A block of one group as a reader of shards would give it."""
    images, audios = block.images, block.audios
    height, width = (images.numbers[name] for name in ("height", "width"))
    return StoredGroup(
        where="the dataset",
        sample_ids=tuple(block.sample_ids),
        input_ids=block.input_ids,
        labels=block.labels,
        cu_seqlens=block.token_offsets.astype(np.int32),
        images=_contents(images),
        image_sizes=np.stack([height, width], axis=1).astype(np.int32),
        image_samples=_owners(images),
        image_frames=images.numbers["num_frames"].astype(np.int32),
        image_rates=images.numbers["rate"].astype(np.float64),
        audios=_contents(audios),
        audio_lengths=audios.numbers["length"].astype(np.int32),
        audio_samples=_owners(audios),
        extras=block.extras,
    )


def _contents(files: PackedFiles) -> list[memoryview]:
    view = files.content.data
    return [view[start:end] for start, end in pairwise(files.content_offsets.tolist())]


def _owners(files: PackedFiles) -> NDArray[np.int32]:
    """Place of each file's sample."""
    sizes = np.diff(files.offsets)
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
