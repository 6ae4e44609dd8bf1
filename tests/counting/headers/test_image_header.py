import io
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from isobatch.counting.headers import image_header
from isobatch.counting.headers.image_header import read_header, warnings_about
from isobatch.counting.records.media import SampleProblem
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.media.jpeg import HEAD_BYTES, jpeg_size
from support.cases import for_each

PIXELS = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


def encode(form, orientation=None, **options):
    buffer = io.BytesIO()
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    Image.fromarray(PIXELS).save(buffer, form, **options)
    return buffer.getvalue()


def decoded_size(data):
    """As transformers' image loading sees it: upright, RGB."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB").size


def header_of(data, **options):
    return read_header(io.BytesIO(data), "a.img", **options)


@for_each("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_size_is_that_of_the_decoded_image(form):
    data = encode(form)
    header = header_of(data)
    assert (header.width, header.height) == decoded_size(data) == (60, 40)
    assert header.num_bytes == len(data)


@for_each("orientation", range(1, 9))
@for_each("form", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_honoured_as_the_decoder_does(form, orientation):
    data = encode(form, orientation)
    header = header_of(data)
    assert (header.width, header.height) == decoded_size(data)


# (type of the tag, number of values, the four bytes of its value or the place of them)
ODD_TAGS = {
    "text": (2, 2, b"6\0\0\0"),
    "byte": (1, 1, b"\6\0\0\0"),
    "undefined": (7, 1, b"\6\0\0\0"),
    "signed byte": (6, 1, b"\6\0\0\0"),
    "two numbers": (3, 2, b"\6\0\1\0"),
    "long": (4, 1, b"\6\0\0\0"),
    "0": (3, 1, b"\0\0\0\0"),
    "9": (3, 1, b"\x09\0\0\0"),
    "6/1": (5, 1, struct.pack("<II", 6, 1)),
    "6/0": (5, 1, struct.pack("<II", 6, 0)),
    "13/2": (5, 1, struct.pack("<II", 13, 2)),
    "float": (11, 1, struct.pack("<f", 8)),
    "not a number": (11, 1, struct.pack("<f", float("nan"))),
    "double": (12, 1, struct.pack("<d", 5)),
}


def exif_with(kind, count, value):
    """EXIF with an orientation of some type; values of 8 bytes come after the directory."""
    place = value if len(value) == 4 else struct.pack("<I", 26)
    more = value if len(value) > 4 else b""
    entry = struct.pack("<HHI", 0x0112, kind, count) + place
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + b"\0\0\0\0" + more


def test_an_odd_orientation_counts_and_decodes_as_pillow_turns_the_image():
    for case, tag in ODD_TAGS.items():
        files = {form: encode(form, exif=exif_with(*tag)) for form in ("JPEG", "PNG", "WEBP")}
        if len(tag[2]) == 4:
            tiff = encode("TIFF", tiffinfo={0x0112: 6})
            before = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
            assert tiff.count(before) == 1
            files["TIFF"] = tiff.replace(before, struct.pack("<HHI", 0x0112, *tag[:2]) + tag[2])
        for form, data in files.items():
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
            header = header_of(data)
            assert (header.width, header.height) == upright.size, (case, form)
            for decoder in (decode, decode_pixels):
                pixels = np.array(decoder(data, counted=upright.size))
                assert np.array_equal(pixels, np.array(upright)), (case, form)


def test_what_pillow_warns_of_is_one_line_with_the_sample(capsys):
    data = encode("TIFF", tiffinfo={0x0112: 6})
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    data = data.replace(entry, struct.pack("<HHIHH", 0x0112, 3, 2, 6, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = image_header._show_named
        with warnings_about("a\nb"):
            header_of(data)
        named = capsys.readouterr().err.splitlines()
        header_of(data)
    assert set(named) == {
        "note: image of sample a b: Metadata Warning, tag 274 had too many entries: 2, expected 1"
    }
    assert "of sample" not in capsys.readouterr().err


def test_turned_tiffs_count_and_decode_upright():
    for orientation in range(1, 9):
        for compression in (None, "tiff_lzw", "tiff_deflate"):
            data = encode("TIFF", tiffinfo={0x0112: orientation}, compression=compression)
            upright = decoded_size(data)
            header = header_of(data)
            assert (header.width, header.height) == upright == decode(data, counted=upright).size
            assert upright == ((60, 40) if orientation < 5 else (40, 60))


def late_exif(data):
    """Move the eXIf chunk of a PNG after the pixels, where it is legal too."""
    chunks, offset = [], 8
    while offset < len(data):
        end = offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        chunks.append(data[offset:end])
        offset = end
    exif = [chunk for chunk in chunks if chunk[4:8] == b"eXIf"]
    others = [chunk for chunk in chunks if chunk[4:8] != b"eXIf"]
    return data[:8] + b"".join([*others[:-1], *exif, others[-1]])


def test_exif_behind_the_pixels_of_a_png_counts_too():
    data = late_exif(encode("PNG", 6))
    assert decoded_size(data) == (40, 60)
    assert header_of(data).width == 40


def test_orientation_in_the_xmp_text_of_a_png_counts_as_the_decoder_counts_it():
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6" />')
    data = encode("PNG", pnginfo=info)
    header = header_of(data)
    assert (header.width, header.height) == decoded_size(data)


@for_each("form", ["JPEG", "PNG", "WEBP"])
@for_each("keep", [0.05, 0.5, 0.97])
def test_a_file_cut_short_is_corrupt(form, keep):
    data = encode(form)
    with pytest.raises(SampleProblem, match="corrupt_image"):
        header_of(data[: int(len(data) * keep)])


def decodes(data):
    try:
        Image.open(io.BytesIO(data)).convert("RGB")
    except (OSError, SyntaxError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("form", "decode"), [("WEBP", False), ("WEBP", True), ("PNG", True), ("JPEG", True)]
)
def test_what_passes_is_what_decodes_whichever_byte_is_damaged(form, decode):
    whole = encode(form)
    damaged = 0
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        data = whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        if decodes(data):
            header_of(data, decode=decode)
        else:
            damaged += 1
            with pytest.raises(SampleProblem):
                header_of(data, decode=decode)
    assert damaged


def test_bytes_behind_a_whole_image_do_no_harm():
    for form in ("JPEG", "PNG"):
        assert header_of(encode(form) + b"appended by a phone").width == 60


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"]
)
def test_what_is_no_image_is_corrupt(data):
    with pytest.raises(SampleProblem, match="corrupt_image"):
        header_of(data)


def test_a_decompression_bomb_is_refused_by_its_header():
    data = bytearray(encode("BMP"))
    data[18:26] = (60_000).to_bytes(4, "little") * 2
    with pytest.raises(SampleProblem, match="too_many_pixels"):
        header_of(bytes(data))


@for_each("mode", ["RGB", "L", "CMYK"])
@for_each(
    "options",
    [{}, {"progressive": True}, {"quality": 95, "subsampling": 0}, {"comment": b"x" * 5000}],
)
def test_the_short_way_to_a_jpegs_size_says_what_pillow_says(mode, options):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(buffer, "JPEG", **options)
    size = jpeg_size(buffer.getvalue()[:HEAD_BYTES])
    assert size == (None if mode == "CMYK" or "comment" in options else (60, 40))
    header = header_of(buffer.getvalue())
    assert (header.width, header.height) == (60, 40)


def test_a_jpeg_with_exif_is_not_taken_the_short_way():
    assert jpeg_size(encode("JPEG", 6)[:HEAD_BYTES]) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_the_short_way_gives_a_size_that_the_bytes_hold_or_none(data):
    for head in (data, b"\xff\xd8" + data, b"\xff\xd8\xff\xe0\x00\x04ab" + data):
        size = jpeg_size(head)
        if size is not None:
            width, height = size
            assert width > 0
            assert height > 0
            assert height.to_bytes(2) + width.to_bytes(2) in head
