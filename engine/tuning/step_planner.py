"""The tuner behind the loader's hook: `TunedSteps` packs each step anew for pipelines that run it
data-parallel.

A step's samples are dealt to the data-parallel ranks by cost, each rank's pipeline is tuned by
itself, and the step is as slow as its slowest pipeline. If dealing anew does not help, each rank
tunes what it was given, or keeps it. Every rank comes to the same answer by itself, so planning
takes as long as tuning all pipelines. What a trainer needs besides the micro-batches, their
schedule above all, travels with the step as its note: so it belongs to that step however far ahead
it was planned, and whatever was resumed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from balance.steps.post_balancing import as_batches, balance_sums
from balance.steps.step_planner import StepAssignment, StepRequest
from balance.types import Counts, Groups
from engine.cost_model.loads import Loads
from engine.simulator.schedule import Schedule
from engine.tuning.pack import marginal_costs, pack_in_order
from engine.tuning.tune import PartitionedModel, TuneOptions, TuneResult, tune

FINGERPRINT_BYTES = 6
"""Few enough that the number is exact in any format that it travels in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNote:
    """What a rank's trainer needs of a tuned step besides micro-batches (`step.note`)."""

    schedule: Schedule | None
    """Schedule of the rank's micro-batches, encodings included; None without samples."""
    step_ns: int
    """Predicted, of the slowest rank."""
    untuned_ns: int
    """The same for the step as it was given."""
    fingerprint: int
    """Of all ranks' micro-batches and schedules: ranks that planned one step have the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedStep:
    """A step of all data-parallel ranks; None for a rank without samples."""

    groups: tuple[Groups, ...]
    """Of each rank, micro-batches of the step's samples in the order in which they enter."""
    tuned: tuple[TuneResult | None, ...]
    """Of each rank; what it counts by are the rank's own samples."""
    untuned_ns: int
    """Of the slowest rank, as the step was given."""

    @property
    def step_ns(self) -> int:
        """Of the slowest rank, without the reduction of gradients."""
        return max((one.step_ns for one in self.tuned if one is not None), default=0)

    @property
    def notes(self) -> tuple[StepNote, ...]:
        """Of each rank."""
        schedules = [one.step.schedule if one is not None else None for one in self.tuned]
        fingerprint = _fingerprint(self.groups, schedules)
        return tuple(
            StepNote(
                schedule=own,
                step_ns=self.step_ns,
                untuned_ns=self.untuned_ns,
                fingerprint=fingerprint,
            )
            for own in schedules
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSteps:
    """A `balance.steps.step_planner.StepPlanner`: give it to a loader as `planner`."""

    pipeline: PartitionedModel
    options: TuneOptions
    loads: Callable[[Counts], Loads]
    """A column per sample: `engine.cost_model.loads.sample_loads` of a model preset."""

    def __call__(self, samples: StepRequest) -> StepAssignment:
        """The micro-batches of every rank, with a `StepNote` for each."""
        plan = self.plan(samples)
        return StepAssignment(micro_batches=plan.groups, notes=plan.notes)

    def plan(self, samples: StepRequest) -> TunedStep:
        """The same with what it is predicted to take."""
        loads = self.loads(samples.counts)
        given = [self._given(samples, rank) for rank in range(samples.dp)]
        as_given = self._tune(loads, given)
        untuned_ns = max(
            (one.breakdown.untuned_ns for one in as_given if one is not None), default=0
        )
        plans = [
            TunedStep(
                groups=_numbered(as_given, given), tuned=tuple(as_given), untuned_ns=untuned_ns
            )
        ]
        if samples.dp > 1 and len(samples):
            dealt = self._deal(loads, given)
            anew = self._tune(loads, dealt)
            plans.append(
                TunedStep(groups=_numbered(anew, dealt), tuned=tuple(anew), untuned_ns=untuned_ns)
            )
        return min(plans, key=lambda plan: plan.step_ns)

    def _given(self, samples: StepRequest, rank: int) -> Groups:
        """A rank's micro-batches that hold samples."""
        first, last = rank * samples.micro_batches, (rank + 1) * samples.micro_batches
        offsets = np.unique(samples.offsets[first : last + 1])
        return Groups(np.arange(offsets[0], offsets[-1]), offsets - offsets[0])

    def _deal(self, loads: Loads, given: list[Groups]) -> list[Groups]:
        """All samples dealt anew by cost, packed in their order."""
        lengths, count = loads.llm.tokens, sum(map(len, given))
        costs = marginal_costs(self.pipeline.cost, loads, self.pipeline.recompute, count)
        largest = max(int(own.sum(lengths).max(initial=1)) for own in given)
        parts = as_batches(
            balance_sums(sum(costs.values(), np.zeros(len(lengths))), len(given)), len(given)
        )
        dealt = []
        for rank in range(len(given)):
            packed = (
                pack_in_order(lengths[parts[rank]], largest) if len(parts[rank]) else _nothing()
            )
            dealt.append(Groups(parts[rank][packed.samples], packed.offsets))
        return dealt

    def _tune(self, loads: Loads, given: list[Groups]) -> list[TuneResult | None]:
        """Each rank's pipeline, tuned by itself."""
        return [
            tune(
                loads.take(own.samples),
                Groups(np.arange(len(own.samples)), own.offsets),
                self.pipeline,
                self.options,
            )
            if len(own.samples)
            else None
            for own in given
        ]


def _numbered(tuned: list[TuneResult | None], given: list[Groups]) -> tuple[Groups, ...]:
    """The tuned micro-batches, with the step's counts; one empty where a rank has none."""
    return tuple(
        _one_empty() if one is None else Groups(own.samples[one.groups.samples], one.groups.offsets)
        for one, own in zip(tuned, given, strict=True)
    )


def _fingerprint(groups: tuple[Groups, ...], schedules: list[Schedule | None]) -> int:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for own, schedule in zip(groups, schedules, strict=True):
        parts = [own.samples, own.offsets]
        if schedule is not None:
            parts += [
                schedule.kinds,
                schedule.stages,
                schedule.micro_batches,
                schedule.rank_offsets,
            ]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _nothing() -> Groups:
    return Groups(np.zeros(0, np.int64), np.zeros(1, np.int64))


def _one_empty() -> Groups:
    return Groups(np.zeros(0, np.int64), np.zeros(2, np.int64))
