"""Training of the small model in each variant, measured: `Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ablation.data import Steps, every, loads_of, samples_of, true_tokens
from ablation.model import KINDS, Batch, kinds_of, make_batch, make_model
from ablation.ranks import GIB, Measured, Row, Step, consecutive, cpu_clock, measure
from ablation.shapes import Shape
from ablation.variants import Variant
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads, joined_loads
from isobatch.engine.cost_model.profile_table import Profile, profiled_costs
from isobatch.engine.planning.partition import even_partition
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import (
    LayerLabels,
    MeasureOptions,
    measure_layers,
)

REPEATS = 4
"""Of each layer's measurement, unless told otherwise."""
PROFILED = 6
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
        shape: Shape,
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
        self.shape, self.counts, self.repeats = shape, counts, repeats
        self.replicas = dist.get_world_size() // num_stages
        self.places = consecutive(dist.get_world_size(), self.replicas)
        self.replica = next(
            place for place, ranks in enumerate(self.places) if dist.get_rank() in ranks
        )
        self.model = make_model(shape, frozen_encoder=frozen_encoder)
        self.num_layers = len(self.model.layers)
        self.num_stages, self._data = num_stages, data
        self.profile = self.measure_layers()
        self._split_profile: Profile | None = None

    def measure_layers(self, *, apart: bool = False) -> Profile:
        """The profile of the model's layers, as the machine is now.

        `apart`: with weight gradients in passes of their own, which takes longer.
        """
        data, num_stages, kinds = self._data, self.num_stages, kinds_of(self.model)
        groups = [(own, padded) for steps, padded in data for own in every(steps)]
        loads = joined_loads(
            [loads_of(own, self.counts, self.shape.sizes, padded=padded) for own, padded in groups]
        )
        batches = [(samples, padded) for own, padded in groups for samples in samples_of(own)]
        chosen = spread(loads.vision.tokens, loads.llm.tokens)
        borders = even_partition(np.ones(self.num_layers, np.int64), num_stages)
        profile = measure_layers(
            Pipeline(self.model, borders, np.zeros(self.num_layers, np.bool_), self.places),
            [
                make_batch(batches[place][0], self.counts, self.shape, padded=batches[place][1])
                for place in chosen.tolist()
            ],
            loads.take(chosen),
            LayerLabels(
                names=[f"{kind} {place}" for place, kind in enumerate(kinds)],
                kinds=kinds,
                phases=dict(KINDS.values()),
            ),
            MeasureOptions(repeats=self.repeats, apart=apart),
        )
        if not cpu_clock():
            return profile
        # on this clock messages take no time
        free = np.zeros_like(profile.costs.send_ns)
        return replace(profile, costs=replace(profile.costs, send_ns=free))

    def pipeline(self, variant: Variant) -> Pipeline:
        """This rank's part."""
        ahead = range(1, len(self.places[0])) if self.model.first_trained else ()
        return Pipeline(
            self.model,
            variant.borders,
            variant.recompute,
            self.places,
            PipelineOptions(
                schedule=variant.schedule,
                stages_per_rank=variant.stages_per_rank,
                encoder_ranks=ahead,
            ),
        )

    def steps(self, variant: Variant) -> list[Step]:
        """This rank's micro-batches of all steps."""
        return [
            Step(
                batches=self.batches(step[self.replica], padded=variant.padded),
                num_labels=int(sum(self.counts.num_loss_tokens[own.samples].sum() for own in step)),
                schedule=variant.schedule_of(number, self.replica),
            )
            for number, step in enumerate(variant.steps)
        ]

    def batches(self, groups: Groups, *, padded: bool) -> list[Batch]:
        """Micro-batches of samples."""
        return [
            make_batch(samples, self.counts, self.shape, padded=padded)
            for samples in samples_of(groups)
        ]

    def cost(self, loads: Loads) -> Costs:
        """By the profile; micro-batches may become larger than any that was measured."""
        return profiled_costs(self.profile, loads, farthest=np.inf)

    def measure_split(self) -> None:
        """Measure layers as zero-bubble schedules run them, for `split_cost`; all ranks call it."""
        self._split_profile = self.measure_layers(apart=True)

    def split_cost(self, loads: Loads) -> Costs:
        """Where weight gradients are passes of their own. After `measure_split`."""
        assert self._split_profile is not None
        return profiled_costs(self._split_profile, loads, farthest=np.inf)

    def costs(self, groups: Groups, padded: bool, split: bool = False) -> Costs:
        """Of micro-batches."""
        cost = self.split_cost if split else self.cost
        return cost(loads_of(groups, self.counts, self.shape.sizes, padded=padded))

    def sample_loads(self, counts: Counts) -> Loads:
        """Of samples by themselves."""
        alone = Groups(np.arange(len(counts)), np.arange(len(counts) + 1))
        return loads_of(alone, counts, self.shape.sizes, padded=False)

    def heaviest(self, variant: Variant) -> list[Step]:
        """The step with the largest micro-batch, by tokens of both phases."""
        loads = [
            loads_of(own, self.counts, self.shape.sizes, padded=variant.padded)
            for own in every(variant.steps)
        ]
        most = [int((own.vision.tokens + own.llm.tokens * self.shape.merge).max()) for own in loads]
        place = int(np.argmax(most)) // self.replicas
        return [self.steps(variant)[place]]

    def peak_bytes(self, variant: Variant, pipeline: Pipeline) -> int:
        """Weights, gradients, Adam's moments and activations of the rank that holds most, in the
        heaviest steps.
        """
        moments = adam(pipeline).state.values()
        held = [*pipeline.parameters(), *(value for own in moments for value in own.values())]
        with LiveBytes() as memory:
            measure(pipeline, self.heaviest(variant), self.replicas)
        return most_of_ranks(memory.peak_bytes + sum(tensor.nbytes for tensor in held))

    def rows(self, variants: Sequence[Variant]) -> list[Row]:
        """All variants; memory is counted first, which warms up. Losses of equal samples must be
        equal.
        """
        pipelines = [self.pipeline(variant) for variant in variants]
        peaks = [self.peak_bytes(*pair) for pair in zip(variants, pipelines, strict=True)]
        # in turns, step by step: the machine is not always as fast
        steps = [self.steps(variant) for variant in variants]
        turns = [
            [
                measure(pipeline, own[number : number + 1], self.replicas)
                for pipeline, own in zip(pipelines, steps, strict=True)
            ]
            for number in range(len(steps[0]))
        ]
        measured = [Measured.joined(own) for own in zip(*turns, strict=True)]
        check_losses(variants, measured)
        return [self._row(*found) for found in zip(variants, peaks, measured, strict=True)]

    def _row(self, variant: Variant, peak_bytes: int, measured: Measured) -> Row:
        seconds = float(measured.seconds.sum())
        # what recomputation is of the passes, by the profile
        passes = recomputed = 0
        for own in every(variant.steps):
            costs = self.costs(own, variant.padded, variant.splits_backward)
            passes += int((costs.forward_ns + costs.backward_ns).sum())
            recomputed += int(costs.recompute_ns[variant.recompute].sum())
        return Row(
            name=variant.name,
            tokens=true_tokens(variant.steps, self.counts),
            predicted_s=self.predicted_s(variant),
            measured_s=seconds,
            replayed_s=float(measured.replayed_s.sum()),
            waiting=1 - measured.busy_s / (dist.get_world_size() * seconds),
            peak_gib=peak_bytes / GIB,
            work_s=measured.busy_s * passes / (passes + recomputed),
            recomputed=f"{int(variant.recompute.sum())} of {len(variant.recompute)}",
        )

    def predicted_s(self, variant: Variant) -> float:
        """What the simulator makes of the profile, all steps."""
        if variant.tuned:
            steps = [[one.timeline.step_ns for one in step] for step in variant.tuned]
        else:
            simulated = variant.simulated(self.costs)
            steps = [[one.step_ns for one in step] for step in simulated]
        return sum(map(max, steps)) / 1e9


def adam(pipeline: Pipeline) -> torch.optim.Optimizer:
    """An optimizer with its state, in the middle of training; weights stay as they are."""
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
