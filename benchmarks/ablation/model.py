"""A vision-language model for CPUs, of a `Shape`.

Tiles are rows of numbers and tokens are drawn: times do not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ablation.shapes import PIXELS, Shape
from isobatch.common.types import LABEL_IGNORE, Counts, IntArray
from isobatch.engine.runtime.stage_io import LOSS, LayerStack, StageTensors, TensorSpec
from isobatch.engine.train.models.tiny_vlm import TinyBlock

IMAGE_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A micro-batch: samples one behind the other, each with its images' tokens first; padded ones
    are longer.
    """

    input_ids: Tensor
    labels: Tensor
    """Of each token the next one."""
    position_ids: Tensor
    lengths: list[int]
    tiles: Tensor
    """(tiles, VIT tokens, PIXELS)."""
    sample_ids: tuple[str, ...]
    num_labels: int


def make_batch(samples: IntArray, counts: Counts, shape: Shape, *, padded: bool) -> Batch:
    """The micro-batch of these samples; the same sample is the same anywhere."""
    true_lengths = counts.seq_len[samples]
    length = int(true_lengths.max(initial=0))
    ids, labels, lengths = [], [], []
    for sample, own in zip(samples.tolist(), true_lengths.tolist(), strict=True):
        tokens = np.random.default_rng([7, sample]).integers(1, shape.vocabulary, own)
        images = int(counts.num_image_tokens[sample])
        wanted = np.append(tokens[1:], LABEL_IGNORE)
        wanted[:images] = LABEL_IGNORE
        tokens[:images] = IMAGE_TOKEN
        fill = length - own if padded else 0
        ids.append(np.pad(tokens, (0, fill), constant_values=1))
        labels.append(np.pad(wanted, (0, fill), constant_values=LABEL_IGNORE))
        lengths.append(own + fill)
    vit_tokens, patches = shape.sizes.vit_tokens, counts.num_image_patches
    tiles = [_tiles(sample, (int(patches[sample]), vit_tokens)) for sample in samples.tolist()]
    wanted = torch.from_numpy(np.concatenate(labels))
    return Batch(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        labels=wanted,
        position_ids=torch.cat([torch.arange(own) for own in lengths]),
        lengths=lengths,
        tiles=torch.from_numpy(np.concatenate(tiles)),
        sample_ids=tuple(map(str, samples.tolist())),
        num_labels=int((wanted != LABEL_IGNORE).sum()),
    )


def _tiles(
    sample: int, tokens: tuple[int, int]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rng = np.random.default_rng([8, sample])
    return rng.standard_normal((*tokens, PIXELS), dtype=np.float32)


class Patches(nn.Module):
    """Tiles -> rows of the encoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, shape.vit_width)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"features": self.embed(batch.tiles).flatten(0, 1)}


class VisionLayer(nn.Module):
    """Every tile is a sequence of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = TinyBlock(shape.vit_width, causal=False)
        self.tokens = shape.sizes.vit_tokens

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"features": self.block(carry["features"], [self.tokens] * len(batch.tiles), None)}


class Join(nn.Module):
    """Rows of the encoder, merged, in the places of image tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = shape.merge * shape.vit_width
        self.project = nn.Linear(self.width, shape.llm_width)
        self.embed = nn.Embedding(shape.vocabulary, shape.llm_width)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        images = self.project(carry["features"].view(-1, self.width))
        is_image = (batch.input_ids == IMAGE_TOKEN)[:, None]
        return {"hidden": self.embed(batch.input_ids).masked_scatter(is_image, images)}


class LanguageLayer(nn.Module):
    """Every sample is a sequence of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = TinyBlock(shape.llm_width, causal=True)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"hidden": self.block(carry["hidden"], batch.lengths, batch.position_ids)}


class Head(nn.Module):
    """The sum of the tokens' losses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.llm_width)
        self.head = nn.Linear(shape.llm_width, shape.vocabulary, bias=False)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        logits = self.head(self.norm(carry["hidden"]))
        return {
            LOSS: functional.cross_entropy(
                logits, batch.labels, ignore_index=LABEL_IGNORE, reduction="sum"
            )
        }


KINDS = {
    Patches: ("patches", "vision"),
    VisionLayer: ("vision_layer", "vision"),
    Join: ("join", "llm"),
    LanguageLayer: ("llm_layer", "llm"),
    Head: ("head", "llm"),
}
"""What a profile calls each layer, and the phase whose tokens decide what it costs."""


def make_model(shape: Shape, *, frozen_encoder: bool = False) -> LayerStack:
    """The layers; the same weights on every rank."""
    torch.manual_seed(0)
    vision = [Patches(shape), *(VisionLayer(shape) for _ in range(shape.vit_depth))]
    layers: list[nn.Module] = [
        *vision,
        Join(shape),
        *(LanguageLayer(shape) for _ in range(shape.llm_depth)),
        Head(shape),
    ]
    if frozen_encoder:
        for layer in vision:
            layer.requires_grad_(requires_grad=False)

    def specs(cut: int, batch: Batch) -> dict[str, TensorSpec]:
        if cut <= len(vision):
            rows = len(batch.tiles) * shape.sizes.vit_tokens
            return {"features": TensorSpec(shape=(rows, shape.vit_width), dtype=torch.float32)}
        size = len(batch.input_ids), shape.llm_width
        return {"hidden": TensorSpec(shape=size, dtype=torch.float32)}

    return LayerStack(layers=layers, specs=specs)


def kinds_of(model: LayerStack) -> tuple[str, ...]:
    """The kind of each layer."""
    return tuple(KINDS[type(layer)][0] for layer in model.layers)
