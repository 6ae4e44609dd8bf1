"""OmniBal's ablation on InternVL's 6B + 20B, with stand-in layers on 8 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch.distributed as dist
from papers.datasets import internvl_samples

from ablation.data import INTERNVL, balanced_steps, every, loads_of, random_steps, true_tokens
from ablation.ranks import GIB, Measured, Row, Step, consecutive, measure
from ablation.stand_in import stand_ins
from ablation.variants import Variant
from balance.flops import FlopsModel
from balance.presets import load_model
from balance.steps.step_planner import StepRequest
from balance.types import Counts, Groups, IntArray
from engine.cost_model.analytical import layer_costs
from engine.cost_model.clusters import load_cluster
from engine.cost_model.costs import Costs
from engine.cost_model.loads import Loads, sample_loads
from engine.cost_model.parallel import Parallelism, Training
from engine.cost_model.training_mode import TrainingMode
from engine.planning.bmp import search_bmp
from engine.planning.partition import METHODS, by_params
from engine.planning.recompute import choose_recompute, fitted_step
from engine.planning.search.branch_and_bound import search_exact
from engine.runtime.pipeline import Pipeline
from engine.simulator.evaluate import evaluate
from engine.simulator.schedule import one_f_one_b
from engine.simulator.stages import StageCosts, stage_costs
from engine.tuning.step_planner import TunedSteps
from engine.tuning.tune import PartitionedModel, TuneOptions

PRESET, CLUSTER, TP = "internvl_1_5", "a100_80g", 2
STAGES, REPLICAS, MICRO_BATCHES = 4, 2, 16
TRAINING = Training(mode=TrainingMode(gradients="bf16"))
FASTER = 4
"""Stand-ins wait for this part of what the cost model says, so that a step takes seconds."""


class Model:
    """The model on so many GPUs, by the cost model."""

    def __init__(self, parallel: Parallelism) -> None:
        self.parallel, self.preset, self.cluster = (
            parallel,
            load_model(PRESET),
            load_cluster(CLUSTER),
        )

    def costs(self, loads: Loads) -> Costs:
        """Of each layer for each micro-batch."""
        return layer_costs(self.preset, self.cluster, self.parallel, loads, TRAINING)

    def costs_of(self, groups: Groups, counts: Counts, *, padded: bool) -> Costs:
        """Of a replica's micro-batches."""
        return self.costs(loads_of(groups, counts, INTERNVL, padded=padded))

    @property
    def full(self) -> Costs:
        """Of micro-batches at the caps: what a plan is made for."""
        sizes = INTERNVL
        loads = Loads.constant(
            MICRO_BATCHES,
            images=sizes.tiles,
            vit_tokens_per_image=sizes.vit_tokens,
            seq_len=sizes.seq_len,
            samples=4,
        )
        return self.costs(loads)


def variants(model: Model, counts: Counts, num_steps: int) -> list[Variant]:
    """From nothing balanced to everything, one kind of balance after the other."""
    random = random_steps(counts, REPLICAS, MICRO_BATCHES, num_steps)
    balanced = balanced_steps(counts, INTERNVL, REPLICAS, MICRO_BATCHES, num_steps)
    costs, schedule = model.full, one_f_one_b(STAGES, MICRO_BATCHES)
    everything, memory = np.ones(costs.num_layers, np.bool_), model.cluster.usable_memory_bytes
    nothing = Variant(
        name="nothing balanced",
        steps=random,
        padded=True,
        borders=by_params(costs, STAGES),
        recompute=everything,
    )
    data = replace(nothing, name="+ data", steps=balanced, padded=False)

    def all_recomputed(borders: IntArray) -> int:
        return evaluate(costs, borders, everything, schedule).step_ns

    bmp = replace(
        data, name="+ model (BMP)", borders=search_bmp(costs, STAGES, all_recomputed).best.borders
    )
    borders = search_bmp(costs, STAGES, fitted_step(costs, schedule, memory)).best.borders
    adaptive = replace(
        data,
        name="+ adaptive recompute",
        borders=borders,
        recompute=choose_recompute(costs, borders, schedule, memory),
    )
    return [nothing, data, bmp, adaptive, tuned(adaptive, model, counts)]


def tuned(variant: Variant, model: Model, counts: Counts) -> Variant:
    """The same samples step by step, packed and ordered anew by the tuner."""
    steps = TunedSteps(
        pipeline=PartitionedModel(
            cost=model.costs,
            borders=variant.borders,
            recompute=variant.recompute,
            memory_bytes=model.cluster.usable_memory_bytes,
        ),
        options=TuneOptions(max_seq_len=INTERNVL.seq_len),
        loads=lambda some: sample_loads(some, model.preset),
    )
    made = []
    for step in variant.steps:
        samples = np.concatenate([own.samples for own in step])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([own.sizes for own in step]))])
        work = steps(
            StepRequest(
                counts=counts.take(samples),
                offsets=offsets,
                dp=len(step),
                micro_batches=len(step[0]),
            )
        )
        made.append(tuple(Groups(samples[own.samples], own.offsets) for own in work.micro_batches))
    return replace(variant, name="+ tuning of each step", steps=tuple(made))


def run(num_steps: int, num_samples: int) -> list[Row]:
    """All variants, on this rank of 8; OmniBal's Table 7."""
    counts = internvl_samples(num_samples)
    model = Model(Parallelism(tp=TP, pp=STAGES, dp=REPLICAS))
    return [
        run_variant(variant, model, counts, REPLICAS)
        for variant in variants(model, counts, num_steps)
    ]


def run_data_parallel(num_steps: int, num_samples: int) -> list[Row]:
    """Data balance alone, each rank with the whole model, one micro-batch per rank and step;
    OmniBal's Table 2.
    """
    counts, dp = internvl_samples(num_samples), dist.get_world_size()
    model = Model(Parallelism(dp=dp))
    costs = model.full
    random = Variant(
        name="nothing balanced",
        steps=random_steps(counts, dp, 1, num_steps),
        padded=True,
        borders=np.array([0, costs.num_layers]),
        recompute=np.ones(costs.num_layers, np.bool_),
    )
    data = replace(
        random,
        name="+ data",
        steps=balanced_steps(counts, INTERNVL, dp, 1, num_steps),
        padded=False,
    )
    return [run_variant(variant, model, counts, dp) for variant in (random, data)]


def run_variant(variant: Variant, model: Model, counts: Counts, replicas: int) -> Row:
    """Run by stand-ins, beside what the simulator says."""
    costs = [model.costs_of(own, counts, padded=variant.padded) for own in every(variant.steps)]
    measured = run_stand_ins(
        [stage_costs(own, variant.borders, variant.recompute) for own in costs], replicas
    )
    outcomes = [
        evaluate(
            own,
            variant.borders,
            variant.recompute,
            one_f_one_b(len(variant.borders) - 1, own.num_micro_batches),
        )
        for own in costs
    ]
    slowest = np.array([one.step_ns for one in outcomes]).reshape(-1, replicas).max(axis=1)
    measured_s = float(measured.seconds.sum()) * FASTER
    samples = np.concatenate([own.samples for own in every(variant.steps)])
    model_flops = FlopsModel.of(model.preset)
    flops = float(model_flops.train_flops(model_flops.loads(counts.take(samples))).sum())
    return Row(
        name=variant.name,
        tokens=true_tokens(variant.steps, counts),
        predicted_s=float(slowest.sum()) / 1e9,
        measured_s=measured_s,
        mfu=flops / (measured_s * model.parallel.num_gpus * model.cluster.peak_flops_per_s),
        waiting=measured.waiting,
        peak_gib=max(int(one.memory.peak_bytes.max()) for one in outcomes) / GIB,
    )


def run_stand_ins(stages: list[StageCosts], replicas: int) -> Measured:
    """Steps of several replicas; `stages` by step and replica, at the model's own speed."""
    places = consecutive(dist.get_world_size(), replicas)
    mine = stages[
        next(place for place, ranks in enumerate(places) if dist.get_rank() in ranks) :: replicas
    ]
    ends = np.cumsum([0, *(each.num_micro_batches for each in mine)]).tolist()
    pipeline = make_stand_ins(mine, places)
    steps = [Step(batches=range(first, end), num_labels=1) for first, end in pairwise(ends)]
    measure(pipeline, steps[:1], replicas)
    return measure(pipeline, steps, replicas)


def make_stand_ins(steps: Sequence[StageCosts], places: Sequence[Sequence[int]]) -> Pipeline:
    """A pipeline of stand-ins; its micro-batches are numbers, those of the first step first."""
    times = (
        np.concatenate([getattr(each, name) for each in steps], axis=1) // FASTER
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    )
    joined = StageCosts.of_times(*times, steps[0].sends_grad)
    num_stages = joined.num_stages
    return Pipeline(
        stand_ins(joined), np.arange(num_stages + 1), np.zeros(num_stages, np.bool_), places
    )


def partitions(model: Model, micro_batches: int) -> dict[str, IntArray]:
    """By OmniBal's Table 4's methods and by the exact search, nothing recomputed, memory without
    end.
    """
    costs, stages = model.full, model.parallel.pp
    schedule = one_f_one_b(stages, micro_batches)
    costs = costs.take(np.zeros(micro_batches, np.int64))
    nothing = np.zeros(costs.num_layers, np.bool_)

    def step_ns(borders: IntArray) -> int:
        return evaluate(costs, borders, nothing, schedule).step_ns

    found = {name: method(costs, stages) for name, method in METHODS.items()}
    found["BMP"] = search_bmp(costs, stages, step_ns).best.borders
    found["exact"] = search_exact(costs, schedule, 1 << 50).borders
    return found
