"""What may be decoded without asking Pillow: a JPEG that is upright and alone in its file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from isobatch.common.errors import DataError
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.media.jpeg import plain_jpeg_size
from support.cases import for_each
from support.oracles.reference_processors import random_image

IMAGE = random_image(np.random.default_rng(0), 40, 30)


def encoded(image: Image.Image = IMAGE, format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


@for_each("options", [{}, {"progressive": True}, {"comment": b"Exif"}, {"icc_profile": b"profile"}])
@for_each("mode", ["RGB", "L"])
def test_plain_ones(mode: str, options: dict[str, Any]) -> None:
    assert plain_jpeg_size(memoryview(encoded(IMAGE.convert(mode), **options))) == (40, 30)


@for_each(
    "content",
    [
        encoded(exif=exif(6)),
        encoded(exif=exif(1)),  # upright, but Pillow knows better how EXIF is to be read
        encoded(xmp=b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'),
        encoded(IMAGE.convert("CMYK")),
        encoded(format="PNG"),
        encoded(format="MPO", save_all=True, append_images=[IMAGE]),
        encoded()[:100],
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff",
    ],
)
def test_all_others_are_left_to_pillow(content: bytes) -> None:
    assert plain_jpeg_size(memoryview(content)) is None


def test_pillow_is_not_asked_about_stored_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.loaders.decode.image._upright_size", None)
    expected = np.asarray(decode(encoded()))
    for content in (
        encoded(),
        memoryview(encoded()),
        pa.py_buffer(encoded()),
        memoryview(pa.py_buffer(encoded())),
    ):
        assert np.array_equal(decode_pixels(content), expected)


def outcome(content: bytes, *, short: bool) -> Any:
    try:
        return (decode_pixels(content) if short else np.asarray(decode(content))).tobytes()
    except DataError as error:
        return str(error)


def test_damaged_headers_have_the_outcome_that_pillow_gives() -> None:
    rng = np.random.default_rng(1)
    files = [
        encoded(IMAGE.convert(mode), **options)
        for mode in ("RGB", "L")
        for options in ({}, {"progressive": True})
    ]
    num_plain = 0
    for number in range(1500):
        content = bytearray(files[number % len(files)])
        places = rng.integers(2, content.index(b"\xff\xda") + 14, rng.integers(1, 3))
        for place in places:
            content[place] = rng.choice([0, 1, 2, 255, content[place] ^ 1, rng.integers(256)])
        damaged = bytes(content[: rng.integers(1, len(content))] if rng.random() < 0.1 else content)
        num_plain += plain_jpeg_size(memoryview(damaged)) is not None
        assert outcome(damaged, short=True) == outcome(damaged, short=False)
    assert num_plain > 700
