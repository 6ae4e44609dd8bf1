"""Each method's micro-batches, as arguments of the model.

Peers get each sample from the same functions as our loader's: the packer's counting, our decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from isobatch.counting.record_counter import RecordCounter
from isobatch.loaders import BalancedLoader
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models.folder.find_model import find_model
from online_runs.padded import Loads, padded_batches
from online_runs.records import Records

ODB_WORKERS, ODB_PREFETCH = 4, 64
"""Of its README."""
ODB_SUMS = ("total_batch_size", "odb_total_tokens")
"""What it writes into each sample of a batch, for the scale of the loss."""
WORKERS = 2
"""Of the padded DataLoader, each rank."""
SEED = 0


@dataclass(slots=True)
class Batch:
    """A micro-batch of a rank."""

    inputs: dict[str, Any]
    """Of the model; its loss is scaled by `scale`."""
    scale: float
    samples: list[int]
    tokens: int
    """Without padding."""

    @property
    def padded(self) -> int:
        """Tokens that the language model runs."""
        return int(self.inputs["input_ids"].numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is given."""

    records: Records
    folder: Path
    """Of the model."""
    method: str
    batch_size: int = 1
    """Of the padded methods."""
    accumulation: int = 1
    odb: Path | None = None
    """Where ODB is installed."""
    warms_up: bool = True
    """Whether ODB begins with small buffers, as it does by default."""
    is_sharded: bool = False
    """Whether weights are sharded over the ranks (`modes.Sharded`)."""


def batches(task: Task, config: Any, figures: dict[str, Any]) -> Iterator[Batch]:
    """One epoch; -> what planning took goes into `figures`."""
    if task.method == "ours":
        return ours(task, config, figures)
    if task.method == "ODB":
        return odb(task)
    return padded(task)


# --- ours ---


def ours(task: Task, config: Any, figures: dict[str, Any]) -> Iterator[Batch]:
    loader = BalancedLoader(
        task.records.rows,
        model=str(task.folder),
        max_tokens=task.records.max_tokens,
        max_vision=task.records.max_vision,
        micro_batches_per_step=1,
        seed=SEED,
    )
    for (batch,) in loader:
        inputs = model_inputs(batch, config)
        spans = batch.cu_seqlens.diff().tolist()
        blank = inputs["input_ids"].shape[1] - len(batch.input_ids)
        inputs["spans"] = [[*spans, *([blank] if blank else [])]]
        names = [int(name.rpartition(":")[2]) for name in batch.sample_ids]
        yield Batch(inputs, 1.0, names, len(batch.input_ids))
    report = loader.report()
    figures |= {"planning_s": report["measuring_s"] + report["grouping_s"]}
    figures |= {"first_window_s": report["first_window_s"]}
    loader.close()


# --- peers ---


class Processed(Dataset[dict[str, Any]]):
    """Each record with its tokens and pixels, as ODB and DataLoaders want them."""

    def __init__(self, task: Task) -> None:
        self._rows = task.records.rows
        self._counter = RecordCounter(find_model(str(task.folder)), tokenizer=str(task.folder))
        self._config = LoaderConfig()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = np.array([index])
        counted = self._counter.count(number, [self._rows[index]])
        raw, _ = self._counter.group([(counted, np.arange(1))], number)
        totals = StepTotals(1, 1, 1.0)
        batch = collate(raw, self._counter.model, self._config, totals)
        return {
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "pixel_values": batch.pixel_values.contiguous(),
            "odb_n_patches": len(batch.pixel_values),
            "index": index,
        }


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of samples, each padded to the longest."""
    lengths = [len(each["input_ids"]) for each in samples]
    shape = len(samples), max(lengths)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for row, each in enumerate(samples):
        ids[row, : lengths[row]], labels[row, : lengths[row]] = each["input_ids"], each["labels"]
    found = {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.cat([each["pixel_values"] for each in samples]),
        "lengths": torch.tensor(lengths),
        "index": torch.tensor([each["index"] for each in samples]),
    }
    return found | {name: samples[0][name] for name in ODB_SUMS if name in samples[0]}


def arguments(batch: dict[str, Any], scale: float) -> Batch:
    lengths: list[int] = batch.pop("lengths").tolist()
    samples: list[int] = batch.pop("index").tolist()
    if not len(batch["pixel_values"]):
        del batch["pixel_values"]
    inputs = batch | {"spans": [[length] for length in lengths], "use_cache": False}
    return Batch(inputs, scale, samples, sum(lengths))


def odb(task: Task) -> Iterator[Batch]:
    """As its README shows: its DataLoader, four workers, a prefetch of 64, exact scaling, join."""
    sys.path.insert(0, str(task.odb))
    import odb as package  # noqa: PLC0415  installed for this run

    dataset = Processed(task)
    loader = package.ODBDataLoader(
        dataset,
        token_budget=task.records.max_tokens,
        max_patches=task.records.max_vision,
        batch_size=1,
        sampler=DistributedSampler(dataset, seed=SEED),
        num_workers=ODB_WORKERS,
        prefetch_factor=ODB_PREFETCH,
        collate_fn=pad,
        loss_scaling="exact",
        join=True,
        no_warmup=not task.warms_up,
    )
    for batch in loader:
        info = package.pop_step_info(batch, loss_scaling="exact")
        yield arguments(batch, float(info.loss_scale) / dist.get_world_size())


def padded(task: Task) -> Iterator[Batch]:
    """Batches of equally many samples, of a random order or grouped by length as Trainer does."""
    dataset = Processed(task)
    whole = padded_batches(task.method, loads(task), task.batch_size, task.accumulation)
    own = whole[dist.get_rank() :: dist.get_world_size()]
    loader = DataLoader(dataset, batch_sampler=own, num_workers=WORKERS, collate_fn=pad)
    for batch in loader:
        yield arguments(batch, 1 / task.accumulation / dist.get_world_size())


def loads(task: Task) -> Loads:
    """Tiles and tokens of each record, which a careful user has stored."""
    counter, rows = (
        RecordCounter(find_model(str(task.folder)), tokenizer=str(task.folder)),
        task.records.rows,
    )
    counts = counter.count(np.arange(len(rows)), rows).counts
    return counts[:, 0].astype(np.int64), counts[:, 2:5].sum(axis=1).astype(np.int64)
