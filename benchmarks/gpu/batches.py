"""Random micro-batches for `gpu.layers`, made on the device.

What is drawn does not change how long a layer takes. Each is made on the CPU; on the way to a GPU
it is pinned, and nothing that the GPU computes is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from gpu.presets import rule_of, shapes_of, squares_of
from isobatch.common.types import LABEL_IGNORE, Counts, IntArray
from isobatch.models.presets import ModelPreset

ROTARY_BASE = 1e6
"""InternLM2-20B's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What lies in a micro-batch, sequence by sequence; (sequences,)."""

    tiles: Sequence[int]
    tokens: Sequence[int]
    """Of the LLM, images included."""
    lengths: Sequence[int]
    """The same with padding."""
    ids: Sequence[int]
    """From which all is drawn: equal ones are equal."""

    @classmethod
    def of_samples(cls, samples: IntArray, counts: Counts, *, padded: bool) -> Sequences:
        """Samples packed one behind the other, or each padded to the longest."""
        tokens = counts.seq_len[samples]
        lengths = np.full_like(tokens, tokens.max(initial=0)) if padded else tokens
        return cls(
            tiles=counts.num_image_patches[samples].tolist(),
            tokens=tokens.tolist(),
            lengths=lengths.tolist(),
            ids=samples.tolist(),
        )

    @classmethod
    def of_sizes(cls, tiles: int, tokens: Sequence[int], tile_tokens: int) -> Sequences:
        """Packed sequences, of which the first ones have as many of the tiles as they hold.
        ValueError if too many.
        """
        dealt, left = [], tiles
        for length in tokens:
            dealt.append(min(left, length // tile_tokens))
            left -= dealt[-1]
        if left:
            raise ValueError(
                f"{tiles} tiles of {tile_tokens} tokens do not go into sequences of {list(tokens)}"
            )
        return cls(tiles=dealt, tokens=tokens, lengths=tokens, ids=range(len(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A micro-batch."""

    input_ids: Tensor
    labels: Tensor
    """Of each token the next one."""
    image_places: Tensor
    """Where features of images go, int64."""
    rotary: Tensor
    """Cosines and sines of each token's position, (2, tokens, 1, head size)."""
    pixels: Tensor
    """(tiles, squares, values)."""
    lengths: tuple[int, ...]
    """Of what attends at once."""
    sample_ids: tuple[str, ...]
    num_labels: int

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device) -> Batch:
        """The same on a device; without waiting for it."""
        if device.type == "cpu":
            return self
        moved = {
            name: each.pin_memory().to(device, non_blocking=True)
            for name, each in self.tensors().items()
        }
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """By field."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def make_batch(sequences: Sequences, preset: ModelPreset, dtype: torch.dtype) -> Batch:
    """The micro-batch, on the CPU."""
    vit, llm = shapes_of(preset)
    tile_tokens = rule_of(preset).llm_tokens_per_patch
    ids, labels, places, start = [], [], [], 0
    for sample, tiles, own, length in zip(
        sequences.ids, sequences.tiles, sequences.tokens, sequences.lengths, strict=True
    ):
        tokens = np.random.default_rng([7, sample]).integers(0, llm.vocab_size, length)
        wanted = np.append(tokens[1:], LABEL_IGNORE)
        wanted[: tiles * tile_tokens] = LABEL_IGNORE
        wanted[own - 1 :] = LABEL_IGNORE
        ids.append(tokens)
        labels.append(wanted)
        places.append(start + np.arange(tiles * tile_tokens))
        start += length
    wanted = torch.from_numpy(np.concatenate(labels))
    # of a generator of their own: whatever else draws, a micro-batch stays the same
    drawn = torch.randn(
        sum(sequences.tiles),
        squares_of(preset),
        vit.patch_values,
        generator=torch.Generator().manual_seed(start),
    )
    return Batch(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        labels=wanted,
        image_places=torch.from_numpy(np.concatenate(places)),
        rotary=_rotary(sequences.lengths, llm.head_size).to(dtype),
        pixels=drawn.to(dtype),
        lengths=tuple(sequences.lengths),
        sample_ids=tuple(map(str, sequences.ids)),
        num_labels=int((wanted != LABEL_IGNORE).sum()),
    )


def _rotary(lengths: Sequence[int], head_size: int) -> Tensor:
    """RoFormer's angles, the same for both halves of a head, (2, tokens, 1, head size)."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2) / head_size)
    angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    return torch.stack([angles.cos(), angles.sin()])
