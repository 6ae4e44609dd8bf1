"""PipeTune's ablation on its 13B model, with stand-in layers on 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from papers.datasets import pipetune_samples
from papers.pipetune_tables import MAX_SEQ_LEN, make_pipeline, most_that_fits

from ablation.plans import CAREFUL, PAPERS
from ablation.ranks import GIB, Row, Step, measure
from ablation.stand_in import stand_ins
from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.common.types import Groups, IntArray
from isobatch.engine.cost_model.loads import Loads, packed_loads, sample_loads
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.stages import StageCosts
from isobatch.engine.tuning.precompute import frozen_encoder
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, tune
from isobatch.models.presets import load_model

PRESET = "pipetune_13b"
FASTER = 4
"""Stand-ins wait for this part of what the cost model says."""
BASELINES = (PAPERS, f"{CAREFUL}: best size")
INGREDIENTS = {
    "+ balance": TuneOptions(max_seq_len=MAX_SEQ_LEN, sizes="given", search="none"),
    "+ order, pre-computation": TuneOptions(max_seq_len=MAX_SEQ_LEN, sizes="given", encode="any"),
    "+ sizes": TuneOptions(max_seq_len=MAX_SEQ_LEN, sizes="any", encode="any"),
}
"""Rows of PipeTune's Table 2, each with those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step as it shall run: its stages' times without the encoder's, and those of the encoder."""

    schedule: Schedule
    stages: StageCosts
    encoder_ns: IntArray
    predicted_ns: int
    peak_bytes: int

    @property
    def work_ns(self) -> int:
        """Passes of all ranks."""
        stages = self.stages.forward_ns + self.stages.backward_ns
        return int(stages.sum()) + int(self.encoder_ns.sum())


def run(num_steps: int, mix: str, batch: int = 128) -> list[Row]:
    """All ingredients on a mixture, on this rank of 4."""
    pipeline = make_pipeline()
    size = most_that_fits(pipeline) * MAX_SEQ_LEN
    steps = [
        sample_loads(
            pipetune_samples(mix, batch, MAX_SEQ_LEN, seed), load_model(PRESET)
        ).all_labelled()
        for seed in range(num_steps)
    ]
    rows = []
    for name in (*BASELINES, *INGREDIENTS):
        options = INGREDIENTS.get(name)
        chosen = size if name != BASELINES[1] else best_size(steps, pipeline, size)
        planned = [
            plan_step(step, pack_in_order(step.llm.tokens, chosen), pipeline, options)
            for step in steps
        ]
        measured_s, waiting = run_steps(planned)
        rows.append(
            Row(
                name=name,
                tokens=sum(int(step.llm.tokens.sum()) for step in steps),
                predicted_s=sum(step.predicted_ns for step in planned) / 1e9,
                measured_s=measured_s,
                waiting=waiting,
                peak_gib=max(step.peak_bytes for step in planned) / GIB,
                work_s=sum(step.work_ns for step in planned) / 1e9,
            )
        )
    return rows


def best_size(steps: Sequence[Loads], pipeline: PartitionedModel, most: int) -> int:
    """The fixed size of micro-batches with which the steps are fastest; quarters of samples'."""

    def predicted_ns(size: int) -> int:
        packed = [(step, pack_in_order(step.llm.tokens, size)) for step in steps]
        return sum(plan_step(*one, pipeline, None).predicted_ns for one in packed)

    return min(range(MAX_SEQ_LEN, most + 1, MAX_SEQ_LEN // 4), key=predicted_ns)


def plan_step(
    samples: Loads, given: Groups, pipeline: PartitionedModel, options: TuneOptions | None
) -> PlannedStep:
    """The given micro-batches in their order, or what the tuner makes of them."""
    if options is None:
        costs = pipeline.cost(packed_loads(samples, given))
        schedule = pipeline.make_schedule(len(given))
        outcome = evaluate(costs, pipeline.borders, pipeline.recompute, schedule)
        encoder = frozen_encoder(costs, pipeline.borders).forward_ns
        stages, predicted, peak = outcome.stages, outcome.step_ns, outcome.memory.peak_bytes
        ahead: list[int] = []
    else:
        step = tune(samples, given, pipeline, options).step
        schedule, stages, encoder = step.schedule, step.stages, step.encodings.forward_ns
        predicted, peak = step.timeline.step_ns, step.peak_bytes
        ahead = list(step.encoding_ranks)
    forward = stages.forward_ns.copy()
    inside = np.setdiff1d(np.arange(len(encoder)), ahead)
    forward[0, inside] -= encoder[inside]
    return PlannedStep(
        schedule=schedule,
        stages=replace(stages, forward_ns=forward),
        encoder_ns=encoder,
        predicted_ns=predicted,
        peak_bytes=int(peak.max()),
    )


def run_steps(steps: Sequence[PlannedStep]) -> tuple[float, float]:
    """(seconds at the model's own speed, share of it that ranks waited)."""
    times = (
        np.concatenate([getattr(step.stages, name) for step in steps], axis=1) // FASTER
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    )
    joined = StageCosts.of_times(*times, steps[0].stages.sends_grad)
    encoder = np.concatenate([step.encoder_ns for step in steps]) // FASTER
    num_stages, first, given = joined.num_stages, 0, []
    for step in steps:
        end = first + len(step.encoder_ns)
        given.append(Step(batches=list(range(first, end)), num_labels=1, schedule=step.schedule))
        first = end
    pipeline = Pipeline(
        stand_ins(joined, encoder),
        # the encoder belongs to the first stage
        np.array([0, *range(2, num_stages + 2)]),
        np.zeros(num_stages + 1, np.bool_),
        [list(range(dist.get_world_size()))],
        PipelineOptions(encoder_ranks=range(1, num_stages)),
    )
    measure(pipeline, given[:1])
    measured = measure(pipeline, given)
    seconds = float(measured.wall_s.sum())
    waiting = 1 - measured.busy_s / (seconds * num_stages)
    return seconds * FASTER, waiting
