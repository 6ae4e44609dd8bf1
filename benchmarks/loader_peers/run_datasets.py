"""HF datasets: Parquet, streamed, in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import measure
import numpy as np
from datasets import Dataset, Features, Image, List, Value, load_dataset
from torch.utils.data import DataLoader

FEATURES = Features(
    {"image": Image(), "input_ids": List(Value("int32")), "labels": List(Value("int32"))}
)
NAMES = [f"part-{number:05d}.parquet" for number in range(measure.SHARDS)]


def write(samples: list[measure.Sample], folder: Path) -> None:
    """Parquet files, by the library."""
    for name, part in zip(NAMES, measure.shards(samples), strict=True):
        columns = {
            "image": [{"bytes": sample.image, "path": None} for sample in part],
            "input_ids": [sample.tokens[0] for sample in part],
            "labels": [sample.tokens[1] for sample in part],
        }
        Dataset.from_dict(columns, features=FEATURES).to_parquet(folder / name)


def open_loader(task: measure.Task) -> Iterable[Any]:
    """Samples are made where the batch is: in the workers, if there are any."""

    names = [f"{task.place}/{name}" for name in NAMES]
    stored = load_dataset(
        "parquet", data_files=names, split="train", streaming=True, cache_dir=str(task.cache)
    )
    dataset = stored.cast_column("image", Image(decode=False))

    def collate(rows: list[dict[str, Any]]) -> measure.Packed:
        tokens = [np.array([row["input_ids"], row["labels"]], np.int32) for row in rows]
        images = [measure.image_of(task, row["image"]["bytes"]) for row in rows]
        return measure.pack(list(zip(images, tokens, strict=True)))

    return DataLoader(
        dataset,
        batch_size=measure.BATCH,
        num_workers=task.workers,
        collate_fn=collate,
        persistent_workers=task.workers > 0,
    )


if __name__ == "__main__":
    measure.main(write, open_loader, package="datasets")
