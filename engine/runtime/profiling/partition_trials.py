"""Trials of the best-ranked partitions: BMP (OmniBal 4.2 and 5.2).

For every candidate a `Pipeline` is made from the same model, runs one step to warm up and three
that count, and is discarded. The first rank searches (`engine.planning.bmp.search_bmp`) and
broadcasts what to run, and finally the result: so all ranks choose the same. The optimizer is not
stepped, and gradients are dropped.
"""

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from balance.errors import ConfigError, IsobatchError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.planning.adaptive_recompute import OutOfMemory
from engine.planning.bmp import MOST_RUN, RADIUS, BmpResult, PartitionCandidate, search_bmp
from engine.planning.recompute import InfeasiblePlan
from engine.runtime.communication.collectives import world_errors
from engine.runtime.layer_rng import preserve_rng
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.profiling.temporary_pipeline import temporary_pipelines
from engine.runtime.stage_io import Batch, LayerStack
from engine.simulator.evaluate import evaluate, schedule_for

Recompute = Callable[[IntArray], NDArray[np.bool_]]
"""borders -> which layers are recomputed; may raise InfeasiblePlan."""

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of the trials."""

    steps: int = 3
    """Steps that count (OmniBal 5.2); one more runs before them."""
    radius: int = RADIUS
    most_run: int = MOST_RUN

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"trials of {self.steps} steps; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    """The step that all ranks run: this rank's part."""

    batches: Sequence[Batch]
    """Micro-batches of this rank's replica."""
    normalizer: int
    """Labels of the whole step."""
    pipelines: Sequence[Sequence[int]]
    """The world's ranks of each replica, first stage first."""
    options: PipelineOptions = field(default_factory=PipelineOptions)
    recompute: Recompute | None = None
    """None: nothing is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTrial:
    """A partition that was run."""

    borders: tuple[int, ...]
    recompute: tuple[int, ...]
    """Indices of the recomputed layers."""
    predicted_ns: int | None
    """Simulated step of the first replica; None if by the simulator it does not fit into memory."""
    steps_ns: tuple[int, ...]
    """Slowest rank's time of each step that counts; empty if it did not fit into memory."""
    failure: str | None = None
    """Why it did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPartitions:
    """Result of the search, and its trials."""

    bmp: BmpResult
    trials: tuple[PartitionTrial, ...]
    """In the order of `bmp.candidates`."""


def measure_partitions(
    model: LayerStack, costs: Costs, step: TrialStep, options: TrialOptions | None = None
) -> MeasuredPartitions:
    """The fastest of the best-ranked partitions, by running them; the same on all ranks.

    All ranks of the world call it. `model` is whole on every rank; its layers move to the device
    where they run and back. `costs`: of the first replica's micro-batches; candidates are ranked by
    those of rank 0. A partition that runs out of memory does not count; InfeasiblePlan if all do.
    ConfigError as `Pipeline`.
    """
    trials = _Trials(model, costs, step, options or TrialOptions())
    return trials.lead() if dist.get_rank() == 0 else trials.follow()


class _Trials:
    """Trials in progress on one rank."""

    def __init__(
        self, model: LayerStack, costs: Costs, step: TrialStep, options: TrialOptions
    ) -> None:
        self.model, self.costs, self.step, self.options = model, costs, step, options
        self.done: list[PartitionTrial] = []
        self.device = torch.device(step.options.device)

    def lead(self) -> MeasuredPartitions:
        """Search, and tell the others what to run."""
        pp = len(self.step.pipelines[0])
        try:
            found = search_bmp(
                self.costs,
                pp * self.step.options.stages_per_rank,
                self.announce,
                radius=self.options.radius,
                most_run=self.options.most_run,
            )
        except (ConfigError, InfeasiblePlan) as error:
            _broadcast(error)
            raise
        measured = MeasuredPartitions(bmp=found, trials=tuple(self.done))
        _broadcast(measured)
        return measured

    def follow(self) -> MeasuredPartitions:
        """Run what the first rank broadcasts."""
        while True:
            message = _broadcast(None)
            if isinstance(message, MeasuredPartitions):
                return message
            if isinstance(message, IsobatchError):
                raise message
            borders, recompute = message
            with suppress(ConfigError, OutOfMemory):  # raised on the first rank too, which decides
                self.run(borders, recompute)

    def announce(self, borders: IntArray) -> int:
        """Run a partition on all ranks; -> the median time of its steps."""
        recompute, predicted = np.zeros(self.costs.num_layers, np.bool_), None
        times, failure = tuple[int, ...](), None
        try:
            if self.step.recompute is not None:
                recompute = np.asarray(self.step.recompute(borders))
            predicted = self.predicted_ns(borders, recompute)
            _broadcast((borders, recompute))
            times = self.run(borders, recompute)
        except (OutOfMemory, InfeasiblePlan) as error:
            failure = error
        self.done.append(
            PartitionTrial(
                borders=tuple(borders.tolist()),
                recompute=tuple(np.flatnonzero(recompute).tolist()),
                predicted_ns=predicted,
                steps_ns=times,
                failure=None if failure is None else str(failure),
            )
        )
        if failure is not None:
            raise InfeasiblePlan(f"partition {borders.tolist()}: {failure}") from failure
        return round(float(np.median(times)))

    def predicted_ns(self, borders: IntArray, recompute: NDArray[np.bool_]) -> int:
        """Simulated time of a step."""
        options = self.step.options
        schedule = schedule_for(
            options.schedule, borders, self.costs.num_micro_batches, options.stages_per_rank
        )
        return evaluate(self.costs, borders, recompute, schedule).step_ns

    def run(self, borders: IntArray, recompute: NDArray[np.bool_]) -> tuple[int, ...]:
        """Times of the steps that count, on the slowest rank of the world."""
        with temporary_pipelines(self.model), preserve_rng(self.device):
            pipeline = self.make(borders, recompute)
            times = [self.step_ns(pipeline) for _ in range(1 + self.options.steps)]
        return tuple(times[1:])

    def make(self, borders: IntArray, recompute: NDArray[np.bool_]) -> Pipeline:
        """A pipeline with this partition; OutOfMemory on all ranks if it does not fit on one."""
        made, lacking = None, 0
        try:
            made = Pipeline(self.model, borders, recompute, self.step.pipelines, self.step.options)
        except torch.OutOfMemoryError:
            own = next(ranks for ranks in self.step.pipelines if dist.get_rank() in ranks)
            lacking = 1 + list(own).index(dist.get_rank())
        lacking = _maximum(lacking, self.device)
        if made is None or lacking:
            raise OutOfMemory([lacking - 1])
        return made

    def step_ns(self, pipeline: Pipeline) -> int:
        """Time from when all ranks are ready to the end of the last pass."""
        _maximum(0, self.device)
        result = pipeline.step(self.step.batches, self.step.normalizer)
        for weight in pipeline.parameters():
            weight.grad = None
        return _maximum(int(result.end_ns.max(initial=0)), self.device)


def write_evidence(measured: MeasuredPartitions, path: Path) -> None:
    """Write what was tried and chosen as JSON."""
    path.write_text(json.dumps(evidence(measured), indent=1) + "\n", "utf-8")


def evidence(measured: MeasuredPartitions) -> dict[str, Any]:
    """What was tried and chosen, ready for JSON; times in ms."""
    bmp = measured.bmp
    rows = zip(bmp.candidates, measured.trials, strict=True)
    on_gpu = torch.cuda.is_available()
    return {
        "chosen": bmp.best.borders.tolist(),
        "chosen_step_ms": _ms(bmp.best.step_ns),
        "anchor": bmp.anchor.tolist(),
        "candidates": [_row(candidate, trial) for candidate, trial in rows],
        "host": platform.node(),
        "processor": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def _row(candidate: PartitionCandidate, trial: PartitionTrial) -> dict[str, Any]:
    return {
        "borders": candidate.borders.tolist(),
        "metric_ms": candidate.metric_ms,
        "variance_ms2": candidate.variance_ms2,
        "comm_bytes": candidate.comm_bytes,
        "recompute": list(trial.recompute),
        "predicted_ms": _ms(trial.predicted_ns),
        "steps_ms": [_ms(time) for time in trial.steps_ns],
        "median_ms": _ms(candidate.step_ns),
        "failure": trial.failure,
    }


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS


def _broadcast(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    box = [value]
    with world_errors():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _maximum(value: int, device: torch.device) -> int:
    """The maximum over all ranks; also a barrier."""
    most = torch.tensor(value, device=device)
    with world_errors():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
