"""A rank that runs a loop as README or docs have it, and the same training sample by sample."""

import contextlib
import os
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from isobatch import model_inputs

NUM_STEPS = 3


class FirstSteps:
    """The first steps of a loader, each noted: its samples' ids and its divisor."""

    def __init__(self, loader):
        self._loader, self.steps = loader, []

    def __iter__(self):
        for step in islice(self._loader, NUM_STEPS):
            ids = [name for batch in step for name in batch.sample_ids]
            self.steps.append((ids, step[0].loss_normalizer))
            yield step


def run_loop(code, make, folder, place):
    """Run `code` with what `make(place)` gives: model, optimizer and perhaps the loader.

    Leaves the weights and the steps of each rank in `folder`.
    """
    os.chdir(folder)
    begin, _, loop = code.rpartition("for step in loader:")
    names = {"torch": torch, "model_inputs": model_inputs, "contextlib": contextlib}
    if "accelerate" in code:
        import accelerate  # noqa: PLC0415

        names["accelerate"] = accelerate
        if dist.is_initialized():  # as `accelerate launch` tells it
            rank, size = dist.get_rank(), dist.get_world_size()
            os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    names |= make(place)
    exec(begin, names)
    names["loader"] = recorder = FirstSteps(names["loader"])
    exec(f"for step in loader:{loop}", names)
    rank = dist.get_rank() if dist.is_initialized() else 0
    module = getattr(names["model"], "module", names["model"])
    weights = {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in module.state_dict().items()
    }
    torch.save((weights, recorder.steps), folder / f"trained.{rank}")


def train_alone(model, optimizer, steps, single):
    """Train on samples one by one; `single`: id -> micro-batch of that sample alone."""
    for ids, normalizer in steps:
        for name in ids:
            batch = replace(single[name], loss_normalizer=normalizer, num_ranks=1)
            model(**model_inputs(batch, model.config)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.state_dict().items()}


def joined(folder, num_ranks):
    """(weights of the first rank, steps of all ranks together); all ranks have equal weights."""
    parts = [
        torch.load(folder / f"trained.{rank}", weights_only=False) for rank in range(num_ranks)
    ]
    for weights, _ in parts[1:]:
        for name, value in weights.items():
            torch.testing.assert_close(value, parts[0][0][name])
    steps = []
    for of_ranks in zip(*(own for _, own in parts), strict=True):
        (normalizer,) = {divisor for _, divisor in of_ranks}
        steps.append(([name for ids, _ in of_ranks for name in ids], normalizer))
    return parts[0][0], steps
