"""A plan that a trainer can follow, next to the free one. Pure."""

from dataclasses import dataclass, replace

from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.planning.planner import (
    PlanResult,
    make_plan,
    simulate_run,
    typical_costs,
)
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.schedule_choice import candidates
from isobatch.engine.planning.search.limits import UNLIMITED, SearchLimits
from isobatch.engine.planning.trainers.expressible import TORCH_SCHEDULES, TRAINERS, Trainer
from isobatch.engine.planning.trainers.restricted_search import (
    LLM_LAYER,
    RecomputeRule,
    search_restricted,
)

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The fastest plan that a trainer can follow."""

    trainer: Trainer
    rule: RecomputeRule
    result: PlanResult
    """The plan, and `free`, the best without the trainer's restrictions."""


def plan_for(
    trainer: Trainer,
    request: PlanRequest,
    free: PlanResult,
    *,
    best_schedule: bool = False,
    limits: SearchLimits = UNLIMITED,
) -> TrainerPlan:
    """The fastest plan that a trainer can follow, with the request's schedule or with any.

    `free`: the plan without restrictions. ConfigError for a model or a schedule that the trainer
    lacks; InfeasiblePlan if nothing that it can express fits.
    """
    knows = TRAINERS[trainer]
    knows.modules_of(request.model)
    asked = [(request.schedule, request.stages_per_rank)]
    num_ranks, num_micro_batches = request.parallel.pp, request.num_micro_batches
    if best_schedule:
        is_whole = num_micro_batches % num_ranks == 0
        names = [name for name in TORCH_SCHEDULES if name == "1f1b" or is_whole]
        asked = [one for one in candidates(request) if one[0] in names]
    plans = []
    for place, (name, per_rank) in enumerate(asked):
        knows.check(name, num_ranks, num_micro_batches)
        variant = request.changed(schedule=name, stages_per_rank=per_rank)
        result = _plan(trainer, variant, free, limits.part(1 / (len(asked) - place)))
        plans += [result] if result is not None else []
    if not plans:
        peak = int(free.best.peak_bytes.max()) / GIB
        raise InfeasiblePlan(
            f"nothing that {knows.title} can express fits into {request.memory_bytes / GIB:.1f} GiB"
            f", where the free plan needs {peak:.1f}: the encoder lies in the first stage as a "
            "whole; use smaller micro-batches or more tensor-parallel ranks"
        )
    return min(plans, key=lambda one: one.result.best.step_ns)


def _plan(
    trainer: Trainer, request: PlanRequest, free: PlanResult, limits: SearchLimits
) -> TrainerPlan | None:
    """The plan with the request's schedule; None if none fits."""
    pipelines = request.split(request.costs(request.loads))
    full = request.costs(request.full_step)
    typical = typical_costs(pipelines, full)
    rules = TRAINERS[trainer].numbers(full.kinds.count(LLM_LAYER))
    schedule = request.make_schedule()
    best = search_restricted(typical, schedule, request.memory_bytes, rules, limits)
    if best is None:
        return None
    name = f"the plan: the fastest that {trainer} can express"
    run = simulate_run(request, name, pipelines, request.loads, best.borders, best.recompute)
    plan = make_plan(request, run, full)
    without = replace(free.best, name="without the trainer's restrictions")
    result = PlanResult(plan=plan, runs=(*free.runs[:-1], run), free=without)
    return TrainerPlan(trainer=trainer, rule=best.rule, result=result)
