"""AdamW in float32 for weights in bf16: `MasterAdamW`, 12 more bytes per parameter.

A bf16 weight has 8 bits: most of Adam's steps are too small to change it. So a copy in float32
takes them. Gradients become float32 one layer at a time: of the largest layer, 4 bytes per
parameter are all that a step needs besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class MasterAdamW:
    """Of a list of layers; state is made at once, so memory is what it will be in training."""

    def __init__(self, layers: Iterable[nn.Module], lr: float, weight_decay: float = 0.01) -> None:
        self._parts: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.Optimizer]] = []
        for layer in layers:
            weights = list(layer.parameters())
            masters = [weight.detach().float().clone() for weight in weights]
            self._parts.append((weights, masters, torch.optim.AdamW(masters, lr=lr, fused=True)))
        # a step with gradients of 0 makes the moments; without decay it changes no weight, and it
        # shall not count
        for _, _, optimizer in self._parts:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        self.step()
        for _, _, optimizer in self._parts:
            optimizer.param_groups[0]["weight_decay"] = weight_decay
            for state in optimizer.state.values():
                state["step"].zero_()

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """All that it keeps, as torch's optimizers tell it."""
        return {
            master: {**optimizer.state[master], "master": master}
            for _, masters, optimizer in self._parts
            for master in masters
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights; leaves no gradients."""
        for weights, masters, optimizer in self._parts:
            for weight, master in zip(weights, masters, strict=True):
                master.grad = (
                    torch.zeros_like(master) if weight.grad is None else weight.grad.float()
                )
                weight.grad = None
            optimizer.step()
            for weight, master in zip(weights, masters, strict=True):
                master.grad = None
                weight.copy_(master)
