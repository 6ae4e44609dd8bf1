"""Resizing of decoded images, and cutting them into patches. Pure.

Pixels stay as decoders give them, three bytes side by side, so that cutting copies whole lines. Two
kernels resize. torch's uses vector instructions, is 5 to 8 times as fast as Pillow's, and is what
transformers' image processors run with torchvision 0.28: the same bits, for all filters. Pillow's
is what they run without. torch's weights have 15 bits instead of 22: one
value in 200 is off by one level of 255, hardly ever one by two (`LEVELS`). It always resizes along
lines first. So does Pillow up to version 12; version 13 takes columns first where an image loses
far more height than width. Where that leaves a hard edge, the order makes up to 31 levels.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from isobatch.models.image_rules.base import Resample

Pixels = NDArray[np.uint8]
"""An image: (height, width, 3), contiguous."""

LEVELS = 2
"""Largest difference from Pillow along lines first, in levels of 255: one rounding per pass."""

Resizer = Callable[[int, int], Pixels]
"""(width, height) -> the image in this size."""


FILTERS: dict[Resample, Image.Resampling] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def resizer(image: Image.Image | Pixels, resample: Resample = "bicubic", *, exact: bool) -> Resizer:
    """The function that resizes an RGB image: `exact` as Pillow does, else within LEVELS."""
    # without vector instructions torch is slower than Pillow
    has_kernel = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if exact or not (has_kernel and _has_filter(resample)):
        whole = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        return lambda width, height: np.array(whole.resize((width, height), FILTERS[resample]))
    pixels = image if isinstance(image, np.ndarray) else np.array(image)
    return lambda width, height: _resize(pixels, resample, width, height)


@lru_cache
def _has_filter(resample: Resample) -> bool:
    """Whether torch knows the filter."""
    try:
        _resize(np.zeros((2, 2, 3), np.uint8), resample, 1, 1)
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # lanczos, before torch 2.13
    return True


def _resize(pixels: Pixels, resample: Resample, width: int, height: int) -> Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    # (1, 3, height, width), the channels last in memory: reshaped so, because torch also looks at
    # the stride of the 1 and would otherwise return, and make, planes: 2.5 times slower
    channels = torch.from_numpy(pixels.reshape(1, *pixels.shape)).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        channels, (height, width), mode=resample, antialias=True
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def patchify(pixels: Pixels, patches: NDArray[np.uint8]) -> None:
    """Write an image's patches by row into (patches, side, side, 3), filling it exactly."""
    side = patches.shape[1]
    rows, columns = check_grid(pixels, len(patches), side, side)
    # (rows, columns, side, side, 3), both
    grid = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    np.copyto(patches.reshape(rows, columns, side, side, 3), grid)


def check_grid(pixels: Pixels, num_patches: int, side: int, unit: int) -> tuple[int, int]:
    """Rows and columns of patches. ValueError unless `num_patches` in whole blocks."""
    height, width = pixels.shape[:2]
    rows, columns = height // side, width // side
    if height % unit or width % unit or rows * columns != num_patches:
        raise ValueError(f"image of {width} x {height} pixels for {num_patches} patches of {side}")
    return rows, columns
