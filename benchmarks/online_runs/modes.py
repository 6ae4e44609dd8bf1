"""How ranks share what they train: weights on every rank, or shards of them (FSDP2).

With whole weights ranks meet once per step, when they sum gradients. With shards they meet in every
pass of a micro-batch, where weights are gathered; so a rank without a batch runs a blank one, and
a batch of text alone encodes a blank tile, as all who train VLMs with FSDP must do.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from online_runs.methods import Batch

BLANK_TOKENS, TIMED_PASSES = 8, 15


class Replicated:
    """Whole weights on each rank."""

    def __init__(self, model: Any) -> None:
        self.price_s = 0.0
        self._model = model
        self._weights = [each for each in model.parameters() if each.requires_grad]

    def must_run(self, has_batch: bool) -> bool:
        """Whether this rank runs a pass."""
        return has_batch

    def run(self, batch: Batch | None) -> None:
        """Forward and backward pass of a batch."""
        assert batch is not None
        (self._model(**batch.inputs).loss * batch.scale).backward()

    def finish(self, has_batch: bool) -> bool:
        """Sum gradients over the ranks; -> whether any rank had a batch."""
        return sum_gradients(self._weights, has_batch)

    def step_times(self, passes_s: list[float]) -> list[float]:
        """Times between two meetings of the ranks."""
        return [sum(passes_s)]


class Sharded:
    """Weights, gradients and optimizer states sharded over the ranks, layer by layer."""

    def __init__(self, model: Any) -> None:
        self._whole = _WithBlank(model)
        before = timed(self._pass_blank)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parts = model.model
        for layer in (*parts.vision_tower.encoder.layer, *parts.language_model.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(self._whole, mesh=mesh)
        self.price_s = max(0.0, timed(self._pass_blank) - before)
        """What a micro-batch of any size waits for weights and gradients, besides its own work."""

    def must_run(self, has_batch: bool) -> bool:
        """Whether this rank runs a pass, because any of them has a batch."""
        told = torch.tensor(float(has_batch))
        dist.all_reduce(told)
        return bool(told > 0)

    def run(self, batch: Batch | None) -> None:
        """Forward and backward pass, after which gradients are summed and sharded."""
        if batch is None:
            self._pass_blank()
        else:
            scale = batch.scale * dist.get_world_size()  # FSDP averages gradients
            (self._whole(**batch.inputs).loss * scale).backward()

    def finish(self, has_batch: bool) -> bool:
        """Whether any rank had a batch; gradients are summed already."""
        return self.must_run(has_batch)

    def step_times(self, passes_s: list[float]) -> list[float]:
        """Times between two meetings of the ranks."""
        return passes_s

    def _pass_blank(self) -> None:
        ids = torch.full((1, BLANK_TOKENS), 5)
        blank = {"input_ids": ids, "labels": ids, "spans": [[BLANK_TOKENS]], "use_cache": False}
        (self._whole(**blank).loss * 0).backward()


class _WithBlank(nn.Module):
    """A model that encodes a blank tile where a batch has none, so all ranks run all layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        if "pixel_values" not in inputs:
            ids = inputs.pop("input_ids")
            side = self.model.config.vision_config.image_size[0]
            features: Tensor = self.model.get_image_features(
                torch.zeros((1, 3, side, side))
            ).pooler_output
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(ids) + 0 * features.sum()
        return self.model(**inputs)


def timed(run: Any) -> float:
    """Seconds in which a call that all ranks make at the same time does not compute."""
    found = []
    for _ in range(TIMED_PASSES):
        dist.barrier()
        began = time.perf_counter() - time.thread_time()
        run()
        found.append(time.perf_counter() - time.thread_time() - began)
    return median(found)


def sum_gradients(weights: list[torch.nn.Parameter], has_batch: bool) -> bool:
    """Sum over the ranks; -> whether any rank had a batch."""
    parts = [
        torch.zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in weights
    ]
    flat = torch.cat([*parts, torch.tensor([float(has_batch)])])
    dist.all_reduce(flat)
    start = 0
    for each in weights:
        each.grad = flat[start : start + each.numel()].view_as(each)
        start += each.numel()
    return bool(flat[-1] > 0)
