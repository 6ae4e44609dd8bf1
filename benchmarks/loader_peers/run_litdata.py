"""LitData: StreamingDataset and StreamingDataLoader on chunks of 64 MB, which is what its
documentation takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import litdata
import measure
from litdata.streaming import downloader


def write(samples: list[measure.Sample], folder: Path) -> None:
    """Chunks, by `optimize`."""
    inputs = [{"image": sample.image, "tokens": sample.tokens} for sample in samples]
    litdata.optimize(
        fn=_same,
        inputs=inputs,
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
        keep_data_ordered=True,
        verbose=False,
    )


def _same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def open_loader(task: measure.Task) -> Iterable[Any]:
    """Packed batches."""

    def sample_of(stored: dict[str, Any]) -> tuple[Any, Any]:
        # views of a chunk, which cannot be sent to another process
        image = bytes(stored["image"]) if task.workers else stored["image"]
        return measure.image_of(task, image), stored["tokens"]

    if task.remote:
        # its downloader refuses servers without TLS, and has no option to allow them
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # type: ignore[typeddict-unknown-key,unused-ignore]
    dataset = litdata.StreamingDataset(
        task.place,
        cache_dir=str(task.cache) if task.remote else None,
        transform=sample_of,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]} if task.remote else None,
    )
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=measure.BATCH,
        num_workers=task.workers,
        collate_fn=measure.pack,
        persistent_workers=task.workers > 0,
    )


if __name__ == "__main__":
    measure.main(write, open_loader, package="litdata")
