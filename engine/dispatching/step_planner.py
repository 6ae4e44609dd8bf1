"""OrchMLLM as a loader's step planner. Pure.

The m-th micro-batches of all ranks are one dispatch, so each rank keeps its number of
micro-batches. The loader reads every image on the rank that encodes it; only features travel, by
routes that come with the step as its note.
"""

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
        """Micro-batches and encoder batches of every rank, with `PlannedRoutes` as notes."""
        rounds = [self._round(samples, number) for number in range(samples.micro_batches)]
        encoders = [name for name in ENCODERS if name in self.options.algorithms]
        work = StepAssignment(
            micro_batches=_of_ranks(rounds, "llm", samples.dp),
            encoders={name: _of_ranks(rounds, name, samples.dp) for name in encoders},
        )
        return replace(work, notes=planned_routes(work, samples.counts))

    def plan(self, samples: StepRequest) -> list[DispatchPlan]:
        """The plans of all rounds; examples are numbered within each."""
        return [self._round(samples, number)[1] for number in range(samples.micro_batches)]

    def _round(self, samples: StepRequest, number: int) -> tuple[IntArray, DispatchPlan]:
        """(numbers of the samples, their plan)."""
        own = np.arange(samples.dp) * samples.micro_batches + number
        groups = Groups(np.arange(len(samples)), samples.offsets).take(own)
        counts, downsample = samples.counts.take(groups.samples), self.audio_downsample
        examples = Examples.of_counts(counts, groups.offsets, audio_downsample=downsample)
        return groups.samples, plan_dispatch(examples, replace(self.options, reads_directly=True))


def _of_ranks(
    rounds: list[tuple[IntArray, DispatchPlan]], phase: str, num_ranks: int
) -> tuple[Groups, ...]:
    """Each rank's batches of all rounds."""
    batches = [(numbers, plan.batches(phase)) for numbers, plan in rounds]
    made = []
    for rank in range(num_ranks):
        parts = [numbers[own[rank]] for numbers, own in batches]
        made.append(Groups(np.concatenate(parts), np.cumsum([0, *map(len, parts)])))
    return tuple(made)
