"""The model of `benchmarks/dispatch_ablation.py`: two encoders, connectors and an LLM.

Real layers, float32. Images attend within themselves and are not padded; clips are padded to the
batch's longest, as Whisper's convolutions need it; the LLM attends inside each sample and pads
nothing. So what a sample's loss is does not depend on who else is in a batch. `phase_flops` counts
what a phase computes, forward and backward, padding included or not: what it is told as load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from dispatching.data import TOKENS, DataShape, PhaseInput
from isobatch.balance.metrics import FloatArray
from isobatch.engine.cost_model.loads import PhaseLoads

BACKWARD = 2
"""FLOPs of a backward pass, in forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Transformer layers."""

    layers: int
    width: int
    heads: int

    @property
    def weights(self) -> int:
        """That every token is multiplied with."""
        return self.layers * 12 * self.width**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    data: DataShape = field(default_factory=DataShape)
    vision: Tower = Tower(layers=4, width=256, heads=4)
    audio: Tower = Tower(layers=4, width=192, heads=4)
    llm: Tower = Tower(layers=4, width=256, heads=4)

    def weights(self, phase: str) -> int:
        """Weights that each token of a phase's load is multiplied with, connector and embedding of
        inputs included.
        """
        data = self.data
        if phase == "vision":
            connector = (
                self.vision.width * self.llm.width + self.llm.width**2 // data.patches_per_token
            )
            return self.vision.weights + data.patch_values * self.vision.width + connector
        if phase == "audio":
            # the first convolution runs on two frames per token
            convolutions = 3 * self.audio.width * (2 * data.frame_values + self.audio.width)
            connector = (
                self.audio.width * self.llm.width + self.llm.width**2 * 2 // data.frames_per_token
            )
            return self.audio.weights + convolutions + connector
        return self.llm.weights + data.vocabulary * self.llm.width


def phase_flops(shape: ModelShape, phase: str, loads: PhaseLoads) -> FloatArray:
    """Forward and backward, of each batch of a phase; (batches,)."""
    tower: Tower = getattr(shape, phase)
    causal = 0.5 if phase == "llm" else 1.0
    forward = (
        2 * shape.weights(phase) * loads.tokens
        + causal * 4 * tower.layers * tower.width * loads.squares
    )
    return (1 + BACKWARD) * forward


class Block(nn.Module):
    """A layer; `attend` mixes (tokens, heads, width of a head) of query, key and value."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.heads = tower.heads
        self.before, self.between = nn.LayerNorm(tower.width), nn.LayerNorm(tower.width)
        self.qkv, self.out = (
            nn.Linear(tower.width, 3 * tower.width),
            nn.Linear(tower.width, tower.width),
        )
        self.up, self.down = (
            nn.Linear(tower.width, 4 * tower.width),
            nn.Linear(4 * tower.width, tower.width),
        )

    def forward(self, hidden: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        parts = self.qkv(self.before(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        hidden = hidden + self.out(attend(*parts).flatten(-2))
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class Connector(nn.Module):
    """Some neighbours of an encoder's tokens -> one LLM token."""

    def __init__(self, width: int, joined: int, llm_width: int) -> None:
        super().__init__()
        self.joined = joined * width
        self.up, self.out = nn.Linear(self.joined, llm_width), nn.Linear(llm_width, llm_width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(functional.gelu(self.up(hidden.reshape(-1, self.joined))))


class Vision(nn.Module):
    """Patches -> image tokens."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.patches = shape.data.image_patches
        self.embed = nn.Linear(shape.data.patch_values, shape.vision.width)
        self.places = nn.Parameter(0.02 * torch.randn(self.patches, shape.vision.width))
        self.blocks = nn.ModuleList(Block(shape.vision) for _ in range(shape.vision.layers))
        self.connector = Connector(
            shape.vision.width, shape.data.patches_per_token, shape.llm.width
        )

    def forward(self, given: PhaseInput) -> Tensor:
        """-> (image tokens, LLM width)."""
        hidden = (
            self.embed(given.rows).unflatten(0, (-1, self.patches)) if len(given.rows) else None
        )
        if hidden is None:  # weights take part all the same: their gradients are 0
            return self.connector(torch.zeros(0, self.connector.joined))
        hidden = hidden + self.places
        for block in self.blocks:
            hidden = block(hidden, _attend_whole)
        return self.connector(hidden)


class Audio(nn.Module):
    """Frames -> audio tokens, padded to the longest."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.first = nn.Conv1d(shape.data.frame_values, shape.audio.width, 3, padding=1)
        self.second = nn.Conv1d(shape.audio.width, shape.audio.width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(shape.audio) for _ in range(shape.audio.layers))
        self.connector = Connector(
            shape.audio.width, shape.data.frames_per_token // 2, shape.llm.width
        )

    def forward(self, given: PhaseInput) -> Tensor:
        """-> (audio tokens, LLM width)."""
        if not given.lengths:
            return self.connector(torch.zeros(0, self.connector.joined))
        padded = pad_sequence(list(given.rows.split(given.lengths)), batch_first=True)
        lengths = torch.tensor(given.lengths)
        hidden = functional.gelu(self.first(padded.transpose(1, 2)))
        # nothing may come out of the padding: the second convolution would bring it into the last
        # token
        hidden = hidden * (torch.arange(padded.shape[1]) < lengths[:, None])[:, None]
        hidden = functional.gelu(self.second(hidden)).transpose(1, 2)
        there = torch.arange(hidden.shape[1]) < lengths[:, None] // 2
        for block in self.blocks:
            hidden = block(hidden, lambda *parts: _attend_masked(there, *parts))
        return self.connector(hidden[there])


class Language(nn.Module):
    """Texts, with features in the places of image and audio tokens -> the sum of the losses of the
    next tokens.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.data.vocabulary, shape.llm.width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape.llm) for _ in range(shape.llm.layers))
        self.norm = nn.LayerNorm(shape.llm.width)

    def forward(self, given: PhaseInput, features: dict[str, Tensor]) -> Tensor:
        hidden = put_features(self.table(given.rows), given, features)
        for block in self.blocks:
            hidden = block(hidden, lambda *parts: _attend_inside(given.lengths, *parts))
        logits = self.norm(hidden) @ self.table.weight.T
        return functional.cross_entropy(
            logits, next_tokens(given), ignore_index=-100, reduction="sum"
        )


def put_features(hidden: Tensor, given: PhaseInput, features: dict[str, Tensor]) -> Tensor:
    """Embeddings, features instead of those of image and audio tokens; encoders take part with 0
    rows too.
    """
    for name, token in TOKENS.items():
        hidden = hidden.index_copy(0, (given.rows == token).nonzero().squeeze(1), features[name])
    return hidden


def next_tokens(given: PhaseInput) -> Tensor:
    """What follows each token inside its sample; -100 behind the last."""
    labels = torch.cat([given.rows[1:], given.rows.new_full((min(1, len(given.rows)),), -100)])
    labels[torch.tensor(given.lengths, dtype=torch.int64).cumsum(0) - 1] = -100
    return labels


def make_model(shape: ModelShape, seed: int = 0) -> nn.ModuleDict:
    """Phases by name; the same on every rank."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"vision": Vision(shape), "audio": Audio(shape), "llm": Language(shape)})


def _attend_whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(images, tokens, heads, width) each, every image within itself."""
    mixed = functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value))
    )
    return mixed.transpose(1, 2)


def _attend_masked(there: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same of padded clips; `there`: (clips, tokens), false where there is padding."""
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(
        *parts, attn_mask=there[:, None, None]
    ).transpose(1, 2)


def _attend_inside(lengths: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(tokens, heads, width) each, causal, every sample within itself."""
    if not lengths:
        return value
    samples = zip(
        *(part.transpose(0, 1).split(lengths, 1) for part in (query, key, value)), strict=True
    )
    mixed = [functional.scaled_dot_product_attention(*parts, is_causal=True) for parts in samples]
    return torch.cat(mixed, 1).transpose(0, 1)
