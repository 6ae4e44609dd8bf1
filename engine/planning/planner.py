"""From a request to a plan: which partition, which layers recompute, and what steps take with and
without it. Pure.

For `python -m engine plan`. The partition is searched for one step, the median of those planned,
with the memory that the largest micro-batches need; what is printed is simulated for all steps.
Nothing here reads files: `PlanRequest` comes with its loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.presets import ModelPreset
from balance.types import IntArray
from engine.cost_model.analytical import layer_costs
from engine.cost_model.clusters import Cluster
from engine.cost_model.costs import Costs
from engine.cost_model.gradient_reduction import reduction_ns
from engine.cost_model.layer_list import layers_of
from engine.cost_model.loads import Loads
from engine.cost_model.parallel import Parallelism, Training
from engine.planning.bmp import search_bmp
from engine.planning.partition import by_params
from engine.planning.plan import Plan, Prediction
from engine.planning.recompute import choose_recompute, fitted_step
from engine.planning.search.branch_and_bound import search_exact
from engine.simulator.evaluate import SimulatedStep, evaluate, schedule_for
from engine.simulator.schedule import Schedule

MUCH = 1e30
"""Bytes per second of a link that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is wanted for."""

    model: ModelPreset
    cluster: Cluster
    parallel: Parallelism
    training: Training
    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    memory_bytes: int
    loads: Loads
    """(steps * dp * micro_batches,): step by step, in it rank by rank."""
    full: Loads
    """One micro-batch, as large as they come."""

    def __post_init__(self) -> None:
        parts = {layer.part for layer in layers_of(self.model, self.parallel)}
        if not any(map(self.training.trains, parts)):
            raise ConfigError("everything is frozen: there is nothing to train")
        if self.loads.audio.tokens.any() and self.model.audio_encoder is None:
            raise ConfigError(
                f"model preset {self.model.name} has no [audio_encoder] table, so what its audio costs is not known: "
                "add the encoder's dimensions"
            )
        node, tp = self.cluster.gpus_per_node, self.parallel.tp
        if node % tp and tp % node:
            raise ConfigError(
                f"tp is {tp}, but a node of {self.cluster.name} has {node} GPUs: give a divisor or a multiple of {node}"
            )

    def costs(self, loads: Loads) -> Costs:
        """What the layers cost for some micro-batches."""
        return layer_costs(self.model, self.cluster, self.parallel, loads, self.training)

    def pipelines(self, loads: Loads) -> list[Costs]:
        """Costs by step and, in it, data-parallel rank."""
        every, count = self.costs(loads), self.num_micro_batches
        return [
            every.take(np.arange(first, first + count)) for first in range(0, len(loads), count)
        ]

    def make_schedule(self, num_stages: int) -> Schedule:
        """The schedule of so many stages."""
        return schedule_for(
            self.schedule, np.arange(num_stages + 1), self.num_micro_batches, self.stages_per_rank
        )

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.parallel.pp * self.stages_per_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """Steps of one choice of data, partition and recomputation, simulated."""

    name: str
    borders: IntArray
    recompute: NDArray[np.bool_]
    steps: tuple[SimulatedStep, ...]
    """By step and, in it, data-parallel rank."""
    costs: tuple[Costs, ...]
    """The same."""
    dp: int
    num_samples: int
    """Of all steps and ranks."""

    @property
    def step_ns(self) -> int:
        """Mean over steps of the slowest rank's time."""
        times = np.array([step.step_ns for step in self.steps]).reshape(-1, self.dp)
        return round(float(times.max(axis=1).mean()))

    @property
    def sample_ns(self) -> float:
        """Time of a step by its samples: what choices of different data compare by."""
        return self.step_ns * (len(self.steps) // self.dp) / max(1, self.num_samples)

    @property
    def peak_bytes(self) -> IntArray:
        """Per pipeline rank, the most of any step."""
        return np.asarray(np.max([step.memory.peak_bytes for step in self.steps], axis=0))

    @property
    def median(self) -> int:
        """The pipeline whose time is in the middle: the one to look at."""
        return int(
            np.argsort([step.step_ns for step in self.steps], kind="stable")[len(self.steps) // 2]
        )

    def recompute_ns(self, place: int) -> IntArray:
        """(stages, micro_batches): recomputation inside backward passes of a pipeline."""
        again = np.where(self.recompute[:, np.newaxis], self.costs[place].recompute_ns, 0)
        return np.asarray(np.add.reduceat(again, self.borders[:-1], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanResult:
    """A plan, and what it is better than."""

    plan: Plan
    runs: tuple[SimulatedRun, ...]
    """From what trainers do today to the plan, one change at a time; the plan is the last one."""
    gap: float | None
    """How much faster another partition could be for the step that was searched, as a share; None
    if not known.
    """

    @property
    def best(self) -> SimulatedRun:
        """The plan's steps."""
        return self.runs[-1]


def make_plan(
    request: PlanRequest, *, search: str = "exact", random: Loads | None = None
) -> PlanResult:
    """Plan, and simulate beside it what trainers do: `random` micro-batches, parameters split
    evenly, all recomputed.

    InfeasiblePlan if nothing fits into memory.
    """
    pipelines = request.pipelines(request.loads)
    typical = _median(pipelines)
    full = request.costs(request.full.take(np.zeros(request.num_micro_batches, np.int64)))
    # times of a typical step, memory of the largest
    sized = replace(
        typical,
        **{name: getattr(full, name) for name in ("saved_bytes", "kept_bytes", "working_bytes")},
    )
    borders, recompute, gap = _search(sized, request, search)
    everything, even = np.ones(len(recompute), np.bool_), by_params(typical, request.num_stages)
    runs = []
    first = "parameters split evenly, all recomputed"
    if random is not None:
        name = f"random samples, {int(random.llm.items.max())} at a time, padded; {first}"
        runs.append(
            simulate_run(request, name, request.pipelines(random), random, even, everything)
        )
        first = "+ packed micro-batches"
    runs.append(simulate_run(request, first, pipelines, request.loads, even, everything))
    runs.append(
        simulate_run(request, "+ searched partition", pipelines, request.loads, borders, everything)
    )
    runs.append(
        simulate_run(
            request,
            "+ recomputed as little as fits: the plan",
            pipelines,
            request.loads,
            borders,
            recompute,
        )
    )
    schedule = request.make_schedule(request.num_stages)
    full_peak = evaluate(full, borders, recompute, schedule).memory.peak_bytes
    plan = Plan(
        model=request.model,
        cluster=request.cluster,
        parallel=request.parallel,
        training=request.training,
        schedule=request.schedule,
        stages_per_rank=request.stages_per_rank,
        num_micro_batches=request.num_micro_batches,
        memory_bytes=request.memory_bytes,
        full=request.full,
        loads=request.loads,
        layer_names=typical.names,
        borders=tuple(borders.tolist()),
        recompute=tuple(np.flatnonzero(recompute).tolist()),
        predicted=predict(request, runs[-1], full_peak),
    )
    return PlanResult(plan=plan, runs=tuple(runs), gap=gap)


def simulate_run(
    request: PlanRequest,
    name: str,
    pipelines: list[Costs],
    loads: Loads,
    borders: IntArray,
    recompute: NDArray[np.bool_],
) -> SimulatedRun:
    """Simulate all steps of one choice."""
    schedule = request.make_schedule(len(borders) - 1)
    return SimulatedRun(
        name=name,
        borders=np.asarray(borders),
        recompute=np.asarray(recompute),
        steps=tuple(evaluate(costs, borders, recompute, schedule) for costs in pipelines),
        costs=tuple(pipelines),
        dp=request.parallel.dp,
        num_samples=int(loads.llm.items.sum()),
    )


def predict(request: PlanRequest, found: SimulatedRun, full_peak_bytes: IntArray) -> Prediction:
    """What a plan says of its steps."""
    stages = [step.stages for step in found.steps]
    again = [found.recompute_ns(place) for place in range(len(stages))]
    return Prediction(
        step_ns=found.step_ns,
        reduction_ns=_reduction_ns(request, found.borders),
        bubble_ratio=tuple(
            np.mean([step.timeline.bubble_ratio for step in found.steps], axis=0).tolist()
        ),
        forward_ns=_mean([each.forward_ns for each in stages]),
        backward_ns=_mean([each.backward_ns for each in stages]),
        recompute_ns=_mean(again),
        state_bytes=tuple(found.steps[0].memory.state_bytes.tolist()),
        peak_bytes=tuple(found.peak_bytes.tolist()),
        full_peak_bytes=tuple(full_peak_bytes.tolist()),
    )


def tensor_parallel_ns(request: PlanRequest, found: SimulatedRun) -> IntArray:
    """(ranks,): what a step's tensor-parallel communication takes on each pipeline rank, in all
    passes, as a mean.
    """
    cluster = request.cluster
    free = replace(
        cluster,
        nvlink_bytes_per_s=MUCH,
        nvlink_latency_us=1e-9,
        network_bytes_per_s=MUCH,
        network_latency_us=1e-9,
    )
    without = replace(request, cluster=free).costs(request.loads)
    every = request.costs(request.loads)
    chosen = found.recompute[:, np.newaxis]
    spent = sum(
        getattr(every, name) - getattr(without, name)
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    ) + np.where(chosen, every.recompute_ns - without.recompute_ns, 0)
    stages = np.add.reduceat(spent.sum(axis=1), found.borders[:-1])
    ranks = np.zeros(request.parallel.pp, np.int64)
    np.add.at(ranks, np.arange(len(stages)) % len(ranks), stages)
    return np.asarray(ranks // len(found.steps))


def _search(
    costs: Costs, request: PlanRequest, search: str
) -> tuple[IntArray, NDArray[np.bool_], float | None]:
    """(borders, recompute, gap)."""
    schedule, memory = request.make_schedule(request.num_stages), request.memory_bytes
    if search == "exact":
        found = search_exact(costs, schedule, memory)
        return found.borders, found.recompute, found.gap
    step_ns: Callable[[IntArray], int] = fitted_step(costs, schedule, memory)
    borders = search_bmp(costs, request.num_stages, step_ns).best.borders
    return borders, choose_recompute(costs, borders, schedule, memory), None


def _median(pipelines: list[Costs]) -> Costs:
    work = [int(costs.forward_ns.sum()) for costs in pipelines]
    return pipelines[int(np.argsort(work, kind="stable")[len(work) // 2])]


def _mean(tables: list[IntArray]) -> tuple[int, ...]:
    """Of (stages, micro_batches) tables, per stage."""
    return tuple(np.rint(np.mean(tables, axis=(0, 2))).astype(int).tolist())


def _reduction_ns(request: PlanRequest, borders: IntArray) -> int:
    trains = request.training.trains
    layers = layers_of(request.model, request.parallel)
    params = np.array([layer.gpu_params if trains(layer.part) else 0 for layer in layers])
    stages = np.add.reduceat(params, borders[:-1])
    ranks = np.zeros(request.parallel.pp, np.int64)
    np.add.at(ranks, np.arange(len(stages)) % len(ranks), stages)
    return int(reduction_ns(ranks, request.cluster, request.parallel, request.training).max())
