"""A vision-language model small enough for one CPU core: what a trainer does with a `MicroBatch`.

A ViT over 56 px patches (16 ViT patches of 14 px and a class token), 2x2 of them merged to one LLM
token, and a causal LLM over packed samples. Attention runs sample by sample along `cu_seqlens`, so
no sample sees another; on a GPU, flash attention's varlen functions take the same `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch import MicroBatch, StreamingLoader, shift_labels

PATCH_SIDE, VIT_PATCH_SIDE, MERGE = 56, 14, 2
GRID = PATCH_SIDE // VIT_PATCH_SIDE
TOKENS_PER_PATCH = (GRID // MERGE) ** 2
HEADS = 4


class Block(nn.Module):
    """A pre-norm transformer block over packed sequences."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, lengths: list[int], positions: Tensor | None) -> Tensor:
        """`x`: (tokens, width), sequences of `lengths`; `positions`: (tokens,), rotary, or None."""
        x = x + self.out(self._attend(self.norm1(x), lengths, positions))
        return x + self.mlp(self.norm2(x))

    def _attend(self, x: Tensor, lengths: list[int], positions: Tensor | None) -> Tensor:
        # (tokens, 3 * width) -> three times (heads, tokens, head width)
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, x.shape[1] // HEADS).permute(1, 2, 0, 3)
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        if len(set(lengths)) == 1:  # image patches: all sequences in one call
            q, k, v = (part.unflatten(1, (len(lengths), -1)) for part in (q, k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return attended.flatten(1, 2).transpose(0, 1).flatten(1)
        parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
        each = [
            functional.scaled_dot_product_attention(*part, is_causal=self.causal) for part in parts
        ]
        return torch.cat([v[:, :0], *each], dim=1).transpose(0, 1).flatten(1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer) of x, (heads, tokens, head width)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies  # (tokens, half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


class VisionEncoder(nn.Module):
    """Patches (n, 3, 56, 56) -> features for the LLM (n * 4, llm width)."""

    def __init__(self, width: int, llm_width: int, depth: int) -> None:
        super().__init__()
        self.vit_patches = nn.Conv2d(3, width, VIT_PATCH_SIDE, VIT_PATCH_SIDE)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(GRID**2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(depth))
        self.project = nn.Sequential(
            nn.LayerNorm(MERGE**2 * width), nn.Linear(MERGE**2 * width, llm_width)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Every patch is a sequence of its own."""
        count = len(pixels)
        x = self.vit_patches(pixels).flatten(2).transpose(1, 2)  # (n, 16, width)
        x = torch.cat([self.class_token.expand(count, -1, -1), x], dim=1) + self.positions
        flat = x.flatten(0, 1)
        for block in self.blocks:
            flat = block(flat, [GRID**2 + 1] * count, None)
        # drop the class token, then (n, 2, 2, 2, 2, width): merge the ViT patches of each quarter
        side, width = GRID // MERGE, flat.shape[1]
        grid = flat.view(count, GRID**2 + 1, width)[:, 1:].reshape(
            count, side, MERGE, side, MERGE, width
        )
        return self.project(
            grid.transpose(2, 3).reshape(count * TOKENS_PER_PATCH, MERGE**2 * width)
        )


class TinyVLM(nn.Module):
    """Vision features in the places of the image tokens, then a causal LLM."""

    def __init__(
        self,
        vocab_size: int,
        image_token_id: int,
        *,
        width: int = 64,
        vit_width: int = 32,
        depth: int = 2,
    ):
        super().__init__()
        self.image_token_id = image_token_id
        self.vision = VisionEncoder(vit_width, width, depth)
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logits (tokens, vocab_size)."""
        x = self.inputs(batch)
        lengths = batch.cu_seqlens.diff().tolist()
        for block in self.blocks:
            x = block(x, lengths, batch.position_ids)
        return self.head(self.norm(x))

    def inputs(self, batch: MicroBatch) -> Tensor:
        """Embeddings (tokens, width), with vision features in the places of image tokens.

        The encoder also runs without images, so that all parameters get a gradient.
        """
        x = self.embed(batch.input_ids)
        features = self.vision(batch.pixel_values)
        is_image = batch.input_ids == self.image_token_id
        if int(is_image.sum()) != len(features):
            raise ValueError(
                f"{len(features)} vision features for {int(is_image.sum())} image tokens"
            )
        return x.masked_scatter(is_image[:, None], features)


def token_losses(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Cross entropy of each token, (tokens,); 0 where there is no label.

    `batch.reduce_loss` makes of them this micro-batch's part of the step's loss.
    """
    targets = shift_labels(batch.labels, batch.cu_seqlens)
    return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def accumulate(model: nn.Module, batches: list[MicroBatch]) -> float:
    """Add the gradients of a rank's micro-batches; -> their part of the step's loss."""
    total = 0.0
    for batch in batches:
        loss = batch.reduce_loss(token_losses(model(batch), batch))
        loss.backward()
        total += loss.item()
    return total


def per_label(loss: float, batches: list[MicroBatch]) -> float:
    """A step's loss as the mean over its labels, for a curve.

    By the epoch's divisor, which trains better, steps of few labels have small losses.
    """
    return loss * batches[0].loss_normalizer / max(1, batches[0].num_loss_tokens)


def endless(loader: StreamingLoader) -> Iterator[list[MicroBatch]]:
    """The steps of epoch after epoch."""
    while True:
        yield from loader


def make_model(loader: StreamingLoader, *, seed: int = 0) -> TinyVLM:
    """A model with random weights, the same on all ranks, for a build of the preset `tiny`."""
    if getattr(loader.model.vision, "image_size", None) != PATCH_SIDE:
        raise SystemExit(f"the build is for {loader.model.name}; build it with --model tiny")
    torch.manual_seed(seed)
    return TinyVLM(loader.vocab_size, loader.image_token_id)
