"""A model in training on one device, profiled and run in each variant: `Trainer`.

The whole model is one stage of a pipeline. A step is timed from the moment its micro-batches are on
the device: its passes by themselves, and with the optimizer. On a GPU its allocator counts memory,
on a CPU `LiveBytes`, in steps that are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ablation.data import Sizes, Steps, every, loads_of, samples_of, true_tokens
from ablation.real import spread
from numpy.typing import NDArray

from gpu.batches import Batch, Sequences, make_batch
from gpu.device import Bench
from gpu.layers import make_model
from gpu.optimizer import MasterAdamW
from gpu.profiles import TRAINING, with_masters
from isobatch.common.types import Counts, Groups
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.layer_list import phases_of
from isobatch.engine.cost_model.loads import joined_loads
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import Profile, profiled_costs
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.planning.recompute import InfeasiblePlan, choose_recompute
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import LayerLabels, measure_layers
from isobatch.engine.runtime.profiling.recompute_trials import (
    AdaptOptions,
    StepObserver,
    adapt_running,
)
from isobatch.engine.simulator.evaluate import SimulatedStep, evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset

LEARNING_RATE = 1e-5
BOUNDLESS = 1 << 60
"""Bytes: a limit that is none, under which a run tells what it needed."""
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train."""

    name: str
    steps: Steps
    """Of one replica."""
    padded: bool
    recompute: NDArray[np.bool_]
    limit_bytes: int | None = None
    """That it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How it went."""

    name: str
    limit_bytes: int | None
    recomputed: dict[str, int]
    """Layers of each kind."""
    tokens: int
    """Of the LLM, of all samples, without padding."""
    passes_s: list[float]
    """Of each step, forward and backward, the median of the rounds; empty if it ran out of
    memory.
    """
    predicted_s: list[float]
    optimizer_s: float
    """Of all steps."""
    flops: float
    """That the samples need, nothing padded or recomputed."""
    peak_bytes: int | None
    """In the heaviest steps, optimizer state and micro-batches included; None if that was too
    much.
    """
    predicted_bytes: int
    whole_step_bytes: int | None
    """Allocated at most in all steps, clipping and the optimizer included; None on a CPU."""
    losses: list[float]

    @property
    def seconds(self) -> float:
        """Of all steps, the optimizer's included."""
        return sum(self.passes_s) + self.optimizer_s


class Trainer:
    """One model, its optimizer and its profile."""

    def __init__(
        self,
        preset: ModelPreset,
        counts: Counts,
        sizes: Sizes,
        data: Sequence[tuple[Steps, bool]],
        bench: Bench,
    ) -> None:
        """`data`: of all that will be run, and whether it is padded; layers are profiled on some of
        it.
        """
        self.preset, self.counts, self.sizes, self.bench = preset, counts, sizes, bench
        groups = [(own, padded) for steps, padded in data for own in every(steps)]
        loads = joined_loads(
            [loads_of(own, counts, sizes, padded=padded) for own, padded in groups]
        )
        modelled = layer_costs(
            preset, bench.cluster, Parallelism(), loads.take(np.zeros(1, np.int64)), TRAINING
        )
        count = modelled.num_layers
        self.kinds, self.borders = modelled.kinds, np.array([0, count])
        self.pipeline = Pipeline(
            make_model(preset, bench.device, bench.dtype),
            self.borders,
            np.ones(count, np.bool_),
            [[0]],
            PipelineOptions(device=bench.device),
        )
        self.num_params = sum(weight.numel() for weight in self.pipeline.parameters())
        chosen = spread(loads.vision.tokens, loads.llm.tokens).tolist()
        batches = [batch for own, padded in groups for batch in samples_of(own)]
        is_padded = [padded for own, padded in groups for _ in range(len(own))]
        found = measure_layers(
            self.pipeline,
            [
                self._batch(batches[place], padded=is_padded[place]).to(bench.device)
                for place in chosen
            ],
            loads.take(np.array(chosen)),
            LayerLabels(names=modelled.names, kinds=modelled.kinds, phases=phases_of(preset)),
        )
        self.profile: Profile = with_masters(found)
        self.optimizer = MasterAdamW(self.pipeline.layers.values(), LEARNING_RATE)

    def _batch(self, samples: NDArray[np.int64], *, padded: bool) -> Batch:
        return make_batch(
            Sequences.of_samples(samples, self.counts, padded=padded), self.preset, self.bench.dtype
        )

    def batches(self, step: Sequence[Groups], *, padded: bool) -> list[Batch]:
        """A step's micro-batches, on the device."""
        (own,) = step
        return [
            self._batch(samples, padded=padded).to(self.bench.device) for samples in samples_of(own)
        ]

    def heaviest(self, way: Way) -> Steps:
        """The steps with the largest micro-batch of each phase."""
        loads = [
            loads_of(own, self.counts, self.sizes, padded=way.padded) for own in every(way.steps)
        ]
        most = {
            int(np.argmax([getattr(own, phase).tokens.max() for own in loads]))
            for phase in ("vision", "llm")
        }
        return tuple(way.steps[place] for place in sorted(most))

    def costs(self, own: Groups, *, padded: bool) -> Costs:
        """Of micro-batches, by the profile."""
        return profiled_costs(
            self.profile, loads_of(own, self.counts, self.sizes, padded=padded), farthest=np.inf
        )

    def peak_bytes(self, way: Way) -> int | None:
        """What really is allocated at most in a way's heaviest steps; None if that is more than the
        device has.
        """
        steps = [self.batches(step, padded=way.padded) for step in self.heaviest(way)]
        observe = StepObserver(
            self.pipeline, steps, limit_bytes=BOUNDLESS, optimizer=self.optimizer
        )
        try:
            left = observe(way.recompute)
        except OutOfMemory:
            return None
        return BOUNDLESS - int(left[0]) + self._uncounted(steps)

    def free_bytes(self) -> int:
        """All that this process may have of the device."""
        self.bench.release()
        free, _ = torch.cuda.mem_get_info(self.bench.device)
        return free + torch.cuda.memory_allocated(self.bench.device)

    def _uncounted(self, steps: Sequence[Sequence[Batch]]) -> int:
        """Micro-batches, which an allocator counts and `LiveBytes` does not: they were there
        before.
        """
        on_gpu = self.bench.device.type == "cuda"
        return 0 if on_gpu else sum(batch.nbytes for batches in steps for batch in batches)

    def predicted_bytes(self, way: Way) -> int:
        """The same by the profile: the planner's, and micro-batches, of which it knows nothing."""
        costs = self._heavy_costs(way)
        return self._inputs(way) + int(self._evaluated(costs, way).memory.peak_bytes.max())

    def _inputs(self, way: Way) -> int:
        """Bytes of the heaviest steps' micro-batches."""
        return sum(
            self._batch(samples, padded=way.padded).nbytes
            for step in self.heaviest(way)
            for own in step
            for samples in samples_of(own)
        )

    def _evaluated(self, costs: Costs, way: Way) -> SimulatedStep:
        return evaluate(
            costs, self.borders, way.recompute, make_schedule("1f1b", 1, costs.num_micro_batches)
        )

    def adapted(self, way: Way) -> tuple[NDArray[np.bool_], int]:
        """The least recomputation with which a way's heaviest steps run within its limit, and how
        many runs it took.
        """
        steps = [self.batches(step, padded=way.padded) for step in self.heaviest(way)]
        limit = (way.limit_bytes or 0) - self._uncounted(steps)
        found = adapt_running(
            self.pipeline,
            self._heavy_costs(way),
            steps,
            AdaptOptions(limit_bytes=limit),
            self.optimizer,
        )
        return found.recompute, len(found.trials)

    def planned(self, way: Way) -> NDArray[np.bool_] | None:
        """The planner's choice within the same limit, by the profile; None if it sees none."""
        costs = self._heavy_costs(way)
        schedule, limit = (
            make_schedule("1f1b", 1, costs.num_micro_batches),
            (way.limit_bytes or 0) - self._inputs(way),
        )
        try:
            return choose_recompute(costs, self.borders, schedule, limit)
        except InfeasiblePlan:
            return None

    def _heavy_costs(self, way: Way) -> Costs:
        """Of the heaviest steps' micro-batches, as those of one step: with one stage there is never
        more than one.
        """
        parts = [
            loads_of(own, self.counts, self.sizes, padded=way.padded)
            for own in every(self.heaviest(way))
        ]
        return profiled_costs(self.profile, joined_loads(parts), farthest=np.inf)

    def run(self, way: Way, rounds: int) -> Ran:
        """Train so: one step that warms up, then all, `rounds` times."""
        self.pipeline.set_recompute(way.recompute)
        turns, losses, optimizer_s = [], [], 0.0
        self.bench.release()
        self.pipeline.peak_bytes()  # from here on
        try:
            self._step(way, way.steps[0])
            for _ in range(rounds):
                ran = [self._step(way, step) for step in way.steps]
                turns.append([passes for passes, _, _ in ran])
                optimizer_s += sum(own for _, own, _ in ran) / rounds
                losses = [loss for _, _, loss in ran]
        except (OutOfMemory, torch.OutOfMemoryError):
            turns = [[]]
        whole_step = self.pipeline.peak_bytes()
        self.bench.release()
        samples = np.concatenate([own.samples for own in every(way.steps)])
        model = FlopsModel.of(self.preset)
        return Ran(
            name=way.name,
            limit_bytes=way.limit_bytes,
            recomputed=self.count(way.recompute),
            tokens=true_tokens(way.steps, self.counts),
            passes_s=np.median(turns, axis=0).tolist(),
            predicted_s=[
                self._evaluated(self.costs(own, padded=way.padded), way).step_ns / NS_PER_S
                for own in every(way.steps)
            ],
            optimizer_s=optimizer_s,
            flops=float(model.train_flops(model.loads(self.counts.take(samples))).sum()),
            peak_bytes=self.peak_bytes(way),
            predicted_bytes=self.predicted_bytes(way),
            whole_step_bytes=whole_step,
            losses=losses,
        )

    def _step(self, way: Way, step: Sequence[Groups]) -> tuple[float, float, float]:
        """(seconds of the passes, of clipping and the optimizer, loss)."""
        batches = self.batches(step, padded=way.padded)
        labels = sum(batch.num_labels for batch in batches)
        self.bench.synchronize()
        begun = time.perf_counter()
        result = self.pipeline.step(batches, labels)
        self.bench.synchronize()
        ended = time.perf_counter()
        self.pipeline.reduce_gradients()
        self.pipeline.clip_gradients(1.0)
        self.optimizer.step()
        self.bench.synchronize()
        return ended - begun, time.perf_counter() - ended, result.loss

    def count(self, recompute: NDArray[np.bool_]) -> dict[str, int]:
        """Recomputed layers of each kind."""
        kinds = np.array(self.kinds)
        return {kind: int(recompute[kinds == kind].sum()) for kind in dict.fromkeys(self.kinds)}
