"""A step as one rank sees it: what it reads, what ranks share, what it costs.

For the loader, which reads it, and for figures. `loaders.plan.steps` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balance.order.global_shuffle import GroupOrder
from balance.types import FloatArray, IntArray
from loaders.plan.selection import Selection


class StepGroups(NamedTuple):
    """The groups of a step, of all ranks; arrays of shape (num_groups,)."""

    epoch: int
    builds: IntArray
    numbers: IntArray
    """Number of each group in its build, the same in every epoch."""
    weights: FloatArray
    """Weights of each group's labels (`loss_weights`)."""


class StepTotals(NamedTuple):
    """Sums over all groups of a step, and the groups, the same on every rank."""

    num_loss_tokens: int
    num_samples: int
    loss_normalizer: float
    """What `MicroBatch.loss_normalizer` says."""
    groups: StepGroups
    """For figures."""


class StepLoads(NamedTuple):
    """Cost of the micro-batches of all ranks; int64 arrays of shape (dp, rounds).

    A round is a micro-batch, or the whole step if a planner gives ranks unequally many.
    """

    vit_tokens: IntArray
    llm_tokens: IntArray
    complete: NDArray[np.bool_]
    """Shape (rounds,): whether every rank had a group; False only at the end of an epoch."""


class StepPlan(NamedTuple):
    """One step for one rank."""

    micro_batches: tuple[Selection, ...]
    totals: StepTotals
    loads: StepLoads
    num_pixel_rows: int
    """Rows of `pixel_values` on this rank: image patches, or ViT tokens at native resolution."""
    num_tokens: int
    """LLM tokens of this rank."""
    num_audio_tokens: int
    """LLM tokens of the clips that this rank decodes."""
    stream: GroupOrder
    """Position in the epoch's stream after this step."""
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
