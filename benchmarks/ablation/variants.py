"""`Variant`: what an ablation compares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ablation.data import Steps
from balance.types import IntArray
from engine.tuning.precompute import EncodedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train: which micro-batches, cut and recomputed how."""

    name: str
    steps: Steps
    padded: bool
    borders: IntArray
    recompute: NDArray[np.bool_]
    tuned: tuple[EncodedStep, ...] = ()
    """Of each step, where it has a schedule of its own."""
