"""Training of the small model in each variant, measured: `Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ablation.data import SHRUNK, Steps, every, loads_of, samples_of, true_tokens
from ablation.model import KINDS, Batch, kinds_of, make_batch, make_model, train_flops
from ablation.ranks import GIB, Measured, Row, Step, consecutive, matmul_flops, measure
from ablation.variants import Variant
from balance.steps.step_planner import StepPlanner, StepRequest
from balance.types import Counts, Groups, IntArray
from engine.cost_model.costs import Costs
from engine.cost_model.loads import Loads, joined_loads
from engine.cost_model.profile_table import Profile, profiled_costs
from engine.planning.partition import even_partition
from engine.runtime.cpu_memory import LiveBytes
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.profiling.measure_layers import LayerLabels, MeasureOptions, measure_layers
from engine.simulator.evaluate import evaluate
from engine.simulator.schedule import one_f_one_b

REPEATS = 6
"""Of each layer's measurement, unless told otherwise."""
PROFILED = 8
"""Micro-batches that layers are measured on, from the smallest to the largest."""
AGREE = 1e-4
"""Relative: losses of the same samples, whose float32 sums come in other orders."""

Data = tuple[Steps, bool]
"""Steps, and whether their micro-batches are padded."""


class Trainer:
    """Runs variants as pipelines of `num_stages`, as many as there are ranks for. All ranks make it
    and call it.
    """

    def __init__(
        self,
        counts: Counts,
        num_stages: int,
        data: Sequence[Data],
        *,
        frozen_encoder: bool = False,
        repeats: int = REPEATS,
    ) -> None:
        """`data`: of all that will be run, out of which micro-batches to measure layers on are
        chosen. `repeats`: of each layer's measurement.
        """
        self.counts, self.repeats = counts, repeats
        self.replicas = dist.get_world_size() // num_stages
        self.places = consecutive(dist.get_world_size(), self.replicas)
        self.replica = next(
            place for place, ranks in enumerate(self.places) if dist.get_rank() in ranks
        )
        self.model = make_model(frozen_encoder=frozen_encoder)
        self.num_layers = len(self.model.layers)
        self.peak_flops = matmul_flops() * dist.get_world_size()
        self.num_stages, self._data = num_stages, data
        self.profile = self.measure_layers()

    def measure_layers(self) -> Profile:
        """The profile of the model's layers, as the machine is now."""
        data, num_stages, kinds = self._data, self.num_stages, kinds_of(self.model)
        groups = [(own, padded) for steps, padded in data for own in every(steps)]
        loads = joined_loads(
            [loads_of(own, self.counts, SHRUNK, padded=padded) for own, padded in groups]
        )
        batches = [(samples, padded) for own, padded in groups for samples in samples_of(own)]
        chosen = spread(loads.vision.tokens, loads.llm.tokens)
        borders = even_partition(np.ones(self.num_layers, np.int64), num_stages)
        return measure_layers(
            Pipeline(self.model, borders, np.zeros(self.num_layers, np.bool_), self.places),
            [
                make_batch(batches[place][0], self.counts, padded=batches[place][1])
                for place in chosen.tolist()
            ],
            loads.take(chosen),
            LayerLabels(
                names=[f"{kind} {place}" for place, kind in enumerate(kinds)],
                kinds=kinds,
                phases=dict(KINDS.values()),
            ),
            MeasureOptions(repeats=self.repeats),
        )

    def pipeline(self, variant: Variant) -> Pipeline:
        """This rank's part."""
        ahead = range(1, len(self.places[0])) if self.model.first_trained else ()
        return Pipeline(
            self.model,
            variant.borders,
            variant.recompute,
            self.places,
            PipelineOptions(encoder_ranks=ahead),
        )

    def steps(self, variant: Variant) -> list[Step]:
        """This rank's micro-batches of all steps."""
        return [
            Step(
                batches=self.batches(step[self.replica], padded=variant.padded),
                num_labels=int(sum(self.counts.num_loss_tokens[own.samples].sum() for own in step)),
                schedule=variant.tuned[number].schedule if variant.tuned else None,
            )
            for number, step in enumerate(variant.steps)
        ]

    def batches(self, groups: Groups, *, padded: bool) -> list[Batch]:
        """Micro-batches of samples."""
        return [make_batch(samples, self.counts, padded=padded) for samples in samples_of(groups)]

    def costs(self, groups: Groups, *, padded: bool) -> Costs:
        """By the profile."""
        return profiled_costs(
            self.profile, loads_of(groups, self.counts, SHRUNK, padded=padded), farthest=np.inf
        )

    def sample_loads(self, counts: Counts) -> Loads:
        """Of samples by themselves."""
        alone = Groups(np.arange(len(counts)), np.arange(len(counts) + 1))
        return loads_of(alone, counts, SHRUNK, padded=False)

    def planned(self, steps: Steps, planner: StepPlanner) -> Steps:
        """What a planner makes of each step's samples, as it would behind a loader's hook."""
        made = []
        for step in steps:
            samples = np.concatenate([own.samples for own in step])
            offsets = np.concatenate([[0], np.cumsum(np.concatenate([own.sizes for own in step]))])
            told = StepRequest(
                counts=self.counts.take(samples),
                offsets=offsets,
                dp=len(step),
                micro_batches=len(step[0]),
            )
            made.append(
                tuple(
                    Groups(samples[own.samples], own.offsets) for own in planner(told).micro_batches
                )
            )
        return tuple(made)

    def heaviest(self, variant: Variant) -> list[Step]:
        """The steps with the largest micro-batch of each phase."""
        loads = [
            loads_of(own, self.counts, SHRUNK, padded=variant.padded)
            for own in every(variant.steps)
        ]
        most = {
            int(np.argmax([getattr(own, phase).tokens.max() for own in loads])) // self.replicas
            for phase in ("vision", "llm")
        }
        steps = self.steps(variant)
        return [steps[place] for place in sorted(most)]

    def peak_bytes(self, variant: Variant) -> int:
        """Weights, gradients, Adam's moments and activations of the rank that holds most, in the
        heaviest steps.
        """
        pipeline = self.pipeline(variant)
        moments = adam(pipeline).state.values()
        held = [*pipeline.parameters(), *(value for own in moments for value in own.values())]
        with LiveBytes() as memory:
            measure(pipeline, self.heaviest(variant), self.replicas)
        return most_of_ranks(memory.peak_bytes + sum(tensor.nbytes for tensor in held))

    def rows(self, variants: Sequence[Variant], rounds: int) -> list[Row]:
        """All variants, taking turns; the first turn only warms up. Losses of equal samples must be
        equal.
        """
        pipelines = [self.pipeline(variant) for variant in variants]
        steps = [self.steps(variant) for variant in variants]
        for pipeline, own in zip(pipelines, steps, strict=True):
            measure(pipeline, own[:1], self.replicas)
        turns = [
            [
                measure(pipeline, own, self.replicas)
                for pipeline, own in zip(pipelines, steps, strict=True)
            ]
            for _ in range(rounds)
        ]
        check_losses(variants, turns[0])
        return [
            self._row(variant, list(own))
            for variant, own in zip(variants, zip(*turns, strict=True), strict=True)
        ]

    def _row(self, variant: Variant, turns: Sequence[Measured]) -> Row:
        seconds = float(np.median([turn.seconds for turn in turns], axis=0).sum())
        frozen = self.model.first_trained > 0
        flops = sum(
            train_flops(own.samples, self.counts, frozen_encoder=frozen)
            for own in every(variant.steps)
        )
        return Row(
            name=variant.name,
            tokens=true_tokens(variant.steps, self.counts),
            predicted_s=self.predicted_s(variant),
            measured_s=seconds,
            mfu=flops / (seconds * self.peak_flops),
            waiting=float(np.median([turn.waiting for turn in turns])),
            peak_gib=self.peak_bytes(variant) / GIB,
        )

    def predicted_s(self, variant: Variant) -> float:
        """What the simulator makes of the profile, all steps."""
        if variant.tuned:
            return sum(step.timeline.step_ns for step in variant.tuned) / 1e9
        times = [
            evaluate(
                self.costs(own, padded=variant.padded),
                variant.borders,
                variant.recompute,
                one_f_one_b(len(variant.borders) - 1, len(own)),
            ).step_ns
            for own in every(variant.steps)
        ]
        return float(np.reshape(times, (-1, self.replicas)).max(axis=1).sum()) / 1e9


def adam(pipeline: Pipeline) -> torch.optim.Optimizer:
    """An optimizer with its state, as in the midst of training; weights stay as they are."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.0)
    for weight in pipeline.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def spread(vision: IntArray, llm: IntArray) -> IntArray:
    """PROFILED places of micro-batches, from the least to the most of both phases."""
    ranks = np.linspace(0, len(vision) - 1, PROFILED // 2).round().astype(int)
    return np.unique(
        np.concatenate(
            [np.argsort(vision, kind="stable")[ranks], np.argsort(llm, kind="stable")[ranks]]
        )
    )


def check_losses(variants: Sequence[Variant], measured: Sequence[Measured]) -> None:
    """The run ends here if a variant made other losses of the same samples than the one before."""
    for place in range(1, len(variants)):
        before, after = variants[place - 1], variants[place]
        same = [
            sorted(np.concatenate([own.samples for own in one]))
            == sorted(np.concatenate([own.samples for own in two]))
            for one, two in zip(before.steps, after.steps, strict=True)
        ]
        losses = measured[place - 1].losses[same], measured[place].losses[same]
        if not np.allclose(*losses, rtol=AGREE):
            sys.exit(
                f"{after.name}: losses {losses[1]} of the same samples as {before.name}, which has "
                f"{losses[0]}"
            )


def most_of_ranks(value: int) -> int:
    """The largest of all ranks' values."""
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)
