"""PipeTune as a loader's step planner. Pure.

Samples are assigned to data-parallel ranks by cost, each rank's pipeline is tuned separately, and
the step is as slow as its slowest pipeline. If a new assignment does not help, each rank tunes its
given samples, or keeps them. Every rank computes the same result, so planning takes as long as
tuning all pipelines. The schedule travels with the step as its note, also after resuming.
"""

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
"""Few enough that the number is exact in any format, such as float64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNote:
    """A rank's data of a tuned step besides its micro-batches; `loaders.StepBatches.note`."""

    schedule: Schedule | None
    """Schedule of the rank's micro-batches, with encodings; None for a rank without samples."""
    step_ns: int
    """Predicted time of the slowest rank."""
    untuned_ns: int
    """The same for the step as given."""
    fingerprint: int
    """Hash of all ranks' micro-batches and schedules: equal on ranks that planned one step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedStep:
    """A step of all data-parallel ranks; None for a rank without samples."""

    groups: tuple[Groups, ...]
    """Micro-batches of each rank, of the step's samples, in the order in which they enter."""
    tuned: tuple[TuneResult | None, ...]
    """Result of each rank, in numbers of the rank's own samples."""
    untuned_ns: int
    """Time of the slowest rank for the step as given."""

    @property
    def step_ns(self) -> int:
        """Time of the slowest rank, without the reduction of gradients."""
        return max((one.step_ns for one in self.tuned if one is not None), default=0)

    @property
    def notes(self) -> tuple[StepNote, ...]:
        """The note of each rank."""
        schedules = [one.step.schedule if one is not None else None for one in self.tuned]
        fingerprint = _fingerprint(self.groups, schedules)
        times = {"step_ns": self.step_ns, "untuned_ns": self.untuned_ns}
        return tuple(StepNote(schedule=s, fingerprint=fingerprint, **times) for s in schedules)


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
        """The same with predicted times."""
        loads = self.loads(samples.counts)
        given = [self._given(samples, rank) for rank in range(samples.dp)]
        choices = [(given, self._tune(loads, given))]
        before = (one.breakdown.untuned_ns for one in choices[0][1] if one is not None)
        untuned_ns = max(before, default=0)
        if samples.dp > 1 and len(samples):
            assigned = self._assign(loads, given)
            choices.append((assigned, self._tune(loads, assigned)))
        plans = [
            TunedStep(groups=_numbered(tuned, own), tuned=tuple(tuned), untuned_ns=untuned_ns)
            for own, tuned in choices
        ]
        return min(plans, key=lambda plan: plan.step_ns)

    def _given(self, samples: StepRequest, rank: int) -> Groups:
        """A rank's micro-batches that hold samples."""
        first, last = rank * samples.micro_batches, (rank + 1) * samples.micro_batches
        offsets = np.unique(samples.offsets[first : last + 1])
        return Groups(np.arange(offsets[0], offsets[-1]), offsets - offsets[0])

    def _assign(self, loads: Loads, given: list[Groups]) -> list[Groups]:
        """All samples assigned to ranks by cost, packed in their order."""
        lengths, count = loads.llm.tokens, sum(map(len, given))
        costs = marginal_costs(self.pipeline.cost, loads, self.pipeline.recompute, count)
        largest = max(int(own.sum(lengths).max(initial=1)) for own in given)
        weights = sum(costs.values(), np.zeros(len(lengths)))
        parts = as_batches(balance_sums(weights, len(given)), len(given))
        assigned = []
        for rank in range(len(given)):
            own = parts[rank]
            packed = pack_in_order(lengths[own], largest) if len(own) else _no_micro_batches(0)
            assigned.append(Groups(own[packed.samples], packed.offsets))
        return assigned

    def _tune(self, loads: Loads, given: list[Groups]) -> list[TuneResult | None]:
        """Each rank's pipeline, tuned separately; None without samples."""

        def tuned(own: Groups) -> TuneResult:
            groups = Groups(np.arange(len(own.samples)), own.offsets)
            return tune(loads.take(own.samples), groups, self.pipeline, self.options)

        return [tuned(own) if len(own.samples) else None for own in given]


def _numbered(tuned: list[TuneResult | None], given: list[Groups]) -> tuple[Groups, ...]:
    """Tuned micro-batches in the step's numbers of samples; an empty one for a rank without."""
    return tuple(
        _no_micro_batches(1)
        if one is None
        else Groups(own.samples[one.groups.samples], one.groups.offsets)
        for one, own in zip(tuned, given, strict=True)
    )


def _fingerprint(groups: tuple[Groups, ...], schedules: list[Schedule | None]) -> int:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for own, schedule in zip(groups, schedules, strict=True):
        parts = [own.samples, own.offsets]
        if schedule is not None:
            parts += [schedule.kinds, schedule.stages, schedule.micro_batches]
            parts.append(schedule.rank_offsets)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _no_micro_batches(empty: int) -> Groups:
    """Groups without samples: so many empty micro-batches."""
    return Groups(np.zeros(0, np.int64), np.zeros(empty + 1, np.int64))
