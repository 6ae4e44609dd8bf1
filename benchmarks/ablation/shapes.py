"""Shapes of the ablation's models: real ones, scaled down so that CPUs can train them.

Lengths are an eighth, and a layer stands for three (InternVL) or two (Qwen2.5-VL) real ones. Widths
and vocabulary are chosen so that layers take about as long relative to each other, on one core in
float32, as the cost model says of the real ones on an A100 (forward and backward, micro-batches of
mean size). The head keeps its share of the LLM, so it is a third or half of a real one:

| | real layers | ViT layer / LLM layer | head / LLM layer |
|---|---|---|---|
| InternVL 6B + 20B, TP 2 | 45 + 48 | .87 | 1.40 |
| Qwen2.5-VL 7B | 32 + 28 | .42 | 2.50 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from papers.datasets import internvl_samples

from ablation.data import INTERNVL, QWEN, SHRUNK, WINDOWS, Sizes, qwen_samples, shrunk
from isobatch.common.types import Counts

PIXELS = 3 * 14 * 14
"""Numbers of one of the encoder's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's layers and what its samples are made of."""

    name: str
    vit_width: int
    vit_depth: int
    llm_width: int
    llm_depth: int
    vocabulary: int
    sizes: Sizes
    real_sizes: Sizes
    real_samples: Callable[[int], Counts]
    preset: str
    """The real model, for its share of memory."""
    tp: int

    @property
    def merge(self) -> int:
        """Tokens of the encoder that become one of the LLM."""
        return self.sizes.vit_tokens // self.sizes.image_tokens

    @property
    def num_layers(self) -> int:
        """Patch embedding, encoder, projector with token embedding, LLM, head."""
        return self.vit_depth + self.llm_depth + 3

    def samples(self, count: int) -> Counts:
        """Samples of the scaled length."""
        return shrunk(self.real_samples(count), self.sizes)


SHAPES = {
    "internvl": Shape(
        name="InternVL 6B + 20B, a third of the layers",
        vit_width=120,
        vit_depth=15,
        llm_width=192,
        llm_depth=16,
        vocabulary=1280,
        sizes=SHRUNK,
        real_sizes=INTERNVL,
        real_samples=internvl_samples,
        preset="internvl_1_5",
        tp=2,
    ),
    "qwen": Shape(
        name="Qwen2.5-VL 7B, half of the layers",
        vit_width=72,
        vit_depth=16,
        llm_width=192,
        llm_depth=14,
        vocabulary=3456,
        sizes=WINDOWS,
        real_sizes=QWEN,
        real_samples=qwen_samples,
        preset="qwen2_vl",
        tp=1,
    ),
    "small": Shape(
        name="small, of no real model's shape",
        vit_width=96,
        vit_depth=16,
        llm_width=256,
        llm_depth=4,
        vocabulary=1024,
        sizes=SHRUNK,
        real_sizes=INTERNVL,
        real_samples=internvl_samples,
        preset="internvl_1_5",
        tp=2,
    ),
}
"""`small` is for predictions alone: its even parameters take uneven times."""
