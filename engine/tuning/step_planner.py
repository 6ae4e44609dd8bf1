"""PipeTune as a loader's step planner. Pure.

Samples are assigned to data-parallel ranks by cost, each rank's pipeline is tuned separately, and
the step is as slow as its slowest pipeline. The assignment stays as given unless another one is
simulated to be no slower before it is tuned: all ranks simulate that for all, and each tunes its
own pipeline. So without a message they agree, also after resuming. 64 ranks take about .1 s of CPU
time each; all of them on each took 5 (`benchmarks/tuner_speed.py`). The schedule travels with the
step as its note.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from isobatch.balance.dispatching.post_balancing import as_batches, balance_sums
from isobatch.balance.steps.step_planner import StepAssignment, StepRequest
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.engine.cost_model.loads import Loads, joined_loads, packed_loads
from isobatch.engine.simulator.schedule import Schedule
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning.order_times import order_problem, times_of_orders
from isobatch.engine.tuning.pack import marginal_costs, pack_balanced
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, TuneResult, tune

FINGERPRINT_BYTES = 6
"""Size of a fingerprint: small enough to be exact in any format, such as float64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNote:
    """A rank's data of a tuned step besides its micro-batches; `loaders.StepBatches.note`."""

    rank: int
    """Data-parallel rank that it is for."""
    schedule: Schedule | None
    """Schedule of the rank's micro-batches, with encodings; None for a rank without samples."""
    step_ns: int
    """Predicted time of this rank's pipeline; 0 without samples. The slowest rank's counts."""
    untuned_ns: int
    """Time of the slowest rank for the step as given."""
    fingerprint: int
    """Hash of the samples of each rank: equal on all ranks that planned one step."""
    pipeline_fingerprint: int
    """Hash of this rank's micro-batches and schedule: equal on all ranks of its pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedStep:
    """A step of all data-parallel ranks."""

    groups: tuple[Groups, ...]
    """Micro-batches of each rank, of the step's samples, in the order in which they enter; all in
    one for a rank that is not tuned here."""
    tuned: tuple[TuneResult | None, ...]
    """Result of each rank, in numbers of the rank's own samples; None for one that is not tuned
    here or has no samples."""
    untuned_ns: int
    """Time of the slowest rank for the step as given."""
    fingerprint: int
    """Hash of the samples of each rank."""

    @property
    def step_ns(self) -> int:
        """Time of the slowest rank that is tuned here, without the reduction of gradients."""
        return max((one.step_ns for one in self.tuned if one is not None), default=0)

    @property
    def notes(self) -> tuple[StepNote, ...]:
        """The note of each rank."""
        return tuple(
            StepNote(
                rank=rank,
                schedule=one.step.schedule if one is not None else None,
                step_ns=one.step_ns if one is not None else 0,
                untuned_ns=self.untuned_ns,
                fingerprint=self.fingerprint,
                pipeline_fingerprint=_pipeline_fingerprint(groups, one),
            )
            for rank, (groups, one) in enumerate(zip(self.groups, self.tuned, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSteps:
    """A `balance.steps.step_planner.StepPlanner`: give it to a loader as `planner`."""

    pipeline: PartitionedModel
    options: TuneOptions
    loads: Callable[[Counts], Loads]
    """A column per sample: `engine.cost_model.loads.sample_loads` of a model preset."""

    def __call__(self, samples: StepRequest) -> StepAssignment:
        """The samples of every rank, and micro-batches and `StepNote` of the one that asks."""
        plan = self.plan(samples)
        return StepAssignment(micro_batches=plan.groups, notes=plan.notes)

    def plan(self, samples: StepRequest) -> TunedStep:
        """The same with predicted times; of all ranks if none of them asks."""
        loads = self.loads(samples.counts)
        groups = [self._rank_groups(samples, rank) for rank in range(samples.dp)]
        untuned_ns = self._slowest_ns(loads, groups, memory_bytes=None)
        chosen = groups
        if samples.dp > 1 and len(samples):
            assigned = self._assign(loads, groups)
            memory_bytes = self.pipeline.memory_bytes
            if self._slowest_ns(loads, assigned, memory_bytes=memory_bytes) <= untuned_ns:
                chosen = assigned
        asked = range(samples.dp) if samples.rank is None else [samples.rank]
        tuned = [
            self._tune(loads, part) if rank in asked and len(part.samples) else None
            for rank, part in enumerate(chosen)
        ]
        return TunedStep(
            groups=tuple(map(_numbered, tuned, chosen)),
            tuned=tuple(tuned),
            untuned_ns=untuned_ns,
            fingerprint=_digest([np.sort(part.samples) for part in chosen]),
        )

    def _rank_groups(self, samples: StepRequest, rank: int) -> Groups:
        """A rank's micro-batches that hold samples."""
        first, last = rank * samples.micro_batches, (rank + 1) * samples.micro_batches
        offsets = np.unique(samples.offsets[first : last + 1])
        return Groups(np.arange(offsets[0], offsets[-1]), offsets - offsets[0])

    def _assign(self, loads: Loads, groups: list[Groups]) -> list[Groups]:
        """All samples assigned to ranks by cost, in micro-batches of even cost."""
        lengths = loads.llm.tokens
        count = sum(map(len, groups))
        costs = marginal_costs(self.pipeline.cost, loads, self.pipeline.recompute, count)
        largest = max(int(samples.sum(lengths).max(initial=1)) for samples in groups)
        weights = sum(costs.values(), np.zeros(len(lengths)))
        parts = as_batches(balance_sums(weights, len(groups)), len(groups))
        assigned = []
        for rank in range(len(groups)):
            samples = parts[rank]
            packed = pack_balanced(lengths[samples], weights[samples], max_len=largest)
            assigned.append(Groups(samples[packed.samples], packed.offsets))
        return assigned

    def _slowest_ns(
        self, loads: Loads, ranks: Sequence[Groups], *, memory_bytes: int | None
    ) -> int:
        """Simulated time of the slowest rank, its micro-batches in order; 0 without samples.

        NEVER if one needs more memory.
        """
        pipeline = self.pipeline
        filled = [part for part in ranks if len(part.samples)]
        if not filled:
            return 0
        costs = pipeline.cost(joined_loads([packed_loads(loads, part) for part in filled]))
        stages = stage_costs(costs, pipeline.borders, pipeline.recompute)
        ends = np.cumsum([0, *map(len, filled)])
        slowest_ns = 0
        for first, end in pairwise(ends.tolist()):
            schedule = pipeline.make_schedule(end - first)
            rank_stages = stages.take(np.arange(first, end))
            problem = order_problem(schedule, rank_stages, memory_bytes)
            order = np.arange(end - first)
            slowest_ns = max(slowest_ns, int(times_of_orders(problem, order[np.newaxis])[0]))
        return slowest_ns

    def _tune(self, loads: Loads, part: Groups) -> TuneResult:
        """A rank's pipeline, tuned."""
        groups = Groups(np.arange(len(part.samples)), part.offsets)
        return tune(loads.take(part.samples), groups, self.pipeline, self.options)


def _numbered(tuned: TuneResult | None, groups: Groups) -> Groups:
    """Tuned micro-batches in the step's numbers of samples; untuned, one with all."""
    if tuned is None:
        return Groups(groups.samples, np.array([0, len(groups.samples)]))
    return Groups(groups.samples[tuned.groups.samples], tuned.groups.offsets)


def _pipeline_fingerprint(groups: Groups, tuned: TuneResult | None) -> int:
    parts = [groups.samples, groups.offsets]
    if tuned is not None:
        schedule = tuned.step.schedule
        parts += [schedule.kinds, schedule.stages, schedule.micro_batches, schedule.rank_offsets]
    return _digest(parts)


def _digest(parts: Sequence[IntArray]) -> int:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")
