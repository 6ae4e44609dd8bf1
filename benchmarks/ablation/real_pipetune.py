"""PipeTune's ablation with real compute: a frozen encoder in front, steps tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ablation.data import loads_of
from ablation.plans import CAREFUL, PAPERS
from ablation.ranks import Row
from ablation.real import REPEATS, Trainer
from ablation.shapes import SHAPES, Shape
from ablation.variants import Variant
from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.tuning.precompute import EncodedStep
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, tune

SAMPLES_PER_STEP = 40
STAGES = 2
SHAPE = SHAPES["qwen"]
SEQ_LEN = SHAPE.sizes.seq_len
SIZES = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Fixed sizes that a careful user measures, relative to `SEQ_LEN`; the papers' is the first."""
INGREDIENTS = {
    "+ balance": TuneOptions(max_seq_len=SEQ_LEN, sizes="given", search="none"),
    "+ order, pre-computation": TuneOptions(max_seq_len=SEQ_LEN, sizes="given", encode="any"),
    "+ sizes": TuneOptions(max_seq_len=SEQ_LEN, sizes="any", encode="any"),
}
"""Rows of PipeTune's Table 2, each with those before."""


def run(
    num_steps: int,
    samples_per_step: int = SAMPLES_PER_STEP,
    repeats: int = REPEATS,
    sizes: Sequence[float] = SIZES,
    shape: Shape = SHAPE,
) -> list[Row]:
    """All ingredients, on this rank of 2. `shape`: `SHAPE`, or with fewer layers."""
    counts = shape.samples(samples_per_step * num_steps)
    drawn = np.arange(len(counts)).reshape(num_steps, -1)
    fixed = [
        tuple((packed(counts, samples, round(size * SEQ_LEN)),) for samples in drawn)
        for size in sizes
    ]
    data = [(steps, False) for steps in fixed]
    trainer = Trainer(shape, counts, STAGES, data, frozen_encoder=True, repeats=repeats)
    nothing = np.zeros(trainer.num_layers, np.bool_)
    borders = behind_encoder(trainer, fixed[0][0][0])
    before = Variant(name=PAPERS, steps=fixed[0], padded=False, borders=borders, recompute=nothing)
    sized = [replace(before, steps=steps) for steps in fixed]
    pipeline = PartitionedModel(cost=trainer.cost, borders=borders, recompute=nothing)
    ours = [tuned(before, counts, pipeline, name) for name in INGREDIENTS]
    rows = trainer.rows([*sized, *ours])
    fastest = min(rows[: len(sized)], key=lambda row: row.measured_s)
    return [rows[0], replace(fastest, name=f"{CAREFUL}: best size"), *rows[len(sized) :]]


def packed(counts: Counts, samples: IntArray, seq_len: int) -> Groups:
    """Micro-batches filled one after the other."""
    own = pack_in_order(counts.seq_len[samples], seq_len)
    return Groups(samples[own.samples], own.offsets)


def behind_encoder(trainer: Trainer, groups: Groups) -> IntArray:
    """The best of the partitions that leave the encoder in the first stage."""
    costs = trainer.costs(groups, padded=False)
    nothing = np.zeros(trainer.num_layers, np.bool_)
    schedule = make_schedule("1f1b", STAGES, len(groups))
    ends = range(trainer.model.first_trained, trainer.num_layers)
    every = [np.array([0, end, trainer.num_layers]) for end in ends]
    return min(every, key=lambda borders: evaluate(costs, borders, nothing, schedule).step_ns)


def tuned(before: Variant, counts: Counts, pipeline: PartitionedModel, name: str) -> Variant:
    """The same samples, step by step."""
    steps: list[tuple[Groups]] = []
    plans: list[tuple[EncodedStep]] = []
    for (given,) in before.steps:
        order = np.arange(len(given.samples))
        alone = Groups(given.samples, np.arange(len(order) + 1))
        found = tune(
            loads_of(alone, counts, SHAPE.sizes, padded=False),
            Groups(order, given.offsets),
            pipeline,
            INGREDIENTS[name],
        )
        steps.append((Groups(given.samples[found.groups.samples], found.groups.offsets),))
        plans.append((found.step,))
    return Variant(
        name=name,
        steps=tuple(steps),
        padded=False,
        borders=before.borders,
        recompute=before.recompute,
        tuned=tuple(plans),
    )
