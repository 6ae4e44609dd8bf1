"""Bicubic resizing and splitting into channels: what happens to pixels between the decoder and the patches. Pure.

A pixel is one 32-bit word here, as Pillow holds it: so a decoded image is looked at without a copy, and a pass over
words writes the three planes of a 448 px patch in 0.04 ms, where Pillow's `split` and a copy per band take 0.27. Two
kernels resize. torch's works with the processor's vector instructions, 5 to 8 times as fast as Pillow's, and is what
transformers' image processors run where torchvision is installed. Its weights have 15 bits instead of 22: one value in
200 is off by one level of 255, hardly ever one by two (`LEVELS`). It resizes along lines first, always. So does Pillow
up to version 12; version 13 takes columns first where an image loses far more height than width. Where that leaves a
hard edge, the order makes up to 31 levels.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.dlpack import from_dlpack

Pixels = NDArray[np.uint8]
Words = NDArray[np.uint32]
"""(height, width): red in the lowest byte, then green and blue; the highest byte means nothing."""

LEVELS = 2
"""Furthest that the kernel may be from Pillow along lines first, in levels of 255: a rounding in each of two passes."""

_SHORT = 32
"""Lines of fewer pixels are too short for vector instructions; such squares are gathered first, in half the time."""

Resizer = Callable[[int, int], Words]
"""(width, height) -> the image in this size."""


def resizer(image: Image.Image | Words, *, exact: bool) -> Resizer:
    """The function that resizes an RGB image: with the installed Pillow's bits if `exact`, else as LEVELS says."""
    if exact or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        # without vector instructions torch has only a kernel that is slower than Pillow's
        whole = to_image(image) if isinstance(image, np.ndarray) else image
        return lambda width, height: to_words(whole.resize((width, height), Image.Resampling.BICUBIC))
    words = image if isinstance(image, np.ndarray) else to_words(image)
    return lambda width, height: _resize(words, width, height)


def to_words(image: Image.Image) -> Words:
    """The pixels of an RGB image; not a copy, if Pillow holds them in one piece (up to 4 megapixels)."""
    try:
        values = from_dlpack(pa.array(image).values)
    except ValueError:  # in several pieces
        values = torch.from_numpy(np.array(image.convert("RGBX")).ravel())
    return values.numpy().view(np.uint32).reshape(image.height, image.width)


def to_image(words: Words) -> Image.Image:
    """An RGB image of Pillow's with these pixels."""
    height, width = words.shape
    return Image.frombuffer("RGBX", (width, height), words, "raw", "RGBX", 0, 1).convert("RGB")


def _resize(words: Words, width: int, height: int) -> Words:
    if words.shape == (height, width):
        return words
    # (1, 4, height, width), the channels last in memory: reshaped so, because torch goes by the stride of the 1 as well
    # and would otherwise return, and make, planes: 2.5 times slower
    channels = torch.from_numpy(words.view(np.uint8).reshape(1, *words.shape, 4)).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(channels, (height, width), mode="bicubic", antialias=True)
    last = np.ascontiguousarray(resized.permute(0, 2, 3, 1).numpy())
    return last.view(np.uint32).reshape(height, width)


def split(words: Words, patches: Pixels, merge_size: int = 1) -> None:
    """Write the squares of an image into `patches`, shape (squares, 3, side, side), block by block of `merge_size`.

    Blocks and the squares inside a block go line by line. ValueError unless they fill `patches` exactly.
    """
    side = patches.shape[-1]
    unit = side * merge_size
    if words.shape[0] % unit or words.shape[1] % unit or words.size != len(patches) * side * side:
        raise ValueError(f"image of {words.shape[1]} x {words.shape[0]} pixels for {len(patches)} squares of {side}")
    # a window of an image would be a second layout to compile the kernel for
    _split(np.ascontiguousarray(words), patches, merge_size)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def _split(words: Words, patches: Pixels, merge_size: int) -> None:  # noqa: C901  (its loops are its subject)
    side = patches.shape[-1]
    rows, columns = words.shape[0] // side, words.shape[1] // side
    gathered = np.empty(min(side, _SHORT) ** 2, np.uint32)
    for row in range(rows):
        for column in range(columns):
            block = row // merge_size * (columns // merge_size) + column // merge_size
            place = (block * merge_size + row % merge_size) * merge_size + column % merge_size
            if side < _SHORT:
                for y in range(side):
                    for x in range(side):
                        gathered[y * side + x] = words[row * side + y, column * side + x]
                planes = patches[place].reshape(3, side * side)
                for pixel in range(side * side):
                    planes[0, pixel] = gathered[pixel] & 255
                    planes[1, pixel] = gathered[pixel] >> 8 & 255
                    planes[2, pixel] = gathered[pixel] >> 16 & 255
            else:
                for y in range(side):
                    line = words[row * side + y, column * side : (column + 1) * side]
                    for x in range(side):
                        patches[place, 0, y, x] = line[x] & 255
                        patches[place, 1, y, x] = line[x] >> 8 & 255
                        patches[place, 2, y, x] = line[x] >> 16 & 255
