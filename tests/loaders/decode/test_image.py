"""The short way for JPEGs gives Pillow's pixels, whatever the file, and Pillow's errors."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from isobatch.common.errors import DataError
from isobatch.loaders.decode import image as decoding
from isobatch.loaders.decode.image import decode, decode_pixels
from support.oracles.reference_processors import random_image

KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True},
    "restart markers": {"restart_marker_blocks": 3},
    "low quality": {"quality": 5},
    "high quality": {"quality": 100},
    "RGB inside": {"keep_rgb": True},
    "profile": {"icc_profile": b"not a profile"},
    "comment": {"comment": b"Exif"},
}
SIZES = [(64, 48), (33, 17), (1, 1), (7, 300), (448, 448)]


def _jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def _outcome(content: bytes, *, short: bool) -> Any:
    try:
        return decode_pixels(content).tolist() if short else np.asarray(decode(content)).tolist()
    except DataError as error:
        return str(error)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each JPEG that goes the short way."""
    made: list[int] = []
    plain = decoding._decode_jpeg

    def counted(*arguments: Any) -> Any:
        pixels = plain(*arguments)
        made.append(1)
        return pixels

    monkeypatch.setattr(decoding, "_decode_jpeg", counted)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_jpegs_of_every_kind_have_pillows_pixels(kind: str, calls: list[int]) -> None:
    rng = np.random.default_rng(0)
    for mode in ("RGB", "L"):
        if mode == "L" and "keep_rgb" in KINDS[kind]:
            continue
        for size in SIZES:
            content = _jpeg(random_image(rng, *size).convert(mode), **KINDS[kind])
            for given in (content, pa.py_buffer(content)):
                pixels = decode_pixels(given, counted=size)
                assert pixels.shape == (*size[::-1], 3)
                assert np.array_equal(pixels, np.asarray(decode(content))), (kind, mode, size)
    assert len(calls) == (1 if kind == "RGB inside" else 2) * 2 * len(SIZES)


@pytest.mark.parametrize("mode", ["CMYK", "turned", "PNG", "grey PNG"])
def test_everything_else_goes_by_pillow(mode: str, calls: list[int]) -> None:
    image = random_image(np.random.default_rng(1), 40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    png = io.BytesIO()
    image.convert("L" if mode == "grey PNG" else "RGB").save(png, "PNG")
    content = {"CMYK": _jpeg(image.convert("CMYK")), "turned": _jpeg(image, exif=exif)}.get(
        mode, png.getvalue()
    )
    assert np.array_equal(decode_pixels(content), np.asarray(decode(content)))
    assert not calls


def test_upright_photographs_with_exif_go_the_short_way(calls: list[int]) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 1, "camera"
    content = _jpeg(random_image(np.random.default_rng(2), 40, 30), exif=exif)
    assert np.array_equal(decode_pixels(content), np.asarray(decode(content)))
    assert calls


def test_damaged_files_have_the_same_outcome() -> None:
    rng = np.random.default_rng(3)
    whole = _jpeg(random_image(rng, 60, 40), quality=80)
    damaged = [whole[:cut] for cut in (0, 1, 20, 300, len(whole) // 2, len(whole) - 2)]
    for _ in range(400):
        content = bytearray(whole)
        for place in rng.integers(2, len(whole), rng.integers(1, 4)):
            content[place] = rng.integers(256)
        damaged.append(bytes(content))
    for content in damaged:
        assert _outcome(content, short=True) == _outcome(content, short=False)


def test_a_file_of_another_size_than_counted_is_refused() -> None:
    content = _jpeg(random_image(np.random.default_rng(4), 60, 40))
    with pytest.raises(
        DataError, match="image has 60 x 40 pixels, but had 40 x 60 when it was counted"
    ):
        decode_pixels(content, counted=(40, 60))


def test_threads_do_not_share_pixels() -> None:
    rng = np.random.default_rng(5)
    files = [
        _jpeg(random_image(rng, int(width), int(height)))
        for width, height in rng.integers(8, 400, (60, 2))
    ]
    expected = [np.asarray(decode(content)) for content in files]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda content: decode_pixels(content).copy(), files * 3))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected * 3, strict=True))


def test_it_works_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "simplejpeg", None)
    content = _jpeg(random_image(np.random.default_rng(6), 60, 40))
    assert np.array_equal(decode_pixels(content), np.asarray(decode(content)))


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_pixels_lie_where_they_shall(mode: str) -> None:
    content = _jpeg(random_image(np.random.default_rng(7), 60, 40).convert(mode))
    target = np.zeros((2, 40, 60, 3), np.uint8)
    assert decode_pixels(content, counted=(60, 40), target=target[1]).base is target
    assert np.array_equal(target[1], np.asarray(decode(content)))
    assert not target[0].any()


def test_several_transparent_colours_are_dropped_without_a_word(
    recwarn: pytest.WarningsRecorder,
) -> None:
    opaque = random_image(np.random.default_rng(0), 40, 30).quantize(16)
    buffer = io.BytesIO()
    opaque.save(buffer, "PNG", transparency=bytes(range(0, 256, 16)))
    decoded = decode(buffer.getvalue())
    assert np.array_equal(np.asarray(decoded), np.asarray(opaque.convert("RGB")))
    assert not recwarn.list


def test_transparent_images_lie_on_white_as_processors_put_them_if_asked() -> None:
    rng = np.random.default_rng(0)
    alpha = Image.fromarray(rng.integers(0, 255, (30, 40), dtype=np.uint8))
    opaque = random_image(rng, 40, 30)
    grey, turned = opaque.convert("L"), Image.Exif()
    turned[0x0112] = 6
    files: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "RGBA": (Image.merge("RGBA", [*opaque.split(), alpha]), "PNG", {}),
        "turned": (Image.merge("RGBA", [*opaque.split(), alpha]), "PNG", {"exif": turned}),
        "LA": (Image.merge("LA", [grey, alpha]), "PNG", {}),
        "WebP": (Image.merge("RGBA", [*opaque.split(), alpha]), "WEBP", {"lossless": True}),
        "palette": (opaque.quantize(16), "PNG", {"transparency": bytes(range(0, 256, 16))}),
        "one colour": (opaque, "PNG", {"transparency": opaque.getpixel((3, 4))}),
        "GIF": (opaque.quantize(16), "GIF", {"transparency": 3}),
        "opaque": (opaque, "PNG", {}),
        "JPEG": (opaque, "JPEG", {}),
    }
    same = {"opaque", "JPEG", "one colour", "GIF"}
    for case, (image, form, options) in files.items():
        buffer = io.BytesIO()
        image.save(buffer, form, **options)
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
        expected = convert_to_rgb(opened, return_numpy=True)
        for decoder in (decode, decode_pixels):
            found = np.asarray(decoder(buffer.getvalue(), on_white=True))
            assert np.array_equal(found, expected), case
            dropped = np.asarray(decoder(buffer.getvalue()))
            assert np.array_equal(dropped, expected) == (case in same), case
