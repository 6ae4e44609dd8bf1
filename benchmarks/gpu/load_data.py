"""Data of `gpu_training.py load`: the demo's files, and micro-batches that DataLoaders make.

`Padded`: rows of transformers' image processor, as a user's collator makes them. `Packed`: groups
by their tokens alone (best fit decreasing, as TRL packs), decoded by our functions. Tokens and
labels of all are the packer's.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from online_runs.padded import padded_batches
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoImageProcessor

from isobatch.common.types import COUNT_COLUMNS, Counts, FloatArray, IntArray
from isobatch.counting.record_counter import CountedRecords, RecordCounter
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import load_model
from isobatch.packer.demo.dataset import demo_tokenizer_path, write_demo

MODEL = "qwen3_vl_2b"
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
"""preprocessor_config.json of Qwen/Qwen3-VL-2B-Instruct."""
LABEL_IGNORE = -100
Numbers = list[int]
"""Samples of a micro-batch."""


@dataclass(frozen=True)
class Data:
    """The demo's samples, counted for the model."""

    folder: Path
    rows: list[dict[str, Any]]
    counter: RecordCounter
    counted: CountedRecords

    @cached_property
    def counts(self) -> Counts:
        columns = self.counted.counts.astype(np.int64).T
        return Counts(**dict(zip(COUNT_COLUMNS, columns, strict=True)))

    @cached_property
    def tokens(self) -> IntArray:
        """Of the LLM, of each sample."""
        return self.counts.seq_len

    @cached_property
    def flops(self) -> FloatArray:
        """Of both passes of each sample, nothing padded or recomputed."""
        model = FlopsModel.of(self.counter.model)
        return model.train_flops(model.loads(self.counts))

    @property
    def source(self) -> dict[str, Any]:
        """What a `BalancedLoader` of the same samples is given."""
        tokenizer = str(demo_tokenizer_path())
        return {"model": MODEL, "tokenizer": tokenizer, "data_root": str(self.folder)}

    def batch(self, numbers: Numbers, config: LoaderConfig) -> MicroBatch:
        """A micro-batch of these samples."""
        chosen = np.array(numbers)
        raw, _ = self.counter.group([(self.counted, chosen)], chosen)
        return collate(raw, self.counter.model, config, StepTotals(1, 1, 1.0))


def open_data(folder: Path, samples: int) -> Data:
    """Draw the demo into a folder, and count it."""
    write_demo(folder, num_samples=samples)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")
    rows = json.loads((folder / "annotations.json").read_text("utf-8"))
    tokenizer = str(demo_tokenizer_path())
    counter = RecordCounter(load_model(MODEL), tokenizer=tokenizer, data_root=str(folder))
    return Data(folder, rows, counter, counter.count(np.arange(len(rows)), rows))


class Padded(Dataset[dict[str, Any]]):
    """Batches of equally many samples, each padded on the right to the longest."""

    def __init__(self, data: Data, method: str, size: int) -> None:
        loads = data.counts.num_vit_tokens, data.tokens
        self.numbers = padded_batches(method, loads, size, 1)
        self._data = data
        self._processor = AutoImageProcessor.from_pretrained(data.folder)
        text = LoaderConfig(images="encoded")
        self._texts = [_text_of(data.batch([number], text)) for number in range(len(data.rows))]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = self.numbers[index]
        texts = [self._texts[number] for number in numbers]
        shape = len(texts), max(len(ids) for ids, _ in texts)
        ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, LABEL_IGNORE)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, (own_ids, own_labels) in enumerate(texts):
            length = len(own_ids)
            ids[row, :length], labels[row, :length], mask[row, :length] = own_ids, own_labels, 1
        is_image = ids == self._data.counter.image_token_id
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}
        images = [image for number in numbers for image in self._images(number)]
        if images:
            made = self._processor(images=images, return_tensors="pt")
            inputs |= {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            inputs["mm_token_type_ids"] = is_image.long()
        return inputs | {"numbers": torch.tensor(numbers)}

    def _images(self, number: int) -> list[Image.Image]:
        names = self._data.rows[number].get("image", [])
        names = [names] if isinstance(names, str) else names
        files = [Image.open(self._data.folder / name) for name in names]
        return [ImageOps.exif_transpose(file).convert("RGB") for file in files]


def _text_of(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return batch.input_ids.clone(), batch.labels.clone()


class Packed(Dataset[dict[str, Any]]):
    """Groups in random order, as arguments of the model."""

    def __init__(self, data: Data, config: Any, cap: int) -> None:
        groups = best_fit_decreasing(data.tokens, cap)
        order = np.random.default_rng(0).permutation(len(groups))
        self.numbers = [groups[place] for place in order]
        self._data, self._config, self._loader = data, config, LoaderConfig()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = self.numbers[index]
        inputs = model_inputs(self._data.batch(numbers, self._loader), self._config)
        inputs["pixel_values"] = inputs["pixel_values"].contiguous()
        del inputs["num_items_in_batch"]
        return inputs | {"numbers": torch.tensor(numbers)}


def best_fit_decreasing(tokens: IntArray, cap: int) -> list[Numbers]:
    """Groups by tokens alone: each sample, from the longest on, goes where least room is left.

    >>> best_fit_decreasing(np.array([3, 6, 5, 4]), 10)
    [[1, 3], [2, 0]]
    """
    groups: list[Numbers] = []
    rooms: list[tuple[int, int]] = []
    for number in np.argsort(-tokens, kind="stable").tolist():
        length = int(tokens[number])
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, group = rooms.pop(place)
        else:
            room, group = cap, len(groups)
            groups.append([])
        groups[group].append(number)
        insort(rooms, (room - length, group))
    return groups
