"""Ranks for tests: processes that meet over gloo on this machine, forked from one that has imported what they need.

So a rank is there in milliseconds: alone, importing torch and transformers takes it longer than most tests. The process
that is forked runs nothing else, so no lock can be held by a thread that its children do not have.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = (
    "engine.dispatching.dispatch_steps",
    "engine.runtime.models.transformers_models",
    "engine.runtime.pipeline",
    "loaders",
    "torch.distributed.checkpoint",
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.llava.modeling_llava",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
)
"""What most ranks import; a module that is not installed is left out."""

context = mp.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))


def meet(folder, rank, world_size):
    """Be a rank: over gloo, on one core."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)


def on_ranks(world_size, folder, work, *arguments):
    """Run `work(*arguments)` on all ranks; the first failure of any is raised. A folder for each call."""
    mp.start_processes(_work, (world_size, folder, work, arguments), nprocs=world_size, start_method="forkserver")


def _work(rank, world_size, folder, work, arguments):
    meet(folder, rank, world_size)
    work(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(folder: Path, world_size: int, work, *arguments, most_s: float = 90.0):
    """Run `work(say, *arguments)` on all ranks; -> what each said, by rank; None of one that was killed."""
    ranks = [
        context.Process(target=_say, args=(str(folder), rank, world_size, work, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + most_s
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join()
    assert not late, f"ranks {late} did not end"
    files = [folder / f"said{rank}" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _say(folder, rank, world_size, work, arguments):
    meet(folder, rank, world_size)
    said = {}
    work(said, *arguments)
    Path(folder, f"said{rank}").write_text(json.dumps(said))
    os._exit(0)  # at once, as a crashed rank does: connections are closed
