"""A step as one rank sees it: what it reads, what ranks share, what it costs.

For the loader, which reads it, and for figures. `loaders.steps.steps` makes it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.order.step_order import GroupOrder
from isobatch.common.types import FloatArray, IntArray
from isobatch.loaders.steps.selection import Selection


class StepTotals(NamedTuple):
    """Sums over all groups of a step, the same on every rank."""

    num_loss_tokens: int
    num_samples: int
    loss_normalizer: float
    """What `MicroBatch.loss_normalizer` says."""
    num_tokens: int = 0
    """LLM tokens, padding included."""


class StepFigures(NamedTuple):
    """Figures of some steps that were planned together, the same on every rank.

    A round is a micro-batch, or the whole step if a planner gives ranks unequally many.
    """

    epoch: int
    loss_normalizers: FloatArray
    """Shape (steps,), as `ends`."""
    ends: IntArray
    """Borders of the steps among `builds`, `numbers` and `weights`, without the 0."""
    builds: IntArray
    numbers: IntArray
    """Number of each group in its build, the same in every epoch."""
    weights: FloatArray
    """Weights of each group's labels (`loss_weights`)."""
    vit_tokens: IntArray
    """Cost of all ranks, shape (steps, dp, rounds), as `llm_tokens`."""
    llm_tokens: IntArray
    complete: NDArray[np.bool_]
    """Shape (steps, rounds): whether every rank had a group; False only at an epoch's end."""
    room: IntArray
    """LLM tokens that the groups of each step may have together, (steps,)."""
    llm_squares: IntArray | None = None
    """The LLM's attention (`ComputeLoad.llm_squares`), as `llm_tokens`; None if nobody asks."""

    def part(self, first: int, last: int) -> "StepFigures":
        """Those of the steps `first` to `last`, with it."""
        steps, start = slice(first, last + 1), int(self.ends[first - 1]) if first else 0
        ends = self.ends[steps] - start
        groups = slice(start, start + int(ends[-1]))
        return StepFigures(
            epoch=self.epoch,
            loss_normalizers=self.loss_normalizers[steps],
            ends=ends,
            builds=self.builds[groups],
            numbers=self.numbers[groups],
            weights=self.weights[groups],
            vit_tokens=self.vit_tokens[steps],
            llm_tokens=self.llm_tokens[steps],
            complete=self.complete[steps],
            room=self.room[steps],
            llm_squares=None if self.llm_squares is None else self.llm_squares[steps],
        )


class StepPlan(NamedTuple):
    """One step for one rank."""

    micro_batches: tuple[Selection, ...]
    totals: StepTotals
    num_pixel_rows: int
    """Rows of `pixel_values` on this rank: image patches, or ViT tokens at native resolution."""
    num_tokens: int
    """LLM tokens of this rank."""
    num_audio_tokens: int
    """LLM tokens of the clips that this rank decodes."""
    stream: GroupOrder
    """Position in the epoch's stream after this step."""
    figures: StepFigures
    """Of this step, which is the one at `place`, and others."""
    place: int
    encoders: Mapping[str, tuple[Selection, ...]] = MappingProxyType({})
    """By encoder, this rank's batches; the micro-batches then come without that encoder's input."""
    note: object = None
    """What the planner tells this rank's trainer."""
    planning_s: float | None = None
    """Time that the planner took; None without one."""

    @property
    def selections(self) -> list[Selection]:
        """All that is to be read."""
        encoded = (selection for batches in self.encoders.values() for selection in batches)
        return [*self.micro_batches, *encoded]
