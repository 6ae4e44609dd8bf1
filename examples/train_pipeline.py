"""Train a pipeline by a plan, in a loop of your own.

    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD plan.json

`python -m engine train` does this too, with saved state, figures, tuning and replicas.
"""

import sys

import torch
import torch.distributed as dist

from isobatch import StreamingLoader
from isobatch.engine import Pipeline, PipelineOptions, open_model, read_plan

STEPS = 20


def main(build: str, plan_file: str) -> list[float]:
    """Train for some steps; -> their mean losses per label, the same on all ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    plan = read_plan(plan_file)

    # all ranks of a pipeline read the same steps; only the first stage needs pixels
    loader = StreamingLoader(
        build,
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=plan.num_micro_batches,
        images="encoded" if dist.get_rank() else "patches",
    )
    torch.manual_seed(0)  # the same weights on all ranks
    # or `from_transformers(model)`, or a `LayerStack` of your own layers
    stack = open_model(None, None, loader).stack
    pipeline = Pipeline(
        stack,
        plan.borders,
        plan.recompute_mask,
        [range(dist.get_world_size())],
        PipelineOptions(schedule=plan.schedule, stages_per_rank=plan.stages_per_rank),
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < STEPS:  # epoch after epoch
        for batches, _ in zip(loader, range(STEPS - len(losses)), strict=False):
            optimizer.zero_grad()
            normalizer, labels = batches[0].loss_normalizer, batches[0].num_loss_tokens
            losses.append(pipeline.step(batches, normalizer).loss * normalizer / max(1, labels))
            pipeline.reduce_gradients()  # of tied weights, and over replicas
            pipeline.clip_gradients(1.0)  # by the norm over all stages
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {len(losses) - 1}: loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
