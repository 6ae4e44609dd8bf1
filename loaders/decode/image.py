"""Image files -> upright RGB pixels, as transformers loads them.

For the loader. Pillow decodes everything but plain JPEGs: simplejpeg, if installed, makes the same
pixels in half the time, with one call of the same libjpeg-turbo for the file, without the GIL.
"""

import threading
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps

from isobatch.common.errors import DataError
from isobatch.loaders.decode.resize import Pixels
from isobatch.media.decoder_faults import fault_of, quiet_decoders
from isobatch.media.jpeg import plain_jpeg_size
from isobatch.media.orientation import ORIENTATION_TAG, upright_size
from isobatch.models.image_rules import VisionRule
from isobatch.models.image_rules.base import ResizeTo
from isobatch.models.image_tokens import plan_image

try:
    import simplejpeg
except ImportError:  # not for this machine's processor, perhaps
    simplejpeg = None

_REDUCED_SIDES = 2
"""Smallest sides of a JPEG decoded at a reduced scale, as a multiple of its resized sides."""

_UPRIGHT = (None, 1)
"""Orientations of an image that is stored as it is seen."""

_SCRATCH_BYTES = 16 << 20
"""Limit of pixels that each thread keeps: new memory costs a tenth of decoding into it."""
_scratch = threading.local()


def decode_pixels(
    image_bytes: bytes | memoryview,
    *,
    counted: tuple[int, int] | None = None,
    target: Pixels | None = None,
    on_white: bool = False,
    keep_colour: bool = False,
) -> Pixels:
    """The pixels of `decode`, valid until this thread decodes again. Errors as `decode`.

    They are written to `target` if given, which is contiguous and of the image's size.
    """
    if simplejpeg is not None:
        try:
            size = plain_jpeg_size(memoryview(image_bytes).cast("B")) or _upright_size(image_bytes)
            if size is not None and counted in {None, size}:
                pixels = _scratch_pixels(size[1], size[0]) if target is None else target
                return _decode_jpeg(image_bytes, pixels)
        except Exception:  # of any type; Pillow names the error, or can decode it
            pass
    # a copy: Pillow has 4 bytes per pixel
    image = decode(image_bytes, counted=counted, on_white=on_white, keep_colour=keep_colour)
    pixels = np.array(image)
    if target is None:
        return pixels
    target[:] = pixels
    return target


def _upright_size(image_bytes: bytes | memoryview) -> tuple[int, int] | None:
    """(width, height) of an upright JPEG in grey or RGB, by Pillow; None for anything else."""
    image = Image.open(BytesIO(image_bytes))
    is_plain = image.format == "JPEG" and image.mode in {"RGB", "L"}
    return image.size if is_plain and image.getexif().get(ORIENTATION_TAG) in _UPRIGHT else None


def _decode_jpeg(image_bytes: bytes | memoryview, target: Pixels) -> Pixels:
    simplejpeg.decode_jpeg(np.frombuffer(image_bytes, np.uint8), "RGB", buffer=target)
    return target


def _scratch_pixels(height: int, width: int) -> Pixels:
    num_bytes = height * width * 3
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = np.empty(num_bytes, np.uint8)
        if num_bytes <= _SCRATCH_BYTES:
            _scratch.buffer = buffer
    pixels: Pixels = buffer[:num_bytes].reshape(height, width, 3)
    return pixels


def decode(
    image_bytes: bytes | memoryview,
    *,
    counted: tuple[int, int] | None = None,
    rule: VisionRule | None = None,
    on_white: bool = False,
    keep_colour: bool = False,
) -> Image.Image:
    """The upright RGB image, as `load_image` gives it; DataError if it cannot be decoded.

    Upright: turned as its EXIF orientation says. An alpha channel is dropped, not blended;
    `on_white`: the image lies on white, as `convert_to_rgb` of transformers' processors puts it
    where they are given an opened file. One transparent colour lies on white always: `load_image`
    keeps it in `info`, where `convert_to_rgb` looks; `keep_colour` leaves that to a processor. So
    do frames of a video, whose processors have no such step. 16-bit grey becomes the upper eight
    bits, as 16-bit colour does, where `load_image` makes everything above 255 white. `counted` is
    the upright (width, height) that the image must have, else DataError.

    With `rule` a JPEG is decoded at 1/2 (.7 of the time), 1/4 or 1/8 of its size, where its sides
    divide by that and stay twice those that the rule resizes it to. Patches of photographs then
    differ by 0.4 levels of 255 in the mean and 3 at most, those of coloured writing by 4 and 50.
    """
    try:
        quiet_decoders()
        image: Image.Image = Image.open(BytesIO(image_bytes))
        stored = image.size  # first: looking for its EXIF may decode a file
        size = upright_size(stored, image.format, image.getexif().get(ORIENTATION_TAG))
        if counted is not None and size != counted:
            current, before = (f"{width} x {height}" for width, height in (size, counted))
            raise DataError(f"image has {current} pixels, but had {before} when it was counted")
        if rule is not None and image.format == "JPEG":
            scale = _reduction(rule, *size)
            image.draft(None, (image.width // scale, image.height // scale))
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):
            image = _upper_bits(image)
        image = to_rgb(image, on_white=on_white, keep_colour=keep_colour)
    except DataError:
        raise
    except Exception as error:  # of any type: decoders raise what they like
        what = f"image of {len(image_bytes):,} bytes cannot be decoded"
        raise DataError(f"{what}: {fault_of(error).detail}") from error
    return image


def _upper_bits(image: Image.Image) -> Image.Image:
    """16-bit grey as 8 bits; what has the transparent value becomes white."""
    values, colour = np.asarray(image), image.info.get("transparency")
    upper = (values >> 8).astype(np.uint8)
    if isinstance(colour, int):
        upper[values == colour] = 255
    return Image.fromarray(upper)


def to_rgb(image: Image.Image, *, on_white: bool, keep_colour: bool = False) -> Image.Image:
    """The image in RGB, with transparency as `decode` has it.

    The same calls of Pillow as `load_image` and `convert_to_rgb` make, one after the other, for
    every mode has its own way there: of a palette with several transparent colours none is kept.
    """
    if not on_white:
        if isinstance(image.info.get("transparency"), bytes) and image.mode == "P":
            del image.info["transparency"]  # Pillow would, with a warning
        if image.mode == "RGB":
            image.load()  # convert would do it, and copy
        else:
            image = image.convert("RGB")
    if keep_colour and not on_white:
        return image
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _reduction(rule: VisionRule, width: int, height: int) -> int:
    """How many times smaller an upright image may be decoded."""
    plan = plan_image(rule, width, height)
    if rule.looks_at_sample or not isinstance(plan.main.steps[0], ResizeTo):
        return 1  # places are those of the full size
    max_scale = min(width / plan.resized_width, height / plan.resized_height) / _REDUCED_SIDES
    for scale in (8, 4, 2):
        if scale <= max_scale and width % scale == height % scale == 0:
            return scale
    return 1
