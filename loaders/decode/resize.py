"""Bicubic resizing of decoded images, and their cutting into patches: between the decoder and the
batch. Pure.

Pixels stay as decoders give them, three bytes side by side, so that cutting copies whole lines. Two
kernels resize. torch's works with the processor's vector instructions, 5 to 8 times as fast as
Pillow's, and is what transformers' image processors run where torchvision is installed. Its weights
have 15 bits instead of 22: one value in 200 is off by one level of 255, hardly ever one by two
(`LEVELS`). It resizes along lines first, always. So does Pillow up to version 12; version 13 takes
columns first where an image loses far more height than width. Where that leaves a hard edge, the
order makes up to 31 levels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
"""An image: (height, width, 3), contiguous."""

LEVELS = 2
"""Furthest that the kernel may be from Pillow along lines first, in levels of 255: a rounding in
each of two passes.
"""

Resizer = Callable[[int, int], Pixels]
"""(width, height) -> the image in this size."""


def resizer(image: Image.Image | Pixels, *, exact: bool) -> Resizer:
    """The function that resizes an RGB image: with the installed Pillow's bits if `exact`, else as
    LEVELS says.
    """
    if exact or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        # without vector instructions torch has only a kernel that is slower than Pillow's
        whole = to_image(image) if isinstance(image, np.ndarray) else image
        return lambda width, height: to_pixels(
            whole.resize((width, height), Image.Resampling.BICUBIC)
        )
    pixels = image if isinstance(image, np.ndarray) else to_pixels(image)
    return lambda width, height: _resize(pixels, width, height)


def to_pixels(image: Image.Image) -> Pixels:
    """The pixels of an RGB image; a copy, because Pillow holds four bytes of each."""
    return np.array(image)


def to_image(pixels: Pixels) -> Image.Image:
    """An RGB image of Pillow's with these pixels."""
    return Image.fromarray(pixels)


def _resize(pixels: Pixels, width: int, height: int) -> Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    # (1, 3, height, width), the channels last in memory: reshaped so, because torch goes by the
    # stride of the 1 as well and would otherwise return, and make, planes: 2.5 times slower
    channels = torch.from_numpy(pixels.reshape(1, *pixels.shape)).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        channels, (height, width), mode="bicubic", antialias=True
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def cut_squares(pixels: Pixels, squares: NDArray[np.uint8]) -> None:
    """Write the squares of an image, line by line, into `squares`, shape (squares, side, side, 3),
    contiguous.

    ValueError unless they fill `squares` exactly.
    """
    side = squares.shape[1]
    rows, columns = check_squares(pixels, len(squares), side, side)
    # (rows, columns, side, side, 3), both
    lined = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    np.copyto(squares.reshape(rows, columns, side, side, 3), lined)


def check_squares(pixels: Pixels, num_squares: int, side: int, unit: int) -> tuple[int, int]:
    """Rows and columns of squares. ValueError unless there are as many, in whole blocks of `unit`
    pixels.
    """
    height, width = pixels.shape[:2]
    rows, columns = height // side, width // side
    if height % unit or width % unit or rows * columns != num_squares:
        raise ValueError(f"image of {width} x {height} pixels for {num_squares} squares of {side}")
    return rows, columns
