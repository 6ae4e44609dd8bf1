"""Run on four ranks: the summed float64 gradients of the tiny model for the first step of an epoch,
into a file.
"""

import dataclasses

import torch
import torch.distributed as dist
from tiny_vlm import accumulate, make_model

from isobatch.loaders import StreamingLoader

WORLD_SIZE = 4


def dump(build, file):
    """On every rank; the first one writes."""
    rank = dist.get_rank()
    loader = StreamingLoader(
        build,
        dp_rank=rank,
        dp_world_size=WORLD_SIZE,
        micro_batches_per_step=2,
        loss_normalizer="step",
        gradients="sum",
    )
    torch.manual_seed(0)
    model = make_model(loader).double()
    batches = next(iter(loader))
    doubled = [
        dataclasses.replace(batch, pixel_values=batch.pixel_values.double()) for batch in batches
    ]
    loss = torch.tensor(accumulate(model, doubled), dtype=torch.float64)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for tensor in (loss, *gradients.values()):
        dist.all_reduce(tensor)
    ids = [None] * WORLD_SIZE
    dist.all_gather_object(ids, [sample_id for batch in batches for sample_id in batch.sample_ids])
    if rank == 0:
        flat = [sample_id for part in ids for sample_id in part]
        torch.save({"loss": loss.item(), "ids": flat, "gradients": gradients}, file)
