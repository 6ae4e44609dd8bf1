"""A vision-language model for CPUs: a slim, deep encoder and a wide language model.

The encoder has a third of the parameters and four tokens for each that the language model gets, as
Qwen2-VL-2B has, so that even parameters are uneven times. Tiles are rows of numbers and tokens are
drawn: times do not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ablation.data import SHRUNK
from balance.types import LABEL_IGNORE, Counts, IntArray
from engine.runtime.stage_io import LOSS, LayerStack, StageTensors, TensorSpec
from engine.train.models.tiny_vlm import TinyBlock

VIT_WIDTH, VIT_DEPTH = 96, 16
LLM_WIDTH, LLM_DEPTH = 256, 4
VOCABULARY, IMAGE_TOKEN = 1024, 0
PIXELS = 3 * 14 * 14
"""Numbers of one of the encoder's tokens."""
MERGE = SHRUNK.vit_tokens // SHRUNK.image_tokens
"""Tokens of the encoder that become one of the LLM."""

TRAIN_FACTOR = 3
"""Of a forward pass's operations: the backward pass takes twice as many."""


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


def make_batch(samples: IntArray, counts: Counts, *, padded: bool) -> Batch:
    """The micro-batch of these samples; the same sample is the same anywhere."""
    true_lengths = counts.seq_len[samples]
    length = int(true_lengths.max(initial=0))
    ids, labels, lengths = [], [], []
    for sample, own in zip(samples.tolist(), true_lengths.tolist(), strict=True):
        tokens = np.random.default_rng([7, sample]).integers(1, VOCABULARY, own)
        images = int(counts.num_image_tokens[sample])
        wanted = np.append(tokens[1:], LABEL_IGNORE)
        wanted[:images] = LABEL_IGNORE
        tokens[:images] = IMAGE_TOKEN
        fill = length - own if padded else 0
        ids.append(np.pad(tokens, (0, fill), constant_values=1))
        labels.append(np.pad(wanted, (0, fill), constant_values=LABEL_IGNORE))
        lengths.append(own + fill)
    tiles = [_tiles(sample, int(counts.num_image_patches[sample])) for sample in samples.tolist()]
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


def _tiles(sample: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rng = np.random.default_rng([8, sample])
    return rng.standard_normal((count, SHRUNK.vit_tokens, PIXELS), dtype=np.float32)


class Patches(nn.Module):
    """Tiles -> rows of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, VIT_WIDTH)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"features": self.embed(batch.tiles).flatten(0, 1)}


class VisionLayer(nn.Module):
    """Every tile is a sequence of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TinyBlock(VIT_WIDTH, causal=False)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {
            "features": self.block(carry["features"], [SHRUNK.vit_tokens] * len(batch.tiles), None)
        }


class Join(nn.Module):
    """Rows of the encoder, merged, in the places of image tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(MERGE * VIT_WIDTH, LLM_WIDTH)
        self.embed = nn.Embedding(VOCABULARY, LLM_WIDTH)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        images = self.project(carry["features"].view(-1, MERGE * VIT_WIDTH))
        is_image = (batch.input_ids == IMAGE_TOKEN)[:, None]
        return {"hidden": self.embed(batch.input_ids).masked_scatter(is_image, images)}


class LanguageLayer(nn.Module):
    """Every sample is a sequence of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TinyBlock(LLM_WIDTH, causal=True)

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        return {"hidden": self.block(carry["hidden"], batch.lengths, batch.position_ids)}


class Head(nn.Module):
    """The sum of the tokens' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(LLM_WIDTH), nn.Linear(LLM_WIDTH, VOCABULARY, bias=False)

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


def make_model(*, frozen_encoder: bool = False) -> LayerStack:
    """The layers; the same weights on every rank."""
    torch.manual_seed(0)
    vision = [Patches(), *(VisionLayer() for _ in range(VIT_DEPTH))]
    layers: list[nn.Module] = [
        *vision,
        Join(),
        *(LanguageLayer() for _ in range(LLM_DEPTH)),
        Head(),
    ]
    if frozen_encoder:
        for layer in vision:
            layer.requires_grad_(requires_grad=False)

    def specs(cut: int, batch: Batch) -> dict[str, TensorSpec]:
        if cut <= len(vision):
            rows = len(batch.tiles) * SHRUNK.vit_tokens
            return {"features": TensorSpec(shape=(rows, VIT_WIDTH), dtype=torch.float32)}
        return {"hidden": TensorSpec(shape=(len(batch.input_ids), LLM_WIDTH), dtype=torch.float32)}

    return LayerStack(layers=layers, specs=specs)


def kinds_of(model: LayerStack) -> tuple[str, ...]:
    """The kind of each layer."""
    return tuple(KINDS[type(layer)][0] for layer in model.layers)


def train_flops(samples: IntArray, counts: Counts, *, frozen_encoder: bool = False) -> float:
    """Operations of forward and backward passes of these samples, nothing padded or recomputed;
    causal attention half.

    A frozen encoder runs forward only.
    """
    tiles, lengths = (
        float(counts.num_image_patches[samples].sum()),
        counts.seq_len[samples].astype(float),
    )
    vit, tokens = tiles * SHRUNK.vit_tokens, float(lengths.sum())
    vision = vit * (PIXELS * VIT_WIDTH + VIT_DEPTH * 12 * VIT_WIDTH**2)
    vision += VIT_DEPTH * 2 * vit * SHRUNK.vit_tokens * VIT_WIDTH
    language = vit * VIT_WIDTH * LLM_WIDTH + tokens * (
        LLM_DEPTH * 12 * LLM_WIDTH**2 + LLM_WIDTH * VOCABULARY
    )
    language += LLM_DEPTH * float((lengths**2).sum()) * LLM_WIDTH
    return 2 * (vision * (1 if frozen_encoder else TRAIN_FACTOR) + language * TRAIN_FACTOR)
