"""OrchMLLM's dispatching behind the loader's hook: `DispatchedSteps` tells each rank what to encode
and what to train.

Of every rank's m-th micro-batch all ranks together make one dispatch, so each keeps its number of
micro-batches. The loader reads every image on the rank that encodes it; only features travel, by
routes that come with the step as its note. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from balance.steps.step_planner import ENCODERS, StepAssignment, StepRequest
from balance.types import Groups, IntArray
from engine.dispatching.dispatch import DispatchOptions, DispatchPlan, Examples, plan_dispatch
from engine.dispatching.routes import planned_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedSteps:
    """A `balance.steps.step_planner.StepPlanner`: give it to a loader as `planner`."""

    options: DispatchOptions = field(default_factory=lambda: DispatchOptions(reads_directly=True))
    audio_downsample: int = 1
    """Encoder tokens per LLM token (`AudioRule.downsample`)."""

    def __call__(self, samples: StepRequest) -> StepAssignment:
        """Every rank's micro-batches and encoders' work, with `PlannedRoutes` as notes."""
        rounds = [self._round(samples, number) for number in range(samples.micro_batches)]
        encoders = [name for name in ENCODERS if name in self.options.algorithms]
        work = StepAssignment(
            micro_batches=_of_ranks(rounds, "llm", samples.dp),
            encoders={name: _of_ranks(rounds, name, samples.dp) for name in encoders},
        )
        return replace(work, notes=planned_routes(work, samples.counts))

    def plan(self, samples: StepRequest) -> list[DispatchPlan]:
        """The same as plans, one for every rank's m-th micro-batch, numbered within each."""
        return [self._round(samples, number)[1] for number in range(samples.micro_batches)]

    def _round(self, samples: StepRequest, number: int) -> tuple[IntArray, DispatchPlan]:
        """(numbers of the samples, their plan)."""
        groups = Groups(np.arange(len(samples)), samples.offsets).take(
            np.arange(samples.dp) * samples.micro_batches + number
        )
        examples = Examples.of_counts(
            samples.counts.take(groups.samples),
            groups.offsets,
            audio_downsample=self.audio_downsample,
        )
        return groups.samples, plan_dispatch(examples, replace(self.options, reads_directly=True))


def _of_ranks(
    rounds: list[tuple[IntArray, DispatchPlan]], phase: str, num_ranks: int
) -> tuple[Groups, ...]:
    """Of each rank, its batch of every round."""
    batches = [(numbers, plan.batches(phase)) for numbers, plan in rounds]
    made = []
    for rank in range(num_ranks):
        parts = [numbers[own[rank]] for numbers, own in batches]
        made.append(Groups(np.concatenate(parts), np.cumsum([0, *map(len, parts)])))
    return tuple(made)
