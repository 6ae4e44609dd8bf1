"""The same pipeline on `torch.distributed.pipelining`'s schedules: `TorchSchedules`, for those who
want theirs.

Layers, partition, recomputation and reduction are those of a `Pipeline`; order and messages are
torch's. torch takes all micro-batches to have one shape, found out by a trial run; `TorchStage`
tells it the shapes of each from the model's specs instead, so that lengths may differ, and nothing
empty travels. For that it replaces private methods of `PipelineStage`, which change from version to
version: so versions that were not tested are refused.

What torch cannot do stays so: encode ahead, another order of micro-batches, fewer of them than
stages (1F1B), several stages per rank (1F1B, GPipe), numbers of micro-batches that do not divide
evenly into rounds (interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from balance.errors import ConfigError
from engine.runtime.pipeline import Pipeline
from engine.runtime.stage_io import Batch

if TYPE_CHECKING:
    from engine.runtime.torch_stage import TorchStage

TESTED = ("2.13",)
"""Versions of torch whose private methods `TorchStage` knows."""

SCHEDULES: Mapping[str, str] = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
"""Our names, and torch's; `zero_bubble` takes any number of stages per rank, as the interleaved
ones do.
"""

_ONE_STAGE = ("1f1b", "gpipe")


def check_version(version: str = torch.__version__) -> None:
    """ConfigError unless this version of torch was tested.

    >>> check_version("2.13.1+cpu")
    >>> check_version("2.14.0")
    Traceback (most recent call last): balance.errors.ConfigError: torch 2.14.0: its pipelining was
    tested with 2.13; use Pipeline's own schedules
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise ConfigError(
            f"torch {version}: its pipelining was tested with {', '.join(TESTED)}; use Pipeline's own schedules"
        )


class TorchSchedules:
    """Steps of a pipeline in torch's order; made for any number of micro-batches."""

    def __init__(self, pipeline: Pipeline, schedule: str = "1f1b") -> None:
        """`schedule`: a name of `SCHEDULES`. ConfigError if torch's schedule cannot take so many
        stages per rank.
        """
        check_version()
        if schedule not in SCHEDULES:
            raise ConfigError(f"schedule is {schedule!r}; torch has {', '.join(SCHEDULES)}")
        options = pipeline._options
        if options.encoder_ranks or options.dropout_seed is not None:
            raise ConfigError(
                "torch's schedules have no encoder_ranks and no dropout_seed; leave them out of the options"
            )
        self._own, self._groups, self._name = pipeline._own, pipeline._groups, schedule
        num_stages, num_ranks = len(self._own.borders) - 1, len(self._groups.ranks)
        if schedule in _ONE_STAGE and num_stages != num_ranks:
            raise ConfigError(
                f"torch's {schedule} has one stage per rank, not {num_stages} on {num_ranks} ranks"
            )
        self._stages = range(self._groups.rank, num_stages, num_ranks)

    def step(self, batches: Sequence[Batch], normalizer: int) -> float:
        """Forward and backward passes of a step; adds to the gradients of the pipeline's
        parameters; -> the loss.

        `normalizer`: labels of the whole step, over all replicas. The loss is the sum over this
        replica's micro-batches, the same on all its ranks. ConfigError if torch's schedule cannot
        take so many micro-batches.
        """
        from engine.runtime.torch_stage import TorchStage  # noqa: PLC0415  (other versions of torch cannot import it)

        stages = [
            TorchStage(stage, batches, self._own, self._groups.pipeline) for stage in self._stages
        ]
        losses: list[Tensor] = []
        schedule = self._schedule(
            stages, len(batches), lambda output, _: output / max(normalizer, 1)
        )
        schedule._step_microbatches(
            arg_mbs=[()] * len(batches),
            kwarg_mbs=[{"batch": batch} for batch in batches],
            target_mbs=[None] * len(batches),
            losses=losses,
            return_outputs=False,
        )
        total = torch.zeros((), device=self._own.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self._groups.pipeline)
        return float(total)

    def _schedule(
        self, stages: list[TorchStage], num_batches: int, loss: Callable[[Tensor, None], Tensor]
    ) -> Any:
        given: Any = stages[0] if self._name in _ONE_STAGE else stages
        try:
            # gradients are sums already
            return getattr(pipelining, SCHEDULES[self._name])(
                given, num_batches, loss_fn=loss, scale_grads=False
            )
        except ValueError as error:
            raise ConfigError(
                f"torch's {self._name} cannot run {num_batches} micro-batches: {error}"
            ) from error
