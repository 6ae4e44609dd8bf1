"""One layer with one micro-batch, cut off from those before and behind: how long its passes take
and what they hold.

Its input is detached, and random numbers come from behind as the gradient: so nothing but the layer
runs. Times are those of the wall on a rank that does nothing else meanwhile; with a GPU they wait
for it. Bytes are counted apart from that, for on a CPU counting takes longer than what is counted
(`engine.runtime.cpu_memory`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.runtime.cpu_memory import LiveBytes
from engine.runtime.stage_io import Batch, StageTensors, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Of one layer and micro-batch, in nanoseconds; 0 where there is no such gradient."""

    forward_ns: int
    backward_ns: int
    """Both gradients in one pass, as most schedules have it."""
    input_grad_ns: int
    """That of the input alone."""
    weight_grad_ns: int
    """That of the weights alone, behind that of the input: it goes through the layer once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Of one layer and micro-batch."""

    own_bytes: int
    """Made by the forward pass for the backward pass, but for the next three."""
    given_bytes: int
    """The input."""
    held_input_bytes: int
    """The part of it that the backward pass needs."""
    held_output_bytes: int
    """The part of the output that the layer's own backward pass needs; more of it the next layer
    may need.
    """
    peak_bytes: int
    """At most while the forward or the backward pass runs, input included; without weights and
    their gradients.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAlone:
    """A layer, a micro-batch, and what comes from the layer before."""

    layer: nn.Module
    batch: Batch
    given: Mapping[str, Tensor]
    specs: Mapping[str, TensorSpec]
    """Of what is given."""
    flows: bool
    """Whether a gradient goes to the layer before."""
    device: torch.device
    context: Callable[[], AbstractContextManager[object]]
    """What the forward pass runs in."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [weight for weight in self.layer.parameters() if weight.requires_grad]

    def leaves(self) -> StageTensors:
        """The input, as where a stage begins."""
        return {
            name: self.given[name].detach().requires_grad_(self.flows and spec.differentiable)
            for name, spec in self.specs.items()
        }

    def forward(self, carry: StageTensors) -> StageTensors:
        """The forward pass."""
        with self.context():
            made: StageTensors = self.layer(carry, self.batch)
        return made


def layer_times(alone: LayerAlone) -> tuple[LayerTimes, StageTensors]:
    """Run all passes of a layer once; -> what they took, and its output. Adds to its weights'
    gradients.
    """
    leaves, begun = alone.leaves(), _now(alone.device)
    made = alone.forward(leaves)
    forward_ns = _now(alone.device) - begun
    given = [leaf for leaf in leaves.values() if leaf.requires_grad]
    backward_ns = input_ns = weight_ns = 0
    if given or alone.weights:
        backward_ns = _backward_ns(alone, made, [*given, *alone.weights])
        input_ns, weight_ns = (backward_ns, 0) if given else (0, backward_ns)
    if given and alone.weights:
        leaves = alone.leaves()
        again = alone.forward(leaves)
        given = [leaf for leaf in leaves.values() if leaf.requires_grad]
        input_ns = _backward_ns(alone, again, given, keep=True)
        weight_ns = _backward_ns(alone, again, alone.weights)
    found = LayerTimes(
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        input_grad_ns=input_ns,
        weight_grad_ns=weight_ns,
    )
    return found, {name: tensor.detach() for name, tensor in made.items()}


def times_in_passes(
    layers: Sequence[Callable[[StageTensors], LayerAlone]], given: StageTensors
) -> list[LayerTimes]:
    """The same of layers that follow each other, each pass through all of them before the next
    begins.

    So caches are as cold as in training, which matters on CPUs; the activations of all of them are
    held meanwhile.
    """
    ran, forward_ns = _forward_through(layers, given)
    joint_ns = [
        _backward_ns(alone, made, [*inputs, *alone.weights])
        for alone, inputs, made in _emptied(ran)
    ]
    ran, _ = _forward_through(layers, given)
    input_ns = [
        _backward_ns(alone, made, inputs, keep=True) if inputs else 0
        for alone, inputs, made in reversed(ran)
    ]
    weight_ns = [_backward_ns(alone, made, alone.weights) for alone, _, made in _emptied(ran)]
    backwards = zip(joint_ns, input_ns, weight_ns, strict=True)
    return [
        LayerTimes(
            forward_ns=forward, backward_ns=joint, input_grad_ns=of_input, weight_grad_ns=of_weights
        )
        for forward, (joint, of_input, of_weights) in zip(
            forward_ns, reversed(list(backwards)), strict=True
        )
    ]


_Ran = tuple[LayerAlone, list[Tensor], StageTensors]
"""A layer behind its forward pass: what of its input wants a gradient, and its output."""


def _forward_through(
    layers: Sequence[Callable[[StageTensors], LayerAlone]], given: StageTensors
) -> tuple[list[_Ran], list[int]]:
    """(layers behind their forward passes, what these took)."""
    ran: list[_Ran] = []
    times: list[int] = []
    carry = given
    for make in layers:
        alone = make(carry)
        leaves, begun = alone.leaves(), _now(alone.device)
        made = alone.forward(leaves)
        times.append(_now(alone.device) - begun)
        ran.append((alone, [leaf for leaf in leaves.values() if leaf.requires_grad], made))
        carry = {name: tensor.detach() for name, tensor in made.items()}
    return ran, times


def _emptied(ran: list[_Ran]) -> Iterator[_Ran]:
    """From the last to the first; none is held any longer."""
    while ran:
        yield ran.pop()


def layer_bytes(alone: LayerAlone) -> LayerBytes:
    """Run forward and backward pass of a layer while its tensors are counted. Its weights must have
    gradients.
    """
    with _meter(alone.device) as meter:
        inputs = _copies(alone)
        given = _storages(inputs)
        meter.restart()
        made = alone.forward(inputs)
        peak = meter.peak_bytes
        outputs = {key: own for key, own in _storages(made).items() if key not in given}
        nodes = [tensor.grad_fn for tensor in made.values()]
        made_bytes, given_bytes = _alive(outputs), _alive(given)
        inputs.clear()
        del made
        live, held_input, held_output = meter.live_bytes, _alive(given), _alive(outputs)
        del nodes
        if alone.weights or alone.flows:
            # what was made stays here, but not in a step, unless the backward pass needs it
            peak = max(peak, _backward_peak(alone, meter) - (made_bytes - held_output))
    return LayerBytes(
        own_bytes=max(0, live - held_input - held_output),
        given_bytes=given_bytes,
        held_input_bytes=held_input,
        held_output_bytes=held_output,
        peak_bytes=peak,
    )


def _backward_peak(alone: LayerAlone, meter: _Meter) -> int:
    inputs = _copies(alone)
    made = alone.forward(inputs)
    inputs.clear()
    outputs = _with_gradient(made)
    gradients = _gradients(outputs)
    meter.restart()
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return meter.peak_bytes


def _copies(alone: LayerAlone) -> StageTensors:
    """The input, made now, and not what a backward pass begins with: so it can be seen who holds
    it.
    """
    return {name: leaf.clone() for name, leaf in alone.leaves().items()}


def _backward_ns(
    alone: LayerAlone, made: StageTensors, targets: Sequence[Tensor], *, keep: bool = False
) -> int:
    outputs = _with_gradient(made)
    if not outputs or not targets:
        return 0
    gradients = _gradients(outputs)
    begun = _now(alone.device)
    torch.autograd.backward(outputs, gradients, inputs=list(targets), retain_graph=keep)
    return _now(alone.device) - begun


def _with_gradient(made: StageTensors) -> list[Tensor]:
    return [tensor for tensor in made.values() if tensor.requires_grad]


def _gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Such as come from behind; of the loss, which is one number, 1."""
    return [
        torch.randn_like(tensor) if tensor.dim() else torch.ones_like(tensor) for tensor in outputs
    ]


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


_Storages = dict[int, tuple["weakref.ref[torch.UntypedStorage]", int]]


def _storages(carry: Mapping[str, Tensor]) -> _Storages:
    """What tensors lie in, each once, by its address, with its size; it is not held."""
    own = [tensor.untyped_storage() for tensor in carry.values()]
    return {int(storage._cdata): (weakref.ref(storage), storage.nbytes()) for storage in own}


def _alive(storages: _Storages) -> int:
    """Bytes of those that somebody holds."""
    return sum(size for reference, size in storages.values() if reference() is not None)


class _Meter(Protocol):
    """Bytes of tensors made since it was begun."""

    @property
    def live_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def restart(self) -> None: ...


class _Cuda:
    """What torch's allocator says; it rounds each tensor up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def _meter(device: torch.device) -> Iterator[_Meter]:
    if device.type == "cuda":
        yield _Cuda(device)
    else:
        with LiveBytes() as memory:
            yield memory
