"""Trials of recomputation on the running pipeline (OmniBal 4.3).

`engine.planning.adaptive_recompute` decides; `StepObserver` here is its `Observe`: it runs steps
with some layers recomputed and returns the memory that each stage had left. Weights and dropout's
random numbers stay as they are; gradients are dropped. It takes about 6 runs more than there are
kinds of layers. On a CPU, where `LiveBytes` counts memory, a run takes a few times its steps' time.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.adaptive_recompute import (
    AdaptedRecompute,
    OutOfMemory,
    adapt_recompute,
)
from isobatch.engine.runtime.communication.collectives import gather_objects
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.layer_rng import preserve_rng
from isobatch.engine.runtime.optimizer.main_weights import local_part
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.stage_io import Batch

FORMAT = 1
"""Version of the evidence file."""


class StepObserver:
    """Runs steps of a pipeline with other layers recomputed.

    All ranks of all replicas make it and call it with the same arguments.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[Sequence[Batch]],
        *,
        limit_bytes: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`steps`: this replica's micro-batches of some steps, the heaviest in training.

        `limit_bytes`: memory of each rank; None for all that its GPU has free. A CPU needs it, and
        the `optimizer` whose state takes part of it and exists already, after a step of training.
        Memory of optimizer steps and gradient reduction is not counted: activations are gone by
        then. ConfigError for several stages per rank, or no steps.
        """
        local, groups = pipeline._local, pipeline._groups
        if len(local.borders) - 1 != len(groups.ranks):
            raise ConfigError(
                f"the pipeline has {len(local.borders) - 1} stages on {len(groups.ranks)} ranks;"
                " recomputation is adapted for one stage per rank"
            )
        sizes = list(map(len, steps))
        if not steps or 0 in sizes:
            raise ConfigError(
                f"steps have {sizes} micro-batches; give at least one step, none empty"
            )
        if limit_bytes is None and local.device.type != "cuda":
            raise ConfigError(
                "limit_bytes is None; without a GPU, give the memory of a rank in bytes"
            )
        self._pipeline, self._steps, self._optimizer = pipeline, steps, optimizer
        self._limit_bytes, self._device, self._groups = limit_bytes, local.device, groups
        self._layers = [*local.layers.values(), *local.encoder]

    def __call__(self, recompute: NDArray[np.bool_]) -> IntArray:
        """Bytes that each stage had left at its peak, (stages,); least over replicas. OutOfMemory.

        Leaves `recompute` set, and no gradients.
        """
        steps_run = self._pipeline.steps_run
        self._pipeline.set_recompute(recompute)
        self._release()
        try:
            with preserve_rng(self._device):
                local_bytes = (
                    self._left_on_gpu() if self._device.type == "cuda" else self._left_on_cpu()
                )
        finally:
            self._pipeline.steps_run = steps_run
            self._release()
        ranks, rank_bytes = zip(*gather_objects((self._groups.rank, local_bytes)), strict=True)
        left_bytes = np.full(len(self._groups.ranks), np.iinfo(np.int64).max)
        np.minimum.at(left_bytes, list(ranks), rank_bytes)
        if (left_bytes < 0).any():
            raise OutOfMemory(np.flatnonzero(left_bytes < 0).tolist())
        return left_bytes

    def _left_on_gpu(self) -> int:
        limit = self._limit_bytes
        if limit is None:
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            limit = int(free_bytes + torch.cuda.memory_reserved(self._device))
        self._pipeline.peak_bytes()  # resets the peak
        self._run()
        return limit - (self._pipeline.peak_bytes() or 0)

    def _left_on_cpu(self) -> int:
        states = self._optimizer.state.values() if self._optimizer else ()
        tensors = [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ]
        tensors = [local_part(value) for value in tensors]
        for layer in self._layers:
            tensors += [*layer.parameters(), *layer.buffers()]
        tensors += [local_part(weight) for weight in self._pipeline.parameters()]
        limit = (self._limit_bytes or 0) - _storage_bytes(tensors)
        memory = LiveBytes(limit)
        with memory:
            self._run()
        return limit - memory.peak_bytes

    def _run(self) -> None:
        for batches in self._steps:
            self._pipeline.step(batches, 1)  # the normalizer does not matter for memory
            self._pipeline.drop_gradients()  # each step begins without, as in training

    def _release(self) -> None:
        """Hold nothing that the steps have left."""
        self._pipeline.drop_gradients()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptOptions:
    """Memory limits of `adapt_running`, and where its trials are recorded."""

    limit_bytes: int | None = None
    """Memory of each rank; None for all that its GPU has free."""
    reserve_bytes: int = 0
    """Part of it that trials must leave free."""
    evidence: Path | None = None
    """JSON file for what was tried and chosen, written by the first rank."""


def adapt_running(
    pipeline: Pipeline,
    costs: Costs,
    steps: Sequence[Sequence[Batch]],
    options: AdaptOptions,
    optimizer: torch.optim.Optimizer | None = None,
) -> AdaptedRecompute:
    """Set the least recomputation with which steps like these run and leave the reserve.

    All ranks of all replicas call it, with steps of their replica, and choose the same. Only kinds
    and recomputation times of `costs` count, the longest of all ranks'. InfeasiblePlan if even full
    recomputation needs too much; the old setting is then restored.
    """
    limit_bytes, reserve_bytes = options.limit_bytes, options.reserve_bytes
    observe = StepObserver(pipeline, steps, limit_bytes=limit_bytes, optimizer=optimizer)
    local, groups = pipeline._local, pipeline._groups
    costs = _agree_on_costs(costs, len(local.recompute))
    schedule = pipeline._options.make_schedule(len(groups.ranks), max(map(len, steps)))
    chosen = pipeline.recompute
    try:
        adapted = adapt_recompute(
            costs, np.array(local.borders), schedule, observe, reserve_bytes=reserve_bytes
        )
        chosen = adapted.recompute
    finally:
        pipeline.set_recompute(chosen)
    if options.evidence is not None and groups.replica == groups.rank == 0:
        table = {
            "format": FORMAT,
            "limit_bytes": limit_bytes,
            "reserve_bytes": reserve_bytes,
            "schedule": schedule.name,
            "borders": list(local.borders),
            "kinds": list(costs.kinds),
            "trials": [
                {
                    "recompute": trial.recompute.tolist(),
                    "left_bytes": None if trial.left_bytes is None else trial.left_bytes.tolist(),
                    "out_of_memory": list(trial.ran_out),
                }
                for trial in adapted.trials
            ],
            "held_bytes": adapted.held_bytes,
            "chosen": {
                "recompute": adapted.recompute.tolist(),
                "left_bytes": adapted.left_bytes.tolist(),
            },
        }
        options.evidence.write_text(f"{json.dumps(table, indent=1)}\n")
    return adapted


def _agree_on_costs(costs: Costs, num_layers: int) -> Costs:
    """Equal costs on all ranks, with the longest recomputation times of whole steps."""
    if costs.num_layers != num_layers:
        raise ConfigError(f"costs are of {costs.num_layers} layers; the model has {num_layers}")
    kinds, times = zip(*gather_objects((costs.kinds, costs.recompute_ns.sum(axis=1))), strict=True)
    if len(set(kinds)) > 1:
        raise ConfigError("ranks were given costs of other kinds of layers; give each the same")
    recompute_ns = np.zeros_like(costs.recompute_ns)
    recompute_ns[:, 0] = np.max(times, axis=0)
    return replace(costs, recompute_ns=recompute_ns)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
