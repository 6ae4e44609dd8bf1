"""Loads of samples and micro-batches: tokens, squared lengths, items. Pure.

Also loads of samples, from the counts table of a build: for `engine.planning.build_steps` and
`engine.tuning.tune`. Exact but for two things that counts do not tell: at native resolution all
images of a sample count as equally large, and a sample's audio as one clip. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from balance.flops import FlopsModel
from balance.presets import ModelPreset
from balance.types import Counts, Groups, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoads:
    """One phase's part of each micro-batch; int64, (micro_batches,)."""

    tokens: IntArray
    squares: IntArray
    """Sum of squared lengths of what attends together: images or tiles, clips, samples."""
    items: IntArray
    """Number of images or tiles, clips, samples."""

    def __len__(self) -> int:
        return len(self.tokens)

    def map(self, function: Callable[[IntArray], IntArray]) -> PhaseLoads:
        """The same quantities with a function applied to each column."""
        return PhaseLoads(**{name: function(getattr(self, name)) for name in QUANTITIES})

    @classmethod
    def nothing(cls, count: int) -> PhaseLoads:
        """`count` micro-batches without anything for this phase."""
        return cls(**{name: np.zeros(count, np.int64) for name in QUANTITIES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The micro-batches of a pipeline's step, in the order in which they enter."""

    vision: PhaseLoads
    audio: PhaseLoads
    llm: PhaseLoads

    def __post_init__(self) -> None:
        lengths = {phase: len(getattr(self, phase)) for phase in PHASES}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"micro-batches per phase: {lengths}; give the same number to each")

    def __len__(self) -> int:
        return len(self.llm)

    def map(self, function: Callable[[IntArray], IntArray]) -> Loads:
        """The same phases with a function applied to each column."""
        return Loads(**{phase: getattr(self, phase).map(function) for phase in PHASES})

    def take(self, indices: IntArray) -> Loads:
        """Some micro-batches, in the order of `indices`."""
        return self.map(lambda column: column[indices])

    def to_lists(self) -> dict[str, dict[str, list[int]]]:
        """Plain values by phase and quantity, for JSON."""
        return {
            phase: {name: getattr(getattr(self, phase), name).tolist() for name in QUANTITIES}
            for phase in PHASES
        }

    @classmethod
    def of_lists(cls, values: dict[str, dict[str, list[int]]]) -> Loads:
        """The inverse of `to_lists`."""
        return cls(
            **{
                phase: PhaseLoads(
                    **{name: np.array(values[phase][name], np.int64) for name in QUANTITIES}
                )
                for phase in PHASES
            }
        )

    @classmethod
    def constant(
        cls, count: int, *, images: int, vit_tokens_per_image: int, seq_len: int, samples: int = 1
    ) -> Loads:
        """`count` equal micro-batches of equal images and `samples` equal samples.

        `seq_len`: tokens of all samples of a micro-batch.

        >>> loads = Loads.constant(2, images=9, vit_tokens_per_image=1025, seq_len=4096)
        >>> loads.vision.tokens.tolist(), loads.llm.squares.tolist()
        ([9225, 9225], [16777216, 16777216])
        """
        vision = images * vit_tokens_per_image, images * vit_tokens_per_image**2, images
        llm = seq_len, seq_len**2 // samples, samples

        def constant(values: tuple[int, int, int]) -> PhaseLoads:
            columns = (np.full(count, value, np.int64) for value in values)
            return PhaseLoads(**dict(zip(QUANTITIES, columns, strict=True)))

        return cls(vision=constant(vision), audio=PhaseLoads.nothing(count), llm=constant(llm))


PHASES = tuple(f.name for f in fields(Loads))
QUANTITIES = tuple(f.name for f in fields(PhaseLoads))


def sample_loads(counts: Counts, model: ModelPreset) -> Loads:
    """Loads of each sample, (samples,). ConfigError if the preset lacks the model's dimensions."""
    load = FlopsModel.of(model).loads(counts)
    samples = np.ones(len(counts), np.int64)
    return Loads(
        vision=PhaseLoads(
            tokens=load.vit_tokens, squares=load.vit_squares, items=counts.num_image_patches
        ),
        audio=_audio_loads(counts, model),
        llm=PhaseLoads(tokens=load.llm_tokens, squares=load.llm_squares, items=samples),
    )


def packed_loads(samples: Loads, groups: Groups) -> Loads:
    """Loads of micro-batches, from those of samples."""
    return samples.map(groups.sum)


def joined_loads(parts: Sequence[Loads]) -> Loads:
    """The micro-batches of several steps, one after the other."""

    def joined(phase: str, name: str) -> IntArray:
        return np.concatenate([getattr(getattr(part, phase), name) for part in parts])

    return Loads(
        **{p: PhaseLoads(**{name: joined(p, name) for name in QUANTITIES}) for p in PHASES}
    )


def _audio_loads(counts: Counts, model: ModelPreset) -> PhaseLoads:
    """Encoder tokens in windows, of one clip per sample."""
    if model.audio is None:
        return PhaseLoads.nothing(len(counts))
    tokens = counts.num_audio_tokens * model.audio.downsample
    window = model.audio.window_frames // model.audio.conv_stride
    full, rest = np.divmod(tokens, window)
    return PhaseLoads(tokens=tokens, squares=full * window**2 + rest**2, items=full + (rest > 0))
