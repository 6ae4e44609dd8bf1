"""`BalancedLoader.save_build`: the samples of a loader as a build.

Tokens and files' places of samples that this process measured are taken from memory as far as they
are still there; the other samples are read and tokenised again, since lengths alone make no shard.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.loaders.online._packer_door import (
    CountedRecords,
    RecordCounter,
    column_texts,
    write_build,
)
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.records import Records
from isobatch.shards.manifest import is_complete

CHUNK_RECORDS = 256
"""Records that are counted at once: few, because each may have images of some megabytes."""

Kept = Mapping[int, tuple[CountedRecords, int]]
"""Record of the dataset -> its row among those counted."""


def save_build(
    out: str,
    records: Records,
    counter: RecordCounter,
    kept: Kept,
    packing: PackingConfig,
    seed: int,
) -> None:
    """Write a build; `kept` are samples in memory, by their numbers for the loader."""
    if packing.encode is not None or packing.processor is not None:
        raise ConfigError("save_build writes what `packer build` would; use model= and tokenizer=")
    places = records.places
    if places is None:
        sizes = [len(records)]
    else:  # copies of a record are made by the build, which numbers their ids
        own = {number: each for number, each in kept.items() if number not in places.suffixes}
        kept = {int(places.rows[number]): each for number, each in own.items()}
        sizes = places.part_sizes
    total = sum(sizes)
    write_build(
        {
            "out": out,
            "model": packing.model,
            "tokenizer": counter.tokenizer_source,
            "chat_template": packing.chat_template,
            "template_date": packing.template_date,
            "data_root": packing.data_root,
            "keep_columns": packing.keep_columns,
            "columns": column_texts(packing.columns),
            "choices": packing.choices,
            "answers": packing.answers,
            "unknown_marks": packing.unknown_marks,
            "max_seq_len": packing.max_tokens,
            "max_vision": packing.max_vision,
            "max_rejected": packing.max_rejected,
            "seed": seed,
            "workers": 1,
        },
        None if places is None else places.dataset,
        sizes,
        _chunks(records, counter, kept, sizes),
        f"{len(kept):,} of {total:,} samples are counted and in memory; the other "
        f"{total - len(kept):,} are read and tokenised now",
    )


def require_place(out: str, *, overwrite: bool) -> None:
    """ConfigError if there is a finished build that is not to be replaced, or no folder."""
    try:
        is_finished = is_complete(out)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; give a folder") from None
    if is_finished and not overwrite:
        raise ConfigError(f"{out} holds a finished build; give another folder, or overwrite=True")


def _chunks(
    records: Records, counter: RecordCounter, kept: Kept, sizes: list[int]
) -> Iterator[tuple[pa.RecordBatch, dict[str, bytes]]]:
    parts = np.repeat(np.arange(len(sizes)), sizes)
    for start in range(0, len(parts), CHUNK_RECORDS):
        rows = np.arange(start, min(start + CHUNK_RECORDS, len(parts)))
        is_kept = np.array([row in kept for row in rows.tolist()])
        found = [kept[row] for row in rows[is_kept].tolist()]
        tables = [counted.table.slice(row, 1) for counted, row in found]
        blobs = {name: blob for counted, _ in found for name, blob in counted.blobs.items()}
        if not is_kept.all():
            missing: IntArray = rows[~is_kept]
            table, new = counter.stage(missing, records.take_rows(missing), parts[missing])
            tables.append(table)
            blobs |= new
        order = np.argsort(np.concatenate([rows[is_kept], rows[~is_kept]]))
        yield pa.concat_batches(tables).take(pa.array(order)), blobs
