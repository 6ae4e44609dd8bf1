"""OmniBal's ablation on InternVL's 6B + 20B, with stand-in layers on 8 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch.distributed as dist
from papers.datasets import internvl_samples

from ablation.data import INTERNVL, loads_of, true_tokens
from ablation.plans import CAREFUL, PAPERS, Setting, papers_way, ways_to_train
from ablation.ranks import GIB, Measured, Row, Step, consecutive, measure
from ablation.stand_in import stand_ins
from ablation.variants import Variant
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads, sample_loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.planning.bmp import search_bmp
from isobatch.engine.planning.partition import METHODS
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import Schedule, make_schedule
from isobatch.engine.simulator.stages import StageCosts
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model

PRESET, CLUSTER, TP = "internvl_1_5", "a100_80g", 2
STAGES, REPLICAS, MICRO_BATCHES = 4, 2, 8
TRAINING = Training(mode=TrainingMode(gradients="bf16"), kernels="fused")
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

    def setting(self, counts: Counts, stages: int, replicas: int, micro_batches: int) -> Setting:
        """What ways to train this model have in common."""
        return Setting(
            counts=counts,
            sizes=INTERNVL,
            stages=stages,
            replicas=replicas,
            micro_batches=micro_batches,
            cost=self.costs,
            split_cost=self.costs,
            sample_loads=lambda some: sample_loads(some, self.preset).all_labelled(),
        )

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


def run(num_steps: int, num_samples: int) -> list[Row]:
    """All ways to train, on this rank of 8; OmniBal's Table 7."""
    model = Model(Parallelism(tp=TP, pp=STAGES, dp=REPLICAS))
    setting = model.setting(internvl_samples(num_samples), STAGES, REPLICAS, MICRO_BATCHES)
    setting = replace(setting, num_steps=num_steps)
    planned: list[list[Variant]] = [[]]
    if dist.get_rank() == 0:
        planned = [ways_to_train(setting, model.cluster.usable_memory_bytes)]
    dist.broadcast_object_list(planned)
    return [run_variant(variant, setting) for variant in planned[0]]


def run_data_parallel(num_steps: int, num_samples: int) -> list[Row]:
    """Data balance alone, each rank with the whole model, one micro-batch per rank and step;
    OmniBal's Table 2.
    """
    dp = dist.get_world_size()
    model = Model(Parallelism(dp=dp))
    setting = model.setting(internvl_samples(num_samples), 1, dp, 1)
    random = replace(papers_way(replace(setting, num_steps=num_steps)), name=PAPERS)
    packed = setting.packed(INTERNVL.seq_len, 1, num_steps)
    careful = replace(random, name=CAREFUL, steps=packed, padded=False)
    even = replace(careful, name="+ even groups", steps=setting.balanced(num_steps))
    return [run_variant(variant, setting) for variant in (random, careful, even)]


def run_variant(variant: Variant, setting: Setting) -> Row:
    """Run by stand-ins, next to what the simulator says."""
    outcomes = [one for step in variant.simulated(setting.costs_of) for one in step]
    schedules = [
        variant.schedule_of(step, replica)
        for step in range(len(variant.steps))
        for replica in range(setting.replicas)
    ]
    measured = run_stand_ins(
        [one.stages for one in outcomes], schedules, setting.replicas, variant.stages_per_rank
    )
    measured_s = float(measured.wall_s.sum()) * FASTER
    return Row(
        name=variant.name,
        tokens=true_tokens(variant.steps, setting.counts),
        predicted_s=setting.predicted_s(variant),
        measured_s=measured_s,
        waiting=1 - measured.busy_s * FASTER / (measured_s * setting.stages * setting.replicas),
        peak_gib=max(int(one.memory.peak_bytes.max()) for one in outcomes) / GIB,
        work_s=setting.work_s(variant)[0],
        recomputed=f"{int(variant.recompute.sum())} of {len(variant.recompute)}",
    )


def run_stand_ins(
    stages: list[StageCosts], schedules: list[Schedule], replicas: int, stages_per_rank: int
) -> Measured:
    """Steps of several replicas; `stages` by step and replica, at the model's own speed."""
    places = consecutive(dist.get_world_size(), replicas)
    mine = slice(
        next(place for place, ranks in enumerate(places) if dist.get_rank() in ranks),
        None,
        replicas,
    )
    own = stages[mine]
    ends = np.cumsum([0, *(each.num_micro_batches for each in own)]).tolist()
    pipeline = make_stand_ins(own, places, stages_per_rank)
    steps = [
        Step(batches=range(first, end), num_labels=1, schedule=schedule)
        for (first, end), schedule in zip(pairwise(ends), schedules[mine], strict=True)
    ]
    measure(pipeline, steps[:1], replicas)
    return measure(pipeline, steps, replicas)


def make_stand_ins(
    steps: Sequence[StageCosts], places: Sequence[Sequence[int]], stages_per_rank: int = 1
) -> Pipeline:
    """A pipeline of stand-ins; its micro-batches are numbers, those of the first step first."""
    times = (
        np.concatenate([getattr(each, name) for each in steps], axis=1) // FASTER
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    )
    joined = StageCosts.of_times(*times, steps[0].sends_grad)
    num_stages = joined.num_stages
    return Pipeline(
        stand_ins(joined),
        np.arange(num_stages + 1),
        np.zeros(num_stages, np.bool_),
        places,
        PipelineOptions(
            schedule="1f1b" if stages_per_rank == 1 else "interleaved",
            stages_per_rank=stages_per_rank,
        ),
    )


def partitions(model: Model, micro_batches: int) -> dict[str, IntArray]:
    """By OmniBal's Table 4's methods and by the search, nothing recomputed, memory without
    end.
    """
    costs, stages = model.full, model.parallel.pp
    schedule = make_schedule("1f1b", stages, micro_batches)
    costs = costs.take(np.zeros(micro_batches, np.int64))
    nothing = np.zeros(costs.num_layers, np.bool_)

    def step_ns(borders: IntArray) -> int:
        return evaluate(costs, borders, nothing, schedule).step_ns

    found = {name: method(costs, stages) for name, method in METHODS.items()}
    found["BMP"] = search_bmp(costs, stages, step_ns).best.borders
    found["exact"] = search_partition(costs, schedule, 1 << 50).borders
    return found
