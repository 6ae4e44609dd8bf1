"""Decoded and cut pixels against transformers' `load_image` and its image processors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import load_image

from isobatch.common.config import preset_names
from isobatch.common.errors import DataError
from isobatch.loaders.decode._patchify import patchify_planes
from isobatch.loaders.decode.image import decode
from isobatch.loaders.decode.pixels import (
    _normalize_on_device,
    normalize,
    patch_memory,
    patch_shape,
    resized_image,
    write_patches,
)
from isobatch.loaders.decode.resize import LEVELS
from isobatch.models.image_rules import AnyresRule, NativeRule, NativeSizeRule
from isobatch.models.image_tokens import ImageRejected, plan_image
from isobatch.models.presets import load_model
from support.cases import for_each
from support.loading.extract_patches import extract_patches
from support.oracles.reference_processors import random_image, reference_processor

PRESETS = sorted({load_model(name).vision: name for name in preset_names("models")}.values())
"""A preset of each rule."""
TOLERANCE = 1e-6
"""Measured 4.8e-7: one multiply and add in float32 instead of the reference's three roundings."""
MEAN_LEVELS = 0.01
"""Mean difference of the fast resize from Pillow's in levels of 255; measured .002 to .006."""
REDUCED_MEAN, REDUCED_MAX = 0.5, 4
"""Levels between photographs decoded at a reduced scale and in full; measured .38 and 3."""
ORIENTATION_TAG = 0x0112


def _encoded(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def _reference_pixels(name: str, image: Image.Image) -> NDArray[np.float32]:
    preset = load_model(name)
    pixels = reference_processor(preset).image_processor(images=[image], return_tensors="np")[
        "pixel_values"
    ]
    return np.asarray(pixels[0] if isinstance(preset.vision, AnyresRule) else pixels)


CHECKED = ["llava_1_5", "llava_next", "internvl_1_5", "internvl_1_5_max1", "tiny", "qwen2_vl"]


def _checked_images() -> list[Image.Image]:
    rng = np.random.default_rng(7)
    # long ones in both directions, smaller than a patch, exact fits, then ordinary
    sizes = [(900, 30), (25, 800), (20, 15), (336, 336), (448, 896), (672, 336)]
    sizes += [(int(width), int(height)) for width, height in rng.integers(60, 800, (9, 2))]
    return [random_image(rng, width, height) for width, height in sizes]


@for_each("name", CHECKED)
def test_exact_pixels_equal_the_reference_processors(name: str) -> None:
    rule = load_model(name).vision
    for image in _checked_images():
        expected = _reference_pixels(name, image)
        ours = normalize(rule, extract_patches(rule, image, exact=True)).numpy()
        assert ours.shape == expected.shape, image.size
        assert ours.dtype == np.float32
        assert np.abs(ours - expected).max() <= TOLERANCE, image.size


def _lines_first(
    image: Image.Image, size: tuple[int, int], *args: Any, **options: Any
) -> Image.Image:
    """Pillow's resize as all versions before 13 do it."""
    return _resize(
        _resize(image, (size[0], image.height), *args, **options), size, *args, **options
    )


_resize = Image.Image.resize


@pytest.mark.parametrize("name", CHECKED)
def test_pixels_are_within_the_stated_levels_of_the_reference_processors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = load_model(name).vision
    level = 1 / (255 * min(rule.std))
    images = _checked_images()
    monkeypatch.setattr(Image.Image, "resize", _lines_first)
    off_by = []
    for image in images:
        difference = np.abs(
            normalize(rule, extract_patches(rule, image)).numpy() - _reference_pixels(name, image)
        )
        assert difference.max() <= LEVELS * level + TOLERANCE, image.size
        off_by.append(difference.mean() / level)
    assert np.mean(off_by) <= MEAN_LEVELS


@for_each("name", PRESETS)
def test_rows_of_pixels_are_the_planned_patches(name: str) -> None:
    rule = load_model(name).vision
    for width, height in [(1, 1), (3, 500), (500, 3), (199, 1), (57, 55), (640, 480), (1000, 999)]:
        plan = plan_image(rule, width, height)
        pixels = extract_patches(rule, Image.new("RGB", (width, height)))
        rows = plan.num_vit_tokens if isinstance(rule, NativeSizeRule) else plan.num_patches
        assert pixels.shape == (rows, *patch_shape(rule))
        assert pixels.dtype == torch.uint8
        is_native = isinstance(rule, NativeSizeRule)
        layout = torch.contiguous_format if is_native else torch.channels_last
        assert pixels.is_contiguous(memory_format=layout)


def test_concatenated_images_normalise_like_each_alone() -> None:
    rng = np.random.default_rng(8)
    for name in ("internvl_1_5", "qwen2_vl"):
        rule = load_model(name).vision
        parts = [
            extract_patches(rule, random_image(rng, *size)) for size in ((300, 200), (100, 400))
        ]
        together = normalize(rule, torch.cat(parts))
        assert torch.equal(together, torch.cat([normalize(rule, part) for part in parts]))


def test_normalising_leaves_its_input_as_it_was_and_refuses_its_output() -> None:
    rule = load_model("tiny").vision
    pixels = extract_patches(rule, random_image(np.random.default_rng(9), 80, 60))
    before = pixels.clone()
    normalized = normalize(rule, pixels)
    assert torch.equal(pixels, before)
    with pytest.raises(ValueError, match="uint8"):
        normalize(rule, normalized)


@pytest.mark.parametrize("exact", [True, False])
@for_each("name", CHECKED)
def test_a_resized_image_is_what_patches_are_cut_from(name: str, exact: bool) -> None:
    rule = load_model(name).vision
    for image in _checked_images()[:3]:
        patches = extract_patches(rule, image, exact=exact)
        plan = plan_image(rule, image.width, image.height)
        whole = resized_image(rule, image, plan, exact=exact)
        side = patches.shape[-1]
        if isinstance(rule, NativeRule):
            cut = torch.empty_like(patches)
            patchify_planes(whole.permute(1, 2, 0).numpy(), cut.numpy(), rule.merge_size)
        else:
            tiles = whole.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
            cut = tiles.reshape(-1, 3, side, side)
        first = 1 if isinstance(rule, AnyresRule) else 0  # the image in the size of a patch
        assert torch.equal(patches[first : first + len(cut)], cut)


@pytest.mark.parametrize("name", ["internvl_1_5", "qwen2_vl"])
def test_normalising_on_a_device_gives_the_same_bits(name: str) -> None:
    rule = load_model(name).vision
    patches = extract_patches(rule, random_image(np.random.default_rng(14), 120, 90))
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (rule.mean, rule.std))
    scale, shift = (values.to(torch.float32) for values in (1 / (255 * std), -mean / std))
    raws = [patches, patches[0]]  # an image has three dimensions
    if name == "qwen2_vl":  # a video's have two frames
        raws.insert(0, torch.stack([patches, patches.flip(0)], dim=2))
    for raw in raws:
        on_device = _normalize_on_device(rule, raw, scale, shift)
        assert torch.equal(on_device, normalize(rule, raw))
    assert on_device.shape == patches[0].shape


def test_no_rows_normalise_to_no_rows() -> None:
    for name in PRESETS:
        rule = load_model(name).vision
        assert len(normalize(rule, torch.empty((0, *patch_shape(rule)), dtype=torch.uint8))) == 0


@for_each("orientation", range(1, 9))
def test_decoding_turns_the_image_as_load_image_does(orientation: int) -> None:
    image = random_image(np.random.default_rng(orientation), 40, 24)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    data = _encoded(image, format="JPEG", exif=exif.tobytes())
    ours = decode(data)
    assert ours.size == ((40, 24) if orientation < 5 else (24, 40))
    assert np.array_equal(np.asarray(ours), np.asarray(load_image(Image.open(io.BytesIO(data)))))


MODES = {
    "PNG": ("RGB", "L", "1", "P", "LA", "RGBA"),
    "JPEG": ("RGB", "L", "CMYK", "YCbCr"),
    "WEBP": ("RGB", "RGBA", "L", "P"),
    "GIF": ("P", "L", "RGBA"),
    "TIFF": ("RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr"),
}


@for_each(
    ("file_format", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes]
)
def test_decoding_makes_rgb_of_every_mode_as_load_image_does(file_format: str, mode: str) -> None:
    source = random_image(np.random.default_rng(10), 33, 21).convert(
        "RGBA" if mode in ("LA", "RGBA") else "RGB"
    )
    data = _encoded(source.convert(mode), format=file_format)
    ours = decode(data)
    assert ours.mode == "RGB"
    assert np.array_equal(np.asarray(ours), np.asarray(load_image(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_upper_bits_where_load_image_makes_it_white(file_format: str) -> None:
    ramp = np.linspace(0, 65535, 33 * 21).astype(np.uint16).reshape(21, 33)
    data = _encoded(Image.fromarray(ramp), format=file_format)
    assert Image.open(io.BytesIO(data)).mode == "I;16"
    ours = np.asarray(decode(data))
    assert np.array_equal(ours, np.repeat((ramp >> 8)[:, :, None], 3, axis=2))
    assert (
        np.asarray(load_image(Image.open(io.BytesIO(data)))) == 255
    ).mean() > 0.99  # why ours differs


def test_an_image_of_another_size_than_counted_is_a_data_error() -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    data = _encoded(Image.new("RGB", (40, 24)), format="JPEG", exif=exif.tobytes())
    assert decode(data, counted=(24, 40)).size == (24, 40)
    with pytest.raises(DataError, match="24 x 40 pixels, but had 40 x 24 when"):
        decode(data, counted=(40, 24))


def _photo(width: int, height: int) -> Image.Image:
    """Soft shapes of several sizes and a little grain."""
    rng = np.random.default_rng(13)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize(
                (width, height)
            ),
            np.float64,
        )
        for side in (4, 16, 64)
    ]
    return Image.fromarray(
        np.clip(np.average(layers, axis=0) + rng.normal(0, 3, (height, width, 1)), 0, 255).astype(
            "u1"
        )
    )


@pytest.mark.parametrize(
    ("model", "size", "reduced"),
    [
        ("llava_1_5", (2000, 1500), (1000, 750)),
        ("llava_1_5", (2688, 2688), (672, 672)),  # exactly twice the patch at a quarter
        ("llava_1_5", (2001, 1500), (2001, 1500)),  # an odd side would shift the image
        ("llava_1_5", (1200, 1000), (1200, 1000)),  # less than twice the patch
        ("internvl_1_5", (2000, 1500), (2000, 1500)),  # its grid is nearly as large as the image
        ("internvl_1_5_max1", (2400, 1800), (1200, 900)),
    ],
)
def test_large_photographs_decode_smaller_and_stay_close(
    model: str, size: tuple[int, int], reduced: tuple[int, int]
) -> None:
    rule = load_model(model).vision
    data = _encoded(_photo(*size), format="JPEG", quality=90)
    full, small = decode(data), decode(data, counted=size, rule=rule)
    assert (full.size, small.size) == (size, reduced)
    plan = plan_image(rule, *size)
    expected = extract_patches(rule, full)
    patches = torch.empty_like(expected)
    write_patches(patch_memory(rule, patches), rule, small, plan)
    difference = (patches.int() - expected.int()).abs().float()
    assert difference.mean() <= REDUCED_MEAN
    assert difference.max() <= REDUCED_MAX


def test_a_turned_photograph_is_reduced_by_its_upright_size() -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 8
    data = _encoded(_photo(800, 3200), format="JPEG", exif=exif.tobytes())
    rule = load_model("tiny").vision
    assert decode(data, counted=(3200, 800), rule=rule).size == (3200 // 4, 800 // 4)


def test_only_jpegs_are_reduced() -> None:
    data = _encoded(_photo(2000, 1500), format="PNG", compress_level=1)
    assert decode(data, rule=load_model("llava_1_5").vision).size == (2000, 1500)


def _decode_error(data: bytes) -> str | None:
    try:
        assert decode(data).mode == "RGB"
    except DataError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@for_each("file_format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_damaged_bytes_are_a_data_error_of_one_line_or_an_image(file_format: str) -> None:
    rng = np.random.default_rng(11)
    whole = _encoded(random_image(rng, 64, 48), format=file_format)
    errors: list[str] = []
    for _ in range(150):
        data = bytearray(whole[: rng.integers(0, len(whole))])
        for place in rng.integers(0, max(len(data), 1), 3):
            data[place : place + 1] = bytes([rng.integers(0, 256)])
        message = _decode_error(bytes(data))
        errors += [] if message is None else [message]
    assert len(errors) > 50
    assert all("\n" not in error and "cannot be decoded" in error for error in errors)


def test_an_image_of_a_million_to_one_is_cut_without_a_giant_resize() -> None:
    image = Image.new("RGB", (1_000_000, 1), (10, 20, 30))
    assert extract_patches(load_model("llava_1_5").vision, image).unique().tolist() == [10, 20, 30]


def test_the_centre_of_a_long_strip_is_the_centre_that_the_full_resize_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = load_model("llava_1_5").vision
    # smooth, so that the order of Pillow's two passes does not matter
    coarse = Image.fromarray(
        np.random.default_rng(12).integers(0, 256, (4, 400, 3), dtype=np.uint8)
    )
    for image in (coarse.resize((8000, 90)), coarse.resize((8000, 90)).rotate(90, expand=True)):
        full = extract_patches(rule, image).int()
        monkeypatch.setattr("isobatch.loaders.decode.pixels._LONGEST_STRIP", 1)
        assert (extract_patches(rule, image).int() - full).abs().max() <= 2
        monkeypatch.undo()


def test_what_the_planner_rejects_is_not_cut() -> None:
    with pytest.raises(ImageRejected):
        extract_patches(load_model("qwen2_vl").vision, Image.new("RGB", (300, 1)))
    with pytest.raises(ValueError, match="RGB"):
        extract_patches(load_model("tiny").vision, Image.new("L", (30, 30)))
