"""What a dispatch plan comes to: time of each phase, volumes between ranks, time of the exchanges.

For reports and for choosing options before a run. Data-parallel ranks that share out their weights
(FSDP) gather every layer together, so each phase is as slow as its slowest rank, and a step is the
sum of its phases (OrchMLLM's setting). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from balance.steps.all_to_all import CommVolumes, Permutation, comm_volumes
from balance.types import IntArray
from engine.cost_model.clusters import NS_PER_S, Link
from engine.cost_model.costs import Costs
from engine.cost_model.loads import Loads, PhaseLoads
from engine.dispatching.dispatch import PHASES, DispatchPlan

PhaseCost = Callable[[str, PhaseLoads], IntArray]
"""(phase, a batch per rank) -> ns that each rank takes, forward and backward, int64, (ranks,)."""

Communicator = Literal["all_to_all", "all_gather"]
"""OrchMLLM's exchange, or its strawman: every rank gathers all batches (5.2.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """What a token weighs on its way."""

    inputs: Mapping[str, int]
    """Input elements per token, by phase: pixels, spectrogram frames, text ids."""
    feature: int
    """Of an LLM token that an encoder made: 2 x the LLM's width in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseVolumes:
    """Tokens that travel for a phase; sends of the forward pass."""

    inputs: CommVolumes
    """Volumes of Pi_E (LLM: Pi_M) in tokens; none where inputs are read directly."""
    features: CommVolumes
    """Of Pi_M o Pi_E^-1, in LLM tokens."""
    features_home: CommVolumes
    """Of Pi_E^-1 alone: what going home first would cost besides Pi_M, in LLM tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Predicted, ns."""

    phases_ns: Mapping[str, int]
    """By phase, its slowest rank."""
    exchange_ns: int
    """All exchanges of a step, there and back."""

    @property
    def step_ns(self) -> int:
        """Without the optimizer."""
        return sum(self.phases_ns.values()) + self.exchange_ns


def phase_volumes(plan: DispatchPlan, phase: str) -> PhaseVolumes:
    """What travels for a phase."""
    own, examples = plan.phases[phase], plan.examples
    per_node = plan.options.ranks_per_node
    lengths = (examples.texts if phase == "llm" else examples.lengths[phase])[own.examples]
    made = np.zeros_like(lengths) if phase == "llm" else examples.features[phase][own.examples]
    stays = _in_place(own.moved.source_offsets) if plan.options.reads_directly else own.moved
    there = own.moved.apply(made)
    return PhaseVolumes(
        inputs=comm_volumes(stays, lengths, ranks_per_node=per_node),
        features=comm_volumes(own.features, there, ranks_per_node=per_node),
        features_home=comm_volumes(own.moved.inverse(), there, ranks_per_node=per_node),
    )


def phase_times(plan: DispatchPlan, cost: PhaseCost) -> dict[str, tuple[IntArray, IntArray]]:
    """By phase, every rank's time as drawn and as planned."""
    return {
        phase: (cost(phase, own.drawn), cost(phase, own.balanced))
        for phase, own in plan.phases.items()
    }


def step_times(
    plan: DispatchPlan,
    cost: PhaseCost,
    link: Link,
    token_bytes: TokenBytes,
    *,
    communicator: Communicator = "all_to_all",
) -> StepTimes:
    """The step as planned. `link`: between nodes, of each rank; exchanges inside nodes count as
    free.

    Inputs travel once, features there and their gradients back. An All-to-All takes as long as the
    rank that sends most to other nodes (equation 5), an All-Gather (ranks - 1) x the largest batch
    (equation 3).
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
            tokens = (
                volume.all_gather
                if communicator == "all_gather" and volume.total
                else volume.largest_inter_node
            )
            total += tokens * size / link.bytes_per_s * NS_PER_S + (
                link.latency_ns if tokens else 0
            )
    return StepTimes(phases_ns=phases, exchange_ns=round(total))


def phase_cost(cost: Callable[[Loads], Costs]) -> PhaseCost:
    """A cost function of whole micro-batches as one of phases: what a phase's load adds to doing
    nothing.

    Forward and backward of all layers, nothing recomputed.
    """

    def of_phase(phase: str, loads: PhaseLoads) -> IntArray:
        count = len(loads)
        # the last one is nothing
        padded = PhaseLoads(**{f.name: np.append(getattr(loads, f.name), 0) for f in fields(loads)})
        rest = {other: PhaseLoads.nothing(count + 1) for other in PHASES if other != phase}
        costs = cost(Loads(**{phase: padded}, **rest))
        total = (costs.forward_ns + costs.backward_ns).sum(axis=0)
        return np.asarray(total[:-1] - total[-1])

    return of_phase


def _in_place(offsets: IntArray) -> Permutation:
    """Nothing moves."""
    return Permutation(np.arange(offsets[-1]), offsets, offsets)
