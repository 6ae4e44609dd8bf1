"""Builds for `loader_scale.py`: manifest, index and tables; it never reads a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from papers.datasets import internvl_samples

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.common.types import COUNT_COLUMNS, Counts, Groups, IntArray, Limits
from isobatch.models.presets import load_model, model_to_dict
from isobatch.shards.folders import open_folder
from isobatch.shards.index import BATCH_ROWS, INDEX_COLUMNS, INDEX_NAME, find_batches, index_schema
from isobatch.shards.manifest import BuildFile, write_manifest
from isobatch.shards.tables import COUNTS_NAME, GROUPS_NAME, groups_table

GROUP_BYTES = 200_000
LIMITS = Limits(max_seq_len=8_192, max_vision=24, min_seq_len=0, min_vision=0)
SAMPLE_LIMITS = Limits(max_seq_len=4_096, max_vision=9, min_seq_len=0, min_vision=0)
SAMPLES_PER_GROUP = 4.6
"""Of `internvl_samples` in SAMPLE_LIMITS; the number of groups is as near as this."""


def write_build(folder: Path, num_groups: int, seed: int) -> None:
    """Index and manifest of a build of groups sorted by vision load, without its shards."""

    def blocks() -> Iterator[dict[str, IntArray]]:
        rng = np.random.default_rng(seed)
        for first in range(0, num_groups, BATCH_ROWS):
            rows = np.arange(first, min(first + BATCH_ROWS, num_groups))
            yield make_rows(rows, num_groups, rng)

    _write(folder, blocks, num_groups, LIMITS, seed)


def write_sampled_build(folder: Path, num_groups: int, seed: int) -> None:
    """A build of samples like InternVL-1.2M's with tables of their counts, without its shards."""
    counts = internvl_samples(int(num_groups * SAMPLES_PER_GROUP), seed)
    loads = SAMPLE_LIMITS.vision_load(counts), counts.seq_len
    groups = group_best_fit(*loads, SAMPLE_LIMITS, seed=seed)
    _write(folder, lambda: group_rows(groups, counts), len(groups), SAMPLE_LIMITS, seed)
    columns = {name: getattr(counts, name).astype(np.int32) for name in COUNT_COLUMNS}
    pq.write_table(pa.table(columns), folder / COUNTS_NAME)
    pq.write_table(groups_table(groups, counts), folder / GROUPS_NAME)


def group_rows(groups: Groups, counts: Counts) -> Iterator[dict[str, IntArray]]:
    """Columns of the index, a record batch at a time."""
    sums = {name: groups.sum(getattr(counts, name)) for name in COUNT_COLUMNS}
    for first in range(0, len(groups), BATCH_ROWS):
        rows = np.arange(first, min(first + BATCH_ROWS, len(groups)))
        loads = {name: values[rows] for name, values in sums.items()}
        yield make_places(rows) | {"num_samples": groups.sizes[rows]} | loads


def _write(
    folder: Path,
    blocks: Callable[[], Iterator[dict[str, IntArray]]],
    num_groups: int,
    limits: Limits,
    seed: int,
) -> None:
    """The index of `blocks`, which are made twice, and the manifest."""
    folder.mkdir(parents=True)
    largest, num_packed = dict.fromkeys(INDEX_COLUMNS, 0), 0
    for columns in blocks():
        num_packed += int(columns["num_samples"].sum())
        largest = {name: max(most, int(columns[name].max())) for name, most in largest.items()}
    schema = index_schema(largest)
    with (
        pa.OSFile(str(folder / INDEX_NAME), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for columns in blocks():
            arrays = [pa.array(columns[field.name]).cast(field.type) for field in schema]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    file = BuildFile.of(open_folder(str(folder)), INDEX_NAME).to_json()
    batches = [batch.to_json() for batch in find_batches(folder / INDEX_NAME)]
    types = {field.name: str(field.type) for field in schema}
    shard = BuildFile(name="shards/none", size=GROUP_BYTES * num_groups, checksum="")
    manifest = {
        "format": "arrow",
        "model": model_to_dict(load_model("internvl_1_5")),
        "tokenizer": {"image_token_id": 3, "vocab_size": 100, "hash": str(seed)},
        "limits": asdict(limits),
        "totals": {
            "num_groups": num_groups,
            "num_packed": num_packed,
            "num_rejected": 0,
            "num_loss_tokens": 1_536 * num_groups,
        },
        "shards": [shard.to_json()],
        "files": [{**file, "batches": batches, "types": types}],
    }
    write_manifest(folder, manifest)


def make_places(rows: IntArray) -> dict[str, IntArray]:
    """Where groups are, all in one shard."""
    return {
        "shard": np.zeros_like(rows),
        "offset": GROUP_BYTES * rows,
        "length": np.full_like(rows, GROUP_BYTES),
        "checksum": np.zeros_like(rows),
    }


def make_rows(rows: IntArray, num_groups: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """Columns of the index for some groups."""
    patches = LIMITS.max_vision * rows // num_groups
    tokens = rng.integers(LIMITS.max_seq_len // 2, LIMITS.max_seq_len, len(rows))
    return (
        dict.fromkeys(COUNT_COLUMNS, np.zeros_like(rows))
        | make_places(rows)
        | {
            "num_samples": rng.integers(1, 17, len(rows)),
            "num_image_patches": patches,
            "num_vit_tokens": 1_025 * patches,
            "num_image_tokens": 256 * patches,
            "num_text_tokens": np.maximum(tokens - 256 * patches, 1),
            "num_loss_tokens": tokens // 4,
        }
    )
