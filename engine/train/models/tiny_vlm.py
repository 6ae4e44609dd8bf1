"""The model of the preset `tiny` as a layer stack, in plain torch.

A ViT over tiles of 56 px (16 patches of 14 px and a class token), 2x2 patches merged to one LLM
token, and a causal LLM over packed samples. Attention runs sample by sample along `cu_seqlens`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.models.vision_layers import merge_tokens
from isobatch.engine.runtime.stage_io import (
    LOSS,
    Batch,
    LayerStack,
    StageTensors,
    TensorSpec,
    host_of,
    to_device,
)
from isobatch.models.image_rules.tiles import TilesRule
from isobatch.models.presets import ModelPreset
from isobatch.tensors.token_loss import labelled_loss

TILE_SIDE, PATCH_SIDE, MERGE = 56, 14, 2
GRID = TILE_SIDE // PATCH_SIDE
VIT_TOKENS = GRID**2 + 1
"""ViT tokens of a tile."""
LLM_TOKENS = (GRID // MERGE) ** 2
"""LLM tokens of a tile."""
WIDTH, VIT_WIDTH, DEPTH, HEADS = 64, 32, 2, 4


class TinyBlock(nn.Module):
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
        """x: (tokens, width); `lengths` of its sequences; rotary `positions` (tokens,), if any."""
        x = x + self.out(self._attend(self.norm1(x), lengths, positions))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed

    def _attend(self, x: Tensor, lengths: list[int], positions: Tensor | None) -> Tensor:
        # (tokens, 3 * width) -> three times (heads, tokens, head width)
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, x.shape[1] // HEADS).permute(1, 2, 0, 3)
        if positions is not None:
            q, k = _rotate(q, positions), _rotate(k, positions)
        if len(set(lengths)) == 1:  # equal lengths, as those of tiles: all sequences in one call
            q, k, v = (part.reshape(HEADS, len(lengths), lengths[0], -1) for part in (q, k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return attended.flatten(1, 2).transpose(0, 1).flatten(1)
        parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
        outputs = [
            functional.scaled_dot_product_attention(*part, is_causal=self.causal) for part in parts
        ]
        return torch.cat([v[:, :0], *outputs], dim=1).transpose(0, 1).flatten(1)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer) of x, (heads, tokens, head width)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies  # (tokens, half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TinyPatchEmbedding(nn.Module):
    """Tiles -> patch and class tokens, one row each."""

    def __init__(self) -> None:
        super().__init__()
        # saved states have the patches' convolution under this name
        self.squares = nn.Conv2d(3, VIT_WIDTH, PATCH_SIDE, PATCH_SIDE)
        self.class_token = nn.Parameter(torch.zeros(1, 1, VIT_WIDTH))
        self.positions = nn.Parameter(torch.randn(VIT_TOKENS, VIT_WIDTH) * 0.02)

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """{} -> features (tiles * 17, ViT width)."""
        pixels = batch.pixel_values.to(self.squares.weight.dtype)
        patches = self.squares(pixels).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(len(patches), -1, -1)
        tokens = torch.cat([class_tokens, patches], dim=1) + self.positions
        return {"features": tokens.flatten(0, 1)}


class TinyVisionLayer(nn.Module):
    """A block in which every tile is a sequence of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TinyBlock(VIT_WIDTH, causal=False)

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """features -> features of the same shape."""
        return {
            "features": self.block(
                inputs["features"], [VIT_TOKENS] * num_tiles(host_of(batch)), None
            )
        }


class TinyProjector(nn.Module):
    """2x2 patches of a tile -> one token of the LLM."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.LayerNorm(MERGE**2 * VIT_WIDTH), nn.Linear(MERGE**2 * VIT_WIDTH, WIDTH)
        )

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """features (tiles * 17, ViT width) -> features (tiles * 4, LLM width)."""
        # without class tokens
        patches = inputs["features"].view(-1, VIT_TOKENS, VIT_WIDTH)[:, 1:]
        return {"features": self.project(merge_tokens(patches, MERGE).flatten(0, 1))}


class TinyTokenEmbedding(nn.Module):
    """Embeddings of the tokens, with features in place of image tokens."""

    def __init__(self, vocab_size: int, image_token_id: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.image_token_id = image_token_id

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """features (tiles * 4, LLM width) -> hidden (tokens, LLM width)."""
        hidden: Tensor = self.embed(batch.input_ids)
        places = (host_of(batch).input_ids == self.image_token_id).nonzero().squeeze(1)
        features = inputs["features"].to(hidden.dtype)
        return {"hidden": hidden.index_copy(0, to_device(places, hidden.device), features)}


class TinyLanguageLayer(nn.Module):
    """A causal block over the packed samples."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TinyBlock(WIDTH, causal=True)

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """hidden -> hidden of the same shape."""
        lengths = host_of(batch).cu_seqlens.diff().tolist()
        return {"hidden": self.block(inputs["hidden"], lengths, batch.position_ids)}


class TinyHead(nn.Module):
    """Logits of the tokens whose next one has a label, and the sum of their losses."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size, bias=False)

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """hidden -> loss, a scalar."""
        logits_of = nn.Sequential(self.norm, self.head)
        return {LOSS: labelled_loss(inputs["hidden"], logits_of, host_of(batch))}


def make_tiny_vlm(preset: ModelPreset, vocab_size: int, image_token_id: int) -> LayerStack:
    """The layers, with random weights, for a build's preset. ConfigError if it is not `tiny`."""
    rule = preset.vision
    if not isinstance(rule, TilesRule) or (rule.image_size, rule.llm_tokens_per_patch) != (
        TILE_SIDE,
        LLM_TOKENS,
    ):
        raise ConfigError(f"the build is for the model {preset.name}; build it with --model tiny")
    vision = [TinyPatchEmbedding(), *(TinyVisionLayer() for _ in range(DEPTH)), TinyProjector()]
    layers = [
        *vision,
        TinyTokenEmbedding(vocab_size, image_token_id),
        *(TinyLanguageLayer() for _ in range(DEPTH)),
        TinyHead(vocab_size),
    ]

    num_vision = len(vision)  # a rank must not keep other ranks' layers for their specs

    def specs(cut: int, batch: Batch) -> dict[str, TensorSpec]:
        if cut < num_vision:
            return {"features": _rows(num_tiles(batch) * VIT_TOKENS, VIT_WIDTH)}
        if cut == num_vision:
            return {"features": _rows(num_tiles(batch) * LLM_TOKENS, WIDTH)}
        return {"hidden": _rows(len(batch.input_ids), WIDTH)}

    return LayerStack(layers=layers, specs=specs)


def num_tiles(batch: Batch) -> int:
    """Tiles of a micro-batch, also where they are not decoded."""
    return int(batch.patches_per_image.sum())


def _rows(count: int, width: int) -> TensorSpec:
    return TensorSpec(shape=(count, width), dtype=torch.float32)
