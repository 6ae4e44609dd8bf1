"""The dimensions of a model's parts that decide their FLOPs: for `balance.cost`, read from presets.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

from balance.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a stack of equal transformer layers that decide its FLOPs; every number is
    positive.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Fewer than `num_heads` with grouped-query attention."""
    head_size: int
    ffn_size: int
    gated: bool
    """Three matrices in the feed-forward part (SwiGLU) instead of two."""

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        wrong = [
            f"{name} = {value}"
            for name, value in values.items()
            if type(value) is int and value < 1
        ]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be greater than 0")

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def layer_weights(self) -> int:
        """Entries of one layer's matrices; biases and norms cost no matrix product."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.ffn_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape(TransformerShape):
    """An encoder with the projector behind it."""

    projector: tuple[int, ...]
    """Widths of the MLP that every token for the LLM passes, first input to last output."""

    @property
    def projector_weights(self) -> int:
        """Entries of the projector's matrices."""
        return sum(first * second for first, second in pairwise(self.projector))


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape(EncoderShape):
    """A vision encoder with its patch embedding, and the projector behind it."""

    patch_values: int
    """Pixel values that the patch embedding reads per ViT patch: 3 x 14 x 14, twice that for films
    of two frames.
    """
    query_key_norm: bool = False
    """Queries and keys are normalised, as in InternViT-6B: no FLOPs to speak of, but
    activations.
    """
    layer_scale: bool = False
    """What attention and feed-forward part give is scaled by learnt factors: activations too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderShape(EncoderShape):
    """An audio encoder with its two convolutions, and the projector behind it."""

    frame_values: int
    """Mel bins that the first convolution reads per frame of the spectrogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmShape(TransformerShape):
    """A language model with its output head."""

    vocab_size: int
