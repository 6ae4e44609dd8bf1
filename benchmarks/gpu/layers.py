"""Layers of the presets' shapes in plain torch, to be measured.

InternViT's: RMSNorm, normalised queries and keys, layer scale, GELU; other encoders: LayerNorm and
none of the rest. InternLM2's: RMSNorm, grouped queries, rotary positions, SwiGLU, no biases.
Attention is torch's `scaled_dot_product_attention`, tile by tile and sample by sample: on a GPU its
flash kernels, which know grouped queries. Elementwise operations are torch's own, not fused: this
is what a model without special kernels takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.batches import Batch
from gpu.presets import rule_of, shapes_of, squares_of
from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.stage_io import LOSS, LayerStack, StageTensors, TensorSpec
from isobatch.models.presets import LlmShape, ModelPreset, TransformerShape, VitShape

LAYER_SCALE = 0.1
"""InternViT-6B's at the beginning."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, causal: bool
) -> Tensor:
    """Attention inside sequences that lie one behind the other: (tokens, heads, size) each ->
    (tokens, width).

    `key` and `value` may have fewer heads. Equal sequences go in one call.
    """
    grouped = query.shape[1] != key.shape[1]
    parts = [each.transpose(0, 1) for each in (query, key, value)]  # (heads, tokens, size)
    if len(set(lengths)) == 1:
        # (sequences, heads, length, size)
        rows = [part.unflatten(1, (len(lengths), -1)).transpose(0, 1) for part in parts]
        made = functional.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=grouped)
        return made.transpose(1, 2).flatten(0, 1).flatten(1)
    each = [
        functional.scaled_dot_product_attention(
            *(part[None] for part in own), is_causal=causal, enable_gqa=grouped
        ).transpose(1, 2)
        for own in zip(*(part.split(list(lengths), 1) for part in parts), strict=True)
    ]
    return torch.cat(each, dim=1)[0].flatten(1)


class Attention(nn.Module):
    """Queries, keys and values in one product; of a vision layer, or of an LLM's."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
        self.size, self.causal = shape.head_size, isinstance(shape, LlmShape)
        widths = [heads * shape.head_size for heads in self.heads]
        self.widths = widths
        self.qkv = nn.Linear(shape.hidden_size, sum(widths), bias=False)
        self.out = nn.Linear(widths[0], shape.hidden_size, bias=not self.causal)
        normed = isinstance(shape, VitShape) and shape.query_key_norm
        self.norms = (
            nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for width in widths[:2]) if normed else None
        )

    def forward(self, x: Tensor, lengths: Sequence[int], rotary: Tensor | None) -> Tensor:
        query, key, value = self.qkv(x).split(self.widths, dim=1)
        if self.norms is not None:
            query, key = (norm(each) for norm, each in zip(self.norms, (query, key), strict=True))
        query, key, value = (each.unflatten(1, (-1, self.size)) for each in (query, key, value))
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return self.out(attend(query, key, value, lengths, causal=self.causal))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary position embedding of x, (tokens, heads, size), by cosines and sines, (2, tokens, 1,
    size).
    """
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]


class FeedForward(nn.Module):
    """Two products with GELU between them, or SwiGLU."""

    def __init__(self, shape: TransformerShape, *, bias: bool) -> None:
        super().__init__()
        self.gated = shape.gated
        self.up = nn.Linear(
            shape.hidden_size, shape.ffn_size * (2 if shape.gated else 1), bias=bias
        )
        self.down = nn.Linear(shape.ffn_size, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=1)
            return self.down(functional.silu(gate) * x)
        return self.down(functional.gelu(x))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        is_vit, width = isinstance(shape, VitShape), shape.hidden_size
        plain = is_vit and not shape.query_key_norm
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if plain else nn.RMSNorm(width, eps=1e-6) for _ in range(2)
        )
        self.attention, self.feed = Attention(shape), FeedForward(shape, bias=is_vit)
        scaled = is_vit and shape.layer_scale
        self.scales = (
            nn.ParameterList(nn.Parameter(torch.full((width,), LAYER_SCALE)) for _ in range(2))
            if scaled
            else None
        )

    def forward(self, x: Tensor, lengths: Sequence[int], rotary: Tensor | None) -> Tensor:
        """x: (tokens, width)."""
        made = self.attention(self.norms[0](x), lengths, rotary)
        x = x + (made if self.scales is None else made * self.scales[0])
        made = self.feed(self.norms[1](x))
        return x + (made if self.scales is None else made * self.scales[1])


class PatchEmbedding(nn.Module):
    """Tiles -> rows of the encoder: a class token if there is one, then squares."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        vit, _ = shapes_of(preset)
        tokens, squares = rule_of(preset).vit_tokens_per_patch, squares_of(preset)
        self.embed = nn.Linear(vit.patch_values, vit.hidden_size)
        self.first = nn.Parameter(torch.zeros(1, tokens - squares, vit.hidden_size))
        self.positions = nn.Parameter(torch.randn(tokens, vit.hidden_size) * 0.02)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        squares = self.embed(batch.pixels)
        rows = torch.cat([self.first.expand(len(squares), -1, -1), squares], dim=1) + self.positions
        return {"features": rows.flatten(0, 1)}


class VisionLayer(nn.Module):
    """Every tile is a sequence of its own."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        self.block, self.tokens = Block(shapes_of(preset)[0]), rule_of(preset).vit_tokens_per_patch

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        if not len(batch.pixels):  # flash kernels take nothing empty
            return {"features": carry["features"]}
        return {"features": self.block(carry["features"], [self.tokens] * len(batch.pixels), None)}


class VisionProjector(nn.Module):
    """Squares merged into tokens of the LLM, a norm and an MLP."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        vit, _ = shapes_of(preset)
        rule, self.squares = rule_of(preset), squares_of(preset)
        self.tokens, self.side = (
            rule.vit_tokens_per_patch,
            isqrt(self.squares // rule.llm_tokens_per_patch),
        )
        self.norm = nn.LayerNorm(vit.projector[0])
        self.products = nn.ModuleList(
            nn.Linear(first, second) for first, second in pairwise(vit.projector)
        )

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        rows, side = carry["features"], self.side
        # (tiles, tokens, width) without the class token -> (tiles, rows, side, columns, side,
        # width)
        squares = rows.unflatten(0, (len(batch.pixels), self.tokens))[
            :, self.tokens - self.squares :
        ]
        columns = isqrt(self.squares) // side
        grid = squares.unflatten(1, (columns, side, columns, side)).transpose(2, 3)
        x = self.norm(grid.reshape(-1, side * side * rows.shape[1]))
        for place, product in enumerate(self.products):
            x = product(functional.gelu(x) if place else x)
        return {"features": x}


class TokenEmbedding(nn.Module):
    """Tokens, and features in the places of image tokens."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        llm = shapes_of(preset)[1]
        self.embed = nn.Embedding(llm.vocab_size, llm.hidden_size)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {
            "hidden": self.embed(batch.input_ids).index_copy(
                0, batch.image_places, carry["features"]
            )
        }


class LlmLayer(nn.Module):
    """Every sample is a sequence of its own."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        self.block = Block(shapes_of(preset)[1])

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"hidden": self.block(carry["hidden"], batch.lengths, batch.rotary)}


class Head(nn.Module):
    """The sum of the tokens' losses; of logits in float32, as transformers' models compute it."""

    def __init__(self, preset: ModelPreset) -> None:
        super().__init__()
        llm = shapes_of(preset)[1]
        self.norm = nn.RMSNorm(llm.hidden_size, eps=1e-6)
        self.head = nn.Linear(llm.hidden_size, llm.vocab_size, bias=False)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        logits = self.head(self.norm(carry["hidden"])).float()
        return {
            LOSS: functional.cross_entropy(
                logits, batch.labels, ignore_index=LABEL_IGNORE, reduction="sum"
            )
        }


def make_model(
    preset: ModelPreset, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LayerStack:
    """A preset's layers in the order of `engine.cost_model.layer_list`, weights drawn on the
    device, in `dtype`.
    """
    vit, llm = shapes_of(preset)
    torch.manual_seed(seed)
    order = [PatchEmbedding, *[VisionLayer] * vit.num_layers, VisionProjector]
    order += [TokenEmbedding, *[LlmLayer] * llm.num_layers, Head]
    with torch.device(device):
        layers = [kind(preset).to(dtype) for kind in order]
    rule, projector = rule_of(preset), 1 + vit.num_layers

    def specs(cut: int, batch: Batch) -> dict[str, TensorSpec]:
        tiles = len(batch.pixels)
        if cut <= projector:
            return {
                "features": TensorSpec(
                    shape=(tiles * rule.vit_tokens_per_patch, vit.hidden_size), dtype=dtype
                )
            }
        if cut == projector + 1:
            return {
                "features": TensorSpec(
                    shape=(tiles * rule.llm_tokens_per_patch, llm.hidden_size), dtype=dtype
                )
            }
        return {"hidden": TensorSpec(shape=(len(batch.input_ids), llm.hidden_size), dtype=dtype)}

    return LayerStack(layers=layers, specs=specs)
