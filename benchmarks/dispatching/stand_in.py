"""Stand-in layers of `benchmarks/dispatch_ablation.py` that wait for their modelled time.

So that more ranks than cores can run. A phase waits as long as its FLOPs would take at a rate,
padding included, a third of it in the forward pass. Features are real tensors of the LLM's width,
made of their inputs, and really travel: the loss shows whether each came to its place. Nothing here
says how fast layers are.
"""

from __future__ import annotations

import numpy as np
import torch
from ablation.stand_in import Wait, wait
from torch import Tensor, nn

from dispatching.data import PhaseInput
from dispatching.model import BACKWARD, ModelShape, next_tokens, phase_flops, put_features
from isobatch.engine.cost_model.loads import PhaseLoads


class StandIn(nn.Module):
    """A phase's time; `rate`: FLOPs per second."""

    def __init__(self, shape: ModelShape, phase: str, rate: float) -> None:
        super().__init__()
        self.shape, self.phase, self.rate = shape, phase, rate

    def wait(self, given: PhaseInput, like: Tensor) -> Tensor:
        """`like`, after the forward pass's time; its gradient takes the backward pass's."""
        forward_s = (
            float(phase_flops(self.shape, self.phase, self._loads(given))[0])
            / self.rate
            / (1 + BACKWARD)
        )
        wait(forward_s)
        return Wait.apply(like, BACKWARD * forward_s)  # type: ignore[no-untyped-call,no-any-return]

    def _loads(self, given: PhaseInput) -> PhaseLoads:
        """The batch's load: images attend within themselves, clips are padded to the longest."""
        lengths = np.array(given.lengths, np.int64)
        count, squares = len(lengths), np.square(lengths).sum()
        if self.phase == "vision":
            squares = lengths.sum() * self.shape.data.image_patches
        if self.phase == "audio":
            lengths = lengths // 2
            lengths = np.full(count, lengths.max(initial=0))
            squares = np.square(lengths).sum()
        return PhaseLoads(
            tokens=lengths.sum(keepdims=True), squares=np.array([squares]), items=np.array([count])
        )


class StandInEncoder(StandIn):
    """Inputs -> features of the usual shape."""

    def __init__(self, shape: ModelShape, phase: str, rate: float) -> None:
        super().__init__(shape, phase, rate)
        values = {"vision": shape.data.patch_values, "audio": shape.data.frame_values}[phase]
        self.joined = {
            "vision": shape.data.patches_per_token,
            "audio": shape.data.frames_per_token,
        }[phase]
        self.out = nn.Linear(values, shape.llm.width)

    def forward(self, given: PhaseInput) -> Tensor:
        return self.wait(given, self.out(given.rows[:: self.joined]))


class StandInLanguage(StandIn):
    """Features and texts -> a loss that depends on each of them and on its place."""

    def __init__(self, shape: ModelShape, rate: float) -> None:
        super().__init__(shape, "llm", rate)
        self.table = nn.Embedding(shape.data.vocabulary, shape.llm.width)
        self.weigh = nn.Linear(shape.llm.width, 1)

    def forward(self, given: PhaseInput, features: dict[str, Tensor]) -> Tensor:
        hidden = put_features(self.table(given.rows), given, features)
        labels = next_tokens(given)
        wanted = torch.where(labels >= 0, 1.0 + labels.remainder(7), 0.0)
        return self.wait(given, (torch.tanh(self.weigh(hidden)[:, 0]) * wanted).square().sum())


def make_standin(shape: ModelShape, rate: float, seed: int = 0) -> nn.ModuleDict:
    """Phases by name; the same on every rank."""
    torch.manual_seed(seed)
    encoders = {name: StandInEncoder(shape, name, rate) for name in ("vision", "audio")}
    return nn.ModuleDict({**encoders, "llm": StandInLanguage(shape, rate)})
