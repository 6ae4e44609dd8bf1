"""Recompute as few layers as memory allows, found on the running pipeline (OmniBal 4.3).

    torchrun --nproc-per-node 2 -m engine measure BUILD --out measured
    torchrun --nproc-per-node 2 examples/adapt_recompute.py BUILD measured MEMORY_MIB

`python -m engine train --recompute adapt` also repeats later steps that run out of memory.
"""

import sys

import torch
import torch.distributed as dist

from isobatch import StreamingLoader
from isobatch.engine import (
    AdaptOptions,
    Pipeline,
    adapt_running,
    batch_loads,
    open_model,
    profiled_costs,
    read_plan,
    read_profile,
)


def main(build: str, measured: str, memory_mib: str) -> list[bool]:
    """One step with every layer recomputed, then the choice; -> which layers are recomputed."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plan, profile = read_plan(f"{measured}/plan.json"), read_profile(f"{measured}/profile.json")
    count = plan.num_micro_batches
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1, micro_batches_per_step=count)
    torch.manual_seed(0)
    model = open_model(None, None, loader)
    everything, ranks = [True] * len(model.names), range(dist.get_world_size())
    pipeline = Pipeline(model.stack, plan.borders, everything, [ranks])
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)

    # after one step the optimizer's state exists, which takes its memory
    batches = next(iter(loader))
    pipeline.step(batches, batches[0].loss_normalizer)
    pipeline.reduce_gradients()
    optimizer.step()

    # then the same step runs a few times with other layers recomputed; weights stay as they are
    costs = profiled_costs(profile, batch_loads(batches, model.preset))
    options = AdaptOptions(limit_bytes=int(float(memory_mib) * 2**20))
    adapt_running(pipeline, costs, [batches], options, optimizer)
    if dist.get_rank() == 0:
        names = zip(model.names, pipeline.recompute, strict=True)
        print("recomputed:", ", ".join(name for name, chosen in names if chosen) or "nothing")
    dist.destroy_process_group()
    return pipeline.recompute.tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
