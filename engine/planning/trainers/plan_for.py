"""The fastest plan that a trainer can follow, next to the free one. Pure.

Trainers run the encoder, its projector and the token embedding in the first stage, and recompute by
one rule in all stages. So these layers are folded into one row of costs, exactly, and for each rule
a local search from several anchors moves the borders of LLM layers. It tries every rule: a slower
one may leave memory for a faster partition. Nothing is proven; the tests compare it with brute
force (`local_search` says how near it comes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import ARRAYS, Costs
from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.planning.planner import (
    PlanResult,
    candidates,
    make_plan,
    simulate_run,
    typical_costs,
)
from isobatch.engine.planning.rank_memory import peak_bytes
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.search.limits import UNLIMITED, SearchLimits
from isobatch.engine.planning.search.local_search import (
    NEVER,
    PartitionEvaluator,
    improve_partition,
)
from isobatch.engine.planning.search.partition_search import anchors, improve_from
from isobatch.engine.planning.trainers.expressible import TORCH_SCHEDULES, TRAINERS, Trainer
from isobatch.engine.simulator.schedule import Schedule

ENCODER_LAYERS, LLM_LAYER = ("vision_layer", "audio_layer"), "llm_layer"
"""Kinds of layers that trainers can recompute."""
LAST_OF_ENCODER = "token_embedding"
"""Kind of the last layer that must lie in the first stage."""


@dataclass(frozen=True, slots=True)
class RecomputeRule:
    """What every stage recomputes."""

    encoder: bool
    """Whether all layers of the encoders are recomputed."""
    num_layers: int
    """LLM layers of each stage that are recomputed, the first ones; all if a stage has fewer."""

    def recomputed(self, kinds: tuple[str, ...], starts: IntArray, ends: IntArray) -> BoolArray:
        """Layers that stages with these starts and ends recompute, (layers,).

        >>> kinds = ("vision_layer", "token_embedding", "llm_layer", "llm_layer", "head")
        >>> rule = RecomputeRule(encoder=True, num_layers=1)
        >>> rule.recomputed(kinds, np.array([0, 3]), np.array([3, 5])).tolist()
        [True, False, True, True, False]
        """
        of_kind = np.array(kinds)
        chosen = np.isin(of_kind, ENCODER_LAYERS) & self.encoder
        for start, end in zip(starts, ends, strict=True):
            layers = start + np.flatnonzero(of_kind[start:end] == LLM_LAYER)
            chosen[layers[: self.num_layers]] = True
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class RestrictedPartition:
    """The fastest partition that was found, of all layers, and its rule."""

    rule: RecomputeRule
    borders: IntArray
    recompute: BoolArray
    step_ns: int


class _RuledEvaluator(PartitionEvaluator):
    """Step times of partitions with the recomputation that a rule gives them."""

    def __init__(
        self, costs: Costs, schedule: Schedule, memory_bytes: int, rule: RecomputeRule
    ) -> None:
        super().__init__(costs, schedule, memory_bytes)
        self.rule = rule

    def smallest(self, starts: IntArray, ends: IntArray) -> BoolArray:
        return self.rule.recomputed(self.costs.kinds, starts, ends)

    def choose_for_rank(self, rank: int, starts: IntArray, ends: IntArray) -> BoolArray | None:
        key = rank, *starts.tolist(), *ends.tolist()
        if key not in self._chosen:
            mask = self.smallest(starts, ends)
            peak = peak_bytes(self.layers, self.orders[rank], starts, ends, mask)
            self._chosen[key] = mask if peak <= self.memory_bytes else None
        return self._chosen[key]

    def fits_alone(self) -> bool:
        """Whether the first rank has room for the first row, with nothing else."""
        count = self.schedule.num_stages // self.schedule.num_ranks
        starts, ends = (np.arange(first, first + count) > 0 for first in (0, 1))
        stages = starts.astype(np.int64), ends.astype(np.int64)
        nothing = np.zeros(self.costs.num_layers, np.bool_)
        # where its stage will end, and so what it sends, is open
        layers = self.layers._replace(messages=np.zeros_like(self.layers.messages))
        peak = peak_bytes(layers, self.orders[0], *stages, nothing)
        return bool(peak <= self.memory_bytes)


def search_restricted(
    costs: Costs,
    schedule: Schedule,
    memory_bytes: int,
    rules: Mapping[bool, Sequence[int]],
    limits: SearchLimits = UNLIMITED,
) -> RestrictedPartition | None:
    """The fastest partition under any rule in which every rank fits; None if none fits.

    `rules`: for encoders that are recomputed or not, the numbers of LLM layers that may be,
    ascending. More recomputation never makes a partition faster: once memory does not bind, larger
    numbers are left out. ConfigError if there are more stages than rows.
    """
    best: RestrictedPartition | None = None
    last = costs.kinds.index(LAST_OF_ENCODER)
    of_encoder = np.isin(np.array(costs.kinds[: last + 1]), ENCODER_LAYERS)
    for encoder, numbers in rules.items():
        folded = fold_first(costs, of_encoder & encoder)
        starts = anchors(folded, schedule.num_stages)
        for number in numbers:
            if best is not None and limits.is_over():
                break
            rule = RecomputeRule(encoder, number)
            evaluator = _RuledEvaluator(folded, schedule, memory_bytes, rule)
            if not evaluator.fits_alone():
                break
            near, step_ns = improve_from(evaluator, starts, limits)
            if step_ns == NEVER:
                continue
            if best is None or step_ns < best.step_ns:
                borders = np.where(near > 0, near + last, 0)
                recompute = rule.recomputed(costs.kinds, borders[:-1], borders[1:])
                best = RestrictedPartition(
                    rule=rule, borders=borders, recompute=recompute, step_ns=step_ns
                )
            starts = [near]
            unbound = _RuledEvaluator(folded, schedule, NEVER, rule)
            if improve_partition(unbound.steps, near, chunk=unbound.chunk)[1] == step_ns:
                break
    return best


def fold_first(costs: Costs, recompute: BoolArray) -> Costs:
    """The costs with the first `len(recompute)` layers as one, of which these are recomputed.

    Times and peaks of passes that compute both gradients at once are the same to the bit. The row
    cannot be recomputed any more.
    """
    count = len(recompute)
    chosen = recompute[:, np.newaxis]
    saved = costs.saved_bytes[:count]
    live = np.where(chosen, costs.kept_bytes[:count], saved)
    turn = np.cumsum(live, axis=0) - live + np.maximum(saved, live) + costs.working_bytes[:count]
    again = np.where(chosen, costs.recompute_ns[:count], 0).sum(axis=0)
    # what is no sum over the layers
    held = live.sum(axis=0)
    row: dict[str, Any] = {name: getattr(costs, name)[:count].sum(axis=0) for name in ARRAYS}
    row |= {name: getattr(costs, name)[count - 1] for name in ("send_ns", "sent_bytes")}
    row |= {"sends_grad": costs.sends_grad[count - 1], "recompute_ns": np.zeros_like(held)}
    row |= {"input_grad_ns": row["input_grad_ns"] + again}
    working = turn.max(axis=0) - held
    row |= {"saved_bytes": held, "kept_bytes": held, "working_bytes": working}
    row |= {"input_working_bytes": working}
    arrays: dict[str, Any] = {
        name: np.concatenate([np.asarray(value)[np.newaxis], getattr(costs, name)[count:]])
        for name, value in row.items()
    }
    name = f"{costs.names[0]} to {costs.names[count - 1]}"
    return Costs(names=(name, *costs.names[count:]), kinds=(name, *costs.kinds[count:]), **arrays)


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
