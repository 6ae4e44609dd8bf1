"""The fastest plan over all schedules that a pipeline can run.

Which schedule is fastest depends on memory. Several stages per rank wait less and hold more, and
deferred weight gradients hold most where layers are wide: what waiting saves may be lost to
recomputation. So each schedule is planned with the partition and the recomputation that suit it.
"""

from dataclasses import dataclass

from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.planning.planner import PlanResult, plan
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.search.limits import UNLIMITED, SearchLimits
from isobatch.engine.simulator.schedule import SCHEDULES, takes_several_stages

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
        counts = range(2, max_stages + 1) if takes_several_stages(name) else range(1, 2)
        schedules += [(name, count) for count in counts if name != "gpipe"]
    return schedules


def plan_best_schedule(
    request: PlanRequest,
    *,
    search: str = "local",
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
            result = plan(variant, search=search, random=random, limits=part)
        except InfeasiblePlan as error:
            problem = problem if place else error
        trials.append(ScheduleTrial(name, per_rank, result))
    results = [trial.result for trial in trials if trial.result is not None]
    if not results:
        raise problem
    return min(results, key=lambda result: result.best.step_ns), tuple(trials)
