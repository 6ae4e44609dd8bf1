"""Image bytes -> pixel tensors, cut by `balance.patches`, equal to what transformers' processors make of the image.

For the loader. Pixels stay uint8 from the decoder to the device: a quarter of float32's bytes through collation and
transfer, and `normalize` afterwards takes 0.3 ms per 448 px patch on one core, where NumPy takes five times the decode.
`cut` is Pillow's own bicubic resize plus one copy per channel (both release the GIL).
"""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from balance.errors import DataError
from balance.patches import ImagePlan, plan_image
from balance.presets import AnyresRule, FixedRule, NativeRule, TilesRule, VisionRule

Pixels = NDArray[np.uint8]

# What Pillow raises on damaged files: the first line on 28,000 mutated images of 16 formats, the second rarely.
_DECODE_ERRORS = (
    *(OSError, ValueError, RuntimeError, SyntaxError, Image.DecompressionBombError),
    *(EOFError, LookupError, OverflowError, struct.error),
)

_LONGEST_STRIP = 200
"""Above this ratio of sides the fixed rule resizes the centre alone: a 1 x 100,000 image would take 45 GB otherwise."""


def decode(image_bytes: bytes) -> Image.Image:
    """The upright RGB image, as `transformers.image_utils.load_image` gives it; DataError if it cannot be decoded.

    Upright: turned as its EXIF orientation says. Transparency is dropped, not blended.
    """
    try:
        image = Image.open(BytesIO(image_bytes))
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode != "RGB":
            return image.convert("RGB")
        image.load()  # convert would do it, and copy
    except _DECODE_ERRORS as error:
        raise DataError(f"image of {len(image_bytes):,} bytes cannot be decoded: {error}") from error
    return image


def patch_shape(rule: VisionRule) -> tuple[int, int, int]:
    """(channels, height, width) of one row of `cut`: a patch, or one ViT square at native resolution."""
    side = rule.vit_patch_size if isinstance(rule, NativeRule) else rule.image_size
    return 3, side, side


def cut(rule: VisionRule, image: Image.Image) -> torch.Tensor:
    """The patches of an upright RGB image: uint8, shape (rows, *patch_shape(rule)), to be concatenated along rows.

    Rows are `plan_image(...).num_patches`: tiles line by line and then the thumbnail (tiles), or the whole image and
    then the tiles (anyres). At native resolution they are `num_vit_tokens` squares, in the order of the merger: the
    `merge_size` x `merge_size` squares of one LLM token are neighbours. Raises ImageRejected as `plan_image` does.
    """
    if image.mode != "RGB":
        raise ValueError(f"image of mode {image.mode}; give an RGB image, as `decode` returns it")
    plan = plan_image(rule, image.width, image.height)
    rows = plan.num_vit_tokens if isinstance(rule, NativeRule) else plan.num_patches
    # every function below fills all rows or fails at a reshape, so counts and pixels cannot disagree
    patches: Pixels = np.empty((rows, *patch_shape(rule)), dtype=np.uint8)
    match rule:
        case FixedRule():
            _fill(patches, _centre(image, plan, rule.image_size))
        case TilesRule():
            _fill_tiles(patches, image, plan, rule.image_size)
        case AnyresRule():
            _fill_anyres(patches, image, plan, rule.image_size)
        case NativeRule():
            _fill(patches, _resize(image, plan.resized_width, plan.resized_height), merge_size=rule.merge_size)
    return torch.from_numpy(patches)


def normalize(rule: VisionRule, pixels: torch.Tensor) -> torch.Tensor:
    """What the vision encoder takes: float32 of `cut`'s pixels, on their device, within 1e-6 of the reference.

    Same shape as `pixels`; at native resolution (rows, 3 * temporal_patch_size * side * side), each square repeated
    for every frame, as Qwen2-VL's patch embedding wants it. The scale 1/255, mean and std are one multiply and add.
    """
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels are {pixels.dtype}; give the uint8 tensor of `cut`, not yet normalised")
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (rule.mean, rule.std))
    scale, shift = (values.to(pixels.device, torch.float32) for values in (1 / (255 * std), -mean / std))
    # (rows, 3, side, side); in place, which is 3 times faster than (pixels / 255 - mean) / std
    normalized = pixels.to(torch.float32).mul_(scale).add_(shift)
    if not isinstance(rule, NativeRule):
        return normalized
    # (rows, 3, side, side) -> (rows, 3, frames, side, side) -> (rows, 3 * frames * side * side)
    return normalized.unsqueeze(2).expand(-1, -1, rule.temporal_patch_size, -1, -1).flatten(1)


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    """Bicubic, the filter of all four references (`resample = 3`)."""
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _centre(image: Image.Image, plan: ImagePlan, side: int) -> Image.Image:
    """The `side` x `side` centre of the image after it is resized to the plan's size."""
    left, top = (plan.resized_width - side) // 2, (plan.resized_height - side) // 2
    box = (left, top, left + side, top + side)
    if max(plan.resized_width, plan.resized_height) <= _LONGEST_STRIP * side:
        return _resize(image, plan.resized_width, plan.resized_height).crop(box)
    # the same filter at the same places, but Pillow may take the other axis first and round in between: a few levels
    scale_x, scale_y = image.width / plan.resized_width, image.height / plan.resized_height
    source = (box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y)
    return image.resize((side, side), Image.Resampling.BICUBIC, box=source)


def _fill_tiles(patches: Pixels, image: Image.Image, plan: ImagePlan, side: int) -> None:
    """Tiles, then the thumbnail."""
    num_tiles = plan.columns * plan.rows
    _fill(patches[:num_tiles], _resize(image, plan.resized_width, plan.resized_height))
    if plan.whole_image:
        _fill(patches[num_tiles:], _resize(image, side, side))


def _fill_anyres(patches: Pixels, image: Image.Image, plan: ImagePlan, side: int) -> None:
    """The whole image squeezed into a square, then the tiles of the image centred on black."""
    canvas = Image.new("RGB", (plan.columns * side, plan.rows * side))
    corner = (canvas.width - plan.resized_width) // 2, (canvas.height - plan.resized_height) // 2
    canvas.paste(_resize(image, plan.resized_width, plan.resized_height), corner)
    _fill(patches[:1], _resize(image, side, side))
    _fill(patches[1:], canvas)


def _fill(patches: Pixels, image: Image.Image, merge_size: int = 1) -> None:
    """Write the squares of `image` into `patches`, shape (squares, 3, side, side), block by block of `merge_size`.

    Band by band: Pillow splits channels twice as fast as NumPy moves the channel axis.
    """
    side = patches.shape[-1]
    rows, columns = image.height // (side * merge_size), image.width // (side * merge_size)
    # (rows, columns, merge, merge, 3, side, side)
    target = patches.reshape(rows, columns, merge_size, merge_size, 3, side, side)
    for channel, band in enumerate(image.split()):
        squares = np.asarray(band).reshape(rows, merge_size, side, columns, merge_size, side)
        target[..., channel, :, :] = squares.transpose(0, 3, 1, 4, 2, 5)
