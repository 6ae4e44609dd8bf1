"""Samples of a tiny Qwen2-VL as dicts of tensors: what a loader that is not ours gives."""

import numpy as np
import torch
import torch.distributed as dist

from isobatch.common.types import LABEL_IGNORE
from support.models.tiny_models import IMAGE, VOCAB

PATCH_VALUES = 3 * 2 * 14 * 14
VISION_START, VISION_END = 7, 8


def draw_sample(number, max_images=3):
    """Sample `number` of an endless dataset: 0 to 3 images of unequal sizes, text of 4 to 90."""
    rng = np.random.default_rng(number)
    grids = [[1, 2 * rng.integers(1, 6), 2 * rng.integers(1, 6)] for _ in range(number % 4)]
    grids = torch.tensor(grids[:max_images], dtype=torch.int64).reshape(-1, 3)
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(10, VOCAB, (4 + int(rng.exponential(20)) % 86,), generator=generator)
    ids = [torch.tensor([1])]
    for tokens in (grids.prod(dim=1) // 4).tolist():
        ids += [torch.tensor([VISION_START, *[IMAGE] * tokens, VISION_END])]
    ids = torch.cat([*ids, text])
    labels = torch.where(torch.arange(len(ids)) >= len(ids) - len(text) // 2, ids, LABEL_IGNORE)
    pixels = torch.randn(int(grids.prod(dim=1).sum()), PATCH_VALUES, generator=generator)
    return {
        "number": number,
        "input_ids": ids,
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": grids,
    }


def loss_of(model, sample, **more):
    """Sum of the labels' losses of one sample; `more`: arguments of the model's forward."""
    ids = sample["input_ids"][None]
    inputs = {"input_ids": ids, "labels": sample["labels"][None], "num_items_in_batch": 1}
    if len(sample["image_grid_thw"]):
        inputs["image_grid_thw"] = sample["image_grid_thw"]
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        if not more:
            inputs["pixel_values"] = sample["pixel_values"]
    return model(**inputs, **more).loss


def num_labels(sample):
    """Labels that a loss counts: of all tokens but the first."""
    return int((sample["labels"][1:] != LABEL_IGNORE).sum())


def sum_gradients(model):
    """Add the ranks' gradients up."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(weight.grad)


def assert_gradients_equal(model, other):
    """Of all weights, to single precision's rounding."""
    expected = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        grad = expected[name].grad
        assert torch.allclose(weight.grad, grad, rtol=1e-4, atol=1e-6), name
