"""`packer group`: counts that somebody already has -> groups, without the raw data.

Reads our own counts.parquet, and the length files that the OmniBal authors publish. Several files become one dataset.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from balance.errors import ConfigError, DataError
from balance.records import COUNT_COLUMNS
from packer.group import Grouping, GroupOptions, group_counts
from packer.progress import StageProgress
from packer.shards.manifest import MANIFEST_NAME
from packer.tables import (
    COUNTS_NAME,
    COUNTS_SCHEMA,
    GROUPS_NAME,
    REJECTED_NAME,
    REJECTED_SCHEMA,
    counts_arrays,
    groups_table,
    read_table,
    reject_rows,
    write_table,
)

LIMITS_NAME = "limits.json"

VIT_TOKENS_PER_TILE, LLM_TOKENS_PER_TILE = 1025, 256
"""InternVL at 448 px, for which OmniBal's length files were made."""


def group_files(
    files: list[Path], out: Path, options: GroupOptions, progress: StageProgress, *, vision_unit: str, context_len: int
) -> tuple[Grouping, pa.Table]:
    """Group the samples of length files; leaves counts, groups and rejected tables and the caps in `out`."""
    if (out / MANIFEST_NAME).exists():
        raise ConfigError(f"{out} holds a finished build: choose another --out")
    tables = [read_lengths(path) for path in files]
    counts = pa.concat_tables(tables).combine_chunks()
    # positions count through all the files, so that each row of the output has a place of its own
    counts = counts.set_column(0, COUNTS_SCHEMA.field("position"), pa.array(range(len(counts)), pa.int64()))
    if len(counts) == 0:
        raise DataError(f"no samples in {', '.join(map(str, files))}")
    with progress.stage("group", None) as stage:
        arrays = counts_arrays(counts)
        grouping = group_counts(arrays, options, vision_unit=vision_unit, context_len=context_len)
        stage.count(len(counts))
    rejected = reject_rows(counts, grouping.over) if grouping.over else REJECTED_SCHEMA.empty_table()
    out.mkdir(parents=True, exist_ok=True)
    write_table(counts, out / COUNTS_NAME)
    write_table(groups_table(grouping.groups, arrays), out / GROUPS_NAME)
    write_table(rejected, out / REJECTED_NAME)
    (out / LIMITS_NAME).write_text(json.dumps(asdict(grouping.limits), indent=1), "utf-8")
    return grouping, rejected


def read_lengths(path: Path) -> pa.Table:
    """A counts table from counts.parquet or from an OmniBal length file (`vit_num`, `token_num`, `image_flags`)."""
    if path.suffix == ".parquet":
        table = read_table(path)
        missing = [name for name in ("sample_id", *COUNT_COLUMNS) if name not in table.column_names]
        if missing:
            raise DataError(f"{path}: no column {', '.join(missing)}; is it a counts.parquet of `packer count`?")
        return table.select(COUNTS_SCHEMA.names).cast(COUNTS_SCHEMA)
    try:
        rows = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    return _from_omnibal(path, rows)


def _from_omnibal(path: Path, rows: object) -> pa.Table:
    columns: dict[str, list[int]] = {"vit_num": [], "token_num": [], "image_flags": []}
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of samples with vit_num, token_num and image_flags")
    for number, row in enumerate(rows):
        for name, values in columns.items():
            value = row.get(name) if isinstance(row, dict) else None
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise DataError(f"{path}: sample {number}: {name} is {value!r}; expected a whole number, 0 or more")
            values.append(value)
    # image_flags counts real tiles: their code gives a text-only sample one dummy tile, which we count as none
    tiles = pa.array(columns["image_flags"], pa.int32())
    tokens = pa.array(columns["token_num"], pa.int32())
    image_tokens = pa.compute.multiply(tiles, pa.scalar(LLM_TOKENS_PER_TILE, pa.int32()))
    zeros = pa.array([0] * len(rows), pa.int32())
    table = {
        "position": pa.array(range(len(rows)), pa.int64()),
        "sample_id": pa.array([f"{path.stem}:{i}" for i in range(len(rows))]),
        "source": pa.array([path.stem] * len(rows), pa.string()),
        "num_image_patches": tiles,
        "num_vit_tokens": pa.compute.multiply(tiles, pa.scalar(VIT_TOKENS_PER_TILE, pa.int32())),
        "num_image_tokens": image_tokens,
        "num_text_tokens": pa.compute.subtract(tokens, image_tokens),
        "num_audio_tokens": zeros,
        "num_loss_tokens": zeros,  # the files do not say
        "seq_len": tokens,
        "image_bytes": pa.array([0] * len(rows), pa.int64()),
    }
    return pa.table(table, schema=COUNTS_SCHEMA)
