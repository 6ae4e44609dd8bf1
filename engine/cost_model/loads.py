"""Loads of samples and micro-batches: tokens, squared lengths, items. Pure.

Loads of samples come from the counts table of a build. Exact but for two things that counts do not
tell: at native resolution all images of a sample count as equally large, its audio as one clip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from isobatch.common.types import Counts, Groups, IntArray
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset


@dataclass(frozen=True, slots=True)
class PhaseLoads:
    """One phase's part of each micro-batch; int64, (micro_batches,)."""

    tokens: IntArray
    squares: IntArray
    """Sum of squared lengths of what attends together: images or tiles, clips, samples."""
    items: IntArray
    """Number of images or tiles, clips, samples."""

    def __len__(self) -> int:
        return len(self.tokens)

    def map(self, function: Callable[[IntArray], IntArray]) -> "PhaseLoads":
        """The same quantities with a function applied to each column."""
        return PhaseLoads(*(function(getattr(self, name)) for name in QUANTITIES))

    @classmethod
    def nothing(cls, count: int) -> "PhaseLoads":
        """`count` micro-batches without anything for this phase."""
        return cls(*(np.zeros(count, np.int64) for _ in QUANTITIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The micro-batches of a pipeline's step, in the order in which they enter."""

    vision: PhaseLoads
    audio: PhaseLoads
    llm: PhaseLoads
    labels: PhaseLoads = None  # type: ignore[assignment]  # set below
    """Tokens with a label, of which the head computes logits. None becomes all of the LLM's: where
    labels are not known, or for a trainer that computes all logits."""

    def __post_init__(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "labels", labelled(self.llm.tokens))
        lengths = {phase: len(getattr(self, phase)) for phase in PHASES}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"micro-batches per phase: {lengths}; give the same number to each")

    def __len__(self) -> int:
        return len(self.llm)

    def all_labelled(self) -> "Loads":
        """The same if every token had a label."""
        return replace(self, labels=labelled(self.llm.tokens))

    def map(self, function: Callable[[IntArray], IntArray]) -> "Loads":
        """The same phases with a function applied to each column."""
        return Loads(**{phase: getattr(self, phase).map(function) for phase in PHASES})

    def take(self, indices: IntArray) -> "Loads":
        """Some micro-batches, in the order of `indices`."""
        return self.map(lambda column: column[indices])

    def to_lists(self) -> dict[str, dict[str, list[int]]]:
        """Plain values by phase and quantity, for JSON."""
        return {
            phase: {name: getattr(getattr(self, phase), name).tolist() for name in QUANTITIES}
            for phase in PHASES
        }

    @classmethod
    def of_lists(cls, values: dict[str, dict[str, list[int]]]) -> "Loads":
        """The inverse of `to_lists`."""
        arrays = {p: [np.array(values[p][q], np.int64) for q in QUANTITIES] for p in values}
        return cls(**{phase: PhaseLoads(*columns) for phase, columns in arrays.items()})

    @classmethod
    def constant(
        cls, count: int, *, images: int, vit_tokens_per_image: int, seq_len: int, samples: int = 1
    ) -> "Loads":
        """`count` equal micro-batches of equal images and `samples` equal samples.

        `seq_len`: tokens of all samples of a micro-batch.

        >>> loads = Loads.constant(2, images=9, vit_tokens_per_image=1025, seq_len=4096)
        >>> loads.vision.tokens.tolist(), loads.llm.squares.tolist()
        ([9225, 9225], [16777216, 16777216])
        """
        ones = np.ones(count, np.int64)
        tokens = images * vit_tokens_per_image
        vision = PhaseLoads(tokens * ones, tokens * vit_tokens_per_image * ones, images * ones)
        llm = PhaseLoads(seq_len * ones, seq_len**2 // samples * ones, samples * ones)
        return cls(vision=vision, audio=PhaseLoads.nothing(count), llm=llm)


def labelled(counts: IntArray) -> PhaseLoads:
    """Tokens with a label, nothing of which attends to anything."""
    return replace(PhaseLoads.nothing(len(counts)), tokens=counts)


PHASES = tuple(f.name for f in fields(Loads))
QUANTITIES = tuple(f.name for f in fields(PhaseLoads))


def sample_loads(counts: Counts, model: ModelPreset) -> Loads:
    """Loads of each sample, (samples,). ConfigError if the preset lacks the model's dimensions."""
    load = FlopsModel.of(model).loads(counts)
    return Loads(
        vision=PhaseLoads(load.vit_tokens, load.vit_squares, counts.num_image_patches),
        audio=_audio_loads(counts, model),
        llm=PhaseLoads(load.llm_tokens, load.llm_squares, np.ones(len(counts), np.int64)),
        labels=labelled(counts.num_loss_tokens),
    )


def packed_loads(samples: Loads, groups: Groups) -> Loads:
    """Loads of micro-batches, from those of samples."""
    return samples.map(groups.sum)


def joined_loads(parts: Sequence[Loads]) -> Loads:
    """The micro-batches of several steps, one after the other."""

    def joined(phase: str, name: str) -> IntArray:
        return np.concatenate([getattr(getattr(part, phase), name) for part in parts])

    return Loads(**{p: PhaseLoads(*(joined(p, name) for name in QUANTITIES)) for p in PHASES})


def largest_micro_batch(loads: Loads) -> Loads:
    """One micro-batch with the most of everything that any of them has: a request's `full`.

    >>> loads = Loads.constant(3, images=2, vit_tokens_per_image=5, seq_len=7)
    >>> largest_micro_batch(loads).vision.tokens.tolist()
    [10]
    """
    return loads.map(lambda column: column.max(keepdims=True, initial=0))


def _audio_loads(counts: Counts, model: ModelPreset) -> PhaseLoads:
    """Encoder tokens in windows, of one clip per sample."""
    if (rule := model.audio) is None:
        return PhaseLoads.nothing(len(counts))
    tokens = counts.num_audio_tokens * rule.downsample
    if rule.long_clips == "whole":
        return PhaseLoads(tokens, rule.attention_squares(tokens), (tokens > 0).astype(np.int64))
    window = rule.encoder_tokens(rule.window_frames)
    full, rest = np.divmod(tokens, window)
    squares = full * rule.attention_squares(np.array(window)) + rule.attention_squares(rest)
    return PhaseLoads(tokens, squares, full + (rest > 0))
