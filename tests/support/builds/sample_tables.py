"""Builds with the tables that regrouping and step planners read, and many small samples without
images.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isobatch.common.types import COUNT_COLUMNS, Limits
from support.builds.shard_fixture import Sample, write_build

MAX_SEQ_LEN = 70
LIMITS = Limits(max_seq_len=MAX_SEQ_LEN, max_vision=12, min_seq_len=MAX_SEQ_LEN, min_vision=12)


def text_samples(count: int, prefix: str = "text") -> list[Sample]:
    """Texts of 3 to 30 tokens, the last third of each with labels."""
    rng = np.random.default_rng(count)
    samples = []
    for number, length in enumerate(rng.integers(3, 31, size=count).tolist()):
        ids = rng.integers(8, 64, size=length).tolist()
        labels = [-100] * (length - length // 3) + ids[length - length // 3 :]
        counts = dict.fromkeys(COUNT_COLUMNS, 0) | {
            "num_text_tokens": length,
            "num_loss_tokens": length // 3,
        }
        samples.append(Sample(f"{prefix}-{number:05d}", ids, labels, counts=counts))
    return samples


def path_groups(samples: list[Sample], max_tokens: int = 60) -> list[list[Sample]]:
    """Groups of neighbours, in path order."""
    groups: list[list[Sample]] = [[]]
    for sample in samples:
        if groups[-1] and sum(len(s.input_ids) for s in [*groups[-1], sample]) > max_tokens:
            groups.append([])
        groups[-1].append(sample)
    patches, tokens = (
        np.array([sum(s.counts[name] for s in group) for group in groups])
        for name in ("num_image_patches", "num_text_tokens")
    )
    return [groups[place] for place in np.lexsort((tokens, patches))]


def write_tabled(
    root: Path, groups: list[list[Sample]], format: str = "arrow", model: str = "tiny"
) -> Path:
    """A build with counts.parquet, in an order of its own, groups.parquet and limits."""
    write_build(root, groups, format, model)
    samples = [sample for group in groups for sample in group]
    order = np.random.default_rng(1).permutation(
        len(samples)
    )  # row of counts -> sample in stored order
    rows = np.empty_like(order)
    rows[order] = np.arange(len(order))
    counts: dict[str, Any] = {
        name: pa.array([samples[s].counts[name] for s in order], pa.int32())
        for name in COUNT_COLUMNS
    }
    counts["sample_id"] = [samples[s].sample_id for s in order]
    counts["source"] = [samples[s].sample_id.partition("-")[0] for s in order]
    pq.write_table(pa.table(counts), root / "counts.parquet")
    borders = np.cumsum([0, *map(len, groups)])
    stored = [rows[start:stop] for start, stop in pairwise(borders.tolist())]
    table = {
        "samples": pa.array(stored, pa.list_(pa.int64())),
        "num_samples": pa.array(map(len, groups), pa.int32()),
    }
    pq.write_table(pa.table(table), root / "groups.parquet")
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["limits"] = dataclasses.asdict(LIMITS)
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def write_texts(root: Path, sizes: Mapping[str, int]) -> list[Path]:
    """A build of texts of each name and number of samples, their ids with that name in front."""
    return [
        write_tabled(root / name, path_groups(text_samples(size, name)))
        for name, size in sizes.items()
    ]


def llm_tokens(table, rows):
    """LLM tokens of rows of an index or of a table of samples."""
    return sum(table.column(f"num_{kind}_tokens", rows) for kind in ("image", "text", "audio"))
