"""What travels from layer to layer: `StageTensors`, its shapes, and the layers that a pipeline is
made of.

A model for the pipeline is a list of layers. Each takes the carry of the layer before and the
micro-batch, and gives the carry for the next; the last one gives `loss`, a sum over tokens. Every
rank has the micro-batch itself, out of its own loader, so only what was computed travels, and every
rank knows the shape of all that will come: none are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.runtime.errors import SpecMismatch

StageTensors = dict[str, Tensor]
Batch = Any
"""A micro-batch: `loaders.MicroBatch`, or whatever the layers understand."""

LOSS = "loss"
"""What the last layer gives: the sum of the losses of a micro-batch's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True
    """Whether a gradient comes back for it, if anything before the cut is trained."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return 0 in self.shape


class TensorSpecs(Protocol):
    """Says what crosses a cut; known to every rank beforehand."""

    def __call__(self, cut: int, batch: Batch) -> Mapping[str, TensorSpec]:
        """The tensors between the layers `cut - 1` and `cut` for one micro-batch, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """A model as a pipeline takes it."""

    layers: Sequence[nn.Module]
    """Each `(carry, batch) -> carry`. Parameters may be shared between layers (tied embeddings)."""
    specs: TensorSpecs

    @property
    def first_trained(self) -> int:
        """The first layer with a parameter that is trained; the number of layers if there is
        none.
        """
        for place, layer in enumerate(self.layers):
            if any(weight.requires_grad for weight in layer.parameters()):
                return place
        return len(self.layers)


def check_carry(carry: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], where: str) -> None:
    """SpecMismatch unless a carry holds what specs say; `where` says which, for people. dtypes may
    differ: autocast.
    """
    for name, spec in specs.items():
        if name not in carry:
            raise SpecMismatch(
                f"{where} has no {name!r}, which the model's specs name; it has {', '.join(sorted(carry))}"
            )
        if tuple(carry[name].shape) != spec.shape:
            raise SpecMismatch(
                f"{where}: {name!r} has the shape {tuple(carry[name].shape)}, but the model's specs say {spec.shape}"
            )


def ids_text(batch: Batch) -> str:
    """A micro-batch's samples, for messages; all of them, for one will be looked for.

    >>> from types import SimpleNamespace
    >>> ids_text(SimpleNamespace(sample_ids=("a", "b"))), ids_text(object())
    ('samples a, b', 'samples unknown: the micro-batch has no sample_ids')
    """
    ids = getattr(batch, "sample_ids", None)
    if ids is None:
        return "samples unknown: the micro-batch has no sample_ids"
    return f"samples {', '.join(map(str, ids))}" if len(ids) else "no samples"
