"""The tables that the stages leave behind: counts, groups and rejected samples, as Parquet.

Rejections come from three stages (counting, the caps, writing); `rejected.parquet` always holds all
of those so far.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from balance.errors import DataError, first_line
from balance.types import COUNT_COLUMNS, Counts, Groups, IntArray

COUNTS_NAME = "counts.parquet"
GROUPS_NAME = "groups.parquet"
REJECTED_NAME = "rejected.parquet"

COUNTS_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("sample_id", pa.string()),
        ("source", pa.string()),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("seq_len", pa.int32()),
        ("media_bytes", pa.int64()),
    ]
)
REJECTED_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        *[(name, pa.string()) for name in ("sample_id", "source", "reason", "detail")],
    ]
)
GROUPS_SCHEMA = pa.schema(
    [
        ("samples", pa.list_(pa.int64())),
        ("num_samples", pa.int32()),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("seq_len", pa.int32()),
    ]
)


def split_staged(staged: Path) -> tuple[pa.Table, pa.Table, list[int]]:
    """(counts, rejected, records per part of the dataset) of the staged samples of a build, in
    source order.
    """
    counts, rejected = [COUNTS_SCHEMA.empty_table()], [REJECTED_SCHEMA.empty_table()]
    position = 0
    with pa.memory_map(str(staged)) as source:
        reader = pa.ipc.open_file(source)
        records_per_part = json.loads(reader.schema.metadata[b"records_per_part"])
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            positions = pa.array(np.arange(position, position + len(batch)), pa.int64())
            batch = batch.append_column("position", positions)
            position += len(batch)
            usable = pc.is_null(batch.column("reason"))
            counts.append(_counts_of(batch.filter(usable)))
            rejected.append(
                pa.Table.from_batches(
                    [batch.select(REJECTED_SCHEMA.names).filter(pc.invert(usable))]
                )
            )
    return (
        pa.concat_tables(counts).combine_chunks(),
        pa.concat_tables(rejected).combine_chunks(),
        records_per_part,
    )


def _counts_of(batch: pa.RecordBatch) -> pa.Table:
    parts = [
        batch.column(name).to_numpy()
        for name in ("num_image_tokens", "num_text_tokens", "num_audio_tokens")
    ]
    columns = {
        **{name: batch.column(name) for name in COUNTS_SCHEMA.names[:-2]},
        "seq_len": pa.array(np.sum(parts, axis=0), pa.int32()),
        "media_bytes": pa.array(
            _sizes(batch.column("images")) + _sizes(batch.column("audios")), pa.int64()
        ),
    }
    return pa.table(columns, schema=COUNTS_SCHEMA)


def _sizes(files: pa.ListArray) -> IntArray:
    """Bytes of all files of each row."""
    sizes = files.flatten().field("size").to_numpy()
    running = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ends = np.concatenate(
        [[0], np.cumsum(pc.list_value_length(files).fill_null(0).to_numpy())]
    ).astype(np.int64)
    return np.asarray(running[ends[1:]] - running[ends[:-1]])


def counts_arrays(table: pa.Table) -> Counts:
    """The counts columns of a table as arrays."""
    return Counts(
        **{name: table.column(name).to_numpy().astype(np.int64) for name in COUNT_COLUMNS}
    )


def source_numbers(table: pa.Table) -> IntArray:
    """The different texts of a counts table's `source` column, numbered from 0 in order of first
    appearance.
    """
    encoded = table.column("source").cast(pa.string()).dictionary_encode()
    parts = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def groups_table(groups: Groups, counts: Counts) -> pa.Table:
    """One row per group: its samples (rows of the counts table) and its loads."""
    loads = {
        name: pa.array(groups.sum(getattr(counts, name)), pa.int32()) for name in COUNT_COLUMNS
    }
    samples = pa.ListArray.from_arrays(
        pa.array(groups.offsets, pa.int32()), pa.array(groups.samples, pa.int64())
    )
    columns = {
        "samples": samples,
        "num_samples": pa.array(groups.sizes, pa.int32()),
        **loads,
        "seq_len": pa.array(groups.sum(counts.seq_len), pa.int32()),
    }
    return pa.table(columns, schema=GROUPS_SCHEMA)


def read_groups(table: pa.Table) -> Groups:
    """The inverse of `groups_table`."""
    samples = table.column("samples").combine_chunks()
    offsets = np.concatenate(
        [[0], np.cumsum(table.column("num_samples").to_numpy(), dtype=np.int64)]
    )
    return Groups(samples.flatten().to_numpy().astype(np.int64), offsets)


def reject_rows(counts: pa.Table, rows: Sequence[tuple[int, str, str]]) -> pa.Table:
    """Rejections of counted samples, given as (row of `counts`, reason, detail)."""
    chosen = counts.select(["position", "sample_id", "source"]).take(
        pa.array([row for row, _, _ in rows], pa.int64())
    )
    reasons, details = (pa.array([row[k] for row in rows], pa.string()) for k in (1, 2))
    return (
        chosen.append_column("reason", reasons)
        .append_column("detail", details)
        .cast(REJECTED_SCHEMA)
    )


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet table, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_table(path: Path) -> pa.Table:
    """Read a Parquet table; raises DataError when it is missing or damaged."""
    try:
        return pq.read_table(path)
    except FileNotFoundError:
        raise DataError(
            f"no {path.name} in {path.parent}: is it the output of `packer build` or `packer group`?"
        ) from None
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: damaged: {first_line(error)}") from None
