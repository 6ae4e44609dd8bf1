"""Image file -> its upright size, from the header alone, and whether the file is whole.

The size is the one that the model's decoder will see: transformers' image loading honours the EXIF
orientation, so a photo stored sideways counts with width and height exchanged. Reading header and
tail costs about 0.1 ms; only a file whose tail looks cut is decoded in full, so that the answer is
right and not only quick.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import IO

from PIL import Image, UnidentifiedImageError

from balance.errors import first_line
from balance.media.jpeg import HEAD_BYTES, jpeg_size
from packer.records.media import MediaProblem

# a size between Pillow's warning and its limit is decoded like any other; once, because threads
# read too
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

ORIENTATION_TAG = 0x0112
SIDEWAYS = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""
XMP_KEYWORD = b"XML:com.adobe.xmp"
TAIL_BYTES = 64
MOST_PIXELS = 1 << 26
"""Larger ones are left to Pillow, which knows what is safe to decode."""
DRAWN_BY_A_PROGRAM = frozenset({"EPS"})
"""Formats that Pillow hands to another program (Ghostscript): whether they decode depends on the
machine.
"""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header of an image file says."""

    width: int
    """Upright, in pixels."""
    height: int
    num_bytes: int


def read_header(file: IO[bytes], name: str, *, decode: bool = False) -> ImageHeader:
    """Upright size and length in bytes of an image file; raises MediaProblem for a file that is
    damaged.

    With `decode` the whole image is decoded, ten to fifty times the work: that also finds bits
    flipped in the middle.
    """
    try:
        return _read(file, name, decode=decode)
    except Image.DecompressionBombError as error:
        raise MediaProblem("too_many_pixels", f"{name}: {error}") from None
    except MediaProblem:
        raise
    # Pillow's parsers leak these for damaged files, SyntaxError for a bad PNG chunk among them
    except (
        OSError,
        ValueError,
        SyntaxError,
        KeyError,
        IndexError,
        OverflowError,
        EOFError,
    ) as error:
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # the file system's word, not Pillow's
            raise MediaProblem("unreadable_image", f"{name}: {error.strerror}") from None
        raise MediaProblem("corrupt_image", f"{name}: {first_line(error)}") from None


def check_png(name: str, data: bytes) -> None:
    """Raise MediaProblem for a PNG whose own checksums say that it is damaged; the price is a
    CRC.
    """
    try:
        Image.open(io.BytesIO(data)).verify()
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaProblem("corrupt_image", f"{name}: {first_line(error)}") from None


def _read(file: IO[bytes], name: str, *, decode: bool) -> ImageHeader:
    num_bytes = file.seek(0, 2)
    if num_bytes == 0:
        raise MediaProblem("corrupt_image", f"{name}: the file is empty")
    file.seek(0)
    head = file.read(HEAD_BYTES)
    whole = not decode and _ends_well(file, head, num_bytes)
    if whole and (size := jpeg_size(head)) is not None and size[0] * size[1] <= MOST_PIXELS:
        return ImageHeader(*size, num_bytes)
    file.seek(0)
    try:
        image = Image.open(file)
    except UnidentifiedImageError:
        raise MediaProblem("corrupt_image", f"{name}: not an image that Pillow knows") from None
    with image:
        if image.format in DRAWN_BY_A_PROGRAM:
            raise MediaProblem(
                "corrupt_image",
                f"{name}: {image.format} is a drawing, not pixels; convert it first",
            )
        width, height = image.size
        if not whole:
            image.load()
        sideways = _orientation(image) in SIDEWAYS
    return (
        ImageHeader(height, width, num_bytes) if sideways else ImageHeader(width, height, num_bytes)
    )


def _ends_well(file: IO[bytes], head: bytes, num_bytes: int) -> bool:
    """Does the file end as its format says (JPEG: end-of-image marker, PNG: IEND)?

    False only asks for a closer look: some writers append bytes behind the image, and other formats
    have no such mark.
    """
    file.seek(max(0, num_bytes - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    if head.startswith(b"\xff\xd8"):
        return tail.rstrip(b"\0").endswith(b"\xff\xd9")
    if head.startswith(b"\x89PNG"):
        return tail.endswith(b"IEND\xaeB`\x82")
    return False


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and not _may_hold_exif(image):
        return 1  # asking Pillow would decode the whole picture to look for EXIF behind it
    return int(image.getexif().get(ORIENTATION_TAG, 1) or 1)


def _may_hold_exif(image: Image.Image) -> bool:
    """EXIF may stand in front of the pixels of a PNG (then Pillow has seen it) or behind them (then
    the file says so).
    """
    if any(
        key == "exif" or str(key).startswith(("Raw profile type", "XML:com.adobe.xmp"))
        for key in image.info
    ):
        return True
    file: IO[bytes] | None = getattr(image, "fp", None)
    if file is None:
        return True
    position = file.tell()
    found = _late_exif_chunk(file)
    file.seek(position)
    return found


def _late_exif_chunk(file: IO[bytes]) -> bool:
    """Walk the chunk headers of a PNG (length, type; 12 bytes around the data) up to its end."""
    offset = 8
    while True:
        file.seek(offset)
        header = file.read(8)
        if len(header) < 8 or header[4:] == b"IEND":
            return False
        if header[4:] == b"eXIf" or (
            header[4:] == b"iTXt" and file.read(len(XMP_KEYWORD)) == XMP_KEYWORD
        ):
            return True
        offset += int.from_bytes(header[:4], "big") + 12
