"""Ranks of an ablation on this machine, and their common measurements.

Two clocks. *Wall*: seconds pass for all ranks; each needs a core of its own. *CPU*: every pass
really runs and takes what its thread computed, however many ranks share the cores; a step takes
what these passes take together if every rank has a core of its own and messages take no time
(`engine.simulator.simulate` of the measured passes, in the order in which they ran).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from isobatch.common.types import IntArray
from isobatch.engine.planning.adaptive_recompute import FloatArray
from isobatch.engine.runtime import stopwatch
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.profiling import _layer_timing
from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.simulate import simulate

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train, as it ran."""

    name: str
    tokens: int
    """Of the LLM, of all samples, without padding."""
    predicted_s: float
    measured_s: float
    waiting: float
    """Share of the ranks' time."""
    peak_gib: float
    """Of any rank."""
    work_s: float | None = None
    """Seconds in passes, of all ranks, nothing recomputed; None if that is not known."""
    replayed_s: float | None = None
    """What the same passes take without messages and all between them."""
    recomputed: str = ""
    """Layers, of all."""


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

    wall_s: FloatArray
    """(steps,), from the first pass of any rank until all gradients are summed on all."""
    replayed_s: FloatArray
    """(steps,), of the slowest replica: its passes, without messages and all between them."""
    busy_s: float
    """Passes of all ranks and steps."""
    losses: FloatArray
    """(steps,)."""

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """The steps of all parts."""
        return cls(
            wall_s=np.concatenate([own.wall_s for own in parts]),
            replayed_s=np.concatenate([own.replayed_s for own in parts]),
            busy_s=sum(own.busy_s for own in parts),
            losses=np.concatenate([own.losses for own in parts]),
        )

    @property
    def seconds(self) -> FloatArray:
        """(steps,), by the clock of this process."""
        return self.replayed_s if cpu_clock() else self.wall_s


MEMORY_KEPT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Freed memory stays with the process, as with a GPU's allocator; else the system clears it anew
for every pass.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How ranks use the cores."""

    apart: bool = False
    """Whether each rank stays on one core; ranks take turns to get one."""
    busy: bool = False
    """Whether something idle computes on those cores whenever no rank does."""
    cpu_clock: bool = False


def on_ranks(
    count: int, run: Callable[..., Any], *arguments: Any, machine: Machine | None = None
) -> Any:
    """What `run(*arguments)` returns on rank 0 of `count` processes with one thread each, that have
    met (gloo).
    """
    os.environ |= MEMORY_KEPT  # read when a process begins
    machine = machine or Machine()
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        cores = sorted(os.sched_getaffinity(0))[:count] if machine.apart else []
        with _kept_busy(cores if machine.busy else ()):
            given = folder, count, results, (run, arguments), (cores, machine.cpu_clock)
            mp.spawn(_rank, given, nprocs=count)
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
    places: tuple[Sequence[int], bool],
) -> None:
    (run, arguments), (cores, by_cpu) = work, places
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if by_cpu:
        _measure_cpu_time()
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


class _CpuTime:
    """What passes and layers are timed with in place of `time`."""

    perf_counter_ns = staticmethod(time.thread_time_ns)


def _measure_cpu_time() -> None:
    """From now on passes take what this thread computes, not what the clock on the wall says."""
    for module in (stopwatch, _layer_timing):
        vars(module)["time"] = _CpuTime


def cpu_clock() -> bool:
    """Whether this process measures by the CPU's clock."""
    return vars(stopwatch)["time"] is _CpuTime


def measure(pipeline: Pipeline, steps: Sequence[Step], replicas: int = 1) -> Measured:
    """Run steps, forward, backward and the sum of gradients, of so many replicas. All ranks call
    it.
    """
    rows = [_one(pipeline, step) for step in steps]
    own = torch.tensor(rows, dtype=torch.float64)  # (steps, figures)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    # each (ranks, steps)
    wall, replayed, busy, losses = torch.stack(ranks).numpy().transpose(2, 0, 1)
    return Measured(
        wall_s=wall.max(axis=0),
        replayed_s=replayed.max(axis=0),
        busy_s=float(busy.sum()),
        # each replica's loss stands on all its ranks
        losses=losses.mean(axis=0) * replicas,
    )


def _one(pipeline: Pipeline, step: Step) -> tuple[float, float, float, float]:
    """(wall, replayed, of it in passes, this replica's part of the loss) of one step."""
    for weight in pipeline.parameters():
        weight.grad = None
    dist.barrier()
    begun = time.perf_counter()
    result = pipeline.step(step.batches, step.num_labels, step.schedule)
    pipeline.reduce_gradients()
    dist.barrier()
    wall = time.perf_counter() - begun
    passes = pipeline.timeline(result).program
    alone = simulate(replace(passes, edge_ns=np.zeros_like(passes.edge_ns)))
    busy = float((result.end_ns - result.start_ns).sum()) / 1e9
    return wall, alone.step_ns / 1e9, busy, result.loss


def consecutive(world_size: int, replicas: int) -> list[list[int]]:
    """The ranks of each replica's pipeline, one pipeline's beside each other."""
    ranks: IntArray = np.arange(world_size).reshape(replicas, -1)
    return [[int(rank) for rank in own] for own in ranks]
