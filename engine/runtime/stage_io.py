"""Tensors between layers and their specs, and the stack of layers.

A model for the pipeline is a list of layers. Each takes the tensors of the layer before and the
micro-batch, and returns those for the next; the last one returns `loss`, a sum over tokens. Every
rank gets the micro-batch itself from its own loader, so only computed tensors are sent. Every rank
knows all shapes beforehand, so no shapes are sent. What sizes and places follow from is read from
the micro-batch on the CPU (`host_of`), so that nothing waits for a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.engine.runtime.errors import SpecMismatch

StageTensors = dict[str, Tensor]
Batch = Any
"""A micro-batch: `loaders.MicroBatch`, or whatever the layers understand."""


class PlacedBatch:
    """A micro-batch on a GPU; `host` is the same one on the CPU."""

    def __init__(self, host: Batch, moved: Batch) -> None:
        self.host, self._moved = host, moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._moved, name)


def placed(batch: Batch, device: torch.device) -> Batch:
    """A micro-batch for layers on `device`: one on a CPU is copied to a GPU without waiting.

    One that is there, or that has no `labels`, `pin_memory` and `to`, is given as it is.
    """
    labels = getattr(batch, "labels", None)
    if labels is None or labels.device.type == device.type or not hasattr(batch, "pin_memory"):
        return batch
    pinned = batch.pin_memory() if device.type == "cuda" else batch
    return PlacedBatch(batch, pinned.to(device, non_blocking=True))


def host_of(batch: Batch) -> Batch:
    """A micro-batch to read values of without waiting, if it was given to the pipeline on a CPU."""
    return batch.host if isinstance(batch, PlacedBatch) else batch


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device, copied without waiting."""
    return values.to(device, non_blocking=True)


LOSS = "loss"
"""Output of the last layer: the sum of the losses of a micro-batch's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True
    """Whether a gradient comes back for it, if any layer before the cut is trained."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.num_bytes


TensorSpecs = Callable[[int, Batch], Mapping[str, TensorSpec]]
"""(cut, micro-batch) -> tensors between the layers `cut - 1` and `cut`, by name; on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """A model as a pipeline takes it."""

    layers: Sequence[nn.Module]
    """Each `(tensors, batch) -> tensors`. Layers may share parameters (tied embeddings)."""
    specs: TensorSpecs
    load: Callable[[int], None] | None = None
    """Gives a layer on the meta device its weights, on the CPU; a rank calls it for its own. May
    raise IsobatchError. None: all layers have weights."""

    @property
    def first_trained(self) -> int:
        """Index of the first layer with a trained parameter; the number of layers if none has."""
        for index, layer in enumerate(self.layers):
            if any(weight.requires_grad for weight in layer.parameters()):
                return index
        return len(self.layers)


def set_values(weight: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other memory, also on another device; layers that share it still do."""
    other = nn.Parameter(values, requires_grad=weight.requires_grad)
    torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]


def check_tensors(
    tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], where: str
) -> None:
    """SpecMismatch unless `tensors` match the specs; a message casts to their dtypes.

    `where` says in messages which tensors these are.
    """
    for name, spec in specs.items():
        if name not in tensors:
            raise SpecMismatch(
                f"{where} has no {name!r}, which the model's specs name; it has"
                f" {', '.join(sorted(tensors))}"
            )
        if tuple(tensors[name].shape) != spec.shape:
            raise SpecMismatch(
                f"{where}: {name!r} has the shape {tuple(tensors[name].shape)}, but the model's"
                f" specs say {spec.shape}"
            )


def samples_text(batch: Batch) -> str:
    """Ids of all samples of a micro-batch, for messages.

    >>> from types import SimpleNamespace
    >>> samples_text(SimpleNamespace(sample_ids=("a", "b"))), samples_text(object())
    ('samples a, b', 'samples unknown: the micro-batch has no sample_ids')
    """
    ids = getattr(batch, "sample_ids", None)
    if ids is None:
        return "samples unknown: the micro-batch has no sample_ids"
    return f"samples {', '.join(map(str, ids))}" if len(ids) else "no samples"
