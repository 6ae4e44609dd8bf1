"""The programs of docs/load/rebalance.md, word for word, on two ranks."""

import re

import numpy as np
import torch
import torch.distributed as dist

from support import ROOT
from support.costs.drawn_samples import (
    assert_gradients_equal,
    draw_sample,
    loss_of,
    num_labels,
    sum_gradients,
)
from support.models.tiny_models import IMAGE, make_model
from support.ranks import on_ranks

PAGE = ROOT / "docs" / "load" / "rebalance.md"
SAMPLES = 16


def program(name):
    text = PAGE.read_text("utf-8")
    (code,) = re.findall(rf"<!-- program: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    return code


def lengths(samples):
    grids = [sample["image_grid_thw"] for sample in samples]
    return {
        "num_images": [len(grid) for grid in grids],
        "num_vit_tokens": [int(grid.prod(dim=1).sum()) for grid in grids],
        "num_tokens": [len(sample["input_ids"]) for sample in samples],
    }


def test_programs_train_as_one_process(tmp_path):
    on_ranks(2, tmp_path, _references)


def _references():
    rank = dist.get_rank()
    dataset = [draw_sample(number) for number in range(SAMPLES)]
    alone, model = make_model("qwen2_vl"), make_model("qwen2_vl")
    labels = sum(map(num_labels, dataset))
    for sample in dataset:
        (loss_of(alone, sample) / labels).backward()
    # those with most images on one rank
    order = sorted(range(SAMPLES), key=lambda number: number % 4 > 1)
    names = {
        "torch": torch,
        "dist": dist,
        "group": None,
        "dataset": dataset,
        "model": model,
        "summed_loss": loss_of,
        "finish_step": sum_gradients,
        "index_loader": [order[rank * SAMPLES // 2 :][: SAMPLES // 2]],
        **lengths(dataset),
    }
    exec(program("references"), names)
    assert_gradients_equal(model, alone)
    assert names["numbers"] != names["index_loader"][0]
    # one sample per rank, three images or one
    sample = draw_sample(3 if rank else 1)
    ids = sample["input_ids"][None]
    inputs = {"input_ids": ids, "labels": sample["labels"][None], "num_items_in_batch": 1}
    inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    names = {
        "model": make_model("qwen2_vl"),
        "group": None,
        "pixels": sample["pixel_values"],
        "grids": sample["image_grid_thw"],
        "inputs": inputs,
    }
    exec(program("encoder"), names)
    torch.testing.assert_close(names["loss"], loss_of(make_model("qwen2_vl"), sample))
    names["loss"].backward()  # a collective


def test_rollouts_are_planned():
    samples = [draw_sample(number) for number in range(64)]
    names = {"prompts": [number // 4 for number in range(64)], **lengths(samples)}
    names = {name: np.array(values) for name, values in names.items()}
    exec(program("rollouts"), names)
    assert set(names["ranks"].tolist()) == set(range(8))
    assert names["micro_batches"].max() == 0
