"""A tiny vision-language model as a list of layers, and micro-batches for it: what the runtime is
tested with.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec
from isobatch.tensors.token_loss import labelled_loss, shift_labels

IMAGE, VOCAB = 0, 29
VIT_TOKENS, PATCH_VALUES, VISION, HIDDEN, HEADS = 4, 12, 8, 16, 2
"""Of a patch: ViT tokens, merged into one LLM token."""


@dataclass(frozen=True, kw_only=True)
class ToyBatch:
    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    pixel_values: Tensor
    sample_ids: tuple[str, ...]

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels >= 0).sum())


def make_batch(generator: torch.Generator, lengths: list[int], num_patches: int) -> ToyBatch:
    """Samples of these lengths, and images anywhere in them."""
    total = sum(lengths)
    ids = torch.randint(1, VOCAB, (total,), generator=generator)
    ids[torch.randperm(total, generator=generator)[:num_patches]] = IMAGE
    labels = torch.where(torch.rand(total, generator=generator) < 0.5, ids, -100)
    return ToyBatch(
        input_ids=ids,
        labels=labels,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        pixel_values=torch.randn(num_patches * VIT_TOKENS, PATCH_VALUES, generator=generator),
        sample_ids=tuple(f"sample-{number}" for number in range(len(lengths))),
    )


class PatchEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(PATCH_VALUES, VISION)

    def forward(self, carry, batch):
        return {"features": self.map(batch.pixel_values.to(self.map.weight.dtype))}


class VisionLayer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(VISION),
            nn.Linear(VISION, 24),
            nn.Linear(24, VISION),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, carry, batch):
        features = carry["features"]
        return {
            "features": features
            + self.dropout(self.down(functional.gelu(self.up(self.norm(features)))))
        }


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(VIT_TOKENS * VISION, HIDDEN)

    def forward(self, carry, batch):
        return {"features": self.map(carry["features"].reshape(-1, VIT_TOKENS * VISION))}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, carry, batch):
        hidden = self.table(batch.input_ids)
        places = (batch.input_ids == IMAGE).nonzero().squeeze(1)
        # also the scale of the features travels on, so that more than one tensor crosses each cut
        return {
            "hidden": hidden.index_copy(0, places, carry["features"]),
            "scale": 1 + 0.1 * carry["features"].sum(0),
        }


class LanguageLayer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.up, self.down, self.dropout = (
            nn.Linear(HIDDEN, 40),
            nn.Linear(40, HIDDEN),
            nn.Dropout(dropout),
        )

    def forward(self, carry, batch):
        hidden = carry["hidden"]
        parts = (
            self.qkv(self.norm(hidden)).reshape(-1, 3, HEADS, HIDDEN // HEADS).permute(1, 2, 0, 3)
        )
        mixed = [
            functional.scaled_dot_product_attention(
                *(part[:, start:end] for part in parts), is_causal=True
            )
            for start, end in pairwise(batch.cu_seqlens.tolist())
        ]
        joined = torch.cat(mixed, 1).permute(1, 0, 2).reshape(-1, HIDDEN)
        hidden = hidden + self.dropout(self.out(joined)) * carry["scale"]
        return {
            "hidden": hidden + self.down(functional.gelu(self.up(hidden))),
            "scale": carry["scale"],
        }


class Head(nn.Module):
    def __init__(self, embedding: Embedding, tied: bool):
        super().__init__()
        self.all_logits = False  # True to compare with
        self.norm = nn.LayerNorm(HIDDEN)
        self.table = embedding.table if tied else nn.Embedding(VOCAB, HIDDEN)

    def forward(self, carry, batch):
        hidden = carry["hidden"]
        if not self.all_logits:
            return {"loss": labelled_loss(hidden, self.logits, batch)}
        targets, logits = shift_labels(batch.labels, batch.cu_seqlens), self.logits(hidden).double()
        return {"loss": functional.cross_entropy(logits, targets, reduction="sum").float()}

    def logits(self, rows: Tensor) -> Tensor:
        return functional.linear(self.norm(rows), self.table.weight)


def make_model(num_vision=3, num_language=4, *, tied=True, dropout=0.0, seed=0) -> LayerStack:
    torch.manual_seed(seed)
    embedding = Embedding()
    vision = [PatchEmbedding(), *(VisionLayer(dropout) for _ in range(num_vision)), Projector()]
    language = [
        embedding,
        *(LanguageLayer(dropout) for _ in range(num_language)),
        Head(embedding, tied),
    ]

    def specs(cut: int, batch: ToyBatch) -> dict[str, TensorSpec]:
        patches = len(batch.pixel_values) // VIT_TOKENS
        if cut < len(vision):
            return {
                "features": TensorSpec(shape=(patches * VIT_TOKENS, VISION), dtype=torch.float32)
            }
        if cut == len(vision):
            return {"features": TensorSpec(shape=(patches, HIDDEN), dtype=torch.float32)}
        hidden = TensorSpec(shape=(len(batch.input_ids), HIDDEN), dtype=torch.float32)
        return {"hidden": hidden, "scale": TensorSpec(shape=(HIDDEN,), dtype=torch.float32)}

    return LayerStack(layers=[*vision, *language], specs=specs)


def freeze(model: LayerStack, part: str | int) -> None:
    """`vision` (without the projector), `language`, or the layer at a place."""
    if isinstance(part, int):
        model.layers[part].requires_grad_(False)
        return
    place = next(
        number for number, layer in enumerate(model.layers) if isinstance(layer, Projector)
    )
    frozen = model.layers[:place] if part == "vision" else model.layers[place + 1 :]
    for layer in frozen:
        layer.requires_grad_(False)


def run_alone(model: LayerStack, batches: list[ToyBatch], normalizer: int, before=None) -> float:
    """Forward and backward passes of a step in one process; -> the loss. `before(layer,
    micro-batch)`: of each pass.
    """
    total = 0.0
    for number, batch in enumerate(batches):
        carry = {}
        for place, layer in enumerate(model.layers):
            if before is not None:
                before(place, number)
            carry = layer(carry, batch)
        loss = carry["loss"] / normalizer
        loss.backward()
        total += float(loss.detach())
    return total
