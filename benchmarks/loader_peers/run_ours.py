"""Isobatch's StreamingLoader. Decoding cuts the images into the model's patches and stacks them,
beyond what is asked.

The build is written by `loader_data.write_build`, in the environment of the benchmark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from isobatch.loaders import MicroBatch, StreamingLoader
from isobatch.loaders.read.build import StorageOptions


def open_loader(task: measure.Task) -> StreamingLoader:
    """A step is a group, of as many samples as others have in a batch. Workers are threads."""
    return StreamingLoader(
        task.place,
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=measure.BATCH // measure.GROUP,
        workers=task.workers,
        pixel_dtype=torch.uint8,
        images="patches" if task.decoded else "encoded",
        storage=StorageOptions(cache_dir=task.cache),
    )


def parts(step: list[MicroBatch]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Images of all micro-batches, encoded or as patches, one each; and the packed tokens."""
    # pixels as they lie in memory, the channels last
    images = [
        image
        for batch in step
        for image in (batch.images or batch.pixel_values.permute(0, 2, 3, 1))
    ]
    return images, [tokens for batch in step for tokens in (batch.input_ids, batch.labels)]


def write(samples: list[measure.Sample], folder: Path) -> None:
    """Nothing: the build is there."""


if __name__ == "__main__":
    measure.main(write, open_loader, parts=parts)
