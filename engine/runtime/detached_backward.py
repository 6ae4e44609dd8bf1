"""Where a stage's backward pass begins: `BackwardHandle`, which holds its outputs' place in the
graph but not the outputs.

A pipeline's outputs are sent, and what autograd needs of them later is only where their gradients
shall go. So a micro-batch under way does not hold them for as long as the stages behind it take;
whoever sends them lets go of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.runtime.stage_io import StageTensors


class _Join(torch.autograd.Function):
    """Any number of tensors -> an empty one; backward, each gets the gradient that stands in a dict
    under its name.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: StageTensors, names: Sequence[str], *outputs: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.names = gradients, names
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(ctx.gradients.get(name) for name in ctx.names))


class BackwardHandle:
    """The root of the backward pass through a stage; it may be passed several times."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        """Outputs that have a gradient; at least one."""
        # nothing that the graph holds may hold the root: a circle would keep the whole graph until
        # it is found
        self._gradients: StageTensors = {}
        self._end: Tensor = _Join.apply(self._gradients, tuple(outputs), *outputs.values())  # type: ignore[no-untyped-call]

    def backward(
        self, gradients: Mapping[str, Tensor], leaves: Sequence[Tensor], *, keep: bool
    ) -> None:
        """Add to the gradients of `leaves`, by those of the outputs. `keep`: it will be passed
        again.
        """
        self._gradients.update(gradients)
        torch.autograd.backward(
            self._end, torch.zeros_like(self._end), inputs=leaves, retain_graph=keep
        )
        self._gradients.clear()
