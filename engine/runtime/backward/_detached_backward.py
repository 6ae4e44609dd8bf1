"""Backward pass of a stage without holding its outputs: `BackwardHandle`.

Autograd needs from an output only the place in the graph where its gradient enters. So while later
stages run, a micro-batch in flight does not keep its outputs; the sender releases them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobatch.engine.runtime.stage_io import StageTensors


class _JoinOutputs(torch.autograd.Function):
    """Maps any number of tensors to an empty one; backward reads their gradients from a dict."""

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
    """Starts the backward pass through a stage, once."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        """`outputs`: at least one, all with a gradient."""
        # the graph must not hold this object: a cycle would keep the graph until gc finds it
        self._gradients: StageTensors = {}
        self._end: Tensor = _JoinOutputs.apply(  # type: ignore[no-untyped-call]
            self._gradients, tuple(outputs), *outputs.values()
        )

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the gradients of all leaves, given those of the outputs; frees the graph."""
        self._gradients.update(gradients)
        torch.autograd.backward(self._end, torch.zeros_like(self._end))
        self._gradients.clear()
