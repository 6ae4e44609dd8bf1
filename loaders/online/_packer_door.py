"""The packer's counting: the one place where `loaders` uses `packer`.

For loading without a build: records are counted and tokenised by the packer's own code, so samples
are those of a build.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isobatch.balance.grouping.caps import GroupOptions, choose_limits
from isobatch.common.consoles import messages
from isobatch.common.errors import ConfigError
from isobatch.common.types import COUNT_COLUMNS, BoolArray, FloatArray, IntArray
from isobatch.common.visible_text import visible
from isobatch.counting.pack_block import CountedBlock, PackOptions, pack_block
from isobatch.counting.records.fields import (
    NeverRead,
    add_columns,
    add_described,
    add_never_read,
    never_read_line,
)
from isobatch.counting.records.reading import DEFAULT_READING, Reading
from isobatch.counting.records.record import BY_CHOICE, RawRecord
from isobatch.counting.records.user_map import ALL_COLUMNS
from isobatch.counting.sample_counter import CountSettings, SampleCounter
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.loaders.online.encoded import EncodedSample
from isobatch.loaders.online.records import BrokenRecord
from isobatch.models.flops import FlopsModel
from isobatch.models.folder.find_model import find_model, is_folder
from isobatch.models.presets import ModelPreset
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.record_table import RecordTable, read_records
from isobatch.packer.count.staging import never_read_in
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.columns import named_columns
from isobatch.packer.sources.dataset import Dataset
from isobatch.shards.stored_group import EMPTY_GROUP, PackedBlock, PackedFiles, StoredGroup

__all__ = [
    "BY_CHOICE",
    "FlopsModel",
    "GroupOptions",
    "NeverRead",
    "RawRecord",
    "Reading",
    "RecordCounter",
    "RecordTable",
    "add_never_read",
    "choose_limits",
    "column_texts",
    "columns_of_records",
    "find_records",
    "never_read_line",
    "visible",
    "write_build",
    "write_page",
]


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
    """Key of `counting.records.record.REASONS`."""
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
    blobs: dict[str, bytes]
    """Content of files that came with the records, by the names that the table has for them."""
    never_read: dict[str, NeverRead] = field(default_factory=dict)
    """Part of the dataset -> keys of its usable records that nothing reads."""
    encoded: Sequence[EncodedSample | None] = ()
    """What a function of the user's made of each record, if there is one."""

    @property
    def has_videos(self) -> bool:
        """Whether a file is a video."""
        frames = pc.struct_field(pc.list_flatten(self.table.column("images")), "num_frames")
        return bool(frames.fill_null(0).to_numpy(zero_copy_only=False).any())

    @property
    def num_bytes(self) -> int:
        """Memory of tokens, files and arrays."""
        files = sum(map(len, self.blobs.values())) + int(self.table.nbytes)
        return files + sum(each.num_bytes for each in self.encoded if each)


def find_records(  # noqa: PLR0913 - as of `PackingConfig`
    place: str,
    data_root: str | None,
    keep_columns: tuple[str, ...],
    *,
    columns: Mapping[str, str] | None = None,
    all_columns: bool,
    seed: int,
    shows: bool,
) -> RecordTable:
    """The records of what `packer build --dataset` takes, indexed; `shows` progress."""
    keep = (*keep_columns, ALL_COLUMNS) if all_columns else keep_columns
    progress = StageProgress(messages) if shows else StageProgress()
    return read_records(place, data_root, keep, seed, progress, column_texts(columns))


def column_texts(columns: Mapping[str, str] | None) -> tuple[str, ...]:
    """As `packer build --columns` takes them."""
    return tuple(f"{ours}={theirs}" for ours, theirs in (columns or {}).items())


def columns_of_records(columns: Mapping[str, str]) -> frozenset[str]:
    """Their columns that `columns` names; keys of turns are none of them."""
    named = named_columns(columns.items())
    return frozenset() if named is None else named.theirs


def write_build(
    options: dict[str, Any],
    dataset: Dataset | None,
    part_sizes: list[int],
    chunks: Iterator[tuple[pa.RecordBatch, dict[str, bytes]]],
    note: str,
) -> None:
    """Write the build of a dataset, None for one in memory; `options` of `BuildConfig`.

    `chunks` are its records, staged, as `CountedSamples` describes them.
    """
    from isobatch.packer.write import counted_build  # noqa: PLC0415  loads what reports need

    dataset = dataset or counted_build.dataset_in_memory(MEMORY_SOURCE)
    samples = counted_build.CountedSamples(
        dataset=dataset, part_sizes=part_sizes, chunks=chunks, note=note
    )
    config = BuildConfig(dataset=dataset.name, **options)
    counted_build.CountedBuilder(config, StageProgress(messages), samples).run()


def write_page(
    path: Path, report: dict[str, Any], ratios: FloatArray, rejected: Sequence[RejectedSample]
) -> None:
    """Write a loader's report as HTML. ConfigError if the file cannot be written."""
    from isobatch.packer.report.loading import write_loading_page  # noqa: PLC0415  as above

    reasons = [(each.reason, f"{each.sample_id}: {each.detail}") for each in rejected]
    try:
        write_loading_page(path, report, ratios, reasons)
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be written: {error.strerror}") from None


class _BlobsInMemory:
    """The blobs of several `CountedRecords`, by name."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self._blobs = blobs

    def read(self, name: str, offset: int, size: int, /) -> memoryview:
        """A range of bytes."""
        return memoryview(self._blobs[name])[offset : offset + size]


class RecordCounter:
    """Counts records for one model and tokenizer."""

    chunk_records = 128
    """Records that are counted together: few, because each may have images of some megabytes."""
    row_bytes = 0
    empty_group = EMPTY_GROUP

    def __init__(  # noqa: PLR0913 - options by name, as of `PackingConfig`
        self,
        model: str | ModelPreset,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        template_date: str | None = None,
        data_root: str | None = None,
        keep_columns: tuple[str, ...] = (),
        columns: Mapping[str, str] | None = None,
        places: RecordTable | None = None,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        """`model` and `tokenizer` as in `packer build`; the demo's tokenizer for no known model.

        `places`: where the records are from; those in memory are of the source "record".
        """
        name = model if isinstance(model, str) else DEMO_MODEL
        self.model = find_model(model) if isinstance(model, str) else model
        if tokenizer is None:
            tokenizer = name if is_folder(name) else None
        if tokenizer is None and name == DEMO_MODEL:
            tokenizer = str(demo_tokenizer_path())
        if tokenizer is None:
            raise ConfigError(f"model is the preset {model}; give the tokenizer to train with too")
        self.tokenizer_source = tokenizer
        self._names, self._places = count(), places
        named = named_columns((columns or {}).items())
        self._renaming = named if places is None else None  # those of places have our names
        parts = [] if places is None else places.dataset.parts
        self._sources = [(part.name, part.data_root) for part in parts] or [(MEMORY_SOURCE, "/")]
        self._counter = SampleCounter(
            CountSettings(
                model=self.model,
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
        rules = blake2b(repr(self.model).encode(), digest_size=8).hexdigest()
        self.identity = f"{self.model.name} {rules} {self.tokenizer.hash[:16]}"
        self.identity += f" {column_texts(columns)}" if columns else ""
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
        rejected = [
            RejectedSample(*each)
            for each in zip(indices.tolist(), ids, sources, reasons, details, strict=True)
            if each[3] is not None
        ]
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

    def unread_columns(self) -> dict[str, NeverRead]:
        """Part of the dataset -> columns that its records come without."""
        found: dict[str, NeverRead] = {}
        for part in self._places.dataset.parts if self._places is not None else ():
            add_columns(found.setdefault(part.name, {}), part.open().unread_columns(), ())
            add_described(found[part.name], part.located.unread)
        return {name: columns for name, columns in found.items() if columns}

    def _never_read(self, table: pa.RecordBatch, parts: IntArray) -> dict[str, NeverRead]:
        if table.column("unread").null_count == len(table):  # nearly always, and quicker to see
            return {}
        found = {
            self._sources[part][0]: never_read_in(table.filter(pa.array(parts == part)))
            for part in np.unique(parts).tolist()
        }
        return {name: paths for name, paths in found.items() if paths}

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
            name = str(next(self._names))  # of its own, so that records of several may be joined
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
        found = np.concatenate([counted.indices[rows] for counted, rows in parts])
        row_of = {index: row for row, index in enumerate(found.tolist())}
        rows = np.array([row_of[index] for index in order.tolist() if index in row_of])
        staged, indices = pa.concat_batches(batches).take(pa.array(rows)), found[rows]
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


def _with_suffixes(
    table: pa.RecordBatch, indices: IntArray, suffixes: dict[int, str]
) -> pa.RecordBatch:
    """Ids that are those of earlier records too, told apart."""
    given = [suffixes.get(index, "") for index in indices.tolist()]
    if not any(given):
        return table
    place = table.schema.get_field_index("sample_id")
    ids = table.column(place).to_pylist()
    columns = table.columns
    columns[place] = pa.array([own + suffix for own, suffix in zip(ids, given, strict=True)])
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
