"""Stand-in stages that wait for the modelled time of each pass.

Nothing is computed, so many ranks can share few cores; what is measured is the runtime, its
messages and its waiting. Activations are a few numbers, whatever the model's would be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.common.types import IntArray
from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec
from isobatch.engine.simulator.stages import StageCosts

WIDTH = 1024
"""float32 values that cross each cut."""
EARLY_S = 150e-6
"""Sleep ends so long before the time, and the rest is waited for awake: sleep wakes up late."""


class Wait(torch.autograd.Function):
    """Takes a tensor as it is; its gradient takes time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wait(ctx.backward_s)
        return gradients[0], None


def wait(seconds: float) -> None:
    """Wait to the microsecond."""
    until = time.perf_counter() + seconds
    if seconds > EARLY_S:
        time.sleep(seconds - EARLY_S)
    while time.perf_counter() < until:
        pass


class StandIn(nn.Module):
    """A stage's times, in seconds; a micro-batch is its column."""

    def __init__(self, forward_s: list[float], input_s: list[float], weight_s: list[float]) -> None:
        super().__init__()
        self._times = forward_s, input_s, weight_s
        # the weight of a product, so that a schedule may defer its gradient: the seconds to wait
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.weight.register_hook(lambda gradient: wait(gradient.item()))

    def forward(self, carry: Mapping[str, Tensor], column: int) -> dict[str, Tensor]:
        """values -> values, and the last one's first as the loss, whose gradient is 1."""
        forward_s, input_s, weight_s = (times[column] for times in self._times)
        wait(forward_s)
        values = carry.get("values", torch.zeros(WIDTH))
        if not values.requires_grad:  # nothing before it is trained; its backward pass runs too
            values = values.detach().requires_grad_()
        late = functional.linear(torch.tensor([[weight_s]]), self.weight)
        values = Wait.apply(values, input_s) + late[0]
        return {"values": values, "loss": values[0]}


class FrozenStandIn(nn.Module):
    """A frozen encoder's time."""

    def __init__(self, forward_s: list[float]) -> None:
        super().__init__()
        self._forward_s = forward_s

    def forward(self, carry: Mapping[str, Tensor], column: int) -> dict[str, Tensor]:
        """Nothing -> values."""
        wait(self._forward_s[column])
        return {"values": torch.zeros(WIDTH)}


def stand_ins(stages: StageCosts, encoder_ns: IntArray | None = None) -> LayerStack:
    """A layer per stage, for pipelines whose partition is one layer per stage.

    `encoder_ns`: with a frozen encoder in front, a layer of its own, whose times come on top of the
    first stage's.
    """
    times = (stages.forward_ns, stages.input_grad_ns, stages.weight_grad_ns)
    layers: list[nn.Module] = [
        StandIn(*((kind[stage] / 1e9).tolist() for kind in times))
        for stage in range(stages.num_stages)
    ]
    if encoder_ns is not None:
        layers.insert(0, FrozenStandIn((encoder_ns / 1e9).tolist()))
    spec = TensorSpec(shape=(WIDTH,), dtype=torch.float32)
    return LayerStack(layers=layers, specs=lambda cut, column: {"values": spec})
