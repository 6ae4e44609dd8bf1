"""Image bytes -> pixel tensors, cut by `balance.patches`, equal to what transformers' processors make of the image.

For the loader. Pixels stay uint8 from the decoder to the device: a quarter of float32's bytes through collation and
transfer, and `normalize` afterwards takes 0.2 ms per 448 px patch on one core, where NumPy takes five times the decode.
Pillow's decoder takes .7 to .8 of the time of a 448 px JPEG that fits its patch, all of it without the GIL. How close
to the processors: bit by bit with `exact=True`, else within `loaders.resize.LEVELS` of 255 of Pillow's bicubic filter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from balance.patches import ImagePlan, plan_image
from balance.presets import AnyresRule, FixedRule, NativeRule, TilesRule, VisionRule
from loaders.resize import Pixels, Resizer, Words, resizer, split, to_image, to_words

if TYPE_CHECKING:
    pass

Floats = NDArray[np.float32]

_LONGEST_STRIP = 200
"""Above this ratio of sides the fixed rule resizes the centre alone: a 1 x 100,000 image would take 45 GB otherwise."""


def patch_shape(rule: VisionRule) -> tuple[int, int, int]:
    """(channels, height, width) of one row of `cut`: a patch, or one ViT square at native resolution."""
    side = rule.vit_patch_size if isinstance(rule, NativeRule) else rule.image_size
    return 3, side, side


def num_rows(rule: VisionRule, plan: ImagePlan) -> int:
    """Rows that `cut` makes of an image: its patches, or its ViT squares at native resolution."""
    return plan.num_vit_tokens if isinstance(rule, NativeRule) else plan.num_patches


def cut(rule: VisionRule, image: Image.Image, *, exact: bool = False) -> torch.Tensor:
    """The patches of an upright RGB image: uint8, shape (rows, *patch_shape(rule)), to be concatenated along rows.

    Rows are `plan_image(...).num_patches`: tiles line by line and then the thumbnail (tiles), or the whole image and
    then the tiles (anyres). At native resolution they are `num_vit_tokens` squares, in the order of the merger: the
    `merge_size` x `merge_size` squares of one LLM token are neighbours. `exact` resizes as Pillow does, bit by bit.
    Raises ImageRejected as `plan_image` does.
    """
    plan = plan_image(rule, image.width, image.height)
    patches = torch.empty((num_rows(rule, plan), *patch_shape(rule)), dtype=torch.uint8)
    cut_into(patches, rule, image, plan, exact=exact)
    return patches


def cut_into(
    patches: torch.Tensor, rule: VisionRule, image: Image.Image | Words, plan: ImagePlan, *, exact: bool = False
) -> None:
    """Write what `cut` gives into `patches`, contiguous, shape (num_rows(rule, plan), *patch_shape(rule)).

    `plan` is that of the image in its full size; the image may have been decoded at a reduced one. `exact` needs an
    image of Pillow's.
    """
    if isinstance(image, Image.Image) and image.mode != "RGB":
        raise ValueError(f"image of mode {image.mode}; give an RGB image, as `decode` returns it")
    # every function below fills all rows or fails in `split`, so counts and pixels cannot disagree
    rows: Pixels = patches.numpy()
    match rule:
        case FixedRule():
            split(_centre(image, plan, rule.image_size, exact=exact), rows)
        case TilesRule():
            _cut_tiles(rows, resizer(image, exact=exact), plan, rule.image_size)
        case AnyresRule():
            _cut_anyres(rows, resizer(image, exact=exact), plan, rule.image_size)
        case NativeRule():
            resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
            split(resized, rows, rule.merge_size)


def normalize(rule: VisionRule, pixels: torch.Tensor) -> torch.Tensor:
    """What the vision encoder takes: float32 of `cut`'s pixels, on their device, within 1e-6 of the reference.

    Same shape as `pixels`; at native resolution (rows, 3 * temporal_patch_size * side * side), each square repeated
    for every frame, as Qwen2-VL's patch embedding wants it. The scale 1/255, mean and std are one multiply and add.
    """
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels are {pixels.dtype}; give the uint8 tensor of `cut`, not yet normalised")
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (rule.mean, rule.std))
    scale, shift = (values.to(torch.float32) for values in (1 / (255 * std), -mean / std))
    if pixels.device.type != "cpu":
        return _normalize_on_device(rule, pixels, scale.to(pixels.device), shift.to(pixels.device))
    frames = rule.temporal_patch_size if isinstance(rule, NativeRule) else 1
    # (rows, 3, frames, pixels)
    normalized = torch.empty((len(pixels), 3, frames, pixels.shape[-2] * pixels.shape[-1]), dtype=torch.float32)
    if len(pixels):  # else nothing need be compiled
        _normalize(pixels.flatten(2).numpy(), scale.numpy(), shift.numpy(), normalized.numpy())
    return normalized.flatten(1) if isinstance(rule, NativeRule) else normalized.view(pixels.shape)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def _normalize(pixels: Pixels, scale: Floats, shift: Floats, normalized: Floats) -> None:
    """One pass: half the time of a conversion and two operations in place, and the same bits."""
    for row in range(normalized.shape[0]):
        for channel in range(3):
            factor, summand = scale[channel], shift[channel]
            for frame in range(normalized.shape[2]):
                for pixel in range(normalized.shape[3]):
                    normalized[row, channel, frame, pixel] = np.float32(pixels[row, channel, pixel]) * factor + summand


def _normalize_on_device(
    rule: VisionRule, pixels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    # (rows, 3, side, side)
    normalized = pixels.to(torch.float32).mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    if not isinstance(rule, NativeRule):
        return normalized
    # (rows, 3, side, side) -> (rows, 3, frames, side, side) -> (rows, 3 * frames * side * side)
    return normalized.unsqueeze(2).expand(-1, -1, rule.temporal_patch_size, -1, -1).flatten(1)


def _centre(image: Image.Image | Words, plan: ImagePlan, side: int, *, exact: bool) -> Words:
    """The `side` x `side` centre of the image after it is resized to the plan's size."""
    left, top = (plan.resized_width - side) // 2, (plan.resized_height - side) // 2
    if max(plan.resized_width, plan.resized_height) <= _LONGEST_STRIP * side:
        resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
        return resized[top : top + side, left : left + side]
    if not isinstance(image, Image.Image):
        image = to_image(image)
    # the same filter at the same places, but Pillow may take the other axis first and round in between: a few levels
    scale_x, scale_y = image.width / plan.resized_width, image.height / plan.resized_height
    source = (left * scale_x, top * scale_y, (left + side) * scale_x, (top + side) * scale_y)
    return to_words(image.resize((side, side), Image.Resampling.BICUBIC, box=source))


def _cut_tiles(rows: Pixels, resize: Resizer, plan: ImagePlan, side: int) -> None:
    """Tiles, then the thumbnail."""
    num_tiles = plan.columns * plan.rows
    split(resize(plan.resized_width, plan.resized_height), rows[:num_tiles])
    if plan.whole_image:
        split(resize(side, side), rows[num_tiles:])


def _cut_anyres(rows: Pixels, resize: Resizer, plan: ImagePlan, side: int) -> None:
    """The whole image squeezed into a square, then the tiles of the image centred on black."""
    split(resize(side, side), rows[:1])
    canvas = np.zeros((plan.rows * side, plan.columns * side), dtype=np.uint32)
    left, top = (canvas.shape[1] - plan.resized_width) // 2, (canvas.shape[0] - plan.resized_height) // 2
    inside = canvas[top : top + plan.resized_height, left : left + plan.resized_width]
    inside[:] = resize(plan.resized_width, plan.resized_height)
    split(canvas, rows[1:])
