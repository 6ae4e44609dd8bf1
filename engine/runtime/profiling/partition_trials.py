"""Trials of the best-ranked partitions: BMP (OmniBal 4.2 and 5.2).

For every candidate a `Pipeline` is made from the same model, runs one step to warm up and three
that count, and is discarded with its gradients. All ranks search (`search_bmp`) by the first rank's
costs and the slowest rank's times, and so try and choose the same.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from isobatch.common.errors import IsobatchError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import NS_PER_MS, Costs
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.planning.bmp import MOST_RUN, RADIUS, BmpResult, search_bmp
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.runtime.communication.collectives import broadcast, gather_objects
from isobatch.engine.runtime.errors import PeerLost
from isobatch.engine.runtime.layer_rng import preserve_rng
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.stage_io import Batch, LayerStack, set_values
from isobatch.engine.simulator.evaluate import evaluate

NUM_STEPS = 3
"""Steps of a trial that count (OmniBal 5.2); one more runs before them."""
Recompute = Callable[[IntArray], NDArray[np.bool_]]
"""borders -> which layers are recomputed; may raise InfeasiblePlan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    """The step that all ranks run: this rank's part."""

    batches: Sequence[Batch]
    """Micro-batches of this rank's replica."""
    normalizer: float
    """Divisor of the step's losses."""
    pipelines: Sequence[Sequence[int]]
    """The world's ranks of each replica, first stage first."""
    options: PipelineOptions = field(default_factory=PipelineOptions)
    recompute: Recompute | None = None
    """Choice of recomputed layers, the same on all ranks; None: nothing is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTrial:
    """A partition that was run."""

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
    """Trials in the order of `bmp.candidates`."""


def measure_partitions(
    model: LayerStack,
    costs: Costs,
    step: TrialStep,
    *,
    num_steps: int = NUM_STEPS,
    radius: int = RADIUS,
    most_run: int = MOST_RUN,
) -> MeasuredPartitions:
    """The fastest of the best-ranked partitions, by running them; the same on all ranks.

    All ranks of the world call it, with all layers; these move to the device where they run and
    back. `costs`: of the first replica's micro-batches; those of rank 0 count. A partition that
    runs out of memory does not count; InfeasiblePlan if all do. ConfigError as `Pipeline`.
    """
    trials = _Trials(model, broadcast(costs), step, num_steps)
    num_stages = len(step.pipelines[0]) * step.options.stages_per_rank
    bmp = search_bmp(trials.costs, num_stages, trials.try_out, radius=radius, most_run=most_run)
    return MeasuredPartitions(bmp=bmp, trials=tuple(trials.done))


class _Trials:
    """Trials in progress; all ranks make the same calls."""

    def __init__(self, model: LayerStack, costs: Costs, step: TrialStep, num_steps: int) -> None:
        self.model, self.costs, self.step, self.num_steps = model, costs, step, num_steps
        self.done: list[PartitionTrial] = []

    def try_out(self, borders: IntArray) -> int:
        """The median time of a partition's steps; InfeasiblePlan if it does not fit into memory."""
        step = self.step
        recompute = np.zeros(self.costs.num_layers, np.bool_)
        predicted = None
        times = tuple[int, ...]()
        failure = None
        try:
            if step.recompute is not None:
                recompute = np.asarray(step.recompute(borders))
            num_ranks, count = len(step.pipelines[0]), self.costs.num_micro_batches
            schedule = step.options.make_schedule(num_ranks, count)
            predicted = evaluate(self.costs, borders, recompute, schedule).step_ns
            times = self.run(borders, recompute)
        except (OutOfMemory, InfeasiblePlan) as error:
            failure = error
        self.done.append(
            PartitionTrial(
                recompute=tuple(np.flatnonzero(recompute).tolist()),
                predicted_ns=predicted,
                steps_ns=times,
                failure=None if failure is None else str(failure),
            )
        )
        if failure is not None:
            raise InfeasiblePlan(f"partition {borders.tolist()}: {failure}") from failure
        return round(float(np.median(times)))

    def run(self, borders: IntArray, recompute: NDArray[np.bool_]) -> tuple[int, ...]:
        """Times of the steps that count, on the slowest rank of the world."""
        device = torch.device(self.step.options.device)
        with temporary_pipelines(self.model), preserve_rng(device):
            pipeline = self.make(borders, recompute)
            times = [self.step_ns(pipeline) for _ in range(1 + self.num_steps)]
        return tuple(times[1:])

    def make(self, borders: IntArray, recompute: NDArray[np.bool_]) -> Pipeline:
        """A pipeline with this partition; OutOfMemory on all ranks if it does not fit on one."""
        pipelines, pipeline, lacking = self.step.pipelines, None, -1
        try:
            pipeline = Pipeline(self.model, borders, recompute, pipelines, self.step.options)
        except torch.OutOfMemoryError:
            me = dist.get_rank()
            lacking = next(list(ranks).index(me) for ranks in pipelines if me in ranks)
        lacking = max(gather_objects(lacking))
        if pipeline is None or lacking >= 0:
            raise OutOfMemory([lacking])
        return pipeline

    def step_ns(self, pipeline: Pipeline) -> int:
        """Time from when all ranks are ready to the end of the last pass."""
        gather_objects(None)  # waits for all ranks
        result = pipeline.step(self.step.batches, self.step.normalizer)
        pipeline.drop_gradients()
        return max(gather_objects(int(result.end_ns.max(initial=0))))


@contextmanager
def temporary_pipelines(model: LayerStack) -> Iterator[None]:
    """Afterwards layers are on their devices again, without gradients or new process groups.

    Nothing is restored if a rank is lost, which ends the run.
    """
    devices = [
        next((tensor.device for tensor in chain(layer.parameters(), layer.buffers())), None)
        for layer in model.layers
    ]
    groups = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    except PeerLost:
        raise
    except IsobatchError:
        _restore(model, devices, groups)
        raise
    _restore(model, devices, groups)


def _restore(
    model: LayerStack, devices: list[torch.device | None], groups: set[dist.ProcessGroup]
) -> None:
    # in the order in which all ranks made them: NCCL's ranks wait for each other here
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in groups]:
        dist.destroy_process_group(group)
    for layer, device in zip(model.layers, devices, strict=True):
        layer.zero_grad(set_to_none=True)
        if device == torch.device("meta"):  # loaded for the trial; `to` would break ties
            for weight in layer.parameters():
                set_values(weight, weight.detach().to(device))
        elif device is not None:
            layer.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def evidence(measured: MeasuredPartitions) -> dict[str, Any]:
    """What was tried and chosen, ready for JSON; times in ms."""
    bmp = measured.bmp
    rows = zip(bmp.candidates, measured.trials, strict=True)
    on_gpu = torch.cuda.is_available()
    return {
        "chosen": bmp.best.borders.tolist(),
        "chosen_step_ms": _ms(bmp.best.step_ns),
        "anchor": bmp.anchor.tolist(),
        "candidates": [
            {
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
            for candidate, trial in rows
        ],
        "host": platform.node(),
        "processor": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS
