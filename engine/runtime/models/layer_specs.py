"""Layers that know what they give: `CutLayer`, and the shapes that cross the cuts of a
vision-language model.

For the layers of transformers' models (`engine.runtime.models.transformers_models`). A shape is a
function of the micro-batch alone and holds no layer: a rank that drops the layers of other ranks
still knows what will come from them. Nor does it need the pixels: ranks behind the first stage
leave images undecoded (the loader's `decode_images=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from engine.runtime.stage_io import Batch, TensorSpec

FEATURES, HIDDEN = "features", "hidden"
"""What crosses cuts: before the token embedding, and behind it."""

Gives = Callable[[Batch], Mapping[str, TensorSpec]]
"""What crosses the cut behind a layer, for one micro-batch."""


class CutLayer(nn.Module):
    """A layer `(carry, batch) -> carry` with what it gives."""

    def __init__(self, gives: Gives) -> None:
        super().__init__()
        self.gives = gives

    def no_features(self, batch: Batch, beside: Tensor) -> Tensor:
        """What a micro-batch without images has for features, on the device of `beside`."""
        spec = self.gives(batch)[FEATURES]
        return torch.zeros(spec.shape, dtype=spec.dtype, device=beside.device)


def gives_hidden(width: int, dtype: torch.dtype) -> Gives:
    """`hidden`: (1, tokens, width)."""
    return lambda batch: {HIDDEN: TensorSpec(shape=(1, len(batch.input_ids), width), dtype=dtype)}


def gives_patches(tokens: int, width: int, dtype: torch.dtype) -> Gives:
    """`features` of patches of one size: (patches, tokens, width)."""
    return lambda batch: {
        FEATURES: TensorSpec(shape=(pixel_rows(batch), tokens, width), dtype=dtype)
    }


def gives_rows(of_pixels: Callable[[int], int], width: int, dtype: torch.dtype) -> Gives:
    """`features`: (rows, width), so many rows as `of_pixels` makes of those of `pixel_values`."""
    return lambda batch: {
        FEATURES: TensorSpec(shape=(of_pixels(pixel_rows(batch)), width), dtype=dtype)
    }


def pixel_rows(batch: Batch) -> int:
    """Rows that `pixel_values` has where images are decoded: patches, or ViT tokens at native
    resolution.
    """
    rows = len(batch.pixel_values)
    if rows or not len(batch.patches_per_image):  # no need to wait for a GPU
        return rows
    counts = (
        batch.patches_per_image if batch.image_grid_thw is None else batch.image_grid_thw.prod(1)
    )
    return int(counts.sum())
