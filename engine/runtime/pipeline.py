"""Trains a model as a plan says: `Pipeline`, one rank of a pipeline of stages over
torch.distributed.

A step is a list of micro-batches, as many and as long as they come; the schedule is made for their
number. Each rank runs its own operations in order (`engine.simulator.schedule`); what it waits for
and what waits for it are the edges of the same `Program` that the simulator ran. Losses are sums
divided by the step's labels on all ranks, so gradients are those of the whole step as one batch;
they are summed over data-parallel replicas once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from balance.errors import ConfigError
from balance.types import IntArray
from engine.charts.measured import measured_timeline
from engine.runtime.communication.consistency import check_agreement, describe_step
from engine.runtime.communication.p2p_schedule import make_routes, reordered
from engine.runtime.communication.process_groups import make_groups, open_links, sum_over
from engine.runtime.errors import peers
from engine.runtime.layer_rng import Draws
from engine.runtime.oom_recovery import uncounted
from engine.runtime.stage_executor import RankLayers, StageExecutor, StepResult
from engine.runtime.stage_io import Batch, LayerStack
from engine.runtime.stopwatch import clock_offsets
from engine.simulator.schedule import PassKind, Schedule, make_schedule
from engine.simulator.simulate import Timeline
from engine.simulator.stages import check_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a pipeline runs, besides its partition."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    device: torch.device | str = "cpu"
    autocast: torch.dtype | None = None
    """torch.bfloat16 for mixed precision; None for the parameters' own."""
    encoder_ranks: Sequence[int] = ()
    """Ranks of the pipeline, besides the first, that keep a copy of the frozen layers in front:
    they can encode ahead, as schedules of `engine.tuning.precompute` have them do.
    """
    dropout_seed: int | None = None
    """If given, what a layer draws depends on this, the step, the replica and the micro-batch
    alone, not on partition, schedule or recomputation. None: layers draw from torch's generators as
    they stand (recomputed ones the same twice).
    """
    check_every_step: bool = False
    """Whether ranks compare their micro-batches in every step, instead of in the first one only; a
    small message.
    """
    timeout_s: float = 300.0
    """For how long a rank waits for another: for longer than any step takes."""


class Pipeline:
    """One rank of a pipeline. All ranks make it alike, with the whole model; each keeps its own
    layers.
    """

    def __init__(
        self,
        model: LayerStack,
        borders: IntArray | Sequence[int],
        recompute: NDArray[np.bool_] | Sequence[bool],
        pipelines: Sequence[Sequence[int]],
        options: PipelineOptions | None = None,
    ) -> None:
        """`pipelines`: of each replica, the world's ranks that run it, first stage first; the same
        list on every rank.

        Weights must be alike on all ranks at the beginning. ConfigError if partition, recomputation
        and ranks do not belong together.
        """
        self._options = options or PipelineOptions()
        places = tuple(int(border) for border in borders)
        _check(model, places, recompute, pipelines, self._options)
        self._groups = make_groups(
            pipelines,
            model,
            places,
            encoder_ranks=self._options.encoder_ranks,
            timeout_s=self._options.timeout_s,
        )
        self.steps_run = 0
        """Steps so far, which dropout depends on; set it when training goes on from a saved
        state.
        """
        self._checked = False
        device, num_ranks = torch.device(self._options.device), len(self._groups.ranks)
        open_links(self._groups, device)
        encodes = (
            self._groups.rank in (0, *self._options.encoder_ranks)
            and model.first_trained <= places[1]
        )
        self._own = RankLayers(
            layers={
                place: model.layers[place].to(device)
                for stage in range(self._groups.rank, len(places) - 1, num_ranks)
                for place in range(places[stage], places[stage + 1])
            },
            encoder=[layer.to(device) for layer in model.layers[: model.first_trained]]
            if encodes
            else [],
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

    @property
    def recompute(self) -> NDArray[np.bool_]:
        """Which layers are recomputed, (layers,)."""
        return np.array(self._own.recompute)

    def set_recompute(self, recompute: NDArray[np.bool_] | Sequence[bool]) -> None:
        """Say anew which layers are recomputed, (layers,), from the next step on; the same on every
        rank.

        `TorchSchedules` that were made before go on as they were.
        """
        _check_recompute(recompute, len(self._own.recompute))
        self._own = replace(self._own, recompute=tuple(bool(chosen) for chosen in recompute))

    def step(
        self,
        batches: Sequence[Batch],
        normalizer: int,
        schedule: Schedule | None = None,
        order: IntArray | Sequence[int] | None = None,
    ) -> StepResult:
        """Forward and backward passes of a step; adds to the gradients of `parameters()`.

        `normalizer`: labels of the whole step, over all replicas. `schedule`: another than the
        plan's, for so many micro-batches; it may encode ahead. `order`: the schedule's first
        micro-batch is `batches[order[0]]`, and so on. PeerLost if another rank has gone,
        LossNotFinite and SpecMismatch with the samples that they come from. OutOfMemory on all
        ranks of all replicas if any ran out of memory in a pass: the gradients are void then, and
        the next step may be run.
        """
        options, groups = self._options, self._groups
        if schedule is None:
            schedule = make_schedule(
                options.schedule, len(groups.ranks), len(batches), options.stages_per_rank
            )
        if order is not None:
            schedule = reordered(schedule, np.asarray(order, np.int64))
        self._check_schedule(schedule)
        if options.check_every_step or not self._checked:
            told = describe_step(
                schedule, batches, normalizer, self._own.borders[1:-1], self._own.specs
            )
            with uncounted():
                check_agreement(groups, told, self._own.device)
            self._checked = True
        draws = None
        if options.dropout_seed is not None:
            draws = Draws(seed=options.dropout_seed, step=self.steps_run, replica=groups.replica)
        result = StageExecutor(self._own, groups, schedule, batches, normalizer, draws).run()
        self.steps_run += 1
        return result

    def timeline(self, result: StepResult) -> Timeline:
        """When the passes of all ranks of this pipeline ran, as measured. All of them call it; all
        get it.

        For charts and traces beside the prediction: `engine.charts.measured`.
        """
        groups, schedule = self._groups, result.schedule
        first, last = schedule.rank_offsets[groups.rank : groups.rank + 2].tolist()
        begun = result.begun_ns - int(clock_offsets(groups, self._own.device)[groups.rank])
        times = torch.zeros(2, len(schedule), dtype=torch.int64, device=self._own.device)
        times[:, first:last] = torch.from_numpy(begun + np.stack([result.start_ns, result.end_ns]))
        with peers(groups.ranks):
            dist.all_reduce(times, group=groups.pipeline)
        start_ns, end_ns = times.cpu().numpy()
        return measured_timeline(
            make_routes(schedule, self._own.sends_grad, groups.rank).program, start_ns, end_ns
        )

    def peak_bytes(self) -> int | None:
        """Most memory of this rank's GPU that torch used since the last call; None on a CPU."""
        device = self._own.device
        if device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def reduce_gradients(self) -> None:
        """Sum gradients of tied parameters over the ranks that have them, and all over replicas.
        Once per step.
        """
        for weight in self._trained():
            if weight.grad is None:  # no micro-batch came by; other ranks may have had one
                weight.grad = torch.zeros_like(weight)
        for tie in self._groups.ties:
            sum_over([weight.grad for weight in tie.weights if weight.grad is not None], tie.group)
        sum_over(
            [weight.grad for weight in self._trained() if weight.grad is not None],
            self._groups.replicas,
        )

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients of the model to a norm of at most `max_norm`; -> the norm before.
        After the reduction.
        """
        # tied parameters count once, on the first rank that has them
        others = {
            id(w) for tie in self._groups.ties if dist.get_rank(tie.group) > 0 for w in tie.weights
        }
        own = [
            weight.grad
            for weight in self._trained()
            if weight.grad is not None and id(weight) not in others
        ]
        total = torch.zeros((), device=self._own.device)
        for gradient in own:
            total += gradient.float().square().sum()
        with peers(self._groups.ranks):
            dist.all_reduce(total, group=self._groups.pipeline)
        norm = float(total.sqrt())
        if norm > max_norm:
            for weight in self._trained():
                if weight.grad is not None:
                    weight.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def _trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.parameters() if weight.requires_grad]

    def _check_schedule(self, schedule: Schedule) -> None:
        """ConfigError if this pipeline cannot run a schedule; on all ranks alike."""
        own, num_ranks = self._own, len(self._groups.ranks)
        if (schedule.num_stages, schedule.num_ranks) != (len(own.borders) - 1, num_ranks):
            raise ConfigError(
                f"the schedule has {schedule.num_stages} stages on {schedule.num_ranks} ranks, the pipeline "
                f"{len(own.borders) - 1} on {num_ranks}"
            )
        encoding = set(schedule.ranks[schedule.kinds == PassKind.ENCODE].tolist())
        if encoding and not 0 < own.first_trained <= own.borders[1]:
            raise ConfigError(
                f"the schedule encodes ahead: the layers in front must be frozen, but layer {own.first_trained} is the "
                f"first that is trained and the first stage ends behind layer {own.borders[1] - 1}"
            )
        without = encoding - {0, *self._options.encoder_ranks}
        if without:
            raise ConfigError(
                f"the schedule encodes on the ranks {sorted(encoding)}; add {sorted(without)} to encoder_ranks"
            )

    def _context(self) -> AbstractContextManager[object]:
        if self._options.autocast is None:
            return nullcontext()
        return torch.autocast(self._own.device.type, dtype=self._options.autocast)


def _check(
    model: LayerStack,
    borders: tuple[int, ...],
    recompute: NDArray[np.bool_] | Sequence[bool],
    pipelines: Sequence[Sequence[int]],
    options: PipelineOptions,
) -> None:
    check_partition(np.array(borders), len(model.layers))
    _check_recompute(recompute, len(model.layers))
    lengths = {len(pipeline) for pipeline in pipelines}
    num_stages = len(borders) - 1
    if lengths != {num_stages // options.stages_per_rank} or num_stages % options.stages_per_rank:
        raise ConfigError(
            f"{num_stages} stages, {options.stages_per_rank} per rank, but pipelines of {sorted(lengths)} ranks"
        )
    beyond = [rank for rank in options.encoder_ranks if not 0 <= rank < max(lengths)]
    if beyond or (options.encoder_ranks and not 0 < model.first_trained <= borders[1]):
        raise ConfigError(
            f"encoder_ranks is {list(options.encoder_ranks)}: these must be ranks of the pipeline, and the layers in "
            f"front frozen and in the first stage; layer {model.first_trained} is the first that is trained"
        )
    if not any(dist.get_rank() in pipeline for pipeline in pipelines):
        raise ConfigError(
            f"rank {dist.get_rank()} is in none of the pipelines {[list(own) for own in pipelines]}"
        )


def _check_recompute(recompute: NDArray[np.bool_] | Sequence[bool], num_layers: int) -> None:
    if len(recompute) != num_layers:
        raise ConfigError(f"recompute names {len(recompute)} layers; the model has {num_layers}")
