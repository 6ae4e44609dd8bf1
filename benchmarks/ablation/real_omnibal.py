"""OmniBal's ablations with real compute: a scaled-down model, profiled, planned, tuned and run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from ablation.data import balanced_steps, loads_of, packed_steps, random_steps
from ablation.plans import (
    CAREFUL,
    EPOCH,
    PAPERS,
    Setting,
    memory_limit,
    memory_share,
    ways_to_train,
)
from ablation.ranks import Row
from ablation.real import Trainer
from ablation.shapes import SHAPES, Shape
from ablation.variants import Variant
from isobatch.common.types import Counts, Groups
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model

SAMPLES, MICRO_BATCHES = 3_000, 8
CLUSTER, DP = "a100_80g", 8
"""Where the real model is trained, with its optimizer sharded: its share of memory counts."""


def run(shape_name: str, num_steps: int) -> list[Row]:
    """Table 7: all ways to train in one pipeline of as many stages as ranks; on this rank."""
    shape, stages = SHAPES[shape_name], dist.get_world_size()
    counts = shape.samples(SAMPLES)
    padded = random_steps(counts, 1, MICRO_BATCHES, num_steps)
    packed = packed_steps(counts, shape.sizes.seq_len, 1, MICRO_BATCHES, EPOCH)
    trainer = Trainer(shape, counts, stages, [(padded, True), (packed, False)])
    trainer.measure_split()
    setting = Setting(
        counts=counts,
        sizes=shape.sizes,
        stages=stages,
        micro_batches=MICRO_BATCHES,
        num_steps=num_steps,
        cost=trainer.cost,
        split_cost=trainer.split_cost,
        sample_loads=trainer.sample_loads,
    )
    planned: list[list[Variant]] = [[]]
    if dist.get_rank() == 0:
        usable = load_cluster(CLUSTER).usable_memory_bytes
        share = memory_share(real_setting(shape, stages), usable)
        planned = [ways_to_train(setting, memory_limit(setting, share))]
    dist.broadcast_object_list(planned)
    return trainer.rows(planned[0])


def run_data_parallel(shape_name: str, num_steps: int) -> list[Row]:
    """Table 2: data balance alone, a micro-batch per rank and step, nothing recomputed."""
    shape, dp = SHAPES[shape_name], dist.get_world_size()
    counts = shape.samples(SAMPLES)
    padded = random_steps(counts, dp, 1, num_steps)
    packed = packed_steps(counts, shape.sizes.seq_len, dp, 1, num_steps)
    even = balanced_steps(counts, shape.sizes, dp, 1, num_steps)
    trainer = Trainer(shape, counts, 1, [(padded, True), (packed, False)])
    first = Variant(
        name=PAPERS,
        steps=padded,
        padded=True,
        borders=np.array([0, trainer.num_layers]),
        recompute=np.zeros(trainer.num_layers, np.bool_),
    )
    careful = replace(first, name=CAREFUL, steps=packed, padded=False)
    return trainer.rows([first, careful, replace(careful, name="+ even groups", steps=even)])


def real_setting(shape: Shape, stages: int) -> Setting:
    """The real model on as many stages, by the cost model."""
    model, cluster = load_model(shape.preset), load_cluster(CLUSTER)
    parallel = Parallelism(tp=shape.tp, pp=stages, dp=DP)

    def cost(loads: Loads) -> Costs:
        return layer_costs(model, cluster, parallel, loads, Training(kernels="fused"))

    def sample_loads(counts: Counts) -> Loads:
        alone = Groups(np.arange(len(counts)), np.arange(len(counts) + 1))
        return loads_of(alone, counts, shape.real_sizes, padded=False)

    return Setting(
        counts=shape.real_samples(SAMPLES),
        sizes=shape.real_sizes,
        stages=stages,
        micro_batches=MICRO_BATCHES,
        cost=cost,
        split_cost=cost,
        sample_loads=sample_loads,
    )
