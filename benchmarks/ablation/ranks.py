"""Ranks of an ablation on this machine, and their common measurements."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from balance.types import IntArray
from engine.planning.adaptive_recompute import FloatArray
from engine.runtime.pipeline import Pipeline
from engine.runtime.stage_io import Batch
from engine.simulator.schedule import Schedule

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train, as it ran."""

    name: str
    tokens: int
    """Of the LLM, of all samples, without padding."""
    predicted_s: float
    measured_s: float
    mfu: float | None
    """Operations that the samples need, of what the hardware could do meanwhile; None if that is
    not known.
    """
    waiting: float
    """Share of the ranks' time."""
    peak_gib: float
    """Of any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step as one rank is given it."""

    batches: Sequence[Batch]
    """Of its replica."""
    num_labels: int
    """Of all replicas."""
    schedule: Schedule | None = None
    """None for the pipeline's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps as they ran; the same on all ranks."""

    seconds: FloatArray
    """(steps,), from the first pass of any rank until all gradients are summed on all."""
    waiting: float
    """Share of all ranks' time in which they ran no pass."""
    losses: FloatArray
    """(steps,)."""


MEMORY_KEPT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Freed memory stays with the process, as with a GPU's allocator; else the system clears it anew
for every pass.
"""


def on_ranks(count: int, run: Callable[..., Any], *arguments: Any, apart: bool = False) -> Any:
    """What `run(*arguments)` returns on rank 0 of `count` processes with one thread each, that have
    met (gloo).

    `apart`: each has a core of its own, which gets no faster while the others wait.
    """
    os.environ |= MEMORY_KEPT  # read when a process begins
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        cores = sorted(os.sched_getaffinity(0))[:count] if apart else []
        with _kept_busy(cores):
            mp.spawn(_rank, (folder, count, results, (run, arguments), cores), nprocs=count)
        return results.get()


@contextmanager
def _kept_busy(cores: Sequence[int]) -> Iterator[None]:
    """Meanwhile something computes on each of these cores whenever nothing else does.

    Cores of one machine share caches, memory and more: one is faster while the other waits, which
    would make up for imbalance. GPUs are not.
    """
    fillers = [
        mp.get_context("spawn").Process(target=_fill, args=(core,), daemon=True) for core in cores
    ]
    for filler in fillers:
        filler.start()
    try:
        yield
    finally:
        for filler in fillers:
            filler.terminate()
            filler.join()


def _fill(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    )
    some, parent = torch.randn(1024, 256), os.getppid()
    while os.getppid() == parent:
        layers(some).sum().backward()  # as much a load for caches and memory as training


def _rank(
    rank: int,
    folder: str,
    count: int,
    results: Any,
    work: tuple[Callable[..., Any], Any],
    cores: Sequence[int],
) -> None:
    run, arguments = work
    if cores:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count
    )
    found = run(*arguments)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(pipeline: Pipeline, steps: Sequence[Step], replicas: int = 1) -> Measured:
    """Run steps, forward, backward and the sum of gradients, of so many replicas. All ranks call
    it.
    """
    rows = [_one(pipeline, step) for step in steps]
    own = torch.tensor(rows, dtype=torch.float64)  # (steps, figures)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    seconds, busy, losses = torch.stack(ranks).numpy().transpose(2, 0, 1)  # each (ranks, steps)
    return Measured(
        seconds=seconds.max(axis=0),
        waiting=1 - float(busy.sum() / (len(ranks) * seconds.max(axis=0).sum())),
        # each replica's loss stands on all its ranks
        losses=losses.mean(axis=0) * replicas,
    )


def _one(pipeline: Pipeline, step: Step) -> tuple[float, float, float]:
    """(seconds, of them in passes, this replica's part of the loss) of one step."""
    for weight in pipeline.parameters():
        weight.grad = None
    dist.barrier()
    begun = time.perf_counter()
    result = pipeline.step(step.batches, step.num_labels, step.schedule)
    pipeline.reduce_gradients()
    dist.barrier()
    return (
        time.perf_counter() - begun,
        float((result.end_ns - result.start_ns).sum()) / 1e9,
        result.loss,
    )


def matmul_flops(seconds: float = 1.0, side: int = 1024) -> float:
    """What this rank's core multiplies per second in large float32 products while all ranks do: the
    limit of MFU.
    """
    a, b = torch.randn(side, side), torch.randn(side, side)
    a @ b
    dist.barrier()
    begun, times = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        a @ b
        times += 1
    own = torch.tensor(2 * side**3 * times / (time.perf_counter() - begun), dtype=torch.float64)
    dist.all_reduce(own)
    return float(own) / dist.get_world_size()


def consecutive(world_size: int, replicas: int) -> list[list[int]]:
    """The ranks of each replica's pipeline, one pipeline's beside each other."""
    ranks: IntArray = np.arange(world_size).reshape(replicas, -1)
    return [[int(rank) for rank in own] for own in ranks]
