"""Finds on the running pipeline which layers must be recomputed: OmniBal's four steps (4.3), with
real steps for runs.

`engine.planning.adaptive_recompute` decides; here is its `Observe`: `StepObserver` runs steps with
some layers recomputed, and tells what memory each stage had left, or that it ran out, which ends a
step but no rank. Weights stay as they are, and what dropout draws afterwards; gradients are
dropped. It takes some 6 runs more than there are kinds of layers, of a step or a few. On a GPU
these cost what steps cost; on a CPU, whose memory `LiveBytes` counts, a few times as much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.planning.adaptive_recompute import AdaptedRecompute, OutOfMemory, adapt_recompute
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.cpu_memory import LiveBytes
from engine.runtime.errors import peers
from engine.runtime.layer_rng import generators_kept
from engine.runtime.pipeline import Pipeline
from engine.runtime.stage_io import Batch
from engine.simulator.schedule import make_schedule

FORMAT = 1
"""Of the evidence."""


class StepObserver:
    """Runs steps of a pipeline with other layers recomputed. All ranks of all replicas make it and
    call it alike.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[Sequence[Batch]],
        *,
        limit_bytes: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`steps`: this replica's micro-batches, step by step; the heaviest that training will
        meet.

        `limit_bytes`: of each rank's memory; None for all that its GPU has free. A CPU needs one,
        and the `optimizer` whose state takes part of it; on a GPU that is counted anyway. What an
        optimizer keeps must be there already: let a step of training go before. What it needs for a
        moment is not looked at, nor what the reduction of gradients does: activations are gone by
        then. ConfigError for several stages per rank, or nothing to run.
        """
        own, groups = pipeline._own, pipeline._groups
        if len(own.borders) - 1 != len(groups.ranks):
            raise ConfigError(
                f"the pipeline has {len(own.borders) - 1} stages on {len(groups.ranks)} ranks; recomputation is "
                "adapted for one stage per rank"
            )
        if not steps or not all(map(len, steps)):
            raise ConfigError(
                f"steps have {[len(batches) for batches in steps]} micro-batches; give one step at least"
            )
        if limit_bytes is None and own.device.type != "cuda":
            raise ConfigError(
                "limit_bytes is None; say how many bytes a rank has where there is no GPU to ask"
            )
        self._pipeline, self._steps, self._limit_bytes, self._optimizer = (
            pipeline,
            steps,
            limit_bytes,
            optimizer,
        )
        self._device, self._groups = own.device, groups
        self._layers = [*own.layers.values(), *own.encoder]

    def __call__(self, recompute: NDArray[np.bool_]) -> IntArray:
        """Bytes that each stage had left at its peak, (stages,), in the replica that had least.
        OutOfMemory.

        Leaves `recompute` set, and no gradients.
        """
        steps_run = self._pipeline.steps_run
        self._pipeline.set_recompute(recompute)
        self._let_go()
        try:
            with generators_kept(self._device):
                own = self._left_of_gpu() if self._device.type == "cuda" else self._left_of_cpu()
        finally:
            self._pipeline.steps_run = steps_run
            self._let_go()
        left = _least_left(own, self._groups, self._device)
        if (left < 0).any():
            raise OutOfMemory(np.flatnonzero(left < 0).tolist())
        return left

    def _left_of_gpu(self) -> int:
        limit = self._limit_bytes
        if limit is None:
            limit = int(
                torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
            )
        self._pipeline.peak_bytes()  # from here on
        self._run()
        return limit - (self._pipeline.peak_bytes() or 0)

    def _left_of_cpu(self) -> int:
        state = self._optimizer.state.values() if self._optimizer else ()
        kept = [value for fields in state for value in fields.values() if isinstance(value, Tensor)]
        weights = (
            tensor for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers())
        )
        limit = (self._limit_bytes or 0) - _bytes_of([*weights, *kept])
        memory = LiveBytes(limit)
        with memory:
            self._run()
        return limit - memory.peak_bytes

    def _run(self) -> None:
        for batches in self._steps:
            self._pipeline.step(batches, 1)  # by what losses are divided changes no memory
            self._drop_gradients()  # each step begins without, as in training

    def _let_go(self) -> None:
        """Hold nothing that the steps have left."""
        self._drop_gradients()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        for weight in self._pipeline.parameters():
            weight.grad = None


def adapt_running(
    pipeline: Pipeline,
    costs: Costs,
    steps: Sequence[Sequence[Batch]],
    *,
    limit_bytes: int | None = None,
    reserve_bytes: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    evidence: Path | None = None,
) -> AdaptedRecompute:
    """The least recomputation with which steps like these run and leave `reserve_bytes`; the
    pipeline has it then.

    All ranks of all replicas call it, with steps of their replica, and choose alike; the first one
    writes the `evidence`, as JSON. Of `costs` only kinds and times of recomputation count; where
    ranks measured other times, the longest do. The rest as in `StepObserver`. InfeasiblePlan on all
    ranks if everything recomputed is too much; the pipeline recomputes then what it did before.
    """
    observe = StepObserver(pipeline, steps, limit_bytes=limit_bytes, optimizer=optimizer)
    own, groups = pipeline._own, pipeline._groups
    costs = _agreed(costs, len(own.recompute), groups, own.device)
    schedule = make_schedule(pipeline._options.schedule, len(groups.ranks), max(map(len, steps)))
    chosen = pipeline.recompute
    try:
        adapted = adapt_recompute(
            costs, np.array(own.borders), schedule, observe, reserve_bytes=reserve_bytes
        )
        chosen = adapted.recompute
    finally:
        pipeline.set_recompute(chosen)
    if evidence is not None and groups.replica == groups.rank == 0:
        given = {
            "limit_bytes": limit_bytes,
            "reserve_bytes": reserve_bytes,
            "schedule": schedule.name,
        }
        table = {"format": FORMAT, **given, **_as_json(adapted, costs, own.borders)}
        evidence.write_text(f"{json.dumps(table, indent=1)}\n")
    return adapted


def _as_json(adapted: AdaptedRecompute, costs: Costs, borders: Sequence[int]) -> dict[str, object]:
    """What was run, what it told, and what follows."""
    trials: list[Mapping[str, object]] = [
        {
            "recompute": trial.recompute.tolist(),
            "left_bytes": None if trial.left_bytes is None else trial.left_bytes.tolist(),
            "out_of_memory": list(trial.ran_out),
        }
        for trial in adapted.trials
    ]
    return {
        "borders": list(borders),
        "kinds": list(costs.kinds),
        "trials": trials,
        "held_bytes": adapted.held_bytes,
        "chosen": {
            "recompute": adapted.recompute.tolist(),
            "left_bytes": adapted.left_bytes.tolist(),
        },
    }


def _agreed(costs: Costs, num_layers: int, groups: ProcessGroups, device: torch.device) -> Costs:
    """The same costs on all ranks: with the longest times of recomputation that any of them has, of
    whole steps.
    """
    if costs.num_layers != num_layers:
        raise ConfigError(f"costs are of {costs.num_layers} layers; the model has {num_layers}")
    mark = int.from_bytes(blake2b(repr(costs.kinds).encode(), digest_size=7).digest(), "little")
    told = torch.tensor(
        [mark, -mark, *costs.recompute_ns.sum(axis=1).tolist()], dtype=torch.int64, device=device
    )
    _over_all(told, groups, dist.ReduceOp.MAX)
    most, least, *times = told.tolist()
    if most != -least:
        raise ConfigError("ranks were given costs of other kinds of layers; give each the same")
    recompute_ns = np.zeros_like(costs.recompute_ns)
    recompute_ns[:, 0] = times
    return replace(costs, recompute_ns=recompute_ns)


def _least_left(own: int, groups: ProcessGroups, device: torch.device) -> IntArray:
    """Of each stage, what the replica had left that had least, (stages,)."""
    left = torch.full(
        (len(groups.ranks),), np.iinfo(np.int64).max, dtype=torch.int64, device=device
    )
    left[groups.rank] = own
    _over_all(left, groups, dist.ReduceOp.MIN)
    return np.asarray(left.cpu().numpy())


def _over_all(told: Tensor, groups: ProcessGroups, operation: dist.ReduceOp.RedOpType) -> None:
    """Reduce over the ranks of this pipeline, and over replicas."""
    with peers(groups.ranks):
        dist.all_reduce(told, op=operation, group=groups.pipeline)
    if groups.replicas is not None:
        with peers(dist.get_process_group_ranks(groups.replicas)):
            dist.all_reduce(told, op=operation, group=groups.replicas)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of different storages."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())
