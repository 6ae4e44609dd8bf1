"""Layers isolated, with one micro-batch: time and memory of their passes.

A layer's input is detached, and random numbers serve as its output's gradient, so nothing but the
layer runs. Times are wall-clock on a rank that does nothing else meanwhile; with a GPU they wait
for it. Bytes are counted in separate passes, because counting is slow on a CPU (`LiveBytes`).
"""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isobatch.engine.runtime.backward import DeferredWeights
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.stage_executor import RankLayers
from isobatch.engine.runtime.stage_io import (
    Batch,
    StageTensors,
    TensorSpec,
    check_tensors,
    host_of,
    samples_text,
)


class LayerTimes(NamedTuple):
    """Times of one layer and micro-batch, in nanoseconds; 0 where there is no such gradient."""

    forward_ns: int
    backward_ns: int
    """Time of both gradients in one pass, as in most schedules."""
    input_grad_ns: int
    """Time without the weight gradients that can be deferred (`DeferredWeights`)."""
    weight_grad_ns: int
    """Time of those weight gradients."""


class LayerBytes(NamedTuple):
    """Memory of one layer and micro-batch."""

    inner_bytes: int
    """Tensors made by the forward pass for the backward pass, without input and output."""
    input_bytes: int
    """Size of the input."""
    held_input_bytes: int
    """The part of the input that the backward pass needs."""
    held_output_bytes: int
    """The part of the output that the layer's own backward pass needs; the next may need more."""
    deferred_bytes: int
    """Tensors that deferred weight gradients need after the backward pass."""
    forward_peak_bytes: int
    """Peak of the forward pass, input included; without weights and their gradients."""
    joint_peak_bytes: int
    """That of the backward pass with both gradients; of the forward pass if it is higher."""
    apart_peak_bytes: int
    """That of the backward pass that defers weight gradients."""
    weight_peak_bytes: int
    """Peak of deferred weight gradients, on top of `deferred_bytes`."""


@dataclass(frozen=True, slots=True)
class _IsolatedLayer:
    """A layer of this rank, a micro-batch, and the output of the layer before."""

    local: RankLayers
    index: int
    batch: Batch
    inputs: StageTensors

    def __post_init__(self) -> None:
        where = f"the output of layer {self.index - 1} ({samples_text(self.batch)})"
        check_tensors(self.inputs, self.specs, where)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Specs of `inputs`."""
        return self.local.specs(self.index, host_of(self.batch)) if self.index else {}

    @property
    def weights(self) -> list[nn.Parameter]:
        """Trained parameters."""
        layer = self.local.layers[self.index]
        return [weight for weight in layer.parameters() if weight.requires_grad]

    def leaves(self) -> StageTensors:
        """The input as leaves of the graph, as at the beginning of a stage."""
        has_gradient = self.local.has_gradient(self.index)
        return {
            name: self.inputs[name].detach().requires_grad_(has_gradient and spec.differentiable)
            for name, spec in self.specs.items()
        }

    def forward(self, inputs: StageTensors) -> StageTensors:
        """The forward pass."""
        outputs: StageTensors = self.local.layers[self.index](inputs, self.batch)
        return outputs

    @torch.no_grad()
    def output(self) -> StageTensors:
        """The output, without a graph."""
        return self.forward(self.leaves())


def stage_inputs(local: RankLayers, groups: ProcessGroups, batch: Batch) -> dict[int, StageTensors]:
    """Inputs of this rank's stages: a micro-batch passes the whole model, forward only."""
    inputs: dict[int, StageTensors] = {}
    tensors: StageTensors = {}
    for stage in range(len(local.borders) - 1):
        tensors = _pass_on(local, groups, stage, batch, tensors)
        if stage % len(groups.ranks) == groups.rank:
            inputs[stage] = tensors
            for index in local.stage_layers(stage):
                tensors = _IsolatedLayer(local, index, batch, tensors).output()
    return inputs


def _pass_on(
    local: RankLayers, groups: ProcessGroups, stage: int, batch: Batch, outputs: StageTensors
) -> StageTensors:
    """A stage's input, on its rank; the rank of the stage before sends it."""
    sender, receiver = (stage - 1) % len(groups.ranks), stage % len(groups.ranks)
    if not stage or sender == receiver or groups.rank not in (sender, receiver):
        return outputs
    tensors: StageTensors = {}
    for name, spec in sorted(local.specs(local.borders[stage], host_of(batch)).items()):
        if groups.rank == receiver:
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=local.device)
        if spec.is_empty:
            continue
        if groups.rank == receiver:
            groups.receive(tensors[name], sender)
        else:
            groups.send(outputs[name].to(spec.dtype).contiguous(), receiver)
    return tensors


def stage_times(
    local: RankLayers, stage: int, batch: Batch, inputs: StageTensors, *, together: bool
) -> list[LayerTimes]:
    """Times of a stage's layers; adds to weight gradients.

    `together`: each pass runs through all layers before the next begins, so caches are as cold as
    in training, which matters on CPUs. The activations of all layers are held meanwhile.
    """
    layers = local.stage_layers(stage)
    tensors = inputs
    times: list[LayerTimes] = []
    for indices in [layers] if together else [range(index, index + 1) for index in layers]:
        # both gradients in one pass
        joint = [nullcontext() for _ in indices]
        done, forward_ns = _forward_through(local, indices, batch, tensors, joint)
        joint_ns = [_backward_ns(*forwarded) for forwarded in _popped(done)]
        # weight gradients of products after all others
        defer = [DeferredWeights() for _ in indices]
        done, _ = _forward_through(local, indices, batch, tensors, defer)
        tensors = {name: tensor.detach() for name, tensor in done[-1][-1].items()}
        input_ns = [_backward_ns(*forwarded) for forwarded in _popped(done)]
        weight_ns = [_deferred_ns(local.device, deferred) for deferred in reversed(defer)]
        times += map(LayerTimes, forward_ns, joint_ns[::-1], input_ns[::-1], weight_ns[::-1])
    return times


_Forwarded = tuple[_IsolatedLayer, StageTensors]
"""A layer after its forward pass, and its output."""


def _forward_through(
    local: RankLayers,
    indices: Sequence[int],
    batch: Batch,
    inputs: StageTensors,
    contexts: Sequence[AbstractContextManager[object]],
) -> tuple[list[_Forwarded], list[int]]:
    """(layers after their forward passes, times of these). `contexts`: of each layer."""
    done: list[_Forwarded] = []
    times: list[int] = []
    tensors = inputs
    for index, context in zip(indices, contexts, strict=True):
        layer = _IsolatedLayer(local, index, batch, tensors)
        leaves = layer.leaves()
        begun = _now(local.device)
        with context:
            outputs = layer.forward(leaves)
        times.append(_now(local.device) - begun)
        done.append((layer, outputs))
        tensors = {name: tensor.detach() for name, tensor in outputs.items()}
    return done, times


def _popped(done: list[_Forwarded]) -> Iterator[_Forwarded]:
    """From the last to the first, each released after use."""
    while done:
        yield done.pop()


def stage_bytes(
    local: RankLayers, stage: int, batch: Batch, inputs: StageTensors
) -> list[LayerBytes]:
    """Memory of a stage's layers, one after the other. Weights must have gradients already."""
    layer_bytes = []
    tensors = inputs
    for index in local.stage_layers(stage):
        layer = _IsolatedLayer(local, index, batch, tensors)
        layer_bytes.append(_layer_bytes(layer))
        tensors = layer.output()
    return layer_bytes


def _layer_bytes(layer: _IsolatedLayer) -> LayerBytes:
    """Count memory during a layer's passes."""
    device = layer.local.device
    with nullcontext(_CudaMeter(device)) if device.type == "cuda" else LiveBytes() as meter:
        inputs = _copies(layer)
        input_storages = _storages(inputs)
        meter.restart()
        outputs = layer.forward(inputs)
        forward_peak = joint_peak = apart_peak = meter.peak_bytes
        deferred_bytes = weight_peak = 0
        output_storages = {
            key: storage for key, storage in _storages(outputs).items() if key not in input_storages
        }
        nodes = [tensor.grad_fn for tensor in outputs.values()]
        output_bytes, input_bytes = _live_bytes(output_storages), _live_bytes(input_storages)
        # only what the graph holds stays
        inputs.clear()
        del outputs
        live = meter.live_bytes
        held_input = _live_bytes(input_storages)
        held_output = _live_bytes(output_storages)
        del nodes
        if layer.weights or layer.local.has_gradient(layer.index):
            # here the output lives through the backward pass; in a step only its needed part does
            more = output_bytes - held_output
            joint_peak = max(joint_peak, _backward_peak(layer, meter) - more)
            apart_peak, deferred_bytes, weight_peak = _apart_bytes(layer, meter)
            apart_peak -= more
    return LayerBytes(
        inner_bytes=max(0, live - held_input - held_output),
        input_bytes=input_bytes,
        held_input_bytes=held_input,
        held_output_bytes=held_output,
        deferred_bytes=deferred_bytes,
        forward_peak_bytes=forward_peak,
        joint_peak_bytes=joint_peak,
        apart_peak_bytes=apart_peak,
        weight_peak_bytes=weight_peak,
    )


def _backward_peak(layer: _IsolatedLayer, meter: "_CudaMeter | LiveBytes") -> int:
    inputs = _copies(layer)
    outputs = _with_gradient(layer.forward(inputs))
    inputs.clear()
    gradients = _output_gradients(outputs)
    meter.restart()
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return meter.peak_bytes


def _apart_bytes(layer: _IsolatedLayer, meter: "_CudaMeter | LiveBytes") -> tuple[int, int, int]:
    """-> (peak of the first backward pass, bytes live between the two, peak of weight gradients).

    The last on top of what is live between the passes.
    """
    before = meter.live_bytes
    defer = DeferredWeights()
    inputs = _copies(layer)
    with defer:
        outputs = _with_gradient(layer.forward(inputs))
    inputs.clear()
    gradients = _output_gradients(outputs)
    meter.restart()
    torch.autograd.backward(outputs, gradients)
    peak = meter.peak_bytes - before
    outputs.clear()
    gradients.clear()
    live = meter.live_bytes
    meter.restart()
    defer.add_gradients()
    return peak, live - before, meter.peak_bytes - live


def _copies(layer: _IsolatedLayer) -> StageTensors:
    """Copies of the input that are no leaves: so it shows who holds them."""
    return {name: leaf.clone() for name, leaf in layer.leaves().items()}


def _backward_ns(layer: _IsolatedLayer, tensors: StageTensors) -> int:
    outputs = _with_gradient(tensors)
    if not outputs:
        return 0
    gradients = _output_gradients(outputs)
    begun = _now(layer.local.device)
    torch.autograd.backward(outputs, gradients)
    return _now(layer.local.device) - begun


def _deferred_ns(device: torch.device, deferred: DeferredWeights) -> int:
    begun = _now(device)
    deferred.add_gradients()
    return _now(device) - begun


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
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    return {int(storage._cdata): (weakref.ref(storage), storage.nbytes()) for storage in storages}


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
