"""The fast resize against Pillow's, and the split into planes against NumPy's transpose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loaders.resize import LEVELS, resizer, split, to_words

sides = st.integers(1, 150)


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Every other one in black and white, whose hard edges overshoot most."""
    step = 255 if seed % 2 else 1
    values = np.random.default_rng(seed).integers(0, 255 // step + 1, (height, width, 3)) * step
    return Image.fromarray(values.astype(np.uint8))


def _rgb(words: np.ndarray) -> np.ndarray:
    return np.stack([words >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.int64)


@settings(max_examples=150, deadline=None)
@given(sides, sides, sides, sides, st.integers(0, 1 << 16))
def test_every_resize_is_within_the_stated_levels_of_pillows(width, height, new_width, new_height, seed):
    image = _noise(width, height, seed)
    exact = np.asarray(image.resize((new_width, new_height), Image.Resampling.BICUBIC))
    assert np.array_equal(_rgb(resizer(image, exact=True)(new_width, new_height)), exact)
    # along lines first, whatever the version of Pillow
    narrowed = image.resize((new_width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(narrowed.resize((new_width, new_height), Image.Resampling.BICUBIC)).astype(np.int64)
    assert np.abs(_rgb(resizer(image, exact=False)(new_width, new_height)) - expected).max() <= LEVELS


@pytest.mark.parametrize("capability", ["NO AVX", "DEFAULT"])
def test_without_vector_instructions_pillow_resizes(monkeypatch, capability):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    image = _noise(97, 61)
    expected = np.asarray(image.resize((40, 33), Image.Resampling.BICUBIC))
    assert np.array_equal(_rgb(resizer(image, exact=False)(40, 33)), expected)


@pytest.mark.parametrize("size", [(1, 1), (33, 21), (2300, 2000)])  # the last one lies in several pieces
def test_words_are_the_pixels(size):
    image = _noise(*size)
    assert np.array_equal(_rgb(to_words(image)), np.asarray(image))


def test_words_outlive_their_image():
    expected = np.asarray(_noise(64, 48)).copy()
    words = to_words(_noise(64, 48))
    others = [_noise(64, 48, seed) for seed in range(1, 9)]  # would take the freed memory
    assert len(others) == 8
    assert np.array_equal(_rgb(words), expected)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_split_writes_each_square_into_its_place(rows, columns, merge, side):
    image = _noise(columns * merge * side, rows * merge * side)
    patches = np.full((rows * columns * merge * merge, 3, side, side), 7, dtype=np.uint8)
    split(to_words(image), patches, merge)
    # (rows, merge, side, columns, merge, side, 3) -> blocks, squares inside a block, channels, lines, pixels
    squares = np.asarray(image).reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    assert np.array_equal(patches, squares.reshape(patches.shape))


def test_split_takes_a_window_of_a_larger_image():
    image = _noise(50, 40)
    patches = np.empty((1, 3, 20, 20), dtype=np.uint8)
    split(to_words(image)[7:27, 11:31], patches)
    assert np.array_equal(patches[0], np.asarray(image.crop((11, 7, 31, 27))).transpose(2, 0, 1))


@pytest.mark.parametrize(("size", "merge"), [((60, 20), 1), ((30, 20), 1), ((40, 20), 2)])
def test_what_does_not_fill_the_patches_exactly_is_refused(size, merge):
    with pytest.raises(ValueError, match="2 squares of 20"):
        split(to_words(_noise(*size)), np.empty((2, 3, 20, 20), dtype=np.uint8), merge)
