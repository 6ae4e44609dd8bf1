"""Predicted times of a dispatch plan: phases, volumes between ranks, exchanges. Pure.

For the paper's figures. Data-parallel ranks with sharded weights (FSDP)
gather every layer together, so each phase is as slow as its slowest rank, and a step is the sum of
its phases (OrchMLLM's setting).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isobatch.balance.dispatching.all_to_all import CommVolumes, Permutation, comm_volumes
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.dispatching.dispatch import PHASES, DispatchPlan
from isobatch.models.clusters import NS_PER_S, Link

PhaseCost = Callable[[str, PhaseLoads], IntArray]
"""(phase, a batch per rank) -> forward and backward time of each rank, int64 ns, (ranks,)."""

Communicator = Literal["all_to_all", "all_gather"]
"""OrchMLLM's exchange, or its strawman: every rank gathers all batches (5.2.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Sizes of tokens in exchanges."""

    inputs: Mapping[str, int]
    """Input by phase: pixels of a ViT patch, spectrogram frames of an audio token, text ids."""
    feature: int
    """LLM token of an encoder: 2 x the LLM's width in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseVolumes:
    """Tokens sent for a phase in the forward pass."""

    inputs: CommVolumes
    """Pi_E (for the LLM Pi_M of texts), in the phase's tokens; nothing with direct reads."""
    features: CommVolumes
    """Pi_M o Pi_E^-1, in LLM tokens."""
    features_home: CommVolumes
    """Pi_E^-1 alone, in LLM tokens: the extra cost of returning features first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Predicted times of a step."""

    phases_ns: Mapping[str, int]
    """Time of the slowest rank by phase."""
    exchange_ns: int
    """All exchanges of a step, forward and backward."""

    @property
    def step_ns(self) -> int:
        """Time of the step without the optimizer."""
        return sum(self.phases_ns.values()) + self.exchange_ns


def phase_volumes(plan: DispatchPlan, phase: str) -> PhaseVolumes:
    """The volumes of a phase's exchanges."""
    own, examples = plan.phases[phase], plan.examples
    per_node = plan.options.ranks_per_node
    lengths = examples.lengths[phase]
    if phase == "llm":  # tokens of text
        lengths = lengths - sum(examples.features.values())
    lengths = lengths[own.examples]
    made = np.zeros_like(lengths) if phase == "llm" else examples.features[phase][own.examples]
    stays = _in_place(own.moved.source_offsets) if plan.options.reads_directly else own.moved
    there = own.moved.apply(made)
    return PhaseVolumes(
        inputs=comm_volumes(stays, lengths, ranks_per_node=per_node),
        features=comm_volumes(own.features, there, ranks_per_node=per_node),
        features_home=comm_volumes(own.moved.inverse(), there, ranks_per_node=per_node),
    )


def phase_times(plan: DispatchPlan, cost: PhaseCost) -> dict[str, tuple[IntArray, IntArray]]:
    """Every rank's time by phase, as drawn and as planned."""
    phases = plan.phases.items()
    return {phase: (cost(phase, own.drawn), cost(phase, own.balanced)) for phase, own in phases}


def step_times(
    plan: DispatchPlan,
    cost: PhaseCost,
    link: Link,
    token_bytes: TokenBytes,
    *,
    communicator: Communicator = "all_to_all",
) -> StepTimes:
    """Times of the planned step. `link`: each rank's between nodes; exchanges in nodes are free.

    Inputs are sent once, features forward and their gradients back. An all-to-all takes as long as
    the rank that sends most to other nodes (equation 5), an all-gather (ranks - 1) x the largest
    batch (equation 3).
    """
    phases = {phase: int(own[1].max()) for phase, own in phase_times(plan, cost).items()}
    total = 0.0
    for phase in PHASES:
        moved = phase_volumes(plan, phase)
        sizes = (
            (moved.inputs, token_bytes.inputs.get(phase, 0)),
            (moved.features, 2 * token_bytes.feature),
        )
        for volume, size in sizes:
            gathers = communicator == "all_gather" and volume.total
            tokens = volume.all_gather if gathers else volume.largest_inter_node
            total += tokens * size / link.bytes_per_s * NS_PER_S
            total += link.latency_ns if tokens else 0
    return StepTimes(phases_ns=phases, exchange_ns=round(total))


def phase_cost(cost: Callable[[Loads], Costs]) -> PhaseCost:
    """The cost of phases from a cost function of whole micro-batches, less that of an empty one.

    Forward and backward of all layers, nothing recomputed.
    """

    def of_phase(phase: str, loads: PhaseLoads) -> IntArray:
        count = len(loads)
        padded = loads.map(lambda column: np.append(column, 0))  # the last one is empty
        rest = {other: PhaseLoads.nothing(count + 1) for other in PHASES if other != phase}
        costs = cost(Loads(**{phase: padded}, **rest))
        total = (costs.forward_ns + costs.backward_ns).sum(axis=0)
        return np.asarray(total[:-1] - total[-1])

    return of_phase


def _in_place(offsets: IntArray) -> Permutation:
    """Nothing moves."""
    return Permutation(np.arange(offsets[-1]), offsets, offsets)
