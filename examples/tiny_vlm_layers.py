"""The tiny vision-language model as a list of layers: what a pipeline cuts into stages
(`engine.runtime`).

The same parts with the same weights as `tiny_vlm.TinyVLM`, and the same loss: patch embedding, a
layer per vision block, projector, token embedding, a layer per LLM block, head with the loss. So
`engine.cost_model.layer_list` lists the model `tiny` too. A micro-batch is packed: sequences of any
lengths, with images or without.
"""

from __future__ import annotations

import torch
from tiny_vlm import GRID, MERGE, TOKENS_PER_PATCH, Block, TinyVLM, VisionEncoder, token_losses
from torch import nn

from engine.runtime.stage_io import LOSS, LayerStack, StageTensors, TensorSpec
from loaders import MicroBatch

VIT_TOKENS_PER_PATCH = GRID**2 + 1


class PatchEmbedding(nn.Module):
    """Patches -> squares and class tokens, one row each."""

    def __init__(self, vision: VisionEncoder) -> None:
        super().__init__()
        self.squares, self.class_token, self.positions = (
            vision.squares,
            vision.class_token,
            vision.positions,
        )

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """{} -> features (patches * 17, vit width)."""
        squares = self.squares(batch.pixel_values).flatten(2).transpose(1, 2)
        tokens = (
            torch.cat([self.class_token.expand(len(squares), -1, -1), squares], dim=1)
            + self.positions
        )
        return {"features": tokens.flatten(0, 1)}


class VisionLayer(nn.Module):
    """A block in which every patch is a sequence of its own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """features -> features of the same shape."""
        features = carry["features"]
        return {"features": self.block(features, [VIT_TOKENS_PER_PATCH] * num_patches(batch), None)}


class Projector(nn.Module):
    """The squares of each quarter of a patch -> a token of the LLM."""

    def __init__(self, vision: VisionEncoder) -> None:
        super().__init__()
        self.project = vision.project

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """features (patches * 17, vit width) -> features (patches * 4, llm width)."""
        features, side = carry["features"], GRID // MERGE
        squares = features.unflatten(0, (-1, VIT_TOKENS_PER_PATCH))[:, 1:]  # without class tokens
        quarters = squares.unflatten(1, (side, MERGE, side, MERGE)).transpose(2, 3)
        return {"features": self.project(quarters.reshape(-1, MERGE**2 * features.shape[1]))}


class TokenEmbedding(nn.Module):
    """Embeddings of the tokens, with features in the places of image tokens."""

    def __init__(self, model: TinyVLM) -> None:
        super().__init__()
        self.embed, self.image_token_id = model.embed, model.image_token_id

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """features (patches * 4, llm width) -> hidden (tokens, llm width)."""
        is_image = (batch.input_ids == self.image_token_id)[:, None]
        hidden = self.embed(batch.input_ids)
        return {"hidden": hidden.masked_scatter(is_image, carry["features"].to(hidden.dtype))}


class LanguageLayer(nn.Module):
    """A causal block over the packed samples."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """hidden -> hidden of the same shape."""
        return {
            "hidden": self.block(
                carry["hidden"], batch.cu_seqlens.diff().tolist(), batch.position_ids
            )
        }


class Head(nn.Module):
    """Logits and the sum of the tokens' losses."""

    def __init__(self, model: TinyVLM) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, carry: StageTensors, batch: MicroBatch) -> StageTensors:
        """hidden -> loss, a scalar."""
        return {LOSS: token_losses(self.head(self.norm(carry["hidden"])), batch).sum()}


def make_layers(model: TinyVLM) -> LayerStack:
    """The layers of a model; they share its weights."""
    vision, widths = model.vision, (model.vision.squares.out_channels, model.embed.embedding_dim)
    encoder = [PatchEmbedding(vision), *map(VisionLayer, vision.blocks), Projector(vision)]
    layers = [*encoder, TokenEmbedding(model), *map(LanguageLayer, model.blocks), Head(model)]

    def specs(cut: int, batch: MicroBatch) -> dict[str, TensorSpec]:
        """Known on every rank, decoded images or not."""
        if cut < len(encoder):
            return {"features": _rows(num_patches(batch) * VIT_TOKENS_PER_PATCH, widths[0])}
        if cut == len(encoder):
            return {"features": _rows(num_patches(batch) * TOKENS_PER_PATCH, widths[1])}
        return {"hidden": _rows(len(batch.input_ids), widths[1])}

    return LayerStack(layers=layers, specs=specs)


def num_patches(batch: MicroBatch) -> int:
    """Also where the images themselves are not decoded."""
    return int(batch.patches_per_image.sum())


def _rows(count: int, width: int) -> TensorSpec:
    return TensorSpec(shape=(count, width), dtype=torch.float32)
