"""A rank of a run: forward and backward passes and summed gradients, on one core."""

from __future__ import annotations

import ctypes
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from online_runs.methods import Batch, Task, batches
from online_runs.model import open_model
from online_runs.modes import Replicated, Sharded

LEARNING_RATE = 1e-4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def run_rank(rank: int, world: int, port: int, task: Task, out: str) -> None:
    """Train an epoch, and write this rank's figures into a file."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    keep_memory()
    warnings.simplefilter("ignore")  # of peers: more worker processes than cores
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    model = open_model(task.folder)
    mode = Sharded(model) if task.is_sharded else Replicated(model)
    figures: dict[str, Any] = {"price_s": mode.price_s}
    dist.barrier()
    begun = time.perf_counter()
    stream = batches(task, model.config, figures)
    train(model, mode, stream, task.accumulation, begun, figures)
    Path(out, f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # a peer's processes would be waited for


def keep_memory() -> None:
    """Let the C library keep what is freed: else pages of large tensors are made anew each time."""
    library = ctypes.CDLL(None)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        library.mallopt(parameter, 1 << 30)


def train(
    model: Any,
    mode: Replicated | Sharded,
    stream: Iterator[Batch],
    accumulation: int,
    begun: float,
    figures: dict[str, Any],
) -> None:
    """All batches; ranks that have none left give zeros, or run blank ones, until all are done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    done: list[Batch] = []
    costs: list[tuple[int, int, int, float]] = []
    steps: list[float] = []
    waits, first_s = [], 0.0
    while True:
        passes_s, has_batch = [], False
        for _ in range(accumulation):
            asked = time.perf_counter()
            batch = next(stream, None)
            waits.append(time.perf_counter() - asked)
            if len(waits) == 1:
                first_s = time.perf_counter() - begun
                dist.barrier()
                began, used_s = time.perf_counter(), cpu_seconds(os.getpid())  # all have a batch
            if not mode.must_run(batch is not None):
                break
            computing = time.thread_time()
            mode.run(batch)
            passes_s.append(time.thread_time() - computing)
            if batch is not None:
                tiles = len(batch.inputs.get("pixel_values", ()))
                costs.append((1, batch.padded, tiles, passes_s[-1]))
                batch.inputs = {"input_ids": batch.inputs["input_ids"]}
                done.append(batch)
                has_batch = True
        steps += mode.step_times(passes_s)
        if not mode.finish(has_batch):
            break
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    figures |= {
        "first_s": first_s,
        "seconds": time.perf_counter() - began,
        "waited_s": sum(waits[1:]),
        "micro_batches": len(done),
        "costs": costs,
        "steps": steps,
        "other_s": cpu_seconds(os.getpid()) - used_s - sum(steps),
        "samples": [name for batch in done for name in batch.samples],
        "tokens": sum(batch.tokens for batch in done),
        "padded": sum(batch.padded for batch in done),
    }


def cpu_seconds(process: int) -> float:
    """CPU time of a process and all that it has started."""
    place = Path(f"/proc/{process}")
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        children = (place / f"task/{process}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and of ended children
    return own + sum(cpu_seconds(int(child)) for child in children)
