"""MosaicML Streaming: StreamingDataset in torch's DataLoader, shards of 64 MB, which is its
default.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import measure
from torch.utils.data import DataLoader

# torchvision cannot be imported beside the CPU build of torch; only the package's own vision
# datasets use it
for name in (
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.transforms.functional",
):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)  # transformers looks whether there is one
sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]

from streaming import MDSWriter, StreamingDataset  # noqa: E402


def write(samples: list[measure.Sample], folder: Path) -> None:
    """MDS shards."""
    shape = ",".join(map(str, samples[0].tokens.shape))
    with MDSWriter(
        out=str(folder), columns={"image": "bytes", "tokens": f"ndarray:int32:{shape}"}
    ) as out:
        for sample in samples:
            out.write({"image": sample.image, "tokens": sample.tokens})


class Samples(StreamingDataset):  # type: ignore[misc]
    """Gives (image, tokens)."""

    def __init__(self, task: measure.Task, **options: Any) -> None:
        super().__init__(**options)
        self._task = task

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        stored = super().__getitem__(place)
        return measure.image_of(self._task, stored["image"]), stored["tokens"]


def open_loader(task: measure.Task) -> Iterable[Any]:
    """Packed batches, in the order of the shards."""
    if task.remote:
        os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    dataset = Samples(
        task,
        local=str(task.cache) if task.remote else task.place,
        remote=task.place if task.remote else None,
        batch_size=measure.BATCH,
        shuffle=False,
    )
    return DataLoader(
        dataset,
        batch_size=measure.BATCH,
        num_workers=task.workers,
        collate_fn=measure.pack,
        persistent_workers=task.workers > 0,
    )


if __name__ == "__main__":
    measure.main(write, open_loader, package="mosaicml-streaming")
