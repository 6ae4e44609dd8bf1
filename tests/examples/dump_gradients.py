"""Four processes: the summed float64 gradients of the tiny model for the first step of an epoch, into a file.

    python dump_gradients.py BUILD FILE

Forked from one process, which has imported everything once: a quarter of the time of torchrun.
"""

import dataclasses
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from train_tiny import accumulate, make_model, sum_over_ranks

from loaders import StreamingLoader

WORLD_SIZE = 4


def main() -> None:
    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def run(rank: int) -> None:
    build, file = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{file}.store", WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    loader = StreamingLoader(build, dp_rank=rank, dp_world_size=WORLD_SIZE, micro_batches_per_step=2)
    torch.manual_seed(0)
    model = make_model(loader).double()
    batches = next(iter(loader))
    doubled = [dataclasses.replace(batch, pixel_values=batch.pixel_values.double()) for batch in batches]
    loss = torch.tensor(accumulate(model, doubled), dtype=torch.float64)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    sum_over_ranks([loss, *gradients.values()])
    ids = [None] * WORLD_SIZE
    dist.all_gather_object(ids, [sample_id for batch in batches for sample_id in batch.sample_ids])
    if rank == 0:
        flat = [sample_id for part in ids for sample_id in part]
        torch.save({"loss": loss.item(), "ids": flat, "gradients": gradients}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
