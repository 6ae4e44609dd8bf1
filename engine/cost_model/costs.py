"""Costs: time and memory per layer and micro-batch. Pure NumPy.

From the analytical model or from a profile. Times are whole nanoseconds, so that two simulations of
one plan agree exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray, IntArray

NS_PER_MS = 1_000_000

_TIMES = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns")
MEMORY = (
    *("saved_bytes", "kept_bytes", "working_bytes", "input_working_bytes"),
    *("weight_working_bytes", "deferred_bytes", "sent_bytes"),
)
"""Arrays of `Costs` that decide its memory, beside `state_bytes`."""
COLUMNS = (*_TIMES, *MEMORY)
"""Arrays of `Costs` with a column per micro-batch."""
ARRAYS = (*COLUMNS, "state_bytes", "param_counts", "sends_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A row per layer, in the order of the forward pass; a column per micro-batch.

    Times include communication in the tensor-parallel group of GPUs, bytes are those of one GPU.
    """

    names: tuple[str, ...]
    """Names of the layers, for people."""
    kinds: tuple[str, ...]
    """Layers of one kind are interchangeable: they cost the same for every micro-batch."""
    forward_ns: IntArray
    """int64, (layers, micro_batches), as the other times."""
    input_grad_ns: IntArray
    """Backward pass without the weight gradients of products, which can be deferred."""
    weight_grad_ns: IntArray
    """Time of those weight gradients; 0 for a frozen layer."""
    recompute_ns: IntArray
    """Time that recomputation of the layer adds to the backward pass."""
    send_ns: IntArray
    """Time of the output to the next rank if the partition cuts after the layer; last layer: 0."""
    saved_bytes: IntArray
    """int64, (layers, micro_batches): live between the passes; 0 if nothing is trained."""
    kept_bytes: IntArray
    """Bytes live between the passes if the layer is recomputed: its input."""
    working_bytes: IntArray
    """Bytes live only while the layer's own pass runs, forward or back with both gradients."""
    input_working_bytes: IntArray
    """Those of a backward pass without the weight gradients that are deferred."""
    weight_working_bytes: IntArray
    """Those of the pass of deferred weight gradients, on top of `deferred_bytes`."""
    deferred_bytes: IntArray
    """Bytes live from the backward pass to deferred weight gradients: products' inputs, and
    gradients of their outputs."""
    sent_bytes: IntArray
    """Size of the layer's output, and of its gradient."""
    state_bytes: IntArray
    """int64, (layers,): weights, gradients, optimizer state."""
    param_counts: IntArray
    """int64, (layers,): parameters over all tensor-parallel ranks."""
    sends_grad: BoolArray
    """(layers,): whether a gradient comes back to the layer: it or a layer before it is trained."""

    def __post_init__(self) -> None:
        layers, micro_batches = self.forward_ns.shape
        for name in COLUMNS:
            values = getattr(self, name)
            if values.shape != (layers, micro_batches) or values.dtype != np.int64:
                raise ValueError(
                    f"{name} is {values.dtype} {values.shape}; give int64 {(layers, micro_batches)}"
                )
            if values.size and values.min() < 0:
                layer = self.names[int(values.min(axis=1).argmin())]
                raise ConfigError(f"layer {layer}: {name} is negative")
        per_layer = ("names", "kinds", "state_bytes", "param_counts")
        rest = {name: len(getattr(self, name)) for name in per_layer}
        if layers < 1 or set(rest.values()) != {layers}:
            raise ValueError(f"{layers} layers, but {rest}; give one of each, for at least 1 layer")

    @property
    def num_layers(self) -> int:
        """Number of rows."""
        return len(self.names)

    @property
    def num_micro_batches(self) -> int:
        """Number of columns."""
        return int(self.forward_ns.shape[1])

    @property
    def backward_ns(self) -> IntArray:
        """Both gradients, int64, (layers, micro_batches); nothing recomputed."""
        return self.input_grad_ns + self.weight_grad_ns

    def take(self, indices: IntArray) -> "Costs":
        """The same layers for some of the micro-batches, in the order of `indices`."""
        columns = {name: getattr(self, name)[:, indices] for name in COLUMNS}
        taken: dict[str, Any] = {
            name: np.ascontiguousarray(column) for name, column in columns.items()
        }
        return replace(self, **taken)

    def rows(self, indices: Sequence[int]) -> "Costs":
        """Some of the layers, in the order of `indices`; one may be there several times."""
        return Costs(
            names=tuple(self.names[row] for row in indices),
            kinds=tuple(self.kinds[row] for row in indices),
            **{name: getattr(self, name)[list(indices)] for name in ARRAYS},
        )


def frozen_costs(costs: Costs, trained: Sequence[bool]) -> Costs:
    """The costs if only the layers `trained`, (layers,), are trained: nothing is measured again.

    The first trained layer needs no gradient of its input, those before it no backward pass, other
    frozen ones no weight gradients. Frozen weights keep the memory of trained ones: costs do not
    tell which part is gradients and optimizer state. ConfigError if a needed gradient is missing.
    """
    is_trained = np.array(trained, np.bool_)
    first = int(is_trained.argmax()) if is_trained.any() else len(is_trained)
    known = int(costs.sends_grad.argmax()) if costs.sends_grad.any() else costs.num_layers
    if len(is_trained) != costs.num_layers or first < known:
        raise ConfigError(
            f"the costs are of {costs.num_layers} layers, trained from layer {known} on, but "
            f"{len(is_trained)} layers are to be trained from layer {first} on: measure with these "
            "parts trained"
        )
    # each (layers, 1)
    layer = np.arange(costs.num_layers)[:, np.newaxis]
    goes_back, passes_on, learns = layer >= first, layer > first, is_trained[:, np.newaxis]
    return replace(
        costs,
        input_grad_ns=costs.input_grad_ns * passes_on,
        weight_grad_ns=costs.weight_grad_ns * (learns & goes_back),
        recompute_ns=costs.recompute_ns * goes_back,
        saved_bytes=costs.saved_bytes * goes_back,
        kept_bytes=costs.kept_bytes * goes_back,
        deferred_bytes=costs.deferred_bytes * (learns & goes_back),
        weight_working_bytes=costs.weight_working_bytes * (learns & goes_back),
        sends_grad=goes_back[:, 0],
    )
