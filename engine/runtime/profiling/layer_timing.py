"""One layer with one micro-batch, isolated: time and memory of its passes.

Its input is detached, and random numbers serve as the output's gradient, so nothing but the layer
runs. Times are wall-clock on a rank that does nothing else meanwhile; with a GPU they wait for it.
Bytes are counted in separate passes, because on a CPU counting is slower than what is counted
(`engine.runtime.cpu_memory`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.runtime.cpu_memory import LiveBytes
from engine.runtime.stage_io import Batch, StageTensors, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of one layer and micro-batch, in nanoseconds; 0 where there is no such gradient."""

    forward_ns: int
    backward_ns: int
    """Both gradients in one pass, as in most schedules."""
    input_grad_ns: int
    """Gradient of the input alone."""
    weight_grad_ns: int
    """Gradients of the weights alone, after the input's: a second pass through the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Memory of one layer and micro-batch."""

    own_bytes: int
    """Tensors made by the forward pass for the backward pass, without input and output."""
    given_bytes: int
    """Size of the input."""
    held_input_bytes: int
    """The part of the input that the backward pass needs."""
    held_output_bytes: int
    """The part of the output that the layer's own backward pass needs; the next may need more."""
    peak_bytes: int
    """Peak of either pass, input included; without weights and their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedLayer:
    """A layer, a micro-batch, and the output of the layer before."""

    layer: nn.Module
    batch: Batch
    given: Mapping[str, Tensor]
    specs: Mapping[str, TensorSpec]
    """Specs of `given`."""
    has_gradient: bool
    """Whether a gradient goes to the layer before."""
    device: torch.device
    context: Callable[[], AbstractContextManager[object]]
    """Context of the forward pass."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """Trained parameters."""
        return [weight for weight in self.layer.parameters() if weight.requires_grad]

    def leaves(self) -> StageTensors:
        """The input as leaves of the graph, as at the beginning of a stage."""
        return {
            name: self.given[name]
            .detach()
            .requires_grad_(self.has_gradient and spec.differentiable)
            for name, spec in self.specs.items()
        }

    def forward(self, inputs: StageTensors) -> StageTensors:
        """The forward pass."""
        with self.context():
            outputs: StageTensors = self.layer(inputs, self.batch)
        return outputs


def layer_times(layer: IsolatedLayer) -> tuple[LayerTimes, StageTensors]:
    """Run all passes of a layer once; -> their times, and its output. Adds to weight gradients."""
    leaves, begun = layer.leaves(), _now(layer.device)
    outputs = layer.forward(leaves)
    forward_ns = _now(layer.device) - begun
    inputs = _with_gradient(leaves)
    backward_ns = input_ns = weight_ns = 0
    if inputs or layer.weights:
        backward_ns = _backward_ns(layer, outputs, [*inputs, *layer.weights])
        input_ns, weight_ns = (backward_ns, 0) if inputs else (0, backward_ns)
    if inputs and layer.weights:
        leaves = layer.leaves()
        again = layer.forward(leaves)
        input_ns = _backward_ns(layer, again, _with_gradient(leaves), keep=True)
        weight_ns = _backward_ns(layer, again, layer.weights)
    found = LayerTimes(
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        input_grad_ns=input_ns,
        weight_grad_ns=weight_ns,
    )
    return found, {name: tensor.detach() for name, tensor in outputs.items()}


def times_in_passes(
    layers: Sequence[Callable[[StageTensors], IsolatedLayer]], given: StageTensors
) -> list[LayerTimes]:
    """`LayerTimes` of successive layers, each pass through all of them before the next begins.

    So caches are as cold as in training, which matters on CPUs. The activations of all layers are
    held meanwhile.
    """
    # both gradients in one pass
    done, forward_ns = _forward_through(layers, given)
    joint_ns = [
        _backward_ns(layer, outputs, [*inputs, *layer.weights])
        for layer, inputs, outputs in _popped(done)
    ]
    # first those of all inputs, then those of all weights
    done, _ = _forward_through(layers, given)
    input_ns = [
        _backward_ns(layer, outputs, inputs, keep=True) if inputs else 0
        for layer, inputs, outputs in reversed(done)
    ]
    weight_ns = [_backward_ns(layer, outputs, layer.weights) for layer, _, outputs in _popped(done)]
    backwards = list(zip(joint_ns, input_ns, weight_ns, strict=True))[::-1]
    return [
        LayerTimes(
            forward_ns=forward, backward_ns=joint, input_grad_ns=of_input, weight_grad_ns=of_weights
        )
        for forward, (joint, of_input, of_weights) in zip(forward_ns, backwards, strict=True)
    ]


_Forwarded = tuple[IsolatedLayer, list[Tensor], StageTensors]
"""A layer after its forward pass: its inputs that get a gradient, and its output."""


def _forward_through(
    layers: Sequence[Callable[[StageTensors], IsolatedLayer]], given: StageTensors
) -> tuple[list[_Forwarded], list[int]]:
    """(layers after their forward passes, times of these)."""
    done: list[_Forwarded] = []
    times: list[int] = []
    tensors = given
    for make in layers:
        layer = make(tensors)
        leaves, begun = layer.leaves(), _now(layer.device)
        outputs = layer.forward(leaves)
        times.append(_now(layer.device) - begun)
        done.append((layer, _with_gradient(leaves), outputs))
        tensors = {name: tensor.detach() for name, tensor in outputs.items()}
    return done, times


def _popped(done: list[_Forwarded]) -> Iterator[_Forwarded]:
    """From the last to the first, each released after use."""
    while done:
        yield done.pop()


def layer_bytes(layer: IsolatedLayer) -> LayerBytes:
    """Count memory during a layer's passes. Its weights must have gradients already."""
    with _meter(layer.device) as meter:
        inputs = _copies(layer)
        given = _storages(inputs)
        meter.restart()
        made = layer.forward(inputs)
        peak = meter.peak_bytes
        outputs = {key: own for key, own in _storages(made).items() if key not in given}
        nodes = [tensor.grad_fn for tensor in made.values()]
        made_bytes, given_bytes = _live_bytes(outputs), _live_bytes(given)
        # only what the graph holds stays
        inputs.clear()
        del made
        live, held_input, held_output = meter.live_bytes, _live_bytes(given), _live_bytes(outputs)
        del nodes
        if layer.weights or layer.has_gradient:
            # here the output lives through the backward pass; in a step only its needed part does
            peak = max(peak, _backward_peak(layer, meter) - (made_bytes - held_output))
    return LayerBytes(
        own_bytes=max(0, live - held_input - held_output),
        given_bytes=given_bytes,
        held_input_bytes=held_input,
        held_output_bytes=held_output,
        peak_bytes=peak,
    )


def _backward_peak(layer: IsolatedLayer, meter: _CudaMeter | LiveBytes) -> int:
    inputs = _copies(layer)
    made = layer.forward(inputs)
    inputs.clear()
    outputs = _with_gradient(made)
    gradients = _output_gradients(outputs)
    meter.restart()
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return meter.peak_bytes


def _copies(layer: IsolatedLayer) -> StageTensors:
    """Copies of the input that are no leaves: so it shows who holds them."""
    return {name: leaf.clone() for name, leaf in layer.leaves().items()}


def _backward_ns(
    layer: IsolatedLayer, made: StageTensors, targets: Sequence[Tensor], *, keep: bool = False
) -> int:
    outputs = _with_gradient(made)
    if not outputs or not targets:
        return 0
    gradients = _output_gradients(outputs)
    begun = _now(layer.device)
    torch.autograd.backward(outputs, gradients, inputs=list(targets), retain_graph=keep)
    return _now(layer.device) - begun


def _with_gradient(tensors: StageTensors) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


def _output_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random gradients; 1 for the loss, which is a scalar."""
    return [
        torch.randn_like(tensor) if tensor.dim() else torch.ones_like(tensor) for tensor in outputs
    ]


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


_Storages = dict[int, tuple["weakref.ref[torch.UntypedStorage]", int]]


def _storages(tensors: Mapping[str, Tensor]) -> _Storages:
    """Storages of tensors, each once, by address, with their sizes; not held."""
    own = [tensor.untyped_storage() for tensor in tensors.values()]
    return {int(storage._cdata): (weakref.ref(storage), storage.nbytes()) for storage in own}


def _live_bytes(storages: _Storages) -> int:
    return sum(size for reference, size in storages.values() if reference() is not None)


class _CudaMeter:
    """As `LiveBytes`, by torch's CUDA allocator, which rounds each tensor up."""

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
def _meter(device: torch.device) -> Iterator[_CudaMeter | LiveBytes]:
    if device.type == "cuda":
        yield _CudaMeter(device)
    else:
        with LiveBytes() as memory:
            yield memory
