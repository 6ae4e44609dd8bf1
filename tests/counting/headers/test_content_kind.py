"""What a file is, by its first bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from isobatch.counting.headers.content_kind import HEAD_BYTES, kind_of_content

# kinds that Pillow writes and whose files begin with nothing that tells them from others
NAMELESS = {"DIB", "EPS", "IM", "MSP", "PCX", "SPIDER", "XBM"}


def _written(kind: str) -> bytes | None:
    Image.preinit()
    for mode in ("RGB", "L", "1"):
        out = io.BytesIO()
        try:
            Image.new(mode, (32, 32)).save(out, kind)
        except (OSError, ValueError, KeyError):
            continue
        return out.getvalue()
    return None


def test_every_kind_of_image_that_pillow_writes_is_one() -> None:
    Image.init()
    kinds = sorted(set(Image.SAVE) & set(Image.OPEN) - NAMELESS)
    found = {kind: kind_of_content(data) for kind in kinds if (data := _written(kind))}
    assert len(found) >= 12
    assert set(found.values()) == {"image"}, found


def test_the_first_bytes_are_enough() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "JPEG2000", "AVIF", "GIF", "TIFF"):
        data = _written(kind)
        assert data is not None
        assert kind_of_content(data[:HEAD_BYTES]) == "image", kind


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x18ftypheic", "image"),
        (b"\0\0\0\x18ftypmif1", "image"),
        (b"\0\0\0\x18ftypisom", "video"),
        (b"\0\0\0\x18ftypqt  ", "video"),
        (b"\0\0\0\x18ftypM4A ", "audio"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "video"),
        (b"RIFF\0\0\0\0AVI LIST", "video"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (b"RIFF\0\0\0\0sfbk", None),
        (b"\x1a\x45\xdf\xa3", "video"),
        (b"G" + bytes(187) + b"G", "video"),
        (b"OggS" + bytes(24) + b"OpusHead", "audio"),
        (b"OggS" + bytes(24) + b"\x80theora", "video"),
        (b"FORM\0\0\0\0AIFF", "audio"),
        (b"ID3\x04", "audio"),
        (b"\xff\xfb\x90\x00", "audio"),
        (b"\xff\xf1\x50\x80", "audio"),
        (b"fLaC", "audio"),
    ],
)
def test_containers_are_told_by_what_they_hold(head: bytes, kind: str | None) -> None:
    assert kind_of_content(head + bytes(8)) == kind


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"B", b"BM", b"P5", b"\xff", b"RIFF"),
        *(b"<!DOCTYPE html><html>", b'{"a": 1}', b"BMW is a maker of cars, and of motorcycles"),
        *(b"Great, thanks", "short text".encode("utf-16"), b"PK\x03\x04"),
        *(b"\x93NUMPY\x01\x00v\x00", b"%PDF-1.7", b"\x80\x04\x95", b"MAC", b"\x1f\x8b\x08"),
    ],
)
def test_other_files_are_none_of_them(head: bytes) -> None:
    assert kind_of_content(head) is None


def test_random_bytes_are_hardly_ever_taken_for_media() -> None:
    rng = np.random.default_rng(0)
    taken = sum(kind_of_content(rng.bytes(HEAD_BYTES)) is not None for _ in range(5000))
    assert taken < 10
