"""What a loader takes from `packer`: records of places, builds, the page.

The one module of `loaders` that imports `packer`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from isobatch.common.consoles import messages
from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray
from isobatch.counting.record_counter import (
    MEMORY_SOURCE,
    CountedRecords,
    RecordCounter,
    RecordPlaces,
    RejectedSample,
)
from isobatch.counting.records.fields import NeverRead, add_columns, add_described
from isobatch.counting.records.user_map import ALL_COLUMNS
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.records import Records
from isobatch.packer.config import DEMO_MODEL, BuildConfig
from isobatch.packer.count.record_table import RecordTable, read_records
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.progress import StageProgress
from isobatch.shards.folders import is_uri
from isobatch.shards.manifest import is_complete

__all__ = [
    "RecordTable",
    "column_texts",
    "demo_tokenizer",
    "find_records",
    "places_of",
    "require_place",
    "save_build",
    "text_tokenizer",
    "write_page",
]

CHUNK_RECORDS = 256
"""Records that are counted at once: few, because each may have images of some megabytes."""

_OF_BUILDS_TOO = (
    *("model", "chat_template", "template_date", "data_root", "keep_columns", "choices"),
    *("answers", "unknown_marks", "max_vision", "pad_each_to", "max_rejected"),
)
"""Options that `packer build` has by the same names."""

Counted = Mapping[int, tuple[CountedRecords, int]]
"""Record of the dataset -> its row among those counted."""


def demo_tokenizer(model: str) -> str | None:
    """The tokenizer of the demo's model; None for other models."""
    return str(demo_tokenizer_path()) if model == DEMO_MODEL else None


def text_tokenizer() -> str:
    """A tokenizer for what has no text of its own."""
    return str(demo_tokenizer_path())


def places_of(table: RecordTable) -> RecordPlaces:
    """Where the records of a table are from."""
    parts, unread = table.dataset.parts, dict[str, NeverRead]()
    for part in parts:
        add_columns(unread.setdefault(part.name, {}), part.open().unread_columns(), ())
        add_described(unread[part.name], part.located.unread)
    return RecordPlaces(
        sources=[(part.name, part.data_root) for part in parts],
        parts=table.parts,
        suffixes=table.suffixes,
        unread={name: columns for name, columns in unread.items() if columns},
    )


def find_records(place: str, packing: PackingConfig, seed: int, *, shows: bool) -> RecordTable:
    """The records of what `packer build --dataset` takes, indexed; `shows` progress."""
    # a function of the user's may read any column
    keep = (*packing.keep_columns, *[ALL_COLUMNS] * (packing.transform is not None))
    progress = StageProgress(messages) if shows else StageProgress()
    columns = column_texts(packing.columns)
    return read_records(place, packing.data_root, keep, seed, progress, columns)


def column_texts(columns: Mapping[str, str] | None) -> tuple[str, ...]:
    """As `packer build --columns` takes them."""
    return tuple(f"{ours}={theirs}" for ours, theirs in (columns or {}).items())


def write_page(
    path: Path, report: dict[str, Any], ratios: FloatArray, rejected: Sequence[RejectedSample]
) -> None:
    """Write a loader's report as HTML. ConfigError if the file cannot be written."""
    from isobatch.packer.report.loading import write_loading_page  # noqa: PLC0415  as above

    reasons = [(sample.reason, f"{sample.sample_id}: {sample.detail}") for sample in rejected]
    try:
        write_loading_page(path, report, ratios, reasons)
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be written: {error.strerror}") from None


def save_build(
    out: str,
    records: Records,
    counter: RecordCounter,
    counted: Counted,
    packing: PackingConfig,
    seed: int,
) -> None:
    """Write a loader's samples as a build; `counted` are those in memory, by their numbers there.

    Tokens and files' places of samples that this process measured are taken from memory as far as
    they are still there; others are read and tokenised again, since lengths alone make no shard.
    """
    from isobatch.packer.build import Builder  # noqa: PLC0415  loads what reports need
    from isobatch.packer.count.counted_samples import (  # noqa: PLC0415
        CountedSamples,
        dataset_in_memory,
    )
    from isobatch.packer.report.figures import make_report  # noqa: PLC0415
    from isobatch.packer.upload import save_html  # noqa: PLC0415

    if packing.encode is not None or packing.processor is not None:
        raise ConfigError("save_build writes what `packer build` would; use model= and tokenizer=")
    places = records.places
    if places is None:
        sizes = [len(records)]
    else:  # copies of a record are made by the build, which numbers their ids
        counted = {
            int(places.rows[number]): row
            for number, row in counted.items()
            if number not in places.suffixes
        }
        sizes = places.part_sizes
    total = sum(sizes)
    dataset = dataset_in_memory(MEMORY_SOURCE) if places is None else places.dataset
    samples = CountedSamples(
        dataset=dataset,
        part_sizes=sizes,
        chunks=_chunks(records, counter, counted, sizes),
        note=f"{len(counted):,} of {total:,} samples are counted and in memory; the other "
        f"{total - len(counted):,} are read and tokenised now",
    )
    config = BuildConfig(
        dataset=dataset.name,
        out=out,
        tokenizer=counter.tokenizer_source,
        columns=column_texts(packing.columns),
        max_seq_len=packing.max_tokens,
        seed=seed,
        workers=1,
        **{name: getattr(packing, name) for name in _OF_BUILDS_TOO},
    )
    Builder(config, StageProgress(messages), samples).build(overwrite=True)
    if not is_uri(config.out):  # at a URI the build has written it
        save_html(make_report(config.out), config.out)


def require_place(out: str, *, overwrite: bool) -> None:
    """ConfigError if there is a finished build that is not to be replaced, or no folder."""
    try:
        is_finished = is_complete(out)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; give a folder") from None
    if is_finished and not overwrite:
        raise ConfigError(f"{out} holds a finished build; give another folder, or overwrite=True")


def _chunks(
    records: Records, counter: RecordCounter, counted: Counted, sizes: list[int]
) -> Iterator[tuple[pa.RecordBatch, dict[str, bytes]]]:
    parts = np.repeat(np.arange(len(sizes)), sizes)
    for start in range(0, len(parts), CHUNK_RECORDS):
        rows = np.arange(start, min(start + CHUNK_RECORDS, len(parts)))
        is_counted = np.array([row in counted for row in rows.tolist()])
        parts_of_rows = [counted[row] for row in rows[is_counted].tolist()]
        tables = [part.table.slice(row, 1) for part, row in parts_of_rows]
        views = {name: blob for part, _ in parts_of_rows for name, blob in part.blobs.items()}
        blobs = {name: bytes(blob) for name, blob in views.items()}
        if not is_counted.all():
            missing: IntArray = rows[~is_counted]
            table, new = counter.stage(missing, records.take_rows(missing), parts[missing])
            tables.append(table)
            blobs |= new
        order = np.argsort(np.concatenate([rows[is_counted], rows[~is_counted]]))
        yield pa.concat_batches(tables).take(pa.array(order)), blobs
