"""A user's transforms, which draw of their generators for all that they change."""

import dataclasses

import numpy as np
import torch


def noisy(image, rng):
    """Each value of the image with bits of its own inverted."""
    return image ^ rng.integers(256, size=image.shape, dtype=np.uint8)


def marked(batch, rngs):
    """A drawn number of each sample in all its positions."""
    numbers = torch.tensor([int(rng.integers(1 << 40)) for rng in rngs], dtype=torch.int64)
    lengths = batch.cu_seqlens.diff().long()
    return dataclasses.replace(batch, position_ids=numbers.repeat_interleave(lengths))
