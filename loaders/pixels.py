"""Image bytes -> pixel tensors, cut by `balance.patches`, equal to what transformers' processors make of the image.

For the loader. Pixels stay uint8 from the decoder to the device: a quarter of float32's bytes through collation and
transfer, and `normalize` afterwards takes 0.2 ms per 448 px patch on one core, where NumPy takes five times the decode.
Pillow's decoder takes .7 to .8 of the time of a 448 px JPEG that fits its patch, all of it without the GIL. How close
to the processors: bit by bit with `exact=True`, else within `loaders.resize.LEVELS` of 255 of Pillow's bicubic filter.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from balance.errors import DataError
from balance.patches import ImagePlan, plan_image
from balance.presets import AnyresRule, FixedRule, NativeRule, TilesRule, VisionRule
from loaders.resize import Pixels, Resizer, Words, resizer, split, to_words

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float32]

# What Pillow raises on damaged files: the first line on 28,000 mutated images of 16 formats, the second rarely.
_DECODE_ERRORS = (
    *(OSError, ValueError, RuntimeError, SyntaxError, Image.DecompressionBombError),
    *(EOFError, LookupError, OverflowError, struct.error),
)

_LONGEST_STRIP = 200
"""Above this ratio of sides the fixed rule resizes the centre alone: a 1 x 100,000 image would take 45 GB otherwise."""

_REDUCED_SIDES = 2
"""A JPEG decoded at a reduced scale keeps at least this many times the sides that it is then resized to."""

_ORIENTATION, _TURNED = 0x0112, range(5, 9)
"""The EXIF tag, and its values for images whose width and height change places."""


def decode(
    image_bytes: bytes | pa.Buffer, *, counted: tuple[int, int] | None = None, rule: VisionRule | None = None
) -> Image.Image:
    """The upright RGB image, as `transformers.image_utils.load_image` gives it; DataError if it cannot be decoded.

    Upright: turned as its EXIF orientation says. Transparency is dropped, not blended. 16-bit grey becomes the upper
    eight bits, as 16-bit colour does, where `load_image` makes everything above 255 white. `counted` is the upright
    (width, height) that the image must have, else DataError.

    With `rule` a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, where its sides divide by that and stay twice those
    that the rule resizes it to; the image that is returned has the reduced size. On photographs the pixels in the
    patches then differ by 0.4 levels of 255 in the mean and 3 at most, on coloured writing by 4 and 50. Decoding
    3 megapixels takes .7 of the time at 1/2.
    """
    try:
        image: Image.Image = Image.open(BytesIO(image_bytes))
        turned = image.getexif().get(_ORIENTATION) in _TURNED
        size = (image.height, image.width) if turned else image.size
        if counted is not None and size != counted:
            found, before = (f"{width} x {height}" for width, height in (size, counted))
            raise DataError(f"image has {found} pixels, but had {before} when it was counted")
        if rule is not None and image.format == "JPEG":
            scale = _reduction(rule, *size)
            image.draft(None, (image.width // scale, image.height // scale))
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode != "RGB":
            return image.convert("RGB")
        image.load()  # convert would do it, and copy
    except _DECODE_ERRORS as error:
        raise DataError(f"image of {len(image_bytes):,} bytes cannot be decoded: {error}") from error
    return image


def _reduction(rule: VisionRule, width: int, height: int) -> int:
    """How many times smaller an upright image may be decoded."""
    plan = plan_image(rule, width, height)
    for scale in (8, 4, 2):
        whole = width % scale == 0 and height % scale == 0
        needed = _REDUCED_SIDES * scale
        if whole and width >= needed * plan.resized_width and height >= needed * plan.resized_height:
            return scale
    return 1


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
    patches: torch.Tensor, rule: VisionRule, image: Image.Image, plan: ImagePlan, *, exact: bool = False
) -> None:
    """Write what `cut` gives into `patches`, contiguous, shape (num_rows(rule, plan), *patch_shape(rule)).

    `plan` is that of the image in its full size; the image may have been decoded at a reduced one.
    """
    if image.mode != "RGB":
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


def _centre(image: Image.Image, plan: ImagePlan, side: int, *, exact: bool) -> Words:
    """The `side` x `side` centre of the image after it is resized to the plan's size."""
    left, top = (plan.resized_width - side) // 2, (plan.resized_height - side) // 2
    if max(plan.resized_width, plan.resized_height) <= _LONGEST_STRIP * side:
        resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
        return resized[top : top + side, left : left + side]
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
