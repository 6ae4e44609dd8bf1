"""Trains a model as a plan says: `Pipeline`, one rank of a pipeline of stages over torch.distributed.

A step is a list of micro-batches, as many and as long as they come; the schedule is made for their number. Each rank
runs its own operations in order (`engine.schedule`); what it waits for and what waits for it are the edges of the same
`Program` that the simulator ran. Losses are sums divided by the step's labels on all ranks, so gradients are those of
the whole step as one batch; they are summed over data-parallel replicas once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from balance.errors import ConfigError
from balance.records import IntArray
from engine.runtime.carries import Batch, LayeredModel
from engine.runtime.groups import make_groups, sum_over
from engine.runtime.steps import RankLayers, Step, StepResult
from engine.schedule import Schedule, make_schedule
from engine.stages import check_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a pipeline runs, besides its partition."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    device: torch.device | str = "cpu"
    autocast: torch.dtype | None = None
    """torch.bfloat16 for mixed precision; None for the parameters' own."""


class Pipeline:
    """One rank of a pipeline. All ranks make it alike, with the whole model; each keeps its own layers."""

    def __init__(
        self,
        model: LayeredModel,
        borders: IntArray | Sequence[int],
        recompute: NDArray[np.bool_] | Sequence[bool],
        pipelines: Sequence[Sequence[int]],
        options: PipelineOptions | None = None,
    ) -> None:
        """`pipelines`: of each replica, the world's ranks that run it, first stage first; the same list on every rank.

        Weights must be alike on all ranks at the beginning. ConfigError if partition, recomputation and ranks do not
        belong together.
        """
        self._options = options or PipelineOptions()
        places = tuple(int(border) for border in borders)
        _check(model, places, recompute, pipelines, self._options)
        self._groups = make_groups(pipelines, model, places)
        device, num_ranks = torch.device(self._options.device), len(self._groups.ranks)
        self._own = RankLayers(
            layers={
                place: model.layers[place].to(device)
                for stage in range(self._groups.rank, len(places) - 1, num_ranks)
                for place in range(places[stage], places[stage + 1])
            },
            borders=places,
            recompute=tuple(bool(chosen) for chosen in recompute),
            specs=model.specs,
            first_trained=model.first_trained,
            device=device,
            context=self._context,
        )

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """This rank's layers, by their place in the model."""
        return self._own.layers

    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's layers, each once."""
        every = (weight for layer in self._own.layers.values() for weight in layer.parameters())
        return list({id(weight): weight for weight in every}.values())

    def step(self, batches: Sequence[Batch], normalizer: int, schedule: Schedule | None = None) -> StepResult:
        """Forward and backward passes of a step; adds to the gradients of `parameters()`.

        `normalizer`: labels of the whole step, over all replicas. `schedule`: another than the plan's, for so many
        micro-batches. PeerLost if another rank has gone.
        """
        if schedule is None:
            options = self._options
            schedule = make_schedule(options.schedule, len(self._groups.ranks), len(batches), options.stages_per_rank)
        return Step(self._own, self._groups, schedule, batches, normalizer).run()

    def reduce_gradients(self) -> None:
        """Sum gradients of tied parameters over the ranks that have them, and all over replicas. Once per step."""
        for weight in self._trained():
            if weight.grad is None:  # no micro-batch came by; other ranks may have had one
                weight.grad = torch.zeros_like(weight)
        for tie in self._groups.ties:
            sum_over([weight.grad for weight in tie.weights if weight.grad is not None], tie.group)
        sum_over([weight.grad for weight in self._trained() if weight.grad is not None], self._groups.replicas)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients of the model to a norm of at most `max_norm`; -> the norm before. After the reduction."""
        # tied parameters count once, on the first rank that has them
        others = {id(w) for tie in self._groups.ties if dist.get_rank(tie.group) > 0 for w in tie.weights}
        own = [weight.grad for weight in self._trained() if weight.grad is not None and id(weight) not in others]
        total = torch.zeros((), device=self._own.device)
        for gradient in own:
            total += gradient.float().square().sum()
        dist.all_reduce(total, group=self._groups.pipeline)
        norm = float(total.sqrt())
        if norm > max_norm:
            for weight in self._trained():
                if weight.grad is not None:
                    weight.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def _trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.parameters() if weight.requires_grad]

    def _context(self) -> AbstractContextManager[object]:
        if self._options.autocast is None:
            return nullcontext()
        return torch.autocast(self._own.device.type, dtype=self._options.autocast)


def _check(
    model: LayeredModel,
    borders: tuple[int, ...],
    recompute: NDArray[np.bool_] | Sequence[bool],
    pipelines: Sequence[Sequence[int]],
    options: PipelineOptions,
) -> None:
    check_partition(np.array(borders), len(model.layers))
    if len(recompute) != len(model.layers):
        raise ConfigError(f"recompute names {len(recompute)} layers; the model has {len(model.layers)}")
    lengths = {len(pipeline) for pipeline in pipelines}
    num_stages = len(borders) - 1
    if lengths != {num_stages // options.stages_per_rank} or num_stages % options.stages_per_rank:
        raise ConfigError(
            f"{num_stages} stages, {options.stages_per_rank} per rank, but pipelines of {sorted(lengths)} ranks"
        )
    if not any(dist.get_rank() in pipeline for pipeline in pipelines):
        raise ConfigError(f"rank {dist.get_rank()} is in none of the pipelines {[list(own) for own in pipelines]}")
