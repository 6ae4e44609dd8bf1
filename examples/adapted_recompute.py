"""`train_pipeline.py --recompute adapt`: as few recomputed layers as memory allows, found behind
the first step.

That step is the run's own, with every layer recomputed: behind it the optimizer's state takes its
memory. Then its micro-batches run some more times, which changes neither weights nor what dropout
draws: losses are those of any other choice. A later step that is too heavy for the choice is
repeated with every layer recomputed; the next choice is made behind it, for that step too.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pipeline_layout import Layout
from pipeline_models import PipelineModel
from pipeline_start import GIB
from step_tuning import costs_of, read_own_profile
from train_options import ONE_STAGE

from balance.errors import ConfigError, DataError
from engine.planning.adaptive_recompute import AdaptedRecompute, OutOfMemory
from engine.planning.plan import Plan
from engine.planning.recompute import InfeasiblePlan
from engine.runtime.batch_loads import batch_loads
from engine.runtime.pipeline import Pipeline
from engine.runtime.profiling.recompute_trials import adapt_running
from engine.runtime.stage_executor import StepResult
from loaders import MicroBatch
from loaders.step_builder import StepBatches

MIB = 2**20
MOST_STEPS = 3
"""That a choice is made for: the last ones, for a step that ran out was heavier than those of the
choice before it.
"""


class Adaptation:
    """What finds the recomputed layers of a run. All ranks make it and call it alike."""

    def __init__(
        self, args: argparse.Namespace, plan: Plan | None, layout: Layout, model: PipelineModel
    ) -> None:
        """ConfigError if it cannot be done."""
        if layout.stages_per_rank > 1:
            raise ConfigError(ONE_STAGE)
        self._profile = read_own_profile(args.profile, model)
        costs_of(
            self._profile, model.trained, self._profile.loads
        )  # refuses one of less than is trained
        self._model, self._names = model, model.names
        self._evidence: Path | None = args.state / "recompute.json" if args.state else None
        self._reserve_bytes, self._limit_bytes = int(args.reserve_gib * GIB), None
        if args.memory_gib is not None:
            self._limit_bytes = int(args.memory_gib * GIB)
        elif args.device == "cpu":
            if plan is None:
                raise ConfigError(
                    "--recompute adapt on a CPU: say how much memory a rank has with --memory-gib"
                )
            self._limit_bytes = plan.memory_bytes
        self._on_gpu = args.device == "cuda"
        self._steps: deque[list[MicroBatch]] = deque(maxlen=MOST_STEPS)
        self.is_due = True
        """Whether a choice is to be made behind this step."""

    def step(self, pipeline: Pipeline, batches: StepBatches) -> StepResult:
        """A step of training, with every layer recomputed if it runs out of memory. OutOfMemory if
        that does too.
        """
        drawn = torch.get_rng_state(), torch.cuda.get_rng_state() if self._on_gpu else None
        try:
            return pipeline.step(batches, batches[0].num_loss_tokens)
        except OutOfMemory as error:
            if pipeline.recompute.all():
                raise
            said = str(error)
        # not before the error has gone, and with it what its traceback holds
        self._make_room(pipeline)
        torch.set_rng_state(drawn[0])
        if drawn[1] is not None:
            torch.cuda.set_rng_state(drawn[1])
        if dist.get_rank() == 0:
            print(f"{said}; the step is repeated with every layer recomputed", flush=True)
        return pipeline.step(batches, batches[0].num_loss_tokens)

    def _make_room(self, pipeline: Pipeline) -> None:
        for weight in pipeline.parameters():
            weight.grad = None
        if self._on_gpu:
            torch.cuda.empty_cache()
        pipeline.set_recompute(np.ones_like(pipeline.recompute))
        self.is_due = True

    def adapt(
        self, pipeline: Pipeline, batches: StepBatches, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Have the pipeline recompute as little as fits; behind a step of training. Gradients are
        dropped.

        If not even full recomputation leaves the reserve, InfeasiblePlan behind the first step;
        everything stays recomputed behind a later one, which has just run so. DataError if evidence
        cannot be written.
        """
        device = batches[0].input_ids.device
        others = list(self._steps)[1 - MOST_STEPS :]
        steps = [*([batch.to(device) for batch in own] for own in others), list(batches)]
        is_first, self.is_due = not self._steps, False
        self._steps.append(
            [batch.to("cpu") for batch in batches]
        )  # a GPU has better to hold than these
        try:
            said = self._adapt(pipeline, steps, optimizer)
        except InfeasiblePlan as error:
            if is_first:
                raise
            said = f"recomputed from here on: everything; {error}"
        except OSError as error:
            raise DataError(f"{self._evidence}: {error.strerror}") from None
        if dist.get_rank() == 0:
            print(said, flush=True)

    def _adapt(
        self,
        pipeline: Pipeline,
        steps: list[list[MicroBatch]],
        optimizer: torch.optim.Optimizer | None,
    ) -> str:
        loads = batch_loads([batch for batches in steps for batch in batches], self._model.preset)
        if self._evidence is not None:
            self._evidence.parent.mkdir(parents=True, exist_ok=True)
        found = adapt_running(
            pipeline,
            costs_of(self._profile, self._model.trained, loads),
            steps,
            limit_bytes=self._limit_bytes,
            reserve_bytes=self._reserve_bytes,
            optimizer=optimizer,
            evidence=self._evidence,
        )
        return describe(found, self._names)


def describe(found: AdaptedRecompute, names: Sequence[str]) -> str:
    """What was chosen, for people."""
    chosen = ", ".join(names[place] for place in np.flatnonzero(found.recompute)) or "nothing"
    left = ", ".join(f"{size / MIB:,.0f}" for size in found.left_bytes)
    return f"recomputed from here on: {chosen}; left {left} MiB ({len(found.trials)} runs)"
