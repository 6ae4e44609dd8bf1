"""One step of a pipeline on one rank: its operations in the schedule's order, and what comes and goes between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from balance.errors import ConfigError
from engine.program import Program, make_program
from engine.runtime.carries import LOSS, Batch, Carry, Spec, Specs
from engine.runtime.groups import Groups
from engine.runtime.messages import Mailbox, Message, messages_of
from engine.schedule import Action, Kind, Schedule
from engine.stages import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a rank knows of a step that it ran."""

    loss: float
    """Sum over this replica's micro-batches of losses divided by the step's labels; the same on all its ranks."""
    schedule: Schedule
    start_s: NDArray[np.float64]
    """When each operation of this rank began, in the order of its schedule; seconds since the step began."""
    end_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """A rank's part of a model."""

    layers: Mapping[int, nn.Module]
    """By place in the model."""
    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    specs: Specs
    first_trained: int
    device: torch.device
    context: Callable[[], AbstractContextManager[object]]
    """What passes run in: autocast, or nothing."""

    def of_stage(self, stage: int) -> range:
        """Places of a stage's layers."""
        return range(self.borders[stage], self.borders[stage + 1])

    def trained(self, stage: int) -> list[nn.Parameter]:
        """A stage's parameters with a gradient."""
        weights = (weight for place in self.of_stage(stage) for weight in self.layers[place].parameters())
        return [weight for weight in weights if weight.requires_grad]

    def gradient_comes(self, cut: int) -> bool:
        """Whether a gradient crosses a cut: whether anything before it is trained."""
        return self.first_trained < cut


@dataclass(slots=True)
class _Passed:
    """What a forward pass leaves for the backward pass."""

    inputs: Carry
    outputs: Carry
    gradients: Carry = field(default_factory=dict)
    """Of the outputs; kept where those of the weights are made later."""


class Step:
    """A step under way."""

    def __init__(
        self, own: RankLayers, groups: Groups, schedule: Schedule, batches: Sequence[Batch], normalizer: int
    ) -> None:
        """`normalizer`: labels of the whole step, over all replicas."""
        if schedule.num_micro_batches != len(batches):
            raise ConfigError(f"the schedule is for {schedule.num_micro_batches} micro-batches, not {len(batches)}")
        self._own, self._groups = own, groups
        self._schedule, self._batches, self._normalizer = schedule, batches, normalizer
        program = waits(schedule, own)
        self._incoming, self._outgoing = _routes(program, groups.rank)
        self._mailbox = Mailbox(groups, messages_of(program), self._specs_of, own.device)
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._kept: dict[Message, Carry] = {}  # between stages of this rank
        self._loss = torch.zeros((), device=own.device)

    def run(self) -> StepResult:
        """Run all operations of this rank."""
        first, last = self._schedule.rank_offsets[self._groups.rank : self._groups.rank + 2].tolist()
        times = np.zeros((2, last - first))
        begun = time.perf_counter()
        for place in range(first, last):
            given = self._take(place)
            times[0, place - first] = time.perf_counter() - begun
            made = self._compute(self._schedule.action(place), given)
            times[1, place - first] = time.perf_counter() - begun
            self._give(place, made)
        self._mailbox.finish()
        dist.all_reduce(self._loss, group=self._groups.pipeline)
        return StepResult(loss=float(self._loss), schedule=self._schedule, start_s=times[0], end_s=times[1])

    def _compute(self, action: Action, given: Carry) -> Carry:
        if action.kind == Kind.FORWARD:
            return self._forward(action, given)
        return self._backward(
            action, given, inputs=action.kind != Kind.WEIGHT_GRAD, weights=action.kind != Kind.INPUT_GRAD
        )

    def _forward(self, action: Action, given: Carry) -> Carry:
        own, batch, cut = self._own, self._batches[action.micro_batch], self._own.borders[action.stage]
        specs = own.specs(cut, batch) if action.stage else {}
        flows = own.gradient_comes(cut)
        inputs = {
            name: tensor.detach().requires_grad_(flows and specs[name].differentiable) for name, tensor in given.items()
        }
        carry: Carry = dict(inputs)
        with own.context():
            for place in own.of_stage(action.stage):
                layer = own.layers[place]
                if own.recompute[place]:
                    carry = checkpoint(layer, carry, batch, use_reentrant=False)
                else:
                    carry = layer(carry, batch)
        if action.stage == self._schedule.num_stages - 1:
            carry = {LOSS: carry[LOSS].float() / max(self._normalizer, 1)}
            self._loss += carry[LOSS].detach()
        self._passed[action.stage, action.micro_batch] = _Passed(inputs, carry)
        return carry

    def _backward(self, action: Action, given: Carry, *, inputs: bool, weights: bool) -> Carry:
        """Gradients of a stage's inputs, of its weights, or of both; -> those of its inputs."""
        key = action.stage, action.micro_batch
        passed = self._passed.pop(key) if weights else self._passed[key]
        if inputs:
            passed.gradients = given
        # what nobody gave a gradient is the loss, or of no use to it
        outputs = {
            name: tensor
            for name, tensor in passed.outputs.items()
            if tensor.requires_grad and (name in passed.gradients or name == LOSS)
        }
        leaves = {name: tensor for name, tensor in passed.inputs.items() if tensor.requires_grad}
        targets = [*(leaves.values() if inputs else ()), *(self._own.trained(action.stage) if weights else ())]
        if outputs and targets:
            gradients = [passed.gradients.get(name) for name in outputs]
            torch.autograd.backward(list(outputs.values()), gradients, inputs=targets, retain_graph=not weights)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in leaves.items()
        }

    def _take(self, place: int) -> Carry:
        """What an operation waits for from other stages."""
        carry: Carry = {}
        for message, sender in self._incoming.get(place, ()):
            came = self._kept.pop(message) if sender == self._groups.rank else self._mailbox.receive(message, sender)
            carry |= came
        return carry

    def _give(self, place: int, made: Carry) -> None:
        """Hand on what an operation made."""
        for message, receiver in self._outgoing.get(place, ()):
            if receiver == self._groups.rank:
                self._kept[message] = {name: made[name].detach() for name in self._specs_of(message)}
            else:
                self._mailbox.send(message, receiver, made)

    def _specs_of(self, message: Message) -> Mapping[str, Spec]:
        """Outputs of a stage, or the gradients of those that have one."""
        source = self._schedule.action(message.source)
        is_output = source.kind == Kind.FORWARD
        cut = self._own.borders[source.stage + 1 if is_output else source.stage]
        specs = self._own.specs(cut, self._batches[source.micro_batch])
        return specs if is_output else {name: spec for name, spec in specs.items() if spec.differentiable}


def waits(schedule: Schedule, own: RankLayers) -> Program:
    """The edges of a schedule; its times are not known here."""
    nothing = np.zeros((schedule.num_stages, schedule.num_micro_batches), np.int64)
    flows = [own.gradient_comes(cut) for cut in own.borders[1:-1]]
    stages = StageCosts(
        forward_ns=nothing,
        input_grad_ns=nothing,
        weight_grad_ns=nothing,
        send_ns=nothing,
        send_back_ns=nothing,
        live_bytes=nothing,
        forward_peak_bytes=nothing,
        backward_peak_bytes=nothing,
        held_bytes=nothing,
        apart_peak_bytes=nothing,
        state_bytes=nothing[:, 0],
        sends_grad=np.array([*flows, False]),
    )
    return make_program(schedule, stages)


Routes = dict[int, list[tuple[Message, int]]]


def _routes(program: Program, rank: int) -> tuple[Routes, Routes]:
    """Of this rank's operations: what comes to each from another stage, and from which rank; what goes, and to whom."""
    schedule, ranks = program.schedule, program.schedule.ranks.tolist()
    sources = np.repeat(np.arange(len(schedule)), np.diff(program.edge_offsets))
    # what a stage keeps for itself is no message
    between = schedule.stages[sources] != schedule.stages[program.edge_targets]
    incoming: Routes = {}
    outgoing: Routes = {}
    for source, target in zip(sources[between].tolist(), program.edge_targets[between].tolist(), strict=True):
        message = Message(source, target)
        if ranks[target] == rank:
            incoming.setdefault(target, []).append((message, ranks[source]))
        if ranks[source] == rank:
            outgoing.setdefault(source, []).append((message, ranks[target]))
    return incoming, outgoing
