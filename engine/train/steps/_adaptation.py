"""`train --recompute adapt`: as few recomputed layers as memory allows.

The first step trains with every layer recomputed. Then, with the optimizer's state, its
micro-batches run a few more times, which changes neither weights nor dropout's random numbers. A
later step that needs more memory is repeated so, and the next choice is made for it too.
"""

from collections import deque
from pathlib import Path

import numpy as np
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.planning.plan import Plan
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.profiling.recompute_trials import AdaptOptions, adapt_running
from isobatch.engine.runtime.stage_executor import StepResult
from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.train.launch import is_first_rank
from isobatch.engine.train.layout import Layout
from isobatch.engine.train.models.open_model import PipelineModel
from isobatch.engine.train.options import GIB, ONE_STAGE, TrainConfig
from isobatch.engine.train.step_source import SourceStep
from isobatch.engine.train.steps.step_tuning import costs_of, read_model_profile

MIB = 2**20
MOST_STEPS = 3
"""Steps that a choice is made for: the last, as one that ran out of memory was heavy."""


class RecomputeAdapter:
    """Chooses the recomputed layers of a run. All ranks make the same calls of it."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan | None,
        layout: Layout,
        model: PipelineModel,
        device: torch.device,
    ) -> None:
        """ConfigError if recomputation cannot be adapted."""
        if layout.stages_per_rank > 1:
            raise ConfigError(ONE_STAGE)
        self._model = model
        self._profile = read_model_profile(config, plan, model)
        costs_of(self._profile, model.trained, self._profile.loads)  # checks what is trained
        self._on_gpu = device.type == "cuda"
        limit_bytes = config.memory_bytes
        if limit_bytes is None and not self._on_gpu:
            if plan is None:
                raise ConfigError("--recompute adapt on a CPU needs --memory-gib, a rank's memory")
            limit_bytes = plan.memory_bytes
        self._evidence: Path | None = config.state / "recompute.json" if config.state else None
        self._options = AdaptOptions(
            limit_bytes=limit_bytes,
            reserve_bytes=int(config.reserve_gib * GIB),
            evidence=self._evidence,
        )
        self._steps: deque[list[Batch]] = deque(maxlen=MOST_STEPS)
        self.is_due = True
        """Whether to choose after this step."""

    def step(self, pipeline: Pipeline, batches: SourceStep) -> StepResult:
        """A training step, repeated with all layers recomputed if memory runs out. OutOfMemory."""
        micro_batches = list(batches)
        normalizer = batches[0].loss_normalizer
        rng = torch.get_rng_state(), torch.cuda.get_rng_state() if self._on_gpu else None
        try:
            return pipeline.step(micro_batches, normalizer)
        except OutOfMemory as error:
            if pipeline.recompute.all():
                raise
            message = str(error)
        # after the except clause: the error's traceback holds tensors
        pipeline.drop_gradients()
        if self._on_gpu:
            torch.cuda.empty_cache()
        pipeline.set_recompute(np.ones_like(pipeline.recompute))
        self.is_due = True
        torch.set_rng_state(rng[0])
        if rng[1] is not None:
            torch.cuda.set_rng_state(rng[1])
        if is_first_rank():
            print(f"{message}; the step is repeated with every layer recomputed", flush=True)
        return pipeline.step(micro_batches, normalizer)

    def adapt(
        self, pipeline: Pipeline, batches: SourceStep, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Set as little recomputation as fits, after a step of training. Gradients are dropped.

        If not even full recomputation leaves the reserve: InfeasiblePlan after the first step;
        after a later one, everything stays recomputed. DataError if evidence cannot be written.
        """
        steps = [*list(self._steps)[1 - MOST_STEPS :], list(batches)]
        is_first, self.is_due = not self._steps, False
        self._steps.append(list(batches))
        try:
            text = self._adapt(pipeline, steps, optimizer)
        except InfeasiblePlan as error:
            if is_first:
                raise
            text = f"recomputed from here on: everything; {error}"
        except OSError as error:
            raise DataError(f"{self._evidence}: {error.strerror}") from None
        if is_first_rank():
            print(text, flush=True)

    def _adapt(
        self, pipeline: Pipeline, steps: list[list[Batch]], optimizer: torch.optim.Optimizer | None
    ) -> str:
        """Choose for these steps; -> the choice, for people."""
        loads = batch_loads([batch for step in steps for batch in step], self._model.preset)
        costs = costs_of(self._profile, self._model.trained, loads)
        if self._evidence is not None:
            self._evidence.parent.mkdir(parents=True, exist_ok=True)
        choice = adapt_running(pipeline, costs, steps, self._options, optimizer)
        names = self._model.names
        recomputed = [names[index] for index in np.flatnonzero(choice.recompute).tolist()]
        left_mib = ", ".join(f"{size / MIB:,.0f}" for size in choice.left_bytes)
        return (
            f"recomputed from here on: {', '.join(recomputed) or 'nothing'}; left {left_mib} MiB"
            f" ({len(choice.trials)} runs)"
        )
