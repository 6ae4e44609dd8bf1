"""Image file -> its upright size, from the header, and whether it is whole.

The size is the one that the model's decoder will see: transformers' image loading honours the EXIF
orientation, so a photo stored sideways counts with width and height exchanged. Reading header and
tail takes about 0.1 ms; only a file whose tail looks truncated is decoded in full.
"""

import io
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from PIL import Image

from isobatch.common.visible_text import visible
from isobatch.counting.headers.file_problem import file_problem
from isobatch.media.decoder_faults import quiet_decoders
from isobatch.media.jpeg import HEAD_BYTES, jpeg_size
from isobatch.media.orientation import ORIENTATION_TAG, upright_size

# A size between Pillow's warning and its limit is decoded like any other. Set once, for threads
# read too.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_plain_showwarning = warnings.showwarning
_reading = threading.local()


def _show_named(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Show a warning of Pillow's in one line, with the sample whose image it is about."""
    sample = getattr(_reading, "sample", None)
    if sample is None:
        _plain_showwarning(message, *rest, **more)
        return
    text = " ".join(visible(f"{sample}: {message}").split())
    sys.stderr.write(f"note: image of sample {text}\n")


warnings.showwarning = _show_named


@contextmanager
def warnings_about(sample_id: str) -> Iterator[None]:
    """Name a sample in what Pillow warns of in this thread."""
    _reading.sample = sample_id
    try:
        yield
    finally:
        _reading.sample = None


XMP_KEYWORD = b"XML:com.adobe.xmp"
TAIL_BYTES = 64
MOST_PIXELS = 1 << 26
"""Larger ones are left to Pillow, which knows what is safe to decode."""
DRAWN_BY_A_PROGRAM = frozenset({"EPS"})
"""Formats that Pillow gives to another program (Ghostscript), which a machine may not have."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header of an image file says."""

    width: int
    """Width of the upright image in pixels."""
    height: int
    num_bytes: int


def read_header(file: IO[bytes], name: str, *, decode: bool = False) -> ImageHeader:
    """Upright size and length in bytes of an image file; SampleProblem if it is damaged.

    `decode`: the whole image, ten to fifty times the work, which also finds flipped bits.
    """
    try:
        num_bytes = file.seek(0, 2)
        if num_bytes == 0:
            raise ValueError("the file is empty")
        file.seek(0)
        head = file.read(HEAD_BYTES)
        whole = not decode and _ends_well(file, head, num_bytes)
        if whole and (size := jpeg_size(head)) is not None and size[0] * size[1] <= MOST_PIXELS:
            return ImageHeader(*size, num_bytes)
        file.seek(0)
        quiet_decoders()
        with Image.open(file) as image:
            if image.format in DRAWN_BY_A_PROGRAM:
                raise ValueError(f"{image.format} is a drawing, not pixels; convert it first")
            size = image.size
            if not whole:
                image.load()
            orientation = None
            # asking Pillow would decode the whole picture to look for EXIF after it
            if image.format != "PNG" or _may_hold_exif(image):
                orientation = image.getexif().get(ORIENTATION_TAG)
            width, height = upright_size(size, image.format, orientation)
        return ImageHeader(width, height, num_bytes)
    except Exception as error:  # of any type: decoders raise what they like
        raise file_problem(error, "image", name) from None


def check_png(name: str, data: bytes) -> None:
    """Raise SampleProblem for a PNG that its own checksums call damaged; costs a CRC."""
    try:
        Image.open(io.BytesIO(data)).verify()
    except Exception as error:  # of any type: decoders raise what they like
        raise file_problem(error, "image", name) from None


def _ends_well(file: IO[bytes], head: bytes, num_bytes: int) -> bool:
    """Whether the file ends as its format says (JPEG: end-of-image marker, PNG: IEND).

    False only asks for a closer look: some writers append bytes, and some formats have no mark.
    """
    file.seek(max(0, num_bytes - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    if head.startswith(b"\xff\xd8"):
        return tail.rstrip(b"\0").endswith(b"\xff\xd9")
    if head.startswith(b"\x89PNG"):
        return tail.endswith(b"IEND\xaeB`\x82")
    return False


def _may_hold_exif(image: Image.Image) -> bool:
    """Whether EXIF precedes the pixels of a PNG (Pillow has seen it) or follows them."""
    prefixes = ("exif", "Raw profile type", "XML:com.adobe.xmp")
    if any(str(key).startswith(prefixes) for key in image.info):
        return True
    file: IO[bytes] | None = getattr(image, "fp", None)
    if file is None:
        return True
    position = file.tell()
    has_exif = _late_exif_chunk(file)
    file.seek(position)
    return has_exif


def _late_exif_chunk(file: IO[bytes]) -> bool:
    """Walk the chunk headers of a PNG (length, type; 12 bytes around the data) up to its end."""
    offset = 8
    while True:
        file.seek(offset)
        header = file.read(8)
        if len(header) < 8 or header[4:] == b"IEND":
            return False
        kind = header[4:]
        if kind == b"eXIf" or (kind == b"iTXt" and file.read(len(XMP_KEYWORD)) == XMP_KEYWORD):
            return True
        offset += int.from_bytes(header[:4], "big") + 12
