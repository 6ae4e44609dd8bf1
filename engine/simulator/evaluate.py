"""Evaluation of a partition: its simulated time and memory. Pure."""

from dataclasses import dataclass

from balance.types import BoolArray, IntArray
from engine.cost_model.costs import Costs
from engine.simulator.memory import Memory, memory_of
from engine.simulator.program import make_program
from engine.simulator.schedule import Schedule, make_schedule
from engine.simulator.simulate import Timeline, simulate
from engine.simulator.stages import StageCosts, stage_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step."""

    stages: StageCosts
    timeline: Timeline
    memory: Memory

    @property
    def step_ns(self) -> int:
        """Time of the step, without the reduction of gradients and the optimizer."""
        return self.timeline.step_ns

    def fits(self, memory_bytes: int) -> bool:
        """Whether no rank needs more than `memory_bytes`."""
        return int(self.memory.peak_bytes.max()) <= memory_bytes


def schedule_for(
    name: str, borders: IntArray, num_micro_batches: int, stages_per_rank: int = 1
) -> Schedule:
    """The schedule of a partition's stages."""
    num_ranks = (len(borders) - 1) // stages_per_rank
    return make_schedule(name, num_ranks, num_micro_batches, stages_per_rank)


def evaluate(
    costs: Costs, borders: IntArray, recompute: BoolArray, schedule: Schedule
) -> SimulatedStep:
    """Simulate a step. ConfigError or ValueError if costs, partition and schedule do not match."""
    stages = stage_costs(costs, borders, recompute)
    return SimulatedStep(
        stages=stages,
        timeline=simulate(make_program(schedule, stages)),
        memory=memory_of(schedule, stages),
    )
