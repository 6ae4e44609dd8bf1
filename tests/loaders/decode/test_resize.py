"""The fast resize against Pillow's, and the cutting into patches against NumPy's transpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from isobatch.loaders.decode._patchify import patchify_planes
from isobatch.loaders.decode.resize import FILTERS, LEVELS, patchify, resizer

sides = st.integers(1, 150)


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Every other one in black and white, whose hard edges overshoot most."""
    step = 255 if seed % 2 else 1
    values = np.random.default_rng(seed).integers(0, 255 // step + 1, (height, width, 3)) * step
    return Image.fromarray(values.astype(np.uint8))


@settings(max_examples=150, deadline=None)
@given(sides, sides, sides, sides, st.integers(0, 1 << 16), st.sampled_from(sorted(FILTERS)))
def test_every_resize_is_within_the_stated_levels_of_pillows(
    width, height, new_width, new_height, seed, name
):
    image = _noise(width, height, seed)
    exact = np.asarray(image.resize((new_width, new_height), FILTERS[name]))
    assert np.array_equal(resizer(image, name, exact=True)(new_width, new_height), exact)
    # along lines first, whatever the version of Pillow
    narrowed = image.resize((new_width, height), FILTERS[name])
    expected = np.asarray(narrowed.resize((new_width, new_height), FILTERS[name])).astype(np.int64)
    fast = resizer(image, name, exact=False)(new_width, new_height).astype(np.int64)
    assert np.abs(fast - expected).max() <= LEVELS


@pytest.mark.parametrize("capability", ["NO AVX", "DEFAULT"])
def test_without_vector_instructions_pillow_resizes(monkeypatch, capability):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    image = _noise(97, 61)
    expected = np.asarray(image.resize((40, 33), Image.Resampling.BICUBIC))
    assert np.array_equal(resizer(image, exact=False)(40, 33), expected)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_patches_are_written_line_by_line(rows, columns, side):
    pixels = np.array(_noise(columns * side, rows * side))
    patches = np.full((rows * columns, side, side, 3), 7, dtype=np.uint8)
    patchify(pixels, patches)
    for row in range(rows):
        for column in range(columns):
            patch = pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]
            assert np.array_equal(patches[row * columns + column], patch)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_planes_are_written_block_by_block(rows, columns, merge, side):
    pixels = np.array(_noise(columns * merge * side, rows * merge * side))
    planes = np.full((rows * columns * merge * merge, 3, side, side), 7, dtype=np.uint8)
    patchify_planes(pixels, planes, merge)
    # (rows, merge, side, columns, merge, side, 3) -> blocks, patches inside a block, channels,
    # lines, pixels
    patches = pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(
        0, 3, 1, 4, 6, 2, 5
    )
    assert np.array_equal(planes, patches.reshape(planes.shape))


def test_a_window_of_a_larger_image_is_cut():
    image = _noise(50, 40)
    patches, planes = (
        np.empty((1, 20, 20, 3), dtype=np.uint8),
        np.empty((1, 3, 20, 20), dtype=np.uint8),
    )
    patchify(np.array(image)[7:27, 11:31], patches)
    patchify_planes(np.array(image)[7:27, 11:31], planes, 1)
    expected = np.asarray(image.crop((11, 7, 31, 27)))
    assert np.array_equal(patches[0], expected)
    assert np.array_equal(planes[0], expected.transpose(2, 0, 1))


@pytest.mark.parametrize(("size", "merge"), [((60, 20), 1), ((30, 20), 1), ((40, 20), 2)])
def test_what_does_not_fill_the_patches_exactly_is_refused(size, merge):
    pixels = np.array(_noise(*size))
    with pytest.raises(ValueError, match="2 patches of 20"):
        patchify_planes(pixels, np.empty((2, 3, 20, 20), dtype=np.uint8), merge)
    if merge == 1:
        with pytest.raises(ValueError, match="2 patches of 20"):
            patchify(pixels, np.empty((2, 20, 20, 3), dtype=np.uint8))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torchvision resizes in float32 there, and we by Pillow",
)
def test_the_default_resize_is_what_torchvision_calls_for_planes_of_bytes():
    rng = np.random.default_rng(7)
    for name in FILTERS:
        for width, height, new_width, new_height in rng.integers(1, 200, (12, 4)).tolist():
            image = np.array(_noise(width, height, width))
            planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()[None]
            size = (new_height, new_width)
            try:
                expected = interpolate(planes, size, mode=name, antialias=True)
            except (NotImplementedError, ValueError):
                continue  # lanczos, before torch 2.13
            ours = resizer(image, name, exact=False)(new_width, new_height)
            assert np.array_equal(ours, expected[0].permute(1, 2, 0).numpy()), (name, image.shape)
