"""OmniBal's ablation with real compute on 2 ranks: profiled, partitioned, recomputed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from papers.datasets import internvl_samples

from ablation.data import SHRUNK, Steps, balanced_steps, random_steps, shrunk
from ablation.ranks import Row
from ablation.real import Trainer, adam
from ablation.variants import Variant
from balance.baseline_samplers import BATCH_SIZE
from balance.types import Counts, IntArray
from engine.cost_model.profile_table import profiled_costs
from engine.planning.partition import by_params
from engine.runtime.profiling.partition_trials import TrialStep, measure_partitions
from engine.runtime.profiling.recompute_trials import AdaptOptions, adapt_running
from engine.tuning.step_planner import TunedSteps
from engine.tuning.tune import PartitionedModel, TuneOptions

SAMPLES, MICRO_BATCHES = 3_000, 8
STAGES = 2
MEMORY = 0.8
"""Of a rank, in what the worst random micro-batches need without recomputation."""


def run(num_steps: int, rounds: int) -> dict[str, list[Row]]:
    """Table 7 in a pipeline of 2 stages, and Table 2, data balance alone, data parallel; on this
    rank of 2.
    """
    counts = shrunk(internvl_samples(SAMPLES))
    return {
        "2 stages, real compute (OmniBal: 2.9)": pipelined(counts, num_steps, rounds),
        "Data parallel on 2 ranks, real compute (OmniBal: 1.3 to 1.5)": data_parallel(
            counts, 4 * num_steps, rounds
        ),
    }


def pipelined(counts: Counts, num_steps: int, rounds: int) -> list[Row]:
    """From nothing balanced to everything, one kind of balance after the other."""
    random = random_steps(counts, 1, MICRO_BATCHES, num_steps)
    balanced = balanced_steps(counts, SHRUNK, 1, MICRO_BATCHES, num_steps)
    trainer = Trainer(counts, STAGES, [(random, True), (balanced, False)])
    everything = np.ones(trainer.num_layers, np.bool_)
    borders = by_params(trainer.costs(balanced[0][0], padded=False), STAGES)
    nothing = Variant(
        name="nothing balanced", steps=random, padded=True, borders=borders, recompute=everything
    )
    data = replace(nothing, name="+ data", steps=balanced, padded=False)
    model = replace(data, name="+ model (BMP)", borders=tried_partition(trainer, data))
    # so little memory that without balance everything must be recomputed, if an epoch's worst
    # micro-batches shall fit
    epoch = random_steps(counts, 1, MICRO_BATCHES, len(counts) // (BATCH_SIZE * MICRO_BATCHES))
    worst = replace(nothing, steps=epoch, recompute=~everything)
    limit = round(MEMORY * trainer.peak_bytes(worst))
    adaptive = replace(model, name="+ adaptive recompute", recompute=adapted(trainer, model, limit))
    tuned = replace(
        adaptive, name="+ tuning of each step", steps=tuned_steps(trainer, adaptive, limit)
    )
    return trainer.rows([nothing, data, model, adaptive, tuned], rounds)


def data_parallel(counts: Counts, num_steps: int, rounds: int) -> list[Row]:
    """A micro-batch per rank and step, nothing recomputed."""
    random = random_steps(counts, 2, 1, num_steps)
    balanced = balanced_steps(counts, SHRUNK, 2, 1, num_steps)
    trainer = Trainer(counts, 1, [(random, True), (balanced, False)])
    borders, nothing = np.array([0, trainer.num_layers]), np.zeros(trainer.num_layers, np.bool_)
    before = Variant(
        name="nothing balanced", steps=random, padded=True, borders=borders, recompute=nothing
    )
    return trainer.rows(
        [before, replace(before, name="+ data", steps=balanced, padded=False)], rounds
    )


def tried_partition(trainer: Trainer, variant: Variant) -> IntArray:
    """BMP's best, really run."""
    step = trainer.steps(variant)[0]
    trial = TrialStep(
        batches=step.batches,
        normalizer=step.num_labels,
        pipelines=trainer.places,
        recompute=lambda borders: variant.recompute,
    )
    costs = trainer.costs(variant.steps[0][0], padded=variant.padded)
    return measure_partitions(trainer.model, costs, trial).bmp.best.borders


def adapted(trainer: Trainer, variant: Variant, limit_bytes: int) -> NDArray[np.bool_]:
    """The least recomputation that the running model bears in so much memory."""
    pipeline, costs = (
        trainer.pipeline(variant),
        trainer.costs(variant.steps[0][0], padded=variant.padded),
    )
    heaviest = [step.batches for step in trainer.heaviest(variant)]
    found = adapt_running(
        pipeline, costs, heaviest, AdaptOptions(limit_bytes=limit_bytes), adam(pipeline)
    )
    return found.recompute


def tuned_steps(trainer: Trainer, variant: Variant, memory_bytes: int) -> Steps:
    """The same samples step by step, packed and ordered anew by the tuner."""
    steps = TunedSteps(
        pipeline=PartitionedModel(
            # micro-batches may become larger than any that was measured
            cost=partial(profiled_costs, trainer.profile, farthest=np.inf),
            borders=variant.borders,
            recompute=variant.recompute,
            memory_bytes=memory_bytes,
        ),
        options=TuneOptions(max_seq_len=SHRUNK.seq_len),
        loads=trainer.sample_loads,
    )
    return trainer.planned(variant.steps, steps)
