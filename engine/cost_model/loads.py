"""What micro-batches bring to each phase of a model: `Loads`, the input of every cost model. Pure
NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from balance.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoads:
    """One phase's part of each micro-batch; int64 arrays of shape (micro_batches,)."""

    tokens: IntArray
    squares: IntArray
    """Sum of the squared lengths of what attends at once: images or tiles, clips, samples."""
    items: IntArray
    """Images or tiles, clips, samples."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, places: IntArray) -> PhaseLoads:
        """Some micro-batches, in the order of `places`."""
        return PhaseLoads(**{f.name: getattr(self, f.name)[places] for f in fields(self)})

    @classmethod
    def nothing(cls, count: int) -> PhaseLoads:
        """`count` micro-batches without anything for this phase."""
        return cls(**{f.name: np.zeros(count, np.int64) for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The micro-batches of a pipeline's step, in the order in which they enter."""

    vision: PhaseLoads
    audio: PhaseLoads
    llm: PhaseLoads

    def __post_init__(self) -> None:
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"micro-batches per phase: {lengths}; give the same number to each")

    def __len__(self) -> int:
        return len(self.llm)

    def take(self, places: IntArray) -> Loads:
        """Some micro-batches, in the order of `places`."""
        return Loads(**{f.name: getattr(self, f.name).take(places) for f in fields(self)})

    @classmethod
    def constant(
        cls, count: int, *, images: int, vit_tokens_per_image: int, seq_len: int, samples: int = 1
    ) -> Loads:
        """`count` equal micro-batches of `images` equal images and `samples` equal samples of
        `seq_len` tokens in all.

        >>> loads = Loads.constant(2, images=9, vit_tokens_per_image=1025, seq_len=4096)
        >>> loads.vision.tokens.tolist(), loads.llm.squares.tolist()
        ([9225, 9225], [16777216, 16777216])
        """
        vision = images * vit_tokens_per_image, images * vit_tokens_per_image**2, images
        llm = seq_len, seq_len**2 // samples, samples
        return cls(
            vision=_constant(count, *vision),
            audio=PhaseLoads.nothing(count),
            llm=_constant(count, *llm),
        )


def _constant(count: int, tokens: int, squares: int, items: int) -> PhaseLoads:
    return PhaseLoads(
        tokens=np.full(count, tokens, np.int64),
        squares=np.full(count, squares, np.int64),
        items=np.full(count, items, np.int64),
    )
