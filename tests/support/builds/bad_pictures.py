"""Image files of every awkward kind, as bytes; small, and the same on every run."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(RNG.integers(0, 255, (40, 60, 3), dtype=np.uint8))


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


JPEG, PNG = encoded(PHOTO, "JPEG"), encoded(PHOTO, "PNG")
HEIC = b"\0\0\0\x18ftypheic" + bytes(4) + b"mif1heic" + bytes(100)
AVIF = (
    b"\0\0\0\x20ftypavif" + bytes(4) + b"avifmif1miafMA1B"
    b"\0\0\0\x2dmeta" + bytes(4) + b"\0\0\0\x21hdlr" + bytes(8) + b"pict" + bytes(13)
)
"""It says that it has a picture, and has none."""
DDS = (
    b"DDS " + struct.pack("<4I", 124, 0x1007, 8, 8) + bytes(56) + struct.pack("<I", 32) + bytes(112)
)
"""Of 8 x 8 pixels, whose format has no flags."""


def animated(form):
    """Red, then blue."""
    first, second = (Image.new("RGB", (60, 40), colour) for colour in ("red", "blue"))
    return encoded(first, form, save_all=True, append_images=[second])


def sideways(form):
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(PHOTO, form, exif=exif)


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *, depth=8, colour=0, pixels=b"", extra=()):
    """A PNG chunk by chunk, with right checksums, whatever its header says."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def colour_16_bit():
    rows = RNG.integers(0, 65535, (40, 60 * 3)).astype(">u2")
    return png(60, 40, depth=16, colour=2, pixels=b"".join(b"\0" + row.tobytes() for row in rows))


def grey_16_bit():
    return encoded(Image.fromarray(RNG.integers(0, 65535, (40, 60), dtype=np.uint16)), "PNG")


def text_bomb():
    """100 MB of text in 100 kB."""
    return png(
        4, 4, pixels=b"\0" * 20, extra=[(b"zTXt", b"k\0\0" + zlib.compress(b"a" * (100 << 20)))]
    )


def flipped(data):
    """One bit of the pixels is wrong."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def without_width(data):
    start = data.find(b"\xff\xc0")
    return data[: start + 7] + b"\0\0" + data[start + 9 :]


PALETTE = PHOTO.quantize(16)
TRANSPARENT = PHOTO.copy()
TRANSPARENT.putalpha(Image.linear_gradient("L").resize((60, 40)))
