"""The planner: a request to a plan, next to what trainers do. Pure.

The partition is searched for one step, the median of those planned, with the memory that the
largest micro-batches need; all steps of the answer are simulated.

Which schedule is fastest depends on memory. Several stages per rank wait less and hold more, and
deferred weight gradients hold most where layers are wide: what waiting saves may be lost to
recomputation. So each schedule is planned with the partition and the recomputation that suit it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import MEMORY, Costs
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import reduction_ns
from isobatch.engine.cost_model.profile_table import Profile, measured_costs, profiled_costs
from isobatch.engine.planning.partition import by_layers, by_params
from isobatch.engine.planning.plan import Plan, PlanRequest, Prediction
from isobatch.engine.planning.rank_memory import peak_bytes, rank_order
from isobatch.engine.planning.recompute import InfeasiblePlan, RecomputeChooser
from isobatch.engine.planning.search.limits import UNLIMITED, SearchLimits
from isobatch.engine.planning.search.partition_search import SearchResult, search_partition
from isobatch.engine.simulator.evaluate import SimulatedStep, evaluate
from isobatch.engine.simulator.schedule import INTERLEAVED, SCHEDULES, most_deferred

FREE_LINK: dict[str, Any] = {
    "nvlink_bytes_per_s": 1e30,
    "nvlink_latency_us": 1e-9,
    "network_bytes_per_s": 1e30,
    "network_latency_us": 1e-9,
}
"""A cluster's links if communication cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """Simulated steps of one choice of data, partition and recomputation."""

    name: str
    borders: IntArray
    recompute: BoolArray
    steps: tuple[SimulatedStep, ...]
    """Steps in order; in each, its data-parallel ranks."""
    costs: tuple[Costs, ...]
    """Costs in the same order."""
    dp: int
    num_samples: int
    """Samples of all steps and ranks."""

    @property
    def step_ns(self) -> int:
        """Time of the slowest rank, as a mean over steps."""
        times = np.array([step.step_ns for step in self.steps]).reshape(-1, self.dp)
        return round(float(times.max(axis=1).mean()))

    @property
    def sample_ns(self) -> float:
        """Time per sample, which compares choices of different data."""
        return self.step_ns * (len(self.steps) // self.dp) / max(1, self.num_samples)

    @property
    def peak_bytes(self) -> IntArray:
        """Peak of each pipeline rank over all steps."""
        return np.asarray(np.max([step.memory.peak_bytes for step in self.steps], axis=0))

    @property
    def median(self) -> int:
        """Number of the pipeline whose time is the median."""
        order = np.argsort([step.step_ns for step in self.steps], kind="stable")
        return int(order[len(self.steps) // 2])

    def recompute_ns(self, number: int) -> IntArray:
        """Recomputation inside a pipeline's backward passes, (stages, micro_batches)."""
        again = np.where(self.recompute[:, np.newaxis], self.costs[number].recompute_ns, 0)
        return np.asarray(np.add.reduceat(again, self.borders[:-1], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanResult:
    """A plan, and the runs that it is compared with."""

    plan: Plan
    runs: tuple[SimulatedRun, ...]
    """Runs from what trainers do today to the plan, the last one; `careful` is before it."""
    free: SimulatedRun | None = None
    """What the plan would be if no trainer restricted it; None if none does."""

    @property
    def best(self) -> SimulatedRun:
        """The plan's steps."""
        return self.runs[-1]

    @property
    def careful(self) -> SimulatedRun:
        """What a careful user does: even layers, and as little recomputed as fits."""
        return self.runs[-2]


def plan(
    request: PlanRequest,
    *,
    random: Loads | None = None,
    limits: SearchLimits = UNLIMITED,
) -> PlanResult:
    """Plan, and simulate the plan next to what trainers do, also with `random` micro-batches.

    `limits`: of the search. InfeasiblePlan if nothing fits into memory.
    """
    pipelines = request.split(request.costs(request.loads))
    full = request.costs(request.full_step)
    typical = typical_costs(pipelines, full)
    runs = _baselines(request, pipelines, typical, random)
    chosen, borders, recompute, bound_ns = _search(typical, request, limits)
    name = "the plan: searched partition, as little recomputed as fits"
    best = simulate_run(chosen, name, pipelines, request.loads, borders, recompute)
    # the search is for one step: over all of them, the simpler partition may be faster
    careful = runs[-1]
    at_full = evaluate(typical, careful.borders, careful.recompute, request.make_schedule())
    if careful.step_ns < best.step_ns and at_full.fits(request.memory_bytes):
        best = replace(careful, name="the plan: even layers, as little recomputed as fits")
        chosen = request
    step_ns = evaluate(typical, best.borders, best.recompute, chosen.make_schedule()).step_ns
    gap = None if bound_ns is None else (step_ns - bound_ns) / max(step_ns, 1)
    return PlanResult(plan=replace(make_plan(chosen, best, full), gap=gap), runs=(*runs, best))


def typical_costs(pipelines: list[Costs], full: Costs) -> Costs:
    """The step that is searched: times of the median forward time, memory of the largest."""
    work = [int(costs.forward_ns.sum()) for costs in pipelines]
    median = int(np.argsort(work, kind="stable")[len(work) // 2])
    return _with_memory(pipelines[median], full)


def _baselines(
    request: PlanRequest, pipelines: list[Costs], typical: Costs, random: Loads | None
) -> list[SimulatedRun]:
    """The papers' baseline, then a careful user's, also with packed micro-batches."""
    num_stages = request.parallel.pp * request.stages_per_rank
    by_size, by_count = by_params(typical, num_stages), by_layers(typical, num_stages)
    everything = np.ones(typical.num_layers, np.bool_)
    papers, careful = "even parameters, all recomputed", "even layers, as little recomputed as fits"
    recompute = _fitted_recompute(request, typical, by_count)
    packed = request, careful, pipelines, request.loads, by_count, recompute
    if random is None:
        first = request, papers, pipelines, request.loads, by_size, everything
        return [simulate_run(*first), simulate_run(*packed)]
    every = request.costs(random)
    drawn = request.split(every)
    name = f"random samples, {int(random.llm.items.max())} at a time, padded"
    # memory for the largest of them
    largest = _with_memory(drawn[0], every)
    recompute = _fitted_recompute(request, largest, by_count)
    return [
        simulate_run(request, f"{name}; {papers}", drawn, random, by_size, everything),
        simulate_run(request, f"the same; {careful}", drawn, random, by_count, recompute),
        simulate_run(request, f"packed micro-batches; {careful}", *packed[2:]),
    ]


def _with_memory(costs: Costs, full: Costs) -> Costs:
    """These times, with the bytes of each layer's largest micro-batch in `full`."""
    shape = costs.saved_bytes.shape
    largest = (getattr(full, name).max(axis=1, keepdims=True) for name in MEMORY)
    changes: dict[str, Any] = {
        name: np.broadcast_to(column, shape) for name, column in zip(MEMORY, largest, strict=True)
    }
    return replace(costs, **changes)


def _fitted_recompute(request: PlanRequest, costs: Costs, borders: IntArray) -> BoolArray:
    """As little recomputed as fits; everything if nothing does."""
    chooser = RecomputeChooser(costs, request.make_schedule(), request.memory_bytes)
    recompute = chooser.choose(borders)
    return np.ones(costs.num_layers, np.bool_) if recompute is None else recompute


def simulate_run(
    request: PlanRequest,
    name: str,
    pipelines: list[Costs],
    loads: Loads,
    borders: IntArray,
    recompute: BoolArray,
) -> SimulatedRun:
    """Simulate all steps of one choice."""
    schedule = request.make_schedule()
    return SimulatedRun(
        name=name,
        borders=np.asarray(borders),
        recompute=np.asarray(recompute),
        steps=tuple(evaluate(costs, borders, recompute, schedule) for costs in pipelines),
        costs=tuple(pipelines),
        dp=request.parallel.dp,
        num_samples=int(loads.llm.items.sum()),
    )


def make_plan(request: PlanRequest, run: SimulatedRun, full: Costs) -> Plan:
    """The plan of a run's partition; `full`: costs of a step of the largest micro-batches."""
    at_full = evaluate(full, run.borders, run.recompute, request.make_schedule())
    stages = [step.stages for step in run.steps]
    layers = layers_of(request.model, request.parallel)
    trains = request.training.trains
    params = np.array([layer.gpu_params if trains(layer.part) else 0 for layer in layers])
    params = _by_rank(params, run.borders, request)
    reduction = reduction_ns(params, request.cluster, request.parallel, request.training)
    bubbles = np.mean([step.timeline.bubble_ratio for step in run.steps], axis=0)
    predicted = Prediction(
        step_ns=run.step_ns,
        reduction_ns=int(reduction.max()),
        bubble_ratio=tuple(bubbles.tolist()),
        forward_ns=_stage_means([costs.forward_ns for costs in stages]),
        backward_ns=_stage_means([costs.backward_ns for costs in stages]),
        recompute_ns=_stage_means([run.recompute_ns(number) for number in range(len(stages))]),
        state_bytes=tuple(run.steps[0].memory.state_bytes.tolist()),
        peak_bytes=tuple(run.peak_bytes.tolist()),
        full_peak_bytes=tuple(at_full.memory.peak_bytes.tolist()),
    )
    return Plan(
        **{f.name: getattr(request, f.name) for f in fields(PlanRequest)},
        layer_names=full.names,
        borders=tuple(run.borders.tolist()),
        recompute=tuple(np.flatnonzero(run.recompute).tolist()),
        predicted=predicted,
    )


def plan_from_profile(
    request: PlanRequest,
    profile: Profile,
    borders: IntArray,
    recompute: BoolArray,
    indices: IntArray | None = None,
) -> Plan:
    """The plan with this partition and these recomputed layers; times and bytes from a profile.

    `indices`: the request's micro-batches among the measured ones, if they are; then nothing is
    fitted. The request's cluster gives the reduction of gradients over replicas alone. ConfigError
    if the profile has other layers than the request's model, or as `profiled_costs`.
    """
    layers = layers_of(request.model, request.parallel)
    if len(layers) != len(profile.names):
        raise ConfigError(
            f"the profile has {len(profile.names)} layers, the model {request.model.name} "
            f"{len(layers)}: give the preset of the model that was measured"
        )
    if indices is None:
        costs = profiled_costs(profile, request.loads)
    else:
        costs = measured_costs(profile, indices)
    pipelines = request.split(_shared_out(costs, request))
    run = simulate_run(request, "measured", pipelines, request.loads, borders, recompute)
    return make_plan(request, run, _shared_out(profiled_costs(profile, request.full_step), request))


def _shared_out(costs: Costs, request: PlanRequest) -> Costs:
    """A profile's costs, which are those of a single replica, with the state of one of many."""
    mode, dp = request.training.mode, request.parallel.dp
    return replace(costs, state_bytes=mode.shared_out(costs.state_bytes, costs.param_counts, dp))


def tensor_parallel_ns(request: PlanRequest, run: SimulatedRun) -> IntArray:
    """Mean time of tensor-parallel communication in a step's passes, per pipeline rank."""
    every = request.costs(request.loads)
    cluster = replace(request.cluster, **FREE_LINK)
    without = request.changed(cluster=cluster).costs(request.loads)
    spent = sum(
        getattr(every, name) - getattr(without, name)
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    ) + np.where(run.recompute[:, np.newaxis], every.recompute_ns - without.recompute_ns, 0)
    return _by_rank(spent.sum(axis=1), run.borders, request) // len(run.steps)


def _search(
    costs: Costs, request: PlanRequest, limits: SearchLimits
) -> tuple[PlanRequest, IntArray, BoolArray, int | None]:
    """-> (request, borders, recompute, lower bound of a step's time if it is known).

    The request says how many weight gradients each rank may hold back. Those and activations share
    the memory. So tried are as many as the schedule does; and one or none, then as many as fit. The
    bound is of plans that hold back as many as those that were searched: none for another number,
    or where one of them does not fit.
    """
    requests = [request]
    if any(most_deferred(request.schedule, request.parallel.pp)):
        requests += [request.changed(deferred=(few,) * request.parallel.pp) for few in (1, 0)]
    results: list[tuple[int, PlanRequest, SearchResult]] = []
    problem = InfeasiblePlan("there is nothing to search")
    for place, variant in enumerate(requests):
        part = limits.part(1 / (len(requests) - place))
        try:
            result = search_partition(costs, variant.make_schedule(), request.memory_bytes, part)
        except InfeasiblePlan as error:
            problem = error
            continue
        results.append((result.step_ns, variant, result))
        if variant.deferred is not None:
            filled = deferring_more(variant, costs, result.borders, result.recompute)
            step = evaluate(costs, result.borders, result.recompute, filled.make_schedule())
            results.append((step.step_ns, filled, result))
    if not results:
        raise problem
    _, chosen, best = min(results, key=lambda one: one[0])
    searched = [variant.deferred for _, variant, result in results if variant in requests]
    bound_ns = None
    if len(searched) == len(requests) and chosen.deferred in searched:
        bound_ns = min(result.lower_bound_ns for _, _, result in results)
    return chosen, best.borders, best.recompute, bound_ns


def deferring_more(
    request: PlanRequest, costs: Costs, borders: IntArray, recompute: BoolArray
) -> PlanRequest:
    """The request with as many weight gradients held back on each rank as fit into memory."""
    chooser = RecomputeChooser(costs, request.make_schedule(), request.memory_bytes)
    most = most_deferred(request.schedule, request.parallel.pp)
    deferred = list(request.deferred or most)
    for count in range(1, max(most) + 1):
        # on each rank one more than before, or as many as fit
        limits = tuple(min(count, limit) for limit in most)
        schedule = request.changed(deferred=limits).make_schedule()
        for rank, limit in enumerate(limits):
            stages = map(np.ascontiguousarray, chooser.stages_of(borders, rank))
            peak = peak_bytes(chooser.layers, rank_order(schedule, rank), *stages, recompute)
            if peak <= request.memory_bytes and deferred[rank] == limit - 1:
                deferred[rank] = limit
    return request.changed(deferred=tuple(deferred))


def _stage_means(tables: list[IntArray]) -> tuple[int, ...]:
    """Mean of (stages, micro_batches) tables per stage."""
    return tuple(np.rint(np.mean(tables, axis=(0, 2))).astype(int).tolist())


def _by_rank(values: IntArray, borders: IntArray, request: PlanRequest) -> IntArray:
    """Values of layers, (layers,), summed over the stages of each pipeline rank."""
    return request.make_schedule().sum_by_rank(np.add.reduceat(values, borders[:-1]))


MOST_STAGES_PER_RANK = 4
"""Limit of interleaved schedules. One more halves the rest of the bubble, and sends as often."""


@dataclass(frozen=True, slots=True)
class ScheduleTrial:
    """One schedule, and the plan for it."""

    schedule: str
    stages_per_rank: int
    result: PlanResult | None
    """The plan; None if nothing fits into memory."""


def candidates(request: PlanRequest) -> list[tuple[str, int]]:
    """Schedules and stages per rank that a request's model and ranks allow, 1F1B first.

    GPipe is left out: it waits as 1F1B does and holds more.
    """
    ranks = request.parallel.pp
    if ranks == 1:  # nothing waits
        return [("1f1b", 1)]
    max_stages = min(MOST_STAGES_PER_RANK, len(layers_of(request.model, request.parallel)) // ranks)
    schedules = []
    for name in SCHEDULES:
        counts = range(2, max_stages + 1) if name in INTERLEAVED else range(1, 2)
        schedules += [(name, count) for count in counts if name != "gpipe"]
    return schedules


def plan_best_schedule(
    request: PlanRequest,
    *,
    random: Loads | None = None,
    limits: SearchLimits = UNLIMITED,
) -> tuple[PlanResult, tuple[ScheduleTrial, ...]]:
    """The fastest of the plans for all `candidates`, and what each of them came to.

    Arguments as `planner.plan`; each search gets an equal part of the time that is left.
    InfeasiblePlan if nothing fits with any schedule.
    """
    asked = candidates(request)
    trials: list[ScheduleTrial] = []
    problem = InfeasiblePlan("there is no schedule to try")
    for place, (name, per_rank) in enumerate(asked):
        variant = request.changed(schedule=name, stages_per_rank=per_rank)
        part = limits.part(1 / (len(asked) - place))
        result = None
        try:
            result = plan(variant, random=random, limits=part)
        except InfeasiblePlan as error:
            problem = problem if place else error
        trials.append(ScheduleTrial(name, per_rank, result))
    results = [trial.result for trial in trials if trial.result is not None]
    if not results:
        raise problem
    return min(results, key=lambda result: result.best.step_ns), tuple(trials)
