"""One step of a variant of OrchMLLM's dispatching on one rank.

Plan, exchange, forward, backward, gradients' sum, optimizer, all with the project's own planner and
exchange; what it is compared with goes home first (`two exchanges`) or gathers everything
(`dispatching.gather`). Planning is part of the step, although a loader does it in its prefetch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dispatching.clock import Clock, boundary
from dispatching.data import DataShape, PhaseInput, StepData, phase_input, rows_of
from dispatching.gather import gather_features
from isobatch.balance.dispatching.all_to_all import Permutation
from isobatch.balance.steps.step_planner import ENCODERS
from isobatch.engine.dispatching.dispatch import (
    PHASES,
    DispatchOptions,
    DispatchPlan,
    plan_dispatch,
)
from isobatch.engine.dispatching.routes import FeatureMove, Route, rank_route
from isobatch.engine.runtime.communication.feature_all_to_all import exchange_features
from isobatch.engine.runtime.communication.process_groups import sum_gradients

Way = Literal["composed", "two exchanges", "all-gather"]
"""How features come to where they are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    name: str
    options: DispatchOptions
    way: Way = "composed"
    by_flops: bool = False
    """Whether samples count by the FLOPs of all their phases, where the LLM is balanced."""

    @property
    def encoders(self) -> tuple[str, ...]:
        """Those whose features travel."""
        return tuple(name for name in ENCODERS if name in self.options.algorithms)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A step as one rank needs it."""

    plan: DispatchPlan
    inputs: dict[str, list[int]]
    """By phase, the samples that this rank works on."""
    drawn: dict[str, Route]
    """By phase, the way of the inputs from where they were drawn; nothing if they are read where
    they are needed.
    """
    hops: tuple[dict[str, Route], ...]
    """The ways of the features, one after the other, by encoder."""


def plan_samples(step: StepData, variant: Variant) -> DispatchPlan:
    """Who works on what, the same on every rank."""
    examples = step.examples
    if variant.by_flops:
        examples = replace(examples, lengths={**examples.lengths, "llm": step.flops})
    return plan_dispatch(examples, variant.options)


def plan_step(step: StepData, variant: Variant, rank: int) -> Planned:
    """The plan, and one rank's part of it."""
    plan = plan_samples(step, variant)
    moves: list[dict[str, FeatureMove]] = []
    if variant.way == "composed":
        moves = [{name: _leg(plan, name, plan.phases[name].features) for name in variant.encoders}]
    elif variant.way == "two exchanges":
        moves = [
            {name: legs[place] for name, legs in _both_legs(plan, variant).items()}
            for place in (0, 1)
        ]
    own = {phase: plan.batches(phase)[rank].tolist() for phase in PHASES}
    drawn: dict[str, Route] = {}
    if variant.options.algorithms and not variant.options.reads_directly:
        drawn = {phase: rank_route(_of_inputs(step, plan, phase), rank) for phase in PHASES}
    hops = tuple({name: rank_route(move, rank) for name, move in hop.items()} for hop in moves)
    return Planned(plan=plan, inputs=own, drawn=drawn, hops=hops)


def drawn_inputs(
    step: StepData, variant: Variant, planned: Planned, shape: DataShape, rank: int
) -> dict[str, PhaseInput]:
    """What a loader has ready for this rank: inputs of what it works on, or of what it drew if
    inputs travel.
    """
    if not planned.drawn:
        return {phase: phase_input(step, shape, phase, planned.inputs[phase]) for phase in PHASES}
    offsets = step.examples.offsets
    mine = range(offsets[rank], offsets[rank + 1])
    lengths = step.examples.lengths
    return {
        phase: phase_input(step, shape, phase, [n for n in mine if lengths[phase][n]])
        for phase in PHASES
    }


def run_step(
    model: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    step: StepData,
    variant: Variant,
    shape: DataShape,
    clock: Clock,
) -> float:
    """-> this rank's part of the loss, before the step."""
    rank = dist.get_rank()
    planned = plan_step(step, variant, rank)
    inputs = drawn_inputs(step, variant, planned, shape, rank)
    with clock.watching():
        clock.begin("planning")
        plan_step(step, variant, rank)
        if planned.drawn:
            clock.turn_to("exchange")
            inputs = _bring_inputs(step, planned, inputs)
        clock.turn_to("vision")
        loss = _forward(model, inputs, planned, variant, clock, rank) / step.num_loss_tokens
        loss.backward()
        clock.meet()
        clock.turn_to("gradients")
        sum_gradients(_gradients(model), dist.group.WORLD)
        clock.turn_to("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        clock.turn_to("")
    return float(loss.detach())


def _gradients(model: nn.ModuleDict) -> list[Tensor]:
    """Of all weights: 0 for layers that this rank had nothing for."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return [weight.grad for weight in model.parameters()]


def _forward(
    model: nn.ModuleDict,
    inputs: dict[str, PhaseInput],
    planned: Planned,
    variant: Variant,
    clock: Clock,
    rank: int,
) -> Tensor:
    """The sum of the losses of this rank's tokens; `vision` is being timed when it begins, on both
    ways.
    """
    seen = boundary(clock, "vision", "audio", {"vision": model["vision"](inputs["vision"])})
    made = seen | {"audio": model["audio"](inputs["audio"])}
    made = boundary(clock, "audio", "exchange", made)
    link = torch.zeros(())
    if variant.way == "all-gather":
        made = made | {
            name: gather_features(made[name], planned.plan, name, rank) for name in variant.encoders
        }
    for hop in planned.hops:
        if hop:
            came = exchange_features({name: made[name] for name in hop}, hop)
            made, link = made | came.features, link + came.link
    used = boundary(clock, "exchange", "llm", made | {"link": link})
    return model["llm"](inputs["llm"], used) + used["link"]


def _leg(plan: DispatchPlan, name: str, moved: Permutation) -> FeatureMove:
    """A move of an encoder's features that begins where they were made."""
    own = plan.phases[name]
    return FeatureMove(
        examples=moved, features=own.moved.apply(plan.examples.features[name][own.examples])
    )


def _both_legs(plan: DispatchPlan, variant: Variant) -> dict[str, tuple[FeatureMove, FeatureMove]]:
    """Home first, Pi_E^-1, and on from there, Pi_M: what composition saves."""
    legs = {}
    for name in variant.encoders:
        own = plan.phases[name]
        on = FeatureMove(
            examples=own.moved.then(own.features),
            features=plan.examples.features[name][own.examples],
        )
        legs[name] = _leg(plan, name, own.moved.inverse()), on
    return legs


def _of_inputs(step: StepData, plan: DispatchPlan, phase: str) -> FeatureMove:
    """Pi_E (Pi_M of texts): inputs from where they were drawn, counted in rows."""
    own = plan.phases[phase]
    rows = np.array(
        [len(rows_of(step.samples[number], phase)) for number in own.examples], np.int64
    )
    return FeatureMove(examples=own.moved, features=rows)


def _bring_inputs(
    step: StepData, planned: Planned, inputs: dict[str, PhaseInput]
) -> dict[str, PhaseInput]:
    """The paper's way: inputs travel from the rank that drew them."""
    came = exchange_features(
        {name: own.rows for name, own in inputs.items()}, planned.drawn, frozen=PHASES
    ).features
    return {
        phase: PhaseInput(
            rows=came[phase],
            lengths=[len(rows_of(step.samples[number], phase)) for number in numbers],
        )
        for phase, numbers in planned.inputs.items()
    }
