"""From stored samples to tensors: `collate` makes a `MicroBatch` of a `RawGroup`.

The image tokens in `input_ids` were counted at build; an image that has changed since would no longer fill them, so
each decoded image is compared with the size that was counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from balance.errors import DataError
from balance.patches import plan_image
from balance.presets import NativeRule, VisionRule
from loaders import pixels
from loaders.batch import MicroBatch
from loaders.shards import RawGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over all groups of a step, the same on every rank."""

    num_loss_tokens: int
    num_samples: int


def collate(raw: RawGroup | None, rule: VisionRule, pixel_dtype: torch.dtype, totals: StepTotals) -> MicroBatch:
    """The micro-batch of a group, or an empty one for None. DataError names the sample whose image cannot be used."""
    if raw is None:
        raw = EMPTY_GROUP
    lengths = np.diff(raw.cu_seqlens)
    # position of each token in its sample: its place in the group less its sample's start
    positions = np.arange(len(raw.input_ids)) - np.repeat(raw.cu_seqlens[:-1], lengths)
    plans = [plan_image(rule, int(width), int(height)) for height, width in raw.image_sizes]
    is_native = isinstance(rule, NativeRule)
    grids = [(1, plan.rows, plan.columns) for plan in plans]
    return MicroBatch(
        sample_ids=raw.sample_ids,
        input_ids=_int64(raw.input_ids),
        labels=_int64(raw.labels),
        position_ids=_int64(positions),
        cu_seqlens=torch.from_numpy(raw.cu_seqlens.copy()),
        pixel_values=_pixel_values(raw, rule, pixel_dtype),
        patches_per_image=_int64([plan.num_patches for plan in plans]),
        image_sizes=_int64(raw.image_sizes),
        image_grid_thw=_int64(grids).reshape(-1, 3) if is_native else None,
        num_loss_tokens=totals.num_loss_tokens,
        num_step_samples=totals.num_samples,
    )


NO_TOKENS = np.zeros(0, dtype=np.int32)
EMPTY_GROUP = RawGroup(
    where="the fill of the epoch's last step",
    sample_ids=(),
    input_ids=NO_TOKENS,
    labels=NO_TOKENS,
    cu_seqlens=np.zeros(1, dtype=np.int32),
    images=(),
    image_sizes=NO_TOKENS.reshape(0, 2),
    image_samples=NO_TOKENS,
)


def _pixel_values(raw: RawGroup, rule: VisionRule, dtype: torch.dtype) -> Tensor:
    """Pixels of all images, in the layout of `MicroBatch.pixel_values`; no rows if there are no images."""
    none = torch.zeros((0, *pixels.patch_shape(rule)), dtype=torch.uint8)
    cut = torch.cat([none, *(_cut_image(raw, place, rule) for place in range(len(raw.images)))])
    return cut if dtype == torch.uint8 else pixels.normalize(rule, cut).to(dtype)


def _cut_image(raw: RawGroup, place: int, rule: VisionRule) -> Tensor:
    """The raw patches of one image."""
    sample = f"sample {raw.sample_ids[raw.image_samples[place]]!r} ({raw.where})"
    height, width = (int(side) for side in raw.image_sizes[place])
    try:
        image = pixels.decode(bytes(raw.images[place]))
    except DataError as error:
        raise DataError(f"{sample}: {error}; restore it, or build again without it") from error
    if (image.width, image.height) != (width, height):
        raise DataError(
            f"{sample}: image has {image.width} x {image.height} pixels, but had {width} x {height} when it was "
            "counted; restore it, or build again"
        )
    return pixels.cut(rule, image)


def _int64(values: object) -> Tensor:
    """A copy: stored arrays may be views into a mapped file."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
