"""One step on one rank: `StageExecutor` runs its operations in order.

Also here: `RankLayers`, a rank's part of the model, `StepResult`, what a rank knows of a step, and
the status on which all ranks agree: losses, or why the step is invalid.
"""

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.runtime.backward import BackwardHandle, DeferredWeights
from isobatch.engine.runtime.communication.collectives import all_reduce, gather_objects
from isobatch.engine.runtime.communication.p2p import Message, P2PQueue, make_p2p_schedule
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.cpu_memory import uncounted
from isobatch.engine.runtime.errors import LossNotFinite, is_out_of_memory
from isobatch.engine.runtime.layer_rng import LayerRng, preserve_rng
from isobatch.engine.runtime.stage_io import (
    LOSS,
    Batch,
    StageTensors,
    TensorSpec,
    TensorSpecs,
    check_tensors,
    placed,
    samples_text,
)
from isobatch.engine.runtime.stopwatch import Stopwatch
from isobatch.engine.simulator.schedule import Action, PassKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A finished step as one rank knows it."""

    losses: NDArray[np.float64]
    """Loss of each micro-batch of this replica over the step's labels; equal on all its ranks."""
    schedule: Schedule
    begun_ns: int
    """Beginning of the step on this rank's clock (`time.perf_counter_ns`)."""
    start_ns: IntArray
    """Start of each operation of this rank since `begun_ns`, in the order of its schedule."""
    end_ns: IntArray

    @property
    def loss(self) -> float:
        """Sum over this replica's micro-batches."""
        return float(self.losses.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """A rank's part of a model."""

    layers: Mapping[int, nn.Module]
    """Layers by index in the model."""
    encoder: Sequence[nn.Module]
    """Frozen layers in front, on ranks that encode ahead."""
    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    specs: TensorSpecs
    first_trained: int
    device: torch.device

    def stage_layers(self, stage: int) -> range:
        """Indices of a stage's layers."""
        return range(self.borders[stage], self.borders[stage + 1])

    def has_gradient(self, cut: int) -> bool:
        """Whether a gradient crosses a cut: whether any layer before it is trained."""
        return self.first_trained < cut

    @property
    def sends_grad(self) -> tuple[bool, ...]:
        """Whether a gradient returns to each stage."""
        return (*(self.has_gradient(cut) for cut in self.borders[1:-1]), False)


class StageExecutor:
    """A step in progress."""

    def __init__(
        self,
        local: RankLayers,
        groups: ProcessGroups,
        schedule: Schedule,
        batches: Sequence[Batch],
        normalizer: float,
        rng: LayerRng | None,
    ) -> None:
        """`normalizer`: divisor of all replicas' losses. `rng`: None for torch's own generators."""
        if schedule.num_micro_batches != len(batches):
            raise ConfigError(
                f"the schedule is for {schedule.num_micro_batches} micro-batches, not"
                f" {len(batches)}; make one for as many"
            )
        self._local, self._groups, self._rng = local, groups, rng
        self._schedule, self._batches, self._normalizer = schedule, batches, normalizer
        self._p2p = make_p2p_schedule(schedule, local.sends_grad, groups.rank)
        is_ahead = schedule.kinds == PassKind.ENCODE
        self._encoded = frozenset(schedule.micro_batches[is_ahead].tolist())
        # by stage and micro-batch: the inputs, and the backward pass if an output has a gradient
        self._forwarded: dict[tuple[int, int], tuple[StageTensors, BackwardHandle | None]] = {}
        is_apart = schedule.kinds == PassKind.WEIGHT_GRAD
        apart = schedule.stages[is_apart].tolist(), schedule.micro_batches[is_apart].tolist()
        self._deferred = {key: DeferredWeights() for key in zip(*apart, strict=True)}
        self._kept: dict[Message, StageTensors] = {}  # between operations of this rank
        self._placed: dict[int, Batch] = {}  # micro-batches that have run, on the device
        self._status = _StepStatus(groups, schedule, batches, local.device)

    def run(self) -> StepResult:
        """Run all operations of this rank.

        PeerLost, SpecMismatch; on all ranks OutOfMemory and LossNotFinite.
        """
        rank = self._groups.rank
        first, last = self._schedule.rank_offsets[rank : rank + 2].tolist()
        watch = Stopwatch(self._local.device)  # waits for the GPU, so before any message
        self._queue = P2PQueue(self._groups, self._p2p.messages, self._specs_of, self._local.device)
        with nullcontext() if self._rng is None else preserve_rng(self._local.device):
            failed = self._run_until_out_of_memory(range(first, last), watch)
        if failed is not None:
            self._status.note_out_of_memory(failed)
            self._answer_with_zeros(range(failed, last))
        self._queue.finish()
        losses = self._status.agree()
        times = watch.times_ns()
        return StepResult(
            losses=losses,
            schedule=self._schedule,
            begun_ns=watch.begun_ns,
            start_ns=times[::2],
            end_ns=times[1::2],
        )

    def _run_until_out_of_memory(self, operations: range, watch: Stopwatch) -> int | None:
        """Run operations in order; -> the one that ran out of memory, or None."""
        operation = operations.start
        try:
            for operation in operations:
                inputs = self._receive(operation)
                self._queue.post_ahead(self._p2p.ahead.get(operation, ()))
                watch.note()
                outputs = self._compute(self._schedule.action(operation), inputs)
                watch.note()
                self._send(operation, outputs)
                # the previous operation's tensors must not live during the next one
                del inputs, outputs
        except Exception as error:  # its traceback holds tensors: it must not outlive this function
            if not is_out_of_memory(error):
                raise
            return operation
        return None

    def _answer_with_zeros(self, operations: range) -> None:
        """Release everything that the step holds; send zeros for the results of `operations`.

        Other ranks wait for this one's messages and send it theirs, whose shapes it knows. So after
        running out of memory it receives what comes, and sends zeros until its schedule ends.
        """
        self._forwarded.clear()
        self._deferred.clear()
        self._kept.clear()
        self._placed.clear()
        # Cycles may hold tensors of the failed operation. Emptying torch's cache as well would wait
        # for all messages in flight, which may wait for this rank.
        gc.collect()
        with uncounted():
            # autograd's queue keeps what a failed pass left in it until the next pass
            torch.autograd.backward(torch.zeros((), requires_grad=True).clone())
            for operation in operations:
                for message, sender in self._p2p.incoming.get(operation, ()):
                    if sender != self._groups.rank:
                        self._queue.drop(message, sender)
                for message, receiver in self._p2p.outgoing.get(operation, ()):
                    if receiver != self._groups.rank:
                        self._queue.send_zeros(message, receiver)

    def _compute(self, action: Action, inputs: StageTensors) -> StageTensors:
        if action.kind == PassKind.ENCODE:
            return self._encode(action.micro_batch)
        if action.kind == PassKind.FORWARD:
            return self._forward(action, inputs)
        if action.kind == PassKind.WEIGHT_GRAD:
            self._deferred.pop((action.stage, action.micro_batch)).add_gradients()
            return {}
        return self._backward(action, inputs)

    def _encode(self, number: int) -> StageTensors:
        """Output of the frozen layers in front for a micro-batch."""
        tensors: StageTensors = {}
        with torch.no_grad():
            for index, layer in enumerate(self._local.encoder):
                tensors = self._run_layer(index, layer, tensors, number)
        self._check(tensors, self._local.first_trained, number)
        return tensors

    def _forward(self, action: Action, received: StageTensors) -> StageTensors:
        local, number, end = self._local, action.micro_batch, self._local.borders[action.stage + 1]
        begin = local.borders[action.stage]
        if action.stage == 0 and number in self._encoded:
            begin = local.first_trained
        specs = local.specs(begin, self._batches[number]) if begin else {}
        has_gradient = local.has_gradient(begin)
        inputs = {
            name: tensor.detach().requires_grad_(has_gradient and specs[name].differentiable)
            for name, tensor in received.items()
        }
        tensors: StageTensors = dict(inputs)
        defer = self._deferred.get((action.stage, number))
        for index in range(begin, end):
            tensors = self._run_layer(index, local.layers[index], tensors, number, defer)
        if action.stage == self._schedule.num_stages - 1:
            tensors = {LOSS: tensors[LOSS].float() / (self._normalizer or 1)}
            self._status.note_loss(number, tensors[LOSS].detach())
            differentiable = [LOSS]
        else:
            specs = self._check(tensors, end, number)
            differentiable = [name for name, spec in specs.items() if spec.differentiable]
        outputs = {name: tensors[name] for name in differentiable if tensors[name].requires_grad}
        handle = BackwardHandle(outputs) if outputs else None
        self._forwarded[action.stage, number] = inputs, handle
        return tensors

    def _run_layer(
        self,
        index: int,
        layer: nn.Module,
        inputs: StageTensors,
        number: int,
        defer: DeferredWeights | None = None,
    ) -> StageTensors:
        """Forward pass of a layer, checkpointed if the layer is recomputed.

        `defer`: leaves weight gradients for later, of recomputed layers too.
        """
        rng = self._rng
        if number not in self._placed:
            self._placed[number] = placed(self._batches[number], self._local.device)
        batch = self._placed[number]

        def run(tensors: StageTensors, _: Tensor | None = None) -> StageTensors:
            if rng is not None:
                rng.seed_layer(index, number, self._local.device)
            with nullcontext() if defer is None else defer:
                outputs: StageTensors = layer(tensors, batch)
            return outputs

        if not self._local.recompute[index] or not torch.is_grad_enabled():
            return run(inputs)
        # `checkpoint` restores generators of GPUs among its arguments: a first layer's are on none
        marker = torch.empty(0, device=self._local.device)
        recomputed: StageTensors = checkpoint(
            run, inputs, marker, use_reentrant=False, preserve_rng_state=rng is None
        )
        return recomputed

    def _check(self, tensors: StageTensors, cut: int, number: int) -> Mapping[str, TensorSpec]:
        """Specs of a cut; SpecMismatch if the tensors do not match them."""
        batch = self._batches[number]
        specs = self._local.specs(cut, batch)
        where = f"the output of layer {cut - 1} for micro-batch {number} ({samples_text(batch)})"
        check_tensors(tensors, specs, where)
        return specs

    def _backward(self, action: Action, received: StageTensors) -> StageTensors:
        """Add to gradients of a stage's weights, but for deferred ones; -> those of its inputs."""
        inputs, handle = self._forwarded.pop((action.stage, action.micro_batch))
        if action.stage == self._schedule.num_stages - 1:
            received = {LOSS: torch.ones((), device=self._local.device)}
        leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        if handle is not None:
            handle.backward(received)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in leaves.items()
        }

    def _receive(self, operation: int) -> StageTensors:
        """Inputs of an operation from other stages."""
        tensors: StageTensors = {}
        for message, sender in self._p2p.incoming.get(operation, ()):
            if sender == self._groups.rank:
                tensors |= self._kept.pop(message)
            else:
                tensors |= self._queue.receive(message, sender)
        return tensors

    def _send(self, operation: int, outputs: StageTensors) -> None:
        """Pass on an operation's results."""
        for message, receiver in self._p2p.outgoing.get(operation, ()):
            if receiver == self._groups.rank:
                specs = self._specs_of(message)
                self._kept[message] = {name: outputs[name].detach() for name in specs}
            else:
                self._queue.send(message, receiver, outputs)

    def _specs_of(self, message: Message) -> Mapping[str, TensorSpec]:
        """Specs of a message: a stage's outputs, or gradients of the differentiable ones."""
        source = self._schedule.action(message.source)
        batch = self._batches[source.micro_batch]
        if source.kind == PassKind.ENCODE:
            return self._local.specs(self._local.first_trained, batch)
        if source.kind == PassKind.FORWARD:
            return self._local.specs(self._local.borders[source.stage + 1], batch)
        specs = self._local.specs(self._local.borders[source.stage], batch)
        return {name: spec for name, spec in specs.items() if spec.differentiable}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why a step's gradients are invalid."""

    text: str
    stage: int | None = None
    """Stage that ran out of memory; None if a loss is not finite."""


class _StepStatus:
    """Losses and failures of one replica's step, each rank its own part until `agree`.

    Costs one small message in each pipeline and one between replicas; texts are sent only on
    failure.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        schedule: Schedule,
        batches: Sequence[Batch],
        device: torch.device,
    ) -> None:
        self._groups, self._schedule, self._batches = groups, schedule, batches
        with uncounted():
            # losses of micro-batches; then, per rank, 1 + the action that ran out of memory, or 0
            self._values = torch.zeros(
                len(batches) + len(groups.ranks), dtype=torch.float64, device=device
            )

    def note_loss(self, number: int, loss: Tensor) -> None:
        """Record the loss of a micro-batch, without waiting for the GPU."""
        self._values[number] = loss

    def note_out_of_memory(self, action: int) -> None:
        """Record the action of the schedule at which this rank ran out of memory."""
        with uncounted():
            self._values[len(self._batches) + self._groups.rank] = 1 + action

    def agree(self) -> NDArray[np.float64]:
        """Losses of this replica's micro-batches, (micro_batches,). All ranks call it.

        Errors: OutOfMemory of any rank of any replica; without one, LossNotFinite.
        """
        with uncounted():
            all_reduce(self._values, self._groups.pipeline)
            values = np.asarray(self._values.cpu().numpy(), np.float64)
            losses, actions = np.split(values, [len(self._batches)])
            # losses after a lack of memory come from zeros: not worth reporting
            local_failures = self._out_of_memory(actions) or self._not_finite(losses)
            failures = _of_all_replicas(local_failures, self._groups, self._values.device)
        stages = {failure.stage for failure in failures if failure.stage is not None}
        if stages:
            passes = [failure.text for failure in failures if failure.stage is not None]
            raise OutOfMemory(sorted(stages), passes)
        if failures:
            texts = "; ".join(failure.text for failure in failures)
            raise LossNotFinite(
                f"the loss is not finite; the gradients of this step are invalid: {texts}"
            )
        return losses

    def _out_of_memory(self, actions: NDArray[np.float64]) -> list[_Failure]:
        failures = []
        for rank in np.flatnonzero(actions).tolist():
            action = self._schedule.action(int(actions[rank]) - 1)
            # a rank that encodes ahead for the first stage does so in its own memory
            stage = rank if action.kind == PassKind.ENCODE else action.stage
            samples = samples_text(self._batches[action.micro_batch])
            text = f"{action} of replica {self._groups.replica}, {samples}"
            failures.append(_Failure(text=text, stage=stage))
        return failures

    def _not_finite(self, losses: NDArray[np.float64]) -> list[_Failure]:
        replica = self._groups.replica
        return [
            _Failure(
                text=f"{losses[number]} in micro-batch {number} of replica {replica},"
                f" {samples_text(self._batches[number])}"
            )
            for number in np.flatnonzero(~np.isfinite(losses)).tolist()
        ]


def _of_all_replicas(
    local_failures: list[_Failure], groups: ProcessGroups, device: torch.device
) -> list[_Failure]:
    if groups.replicas is None:
        return local_failures
    count = torch.tensor(len(local_failures), device=device)
    all_reduce(count, groups.replicas)
    failures = gather_objects(local_failures, groups.replicas) if int(count) else []
    return [failure for replica in failures for failure in replica]
