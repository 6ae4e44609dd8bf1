"""One step of a pipeline on one rank: its operations in the schedule's order, and what comes and
goes between them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from balance.errors import ConfigError
from balance.types import IntArray
from engine.runtime.communication.p2p_schedule import Message, make_routes
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.detached_backward import BackwardHandle
from engine.runtime.layer_rng import Draws, generators_kept, on_device
from engine.runtime.oom_recovery import StepMailbox, is_out_of_memory, uncounted
from engine.runtime.stage_io import (
    LOSS,
    Batch,
    StageTensors,
    TensorSpec,
    TensorSpecs,
    check_carry,
    ids_text,
)
from engine.runtime.step_status import Outcome
from engine.runtime.stopwatch import Stopwatch
from engine.simulator.schedule import Action, PassKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a rank knows of a step that it ran."""

    losses: NDArray[np.float64]
    """Of each of this replica's micro-batches, divided by the step's labels; the same on all its
    ranks.
    """
    schedule: Schedule
    begun_ns: int
    """When this rank began the step, on its own clock (`time.perf_counter_ns`)."""
    start_ns: IntArray
    """When each operation of this rank began, in the order of its schedule; from `begun_ns` on."""
    end_ns: IntArray

    @property
    def loss(self) -> float:
        """Sum over this replica's micro-batches."""
        return float(self.losses.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """A rank's part of a model."""

    layers: Mapping[int, nn.Module]
    """By place in the model."""
    encoder: Sequence[nn.Module]
    """The frozen layers in front, on ranks that encode ahead."""
    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    specs: TensorSpecs
    first_trained: int
    device: torch.device
    context: Callable[[], AbstractContextManager[object]]
    """What passes run in: autocast, or nothing."""

    def of_stage(self, stage: int) -> range:
        """Places of a stage's layers."""
        return range(self.borders[stage], self.borders[stage + 1])

    def trained(self, stage: int) -> list[nn.Parameter]:
        """A stage's parameters with a gradient."""
        weights = (
            weight for place in self.of_stage(stage) for weight in self.layers[place].parameters()
        )
        return [weight for weight in weights if weight.requires_grad]

    def gradient_comes(self, cut: int) -> bool:
        """Whether a gradient crosses a cut: whether anything before it is trained."""
        return self.first_trained < cut

    @property
    def sends_grad(self) -> tuple[bool, ...]:
        """Of each stage, whether a gradient comes back to it."""
        return (*(self.gradient_comes(cut) for cut in self.borders[1:-1]), False)


@dataclass(slots=True)
class _Passed:
    """What a forward pass leaves for the backward pass."""

    inputs: StageTensors
    root: BackwardHandle | None
    """None where no output has a gradient."""
    gradients: StageTensors = field(default_factory=dict)
    """Of the outputs; kept where those of the weights are made later."""


class StageExecutor:
    """A step under way."""

    def __init__(
        self,
        own: RankLayers,
        groups: ProcessGroups,
        schedule: Schedule,
        batches: Sequence[Batch],
        normalizer: int,
        draws: Draws | None,
    ) -> None:
        """`normalizer`: labels of the whole step, over all replicas. Without `draws`, layers draw
        from torch's own.
        """
        if schedule.num_micro_batches != len(batches):
            raise ConfigError(
                f"the schedule is for {schedule.num_micro_batches} micro-batches, not {len(batches)}"
            )
        self._own, self._groups, self._draws = own, groups, draws
        self._schedule, self._batches, self._normalizer = schedule, batches, normalizer
        self._routes = make_routes(schedule, own.sends_grad, groups.rank)
        is_ahead = schedule.kinds == PassKind.ENCODE
        self._encoded = frozenset(schedule.micro_batches[is_ahead].tolist())
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._kept: dict[Message, StageTensors] = {}  # between operations of this rank
        self._outcome = Outcome(groups, schedule, batches, own.device)

    def run(self) -> StepResult:
        """Run all operations of this rank. PeerLost, SpecMismatch; OutOfMemory and LossNotFinite on
        all ranks alike.
        """
        first, last = self._schedule.rank_offsets[
            self._groups.rank : self._groups.rank + 2
        ].tolist()
        watch = Stopwatch(self._own.device)  # waits for the GPU, so before anything is on its way
        self._mailbox = StepMailbox(
            self._groups, self._routes.messages, self._specs_of, self._own.device
        )
        with nullcontext() if self._draws is None else generators_kept(self._own.device):
            failed = self._operate(range(first, last), watch)
        if failed is not None:
            self._outcome.note_out_of_memory(failed)
            self._answer(range(failed, last))
        self._mailbox.finish()
        losses = self._outcome.agree()
        times = watch.times_ns()
        return StepResult(
            losses=losses,
            schedule=self._schedule,
            begun_ns=watch.begun_ns,
            start_ns=times[::2],
            end_ns=times[1::2],
        )

    def _operate(self, places: range, watch: Stopwatch) -> int | None:
        """Run operations in order, up to one that runs out of memory; -> its place, or None if
        there is none.
        """
        place = places.start
        try:
            for place in places:
                self._run_one(place, watch)
        except (
            Exception
        ) as error:  # it holds what the operation had made: nothing of it outlives this function
            if not is_out_of_memory(error):
                raise
            return place
        return None

    def _run_one(self, place: int, watch: Stopwatch) -> None:
        given = self._take(place)
        watch.note()
        made = self._compute(self._schedule.action(place), given)
        watch.note()
        self._give(place, made)

    def _answer(self, places: range) -> None:
        """Let go of all that the step holds; give zeros for what these operations would have
        made.
        """
        self._passed.clear()
        self._kept.clear()
        # what failed half-way may be held by circles. torch keeps what is freed of a GPU: to give
        # it back it would wait for all that is on its way, and that may wait for what this rank has
        # not sent yet
        gc.collect()
        with uncounted():
            for place in places:
                for message, sender in self._routes.incoming.get(place, ()):
                    if sender != self._groups.rank:
                        self._mailbox.drop(message, sender)
                for message, receiver in self._routes.outgoing.get(place, ()):
                    if receiver != self._groups.rank:
                        self._mailbox.send_zeros(message, receiver)

    def _compute(self, action: Action, given: StageTensors) -> StageTensors:
        if action.kind == PassKind.ENCODE:
            return self._encode(action.micro_batch)
        if action.kind == PassKind.FORWARD:
            return self._forward(action, given)
        return self._backward(
            action,
            given,
            inputs=action.kind != PassKind.WEIGHT_GRAD,
            weights=action.kind != PassKind.INPUT_GRAD,
        )

    def _encode(self, number: int) -> StageTensors:
        """What the frozen layers in front make of a micro-batch."""
        carry: StageTensors = {}
        with torch.no_grad(), self._own.context():
            for place, layer in enumerate(self._own.encoder):
                carry = self._run_layer(place, layer, carry, number)
        self._check(carry, self._own.first_trained, number)
        return carry

    def _forward(self, action: Action, given: StageTensors) -> StageTensors:
        own, number, end = self._own, action.micro_batch, self._own.borders[action.stage + 1]
        begin = own.borders[action.stage]
        if action.stage == 0 and number in self._encoded:
            begin = own.first_trained
        specs = own.specs(begin, self._batches[number]) if begin else {}
        flows = own.gradient_comes(begin)
        inputs = {
            name: tensor.detach().requires_grad_(flows and specs[name].differentiable)
            for name, tensor in given.items()
        }
        carry: StageTensors = dict(inputs)
        with own.context():
            for place in range(begin, end):
                carry = self._run_layer(place, own.layers[place], carry, number)
        if action.stage == self._schedule.num_stages - 1:
            carry = {LOSS: carry[LOSS].float() / max(self._normalizer, 1)}
            self._outcome.note_loss(number, carry[LOSS].detach())
            comes_back = [LOSS]
        else:
            specs = self._check(carry, end, number)
            comes_back = [name for name, spec in specs.items() if spec.differentiable]
        roots = {name: carry[name] for name in comes_back if carry[name].requires_grad}
        self._passed[action.stage, number] = _Passed(
            inputs, BackwardHandle(roots) if roots else None
        )
        return carry

    def _run_layer(
        self, place: int, layer: nn.Module, carry: StageTensors, number: int
    ) -> StageTensors:
        """A layer's forward pass, to be repeated in the backward pass if it is recomputed."""
        draws, batch = self._draws, self._batches[number]

        def run(given: StageTensors, _: Tensor | None = None) -> StageTensors:
            if draws is not None:
                draws.seed_layer(place, number, self._own.device)
            made: StageTensors = layer(given, batch)
            return made

        if not self._own.recompute[place] or not torch.is_grad_enabled():
            return run(carry)
        again: StageTensors = checkpoint(
            run,
            carry,
            on_device(self._own.device),
            use_reentrant=False,
            preserve_rng_state=draws is None,
        )
        return again

    def _check(self, carry: StageTensors, cut: int, number: int) -> Mapping[str, TensorSpec]:
        """What the specs say of a cut; SpecMismatch if a carry is something else."""
        batch = self._batches[number]
        specs = self._own.specs(cut, batch)
        check_carry(
            carry, specs, f"what layer {cut - 1} gives for micro-batch {number} ({ids_text(batch)})"
        )
        return specs

    def _backward(
        self, action: Action, given: StageTensors, *, inputs: bool, weights: bool
    ) -> StageTensors:
        """Gradients of a stage's inputs, of its weights, or of both; -> those of its inputs."""
        key = action.stage, action.micro_batch
        passed = self._passed.pop(key) if weights else self._passed[key]
        if action.stage == self._schedule.num_stages - 1:
            given = {LOSS: torch.ones((), device=self._own.device)}
        if inputs:
            passed.gradients = given
        leaves = {name: tensor for name, tensor in passed.inputs.items() if tensor.requires_grad}
        targets = [
            *(leaves.values() if inputs else ()),
            *(self._own.trained(action.stage) if weights else ()),
        ]
        if passed.root is not None and targets:
            passed.root.backward(passed.gradients, targets, keep=not weights)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in leaves.items()
        }

    def _take(self, place: int) -> StageTensors:
        """What an operation waits for from other stages."""
        carry: StageTensors = {}
        for message, sender in self._routes.incoming.get(place, ()):
            came = (
                self._kept.pop(message)
                if sender == self._groups.rank
                else self._mailbox.receive(message, sender)
            )
            carry |= came
        return carry

    def _give(self, place: int, made: StageTensors) -> None:
        """Hand on what an operation made."""
        for message, receiver in self._routes.outgoing.get(place, ()):
            if receiver == self._groups.rank:
                self._kept[message] = {
                    name: made[name].detach() for name in self._specs_of(message)
                }
            else:
                self._mailbox.send(message, receiver, made)

    def _specs_of(self, message: Message) -> Mapping[str, TensorSpec]:
        """Outputs of a stage, or the gradients of those that have one."""
        source = self._schedule.action(message.source)
        batch = self._batches[source.micro_batch]
        if source.kind == PassKind.ENCODE:
            return self._own.specs(self._own.first_trained, batch)
        is_output = source.kind == PassKind.FORWARD
        specs = self._own.specs(
            self._own.borders[source.stage + 1 if is_output else source.stage], batch
        )
        return (
            specs
            if is_output
            else {name: spec for name, spec in specs.items() if spec.differentiable}
        )
