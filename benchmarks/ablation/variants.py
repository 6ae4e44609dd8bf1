"""`Variant`: what an ablation compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ablation.data import Steps
from isobatch.common.types import Groups, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.evaluate import SimulatedStep, evaluate
from isobatch.engine.simulator.schedule import Schedule, make_schedule
from isobatch.engine.tuning.precompute import EncodedStep

CostsOf = Callable[[Groups, bool, bool], Costs]
"""(micro-batches, whether they are padded, whether weight gradients are passes of their own) ->
costs of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train: which micro-batches, cut and recomputed how, in which order."""

    name: str
    steps: Steps
    padded: bool
    borders: IntArray
    recompute: NDArray[np.bool_]
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    tuned: tuple[tuple[EncodedStep, ...], ...] = ()
    """Of each step and replica, where it has a schedule of its own."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are passes of their own."""
        return self.schedule.endswith("zero_bubble")

    def schedule_of(self, step: int, replica: int) -> Schedule:
        """What a replica runs in a step."""
        if self.tuned:
            return self.tuned[step][replica].schedule
        count = len(self.steps[step][replica])
        num_ranks = (len(self.borders) - 1) // self.stages_per_rank
        return make_schedule(self.schedule, num_ranks, count, self.stages_per_rank)

    def simulated(self, costs_of: CostsOf) -> list[list[SimulatedStep]]:
        """Every step and replica, simulated; of schedules that encode nothing ahead."""
        return [
            [
                evaluate(
                    costs_of(own, self.padded, self.splits_backward),
                    self.borders,
                    self.recompute,
                    self.schedule_of(number, replica),
                )
                for replica, own in enumerate(step)
            ]
            for number, step in enumerate(self.steps)
        ]
