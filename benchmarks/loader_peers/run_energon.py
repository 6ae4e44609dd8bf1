"""Megatron-Energon: a crude webdataset, cooked by a task encoder; from S3 by the Multi-Storage
Client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from tars import IMAGE, NAMES, TOKENS, read_tokens, write_tars

PROFILE = "bench"


def write(samples: list[measure.Sample], folder: Path) -> None:
    """Tars, and what `energon prepare` puts beside them."""
    write_tars(samples, folder)
    WebdatasetPreparator.prepare_dataset(
        folder, NAMES, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=2
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )


@dataclass
class Cooked(Sample):  # type: ignore[misc]
    """One sample as it arrives."""

    image: Any
    tokens: Any


def open_loader(task: measure.Task) -> Iterable[Any]:
    """An endless stream, cut into passes by `virtual_epoch_length`; a pass continues where the last
    has stopped.
    """

    @stateless
    def cook(stored: dict[str, Any]) -> Cooked:
        image = measure.image_of(task, stored[IMAGE])
        return Cooked(**basic_sample_keys(stored), image=image, tokens=read_tokens(stored[TOKENS]))

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc,type-arg]
        decoder = None
        cookers = [Cooker(cook)]  # noqa: RUF012

        @stateless
        def batch(self, samples: list[Cooked]) -> measure.Packed:
            return measure.pack([(sample.image, sample.tokens) for sample in samples])

    dataset = get_train_dataset(
        _remote(task) if task.remote else task.place,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=task.workers),
        batch_size=measure.BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        virtual_epoch_length=task.num_samples // measure.BATCH,
        task_encoder=Encoder(),
    )
    return get_loader(dataset)


def _remote(task: measure.Task) -> str:
    """The dataset for the Multi-Storage Client, which takes the server's address from a file."""
    bucket, _, path = task.place.removeprefix("s3://").partition("/")
    keys = {
        "access_key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    storage = {"base_path": bucket, "region_name": os.environ["AWS_REGION"]}
    storage["endpoint_url"] = os.environ["AWS_ENDPOINT_URL"]
    profile = {
        "storage_provider": {"type": "s3", "options": storage},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    config = task.cache / "storage.json"
    config.write_text(json.dumps({"profiles": {PROFILE: profile}}))
    os.environ["MSC_CONFIG"] = str(config)
    return f"msc://{PROFILE}/{path}"


if __name__ == "__main__":
    measure.main(write, open_loader, package="megatron-energon")
