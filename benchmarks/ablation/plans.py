"""Ways to train, from the paper's baseline to everything: data, partition, schedule, order.

Two baselines. The papers': 4 random padded samples per micro-batch, even parameters, everything
recomputed. A careful user's: samples in random order packed to the token limit, the best of a few
micro-batch sizes, even layers, and the least recomputation with which an epoch's largest
micro-batches fit. Every other row is added to the one above; memory is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ablation.data import (
    Sizes,
    Steps,
    balanced_steps,
    every,
    loads_of,
    packed_steps,
    random_steps,
    true_tokens,
)
from ablation.variants import Variant
from isobatch.balance.steps.step_planner import StepRequest
from isobatch.common.types import Counts, Groups
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.planning.partition import by_layers, by_params
from isobatch.engine.planning.recompute import InfeasiblePlan, choose_recompute
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.tuning.step_planner import TunedSteps
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions

SIZES = (0.75, 1.0, 2.0)
"""Token limits that the careful user tries, relative to the usual one; steps stay as large."""
SCHEDULES = (
    ("1f1b", 1),
    ("zero_bubble", 1),
    *((name, count) for name in ("interleaved", "interleaved_zero_bubble") for count in (2, 3, 4)),
)
"""Schedules that the planner compares, with stages per rank."""
EPOCH = 1 << 30
"""Steps: all that the samples make."""
PAPERS, CAREFUL = "papers' baseline", "careful baseline"
MEMORY = ("saved_bytes", "kept_bytes", "working_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rows have in common."""

    counts: Counts
    sizes: Sizes
    stages: int
    """Ranks of a pipeline."""
    replicas: int = 1
    micro_batches: int = 8
    """Of a step and replica, at the usual token limit."""
    num_steps: int = EPOCH
    cost: Callable[[Loads], Costs]
    split_cost: Callable[[Loads], Costs]
    """Where weight gradients are passes of their own."""
    sample_loads: Callable[[Counts], Loads]
    """A column per sample."""

    def costs_of(self, groups: Groups, padded: bool, split: bool = False) -> Costs:
        """Of each layer for each micro-batch."""
        cost = self.split_cost if split else self.cost
        return cost(loads_of(groups, self.counts, self.sizes, padded=padded))

    def predicted_s(self, variant: Variant) -> float:
        """Simulated time of all steps; each takes as long as its slowest replica."""
        steps = variant.simulated(self.costs_of)
        return sum(max(one.step_ns for one in step) for step in steps) / 1e9

    def work_s(self, variant: Variant) -> tuple[float, float]:
        """Seconds of all ranks: (passes, recomputation)."""
        passes = recomputed = 0
        for own in every(variant.steps):
            costs = self.costs_of(own, variant.padded, variant.splits_backward)
            passes += int((costs.forward_ns + costs.backward_ns).sum())
            recomputed += int(costs.recompute_ns[variant.recompute].sum())
        return passes / 1e9, recomputed / 1e9

    def speed(self, variant: Variant) -> float:
        """Predicted tokens per second."""
        return true_tokens(variant.steps, self.counts) / self.predicted_s(variant)

    def packed(self, seq_len: int, micro_batches: int, steps: int) -> Steps:
        """Random packed steps."""
        return packed_steps(self.counts, seq_len, self.replicas, micro_batches, steps)

    def balanced(self, steps: int) -> Steps:
        """Even groups in the loader's order."""
        return balanced_steps(self.counts, self.sizes, self.replicas, self.micro_batches, steps)


def memory_share(setting: Setting, memory_bytes: int) -> float:
    """The part of the activations of a careful user, nothing recomputed, that memory holds."""
    state, peak = _most_needed(setting)
    return (memory_bytes - state) / (peak - state)


def memory_limit(setting: Setting, share: float) -> int:
    """Bytes of a rank in which this share of those activations fits."""
    state, peak = _most_needed(setting)
    return round(state + share * (peak - state))


def _most_needed(setting: Setting) -> tuple[int, int]:
    """(state, peak) of the rank with most, even layers, an epoch's largest packed micro-batches."""
    costs = _largest(setting, setting.packed(setting.sizes.seq_len, setting.micro_batches, EPOCH))
    borders, nothing = by_layers(costs, setting.stages), np.zeros(costs.num_layers, np.bool_)
    schedule = make_schedule("1f1b", setting.stages, costs.num_micro_batches)
    memory = evaluate(costs, borders, nothing, schedule).memory
    rank = int(memory.peak_bytes.argmax())
    return int(memory.state_bytes[rank]), int(memory.peak_bytes[rank])


def ways_to_train(setting: Setting, memory_bytes: int) -> list[Variant]:
    """All rows; the first is the papers' baseline, the second the careful one."""
    first, careful = papers_way(setting), careful_way(setting, memory_bytes)
    steps = setting.balanced(setting.num_steps)
    largest = _largest(setting, setting.balanced(EPOCH))
    schedule = make_schedule("1f1b", setting.stages, setting.micro_batches)
    data = replace(
        careful,
        name="+ even groups",
        steps=steps,
        recompute=choose_recompute(largest, careful.borders, schedule, memory_bytes),
    )
    rows = [first, careful, data]
    found = [
        _searched(setting, data, largest, memory_bytes, name, stages) for name, stages in SCHEDULES
    ]
    rows.append(replace(found[0], name="+ partition, recomputation"))
    rows.append(replace(max(found, key=setting.speed), name="+ schedule"))
    tuned = [_tuned(setting, one, memory_bytes) for one in found]
    tuned += [
        _tuned(setting, _replanned(setting, one, memory_bytes), memory_bytes) for one in tuned
    ]
    rows.append(replace(max(tuned, key=setting.speed), name="+ order, sizes of each step"))
    return rows


def papers_way(setting: Setting) -> Variant:
    """The papers' baseline."""
    steps = random_steps(setting.counts, setting.replicas, setting.micro_batches, setting.num_steps)
    costs = setting.costs_of(steps[0][0], padded=True)
    return Variant(
        name=PAPERS,
        steps=steps,
        padded=True,
        borders=by_params(costs, setting.stages),
        recompute=np.ones(costs.num_layers, np.bool_),
    )


def careful_way(setting: Setting, memory_bytes: int) -> Variant:
    """What a careful user would choose, at the best micro-batch size."""
    longest, found = int(setting.counts.seq_len.max()), []
    for share in SIZES:
        seq_len, count = (
            round(share * setting.sizes.seq_len),
            round(setting.micro_batches / share),
        )
        if seq_len < longest or count < setting.stages:
            continue
        costs = _largest(setting, setting.packed(seq_len, count, EPOCH))
        borders = by_layers(costs, setting.stages)
        try:
            recompute = choose_recompute(
                costs, borders, make_schedule("1f1b", setting.stages, count), memory_bytes
            )
        except InfeasiblePlan:
            continue
        steps = setting.packed(seq_len, count, setting.num_steps)
        name = f"{CAREFUL}: {seq_len} tokens"
        found.append(
            Variant(name=name, steps=steps, padded=False, borders=borders, recompute=recompute)
        )
    return max(found, key=setting.speed)


def _largest(setting: Setting, steps: Steps) -> Costs:
    """Costs of a step whose micro-batches need as much memory as any of these."""
    every_costs = [setting.costs_of(own, padded=False) for own in every(steps)]
    return _with_most_memory(every_costs[0], every_costs)


def _with_most_memory(costs: Costs, others: Iterable[Costs]) -> Costs:
    """The costs with each layer's most memory of any of the others' micro-batches."""
    shape = costs.forward_ns.shape
    most = {
        name: np.max([getattr(own, name).max(axis=1) for own in others], axis=0) for name in MEMORY
    }
    whole = {
        name: np.broadcast_to(values[:, np.newaxis], shape).copy() for name, values in most.items()
    }
    return replace(costs, **whole)


def _searched(
    setting: Setting, data: Variant, largest: Costs, memory_bytes: int, name: str, stages: int
) -> Variant:
    """The search's partition and recomputation for a schedule."""
    planned = replace(data, schedule=name, stages_per_rank=stages)
    split = planned.splits_backward
    costs = [setting.costs_of(own, padded=False, split=split) for own in every(data.steps)]
    typical = sorted(costs, key=lambda own: int(own.forward_ns.sum()))[len(costs) // 2]
    schedule = make_schedule(name, setting.stages, typical.num_micro_batches, stages)
    typical = _with_most_memory(typical, [largest])
    found = search_partition(typical, schedule, memory_bytes)
    return replace(planned, borders=found.borders, recompute=found.recompute)


def _tuned(setting: Setting, variant: Variant, memory_bytes: int) -> Variant:
    """The same samples step by step, packed and ordered again by PipeTune's tuner."""
    planner = TunedSteps(
        pipeline=PartitionedModel(
            cost=setting.split_cost if variant.splits_backward else setting.cost,
            borders=variant.borders,
            recompute=variant.recompute,
            schedule=variant.schedule,
            stages_per_rank=variant.stages_per_rank,
            memory_bytes=memory_bytes,
        ),
        options=TuneOptions(max_seq_len=setting.sizes.seq_len),
        loads=setting.sample_loads,
    )
    steps, plans = [], []
    for step in variant.steps:
        samples = np.concatenate([own.samples for own in step])
        sizes = np.concatenate([own.sizes for own in step])
        made = planner.plan(
            StepRequest(
                counts=setting.counts.take(samples),
                offsets=np.concatenate([[0], np.cumsum(sizes)]),
                dp=len(step),
                micro_batches=len(sizes) // len(step),
            )
        )
        steps.append(tuple(Groups(samples[own.samples], own.offsets) for own in made.groups))
        plans.append(tuple(one.step for one in made.tuned if one is not None))
    return replace(variant, steps=tuple(steps), tuned=tuple(plans))


def _replanned(setting: Setting, tuned: Variant, memory_bytes: int) -> Variant:
    """Partition and recomputation for the micro-batches that the tuner made; not yet tuned."""
    largest = _largest(setting, tuned.steps)
    plain = replace(tuned, tuned=())
    return _searched(setting, plain, largest, memory_bytes, tuned.schedule, tuned.stages_per_rank)
