"""Analytical costs of a model on a cluster, from presets alone. Pure.

An operation of a layer takes as long as its FLOPs or its bytes, whichever is longer, and a launch:

- a matrix product runs at peak x `Cluster.efficiency` of its width, operands in bf16; of float32
  operands, which move twice the bytes, at half of that (TF32);
- attention has its own efficiency; backward 2.5 times as much (FlashAttention-2 recomputes scores);
- elementwise operations move bytes; their backward passes one and a half times as many;
- tensor-parallel GPUs gather and scatter over NVLink, as much backward as forward. The extra gather
  of sequence parallelism for weight gradients is taken to overlap with products, as in Megatron-LM.

To recompute a layer takes its forward pass, communication included (OmniBal's Table 7: forward,
recomputation and backward are 1.36 times forward and backward). 128 layers with 256 micro-batches
take 3 ms, as each kind is computed once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.common.types import FloatArray, IntArray
from isobatch.engine.cost_model.costs import COLUMNS, Costs
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.operations import (
    BYTES,
    Attention,
    Collective,
    Elementwise,
    Layer,
    MatMul,
    Operation,
    TokenStream,
)
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.models.clusters import NS_PER_S, NS_PER_US, Cluster, Link
from isobatch.models.presets import ModelPreset

ATTENTION_BACKWARD = 2.5
"""Backward over forward FLOPs of attention: five products of scores instead of two."""
TRAFFIC_BACKWARD = 1.5
"""Backward over forward bytes: it reads a gradient and an activation, and writes a gradient."""


def layer_costs(
    model: ModelPreset,
    cluster: Cluster,
    parallel: Parallelism,
    loads: Loads,
    training: Training | None = None,
) -> Costs:
    """Costs of every layer for every micro-batch. ConfigError if the preset lacks dimensions.

    `Parallelism.stage_link` connects stages. Layers before everything trained only run forward.
    """
    training = training or Training()
    layers = layers_of(model, parallel, training)
    device = _Device(cluster, parallel, training, loads)
    trained = [training.trains(layer.part) for layer in layers]
    flows = _gradients(layers, trained)
    rows: dict[str, dict[str, IntArray]] = {}
    for layer, is_trained, flow in zip(layers, trained, flows, strict=True):
        if layer.kind not in rows:
            rows[layer.kind] = _layer(layer, device, is_trained, flow)
    columns = {name: np.stack([rows[layer.kind][name] for layer in layers]) for name in COLUMNS}
    columns["send_ns"][-1] = 0
    state = [
        training.mode.state_bytes(layer.gpu_params, parallel.dp, trained=is_trained)
        for layer, is_trained in zip(layers, trained, strict=True)
    ]
    return Costs(
        names=layer_names(layers),
        kinds=tuple(layer.kind for layer in layers),
        **columns,
        state_bytes=np.array(state, np.int64),
        param_counts=np.array([layer.num_params for layer in layers], np.int64),
        sends_grad=np.logical_or.accumulate(trained),
    )


def _gradients(layers: Sequence[Layer], trained: Sequence[bool]) -> list[bool]:
    """Whether each layer gives a gradient to its input; no encoder comes after another."""
    before = {"audio": False, "vision": False, "llm": False}
    flows = []
    for layer, is_trained in zip(layers, trained, strict=True):
        phase = (layer.inputs or layer.stream).phase
        flows.append(any(before.values()) if phase == "llm" else before[phase])
        before[phase] = before[phase] or is_trained
    return flows


def layer_names(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Names of the layers for people: the kind, and a number where there are several.

    >>> from isobatch.models.presets import load_model
    >>> layer_names(layers_of(load_model("tiny"), Parallelism()))[1:4]
    ('vision_layer 0', 'vision_layer 1', 'vision_projector')
    """
    counts = Counter(layer.kind for layer in layers)
    numbers = Counter[str]()
    names = []
    for layer in layers:
        kind = layer.kind
        names.append(f"{kind} {numbers[kind]}" if counts[kind] > 1 else kind)
        numbers[kind] += 1
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Times of an operation, float64 ns, (micro_batches,)."""

    forward: FloatArray
    input_grad: FloatArray
    weight_grad: FloatArray | float = 0.0


@dataclass(frozen=True, slots=True)
class _Device:
    """A tensor-parallel group of GPUs and its micro-batches."""

    cluster: Cluster
    parallel: Parallelism
    training: Training
    loads: Loads

    @property
    def scale(self) -> float:
        """Size of an activation over that in bf16."""
        return self.training.mode.weight_bytes / BYTES

    @property
    def peak_flops_per_s(self) -> float:
        """Of products and attention: TF32 has half the speed of bf16."""
        return self.cluster.peak_flops_per_s / self.scale

    def tokens(self, stream: TokenStream) -> FloatArray:
        tokens: IntArray = getattr(self.loads, stream.phase).tokens
        return np.asarray(tokens * stream.per_token, np.float64)

    def times(self, operation: Operation) -> _Times:
        measure: dict[type, Callable[..., _Times]] = {
            MatMul: self._product,
            Attention: self._attention,
            Elementwise: self._traffic,
            Collective: self._collective,
        }
        return measure[type(operation)](operation)

    def _product(self, product: MatMul) -> _Times:
        tokens = self.tokens(product.stream)
        weights = product.inputs * product.outputs
        width = min(product.inputs, product.outputs)
        speed = self.peak_flops_per_s * self.cluster.efficiency(width)
        flops, size = 2.0 * weights * tokens, self.training.mode.weight_bytes
        moved = size * (product.inputs + product.outputs) * tokens
        forward = self._roofline(flops / speed, moved + size * weights, tokens)
        # the gradient is read and written
        gradient = 2 * self.training.mode.gradient_bytes * weights
        added = self._roofline(flops / speed, moved + gradient, tokens)
        return _Times(forward=forward, input_grad=forward, weight_grad=added)

    def _attention(self, attention: Attention) -> _Times:
        tokens = self.tokens(attention.stream)
        peak = self.peak_flops_per_s
        squares: IntArray = getattr(self.loads, attention.stream.phase).squares
        flops = (2.0 if attention.causal else 4.0) * attention.width * squares
        size = self.training.mode.weight_bytes
        moved = size * 2.0 * (attention.width + attention.kv_width) * tokens
        forward = np.asarray(flops / (peak * self.cluster.attention_forward_efficiency))
        added = ATTENTION_BACKWARD * flops
        backward = np.asarray(added / (peak * self.cluster.attention_backward_efficiency))
        return _Times(
            forward=self._roofline(forward, moved, tokens),
            input_grad=self._roofline(backward, 2 * moved, tokens),
        )

    def _traffic(self, traffic: Elementwise) -> _Times:
        tokens = self.tokens(traffic.stream)
        moved, launches = self.scale * traffic.bytes_per_token * tokens, traffic.kernels
        zeros = np.zeros_like(tokens)
        return _Times(
            forward=self._roofline(zeros, moved, tokens, launches),
            input_grad=self._roofline(zeros, TRAFFIC_BACKWARD * moved, tokens, launches),
        )

    def _collective(self, collective: Collective) -> _Times:
        tokens = self.tokens(collective.stream)
        tp = self.parallel.tp
        link = self.parallel.tensor_link(self.cluster)
        token_bytes = self.scale * collective.bytes_per_token
        once = travel_ns(token_bytes * tokens * (tp - 1) / tp, link)
        times = collective.count * once
        return _Times(forward=times, input_grad=times)

    def _roofline(
        self, seconds: FloatArray, moved: FloatArray, tokens: FloatArray, launches: int = 1
    ) -> FloatArray:
        longer = np.maximum(seconds, moved / self.cluster.memory_bytes_per_s) * NS_PER_S
        return (longer + launches * self.cluster.launch_us * NS_PER_US) * (tokens > 0)


def travel_ns(num_bytes: FloatArray, link: Link) -> FloatArray:
    """Time of bytes over a link, float64 ns; no bytes take no time."""
    return (num_bytes / link.bytes_per_s * NS_PER_S + link.latency_ns) * (num_bytes > 0)


def _layer(layer: Layer, device: _Device, trained: bool, flows: bool) -> dict[str, IntArray]:
    """A row of each column of `Costs`; `flows` if the gradient of the layer's input is needed."""
    times = [device.times(operation) for operation in layer.operations]
    zeros = np.zeros(len(device.loads))
    forward = sum((time.forward for time in times), zeros)
    input_grad = sum((time.input_grad for time in times), zeros)
    weight_grad = np.asarray(sum((time.weight_grad for time in times), zeros))
    if not flows:
        # no gradient passes the first product; those after it are needed for weight gradients
        is_product = [isinstance(operation, MatMul) for operation in layer.operations]
        first = is_product.index(True) if any(is_product) else len(times)
        input_grad = sum((time.input_grad for time in times[first + 1 :]), zeros)
    scale = device.scale
    tokens, inputs = device.tokens(layer.stream), device.tokens(layer.inputs or layer.stream)
    input_bytes = scale * layer.input_bytes * inputs
    chunk = np.minimum(layer.chunk_bytes * tokens, layer.max_chunk_bytes)
    saved = (layer.saved.trained if trained else layer.saved.frozen) * tokens
    # the head keeps little where few tokens have a label, but its input is all of them
    kept = input_bytes if layer.inputs else np.minimum(input_bytes, saved)
    sent = sum((scale * size * device.tokens(stream) for stream, size in layer.sent), zeros)
    link = device.parallel.stage_link(device.cluster)
    goes_back = trained or flows
    working = _whole(scale * layer.working_bytes * inputs + chunk)
    return {
        "forward_ns": _whole(forward),
        "input_grad_ns": _whole(input_grad * (trained or flows)),
        "weight_grad_ns": _whole(weight_grad * trained),
        "recompute_ns": _whole(forward * goes_back),
        "send_ns": _whole(travel_ns(sent, link)),
        "saved_bytes": _whole(saved * goes_back),
        "kept_bytes": _whole(kept * goes_back),
        "working_bytes": working,
        # weight gradients are added where they are kept
        "input_working_bytes": working,
        "weight_working_bytes": np.zeros_like(working),
        "deferred_bytes": _whole(scale * layer.deferred_bytes * tokens * trained),
        "sent_bytes": _whole(sent),
    }


def _whole(values: FloatArray) -> IntArray:
    return np.rint(values).astype(np.int64)
