"""Predicted against measured step times, for several partitions.

    python benchmarks/prediction.py [--steps 3] [--rounds 3]

- real compute: the small model of `ablation/model.py` on 2 ranks, a core each: its layers are
  profiled, every partition near BMP's anchor is simulated with the profile, and run;
- stand-ins, which wait for as long as the cost model says: InternVL's 6B + 20B in 4 stages on 4
  ranks and in 8 on 8, partitioned by each of the methods of OmniBal's Table 4 and by the exact
  search.

Every partition runs the same balanced micro-batches, nothing recomputed; partitions take turns,
medians count. A machine that others use too is not always as fast: so layers are profiled anew
before each turn. "order": of all pairs of partitions whose measured times are more than 3 % apart,
the share that the prediction has in the same order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch.distributed as dist
from ablation.data import INTERNVL, balanced_steps, every
from ablation.internvl_stand_in import FASTER, Model, make_stand_ins, partitions
from ablation.ranks import Step, measure, on_ranks
from ablation.real import Trainer
from ablation.shapes import SHAPES
from ablation.variants import Variant
from papers.datasets import internvl_samples
from tables import console, new_table

from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.planning.bmp import RADIUS, greedy_anchor, rank_candidates
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule

SAMPLES, MICRO_BATCHES = 3_000, 8
APART = 0.03
"""Partitions whose times are nearer to each other are taken as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A partition."""

    name: str
    predicted_s: float
    """Of all steps."""
    measured_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="of each partition (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="partitions take turns so often (default: 3)"
    )
    options = parser.parse_args(arguments)
    show(
        "small model, 2 stages on 2 ranks, real compute",
        on_ranks(2, real, options.steps, options.rounds),
    )
    for stages in (4, 8):
        rows = on_ranks(stages, stand_in, stages, options.steps, options.rounds)
        show(f"InternVL 6B + 20B, {stages} stages on {stages} ranks, stand-ins", rows)
    return 0


def show(title: str, rows: Sequence[Row]) -> None:
    """A table, the fastest partition first."""
    table = new_table(title, ["partition", "predicted s", "measured s", "measured / predicted"])
    for row in sorted(rows, key=lambda row: row.measured_s):
        ratio = row.measured_s / row.predicted_s
        table.add_row(row.name, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", f"{ratio:.3f}")
    console.print(table)
    pairs = [
        (one.predicted_s - two.predicted_s) * (one.measured_s - two.measured_s) > 0
        for one, two in combinations(rows, 2)
        if abs(one.measured_s / two.measured_s - 1) > APART
    ]
    console.print(
        f"order: {sum(pairs)} of {len(pairs)} pairs that are more than {APART:.0%} apart\n"
    )


def real(num_steps: int, rounds: int) -> list[Row]:
    """All partitions near the anchor, on this rank of 2."""
    shape = SHAPES["small"]
    counts = shape.samples(SAMPLES)
    steps = balanced_steps(counts, shape.sizes, 1, MICRO_BATCHES, num_steps)
    trainer = Trainer(shape, counts, 2, [(steps, False)])
    costs = trainer.costs(steps[0][0], padded=False)
    anchor = greedy_anchor(costs, 2)
    near = rank_candidates(costs, anchor, radius=RADIUS, max_count=2 * RADIUS + 1)
    variants = [
        Variant(
            name=str(candidate.borders.tolist()),
            steps=steps,
            padded=False,
            borders=candidate.borders,
            recompute=np.zeros(trainer.num_layers, np.bool_),
        )
        for candidate in near
    ]
    pipelines, given = (
        [trainer.pipeline(variant) for variant in variants],
        trainer.steps(variants[0]),
    )
    warm_up(pipelines, given)
    predicted, measured = [], []
    for _ in range(rounds):
        trainer.profile = trainer.measure_layers()
        predicted.append([trainer.predicted_s(variant) for variant in variants])
        measured.append([measure(pipeline, given).seconds for pipeline in pipelines])
    return [
        Row(
            name=variant.name,
            predicted_s=float(np.median(said)),
            measured_s=float(np.median(took, axis=0).sum()),
        )
        for variant, said, took in zip(
            variants, zip(*predicted, strict=True), zip(*measured, strict=True), strict=True
        )
    ]


def stand_in(stages: int, num_steps: int, rounds: int) -> list[Row]:
    """Each method's partition, on this rank of as many as stages."""
    counts, model = internvl_samples(SAMPLES), Model(Parallelism(tp=2, pp=stages))
    steps = balanced_steps(counts, INTERNVL, 1, 2 * stages, num_steps)
    costs = [model.costs_of(own, counts, padded=False) for own in every(steps)]
    found = partitions(model, 2 * stages)
    nothing = np.zeros(costs[0].num_layers, np.bool_)
    given = [
        Step(batches=range(2 * stages * at, 2 * stages * (at + 1)), num_labels=1)
        for at in range(num_steps)
    ]
    pipelines, predicted = [], []
    for borders in found.values():
        outcomes = [
            evaluate(own, borders, nothing, make_schedule("1f1b", stages, own.num_micro_batches))
            for own in costs
        ]
        predicted.append(sum(one.step_ns for one in outcomes) / 1e9)
        pipelines.append(
            make_stand_ins([one.stages for one in outcomes], [list(range(dist.get_world_size()))])
        )
    warm_up(pipelines, given)
    turns = [[measure(pipeline, given).seconds for pipeline in pipelines] for _ in range(rounds)]
    return [
        Row(name=name, predicted_s=said, measured_s=float(np.median(took, axis=0).sum()) * FASTER)
        for name, said, took in zip(found, predicted, zip(*turns, strict=True), strict=True)
    ]


def warm_up(pipelines: Sequence[Pipeline], steps: Sequence[Step]) -> None:
    """A step of each."""
    for pipeline in pipelines:
        measure(pipeline, steps[:1])


if __name__ == "__main__":
    sys.exit(main())
