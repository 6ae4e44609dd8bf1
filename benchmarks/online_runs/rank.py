"""A rank of a run: forward, backward and a sum of gradients for each step, on one core."""

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
    figures: dict[str, Any] = {}
    dist.barrier()
    begun = time.perf_counter()
    stream = batches(task, model.config, figures)
    train(model, stream, task.accumulation, begun, figures)
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
    stream: Iterator[Batch],
    accumulation: int,
    begun: float,
    figures: dict[str, Any],
) -> None:
    """All batches; ranks that have none left give zeros until all are at their end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    weights = [each for each in model.parameters() if each.requires_grad]
    done: list[Batch] = []
    costs: list[tuple[int, int, int, float]] = []
    steps: list[float] = []
    waits, first_s = [], 0.0
    while True:
        own = []
        for _ in range(accumulation):
            asked = time.perf_counter()
            batch = next(stream, None)
            waits.append(time.perf_counter() - asked)
            if not done and not own:
                first_s = time.perf_counter() - begun
                dist.barrier()
                began, used_s = time.perf_counter(), cpu_seconds(os.getpid())  # all have a batch
            if batch is None:
                break
            tiles = len(batch.inputs.get("pixel_values", ()))
            computing = time.thread_time()
            (model(**batch.inputs).loss * batch.scale).backward()
            costs.append((1, batch.padded, tiles, time.thread_time() - computing))
            batch.inputs = {"input_ids": batch.inputs["input_ids"]}
            own.append(batch)
        done += own
        steps.append(sum(seconds for *_, seconds in costs[-len(own) :]) if own else 0.0)
        if not sum_gradients(weights, bool(own)):
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
