"""Pixels of all rules against transformers' image processors.

`ISOBATCH_TEST_DRAWS=100` asks for 100 images of each family.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from isobatch.loaders.decode.pixels import normalize, resized_image
from isobatch.loaders.decode.resize import LEVELS
from isobatch.models.image_tokens import ImageRejected, plan_image
from support.cases import for_each, record
from support.loading.extract_patches import extract_patches
from support.oracles.family_processors import Rows, families
from support.oracles.reference_processors import random_image

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "1"))
FAMILIES = families()
TOLERANCE = 1e-6
"""One multiply and add in float32 instead of the reference's three roundings."""


def _images(name: str) -> list[Image.Image]:
    """Long ones in both directions, tiny, exact fits, then ordinary."""
    rng = np.random.default_rng(len(name))
    sizes = [(300, 12), (17, 200), (3, 2), (448, 448)]
    sizes += [(int(w), int(h)) for w, h in rng.integers(40, 1100, (DRAWS, 2))]
    return [random_image(rng, *size) for size in sizes]


def _ours(name: str, image: Image.Image, several: int = 1, *, exact: bool = True) -> Rows:
    rule = FAMILIES[name].rule
    raw = extract_patches(rule, image, exact=exact, images_in_sample=several)
    return normalize(rule, raw).flatten(1).numpy()


# others differ in their counts
@for_each("name", [name for name in FAMILIES if " of " not in name])
def test_exact_pixels_equal_the_processors(name: str) -> None:
    for image in _images(name):
        try:
            plan_image(FAMILIES[name].rule, *image.size)
        except ImageRejected:
            continue
        (expected,) = FAMILIES[name].pixels([image])
        ours = _ours(name, image)
        assert ours.shape == expected.shape, image.size
        assert np.abs(ours - expected).max() <= TOLERANCE, image.size
    record("pixels", name, DRAWS)


def test_exact_pixels_of_samples_with_several_images_equal_the_processors() -> None:
    for name in ("llava_onevision", "smolvlm2", "minicpm_v"):
        images = _images(name)[:4]
        for image, expected in zip(images, FAMILIES[name].pixels(images), strict=True):
            ours = _ours(name, image, len(images))
            assert ours.shape == expected.shape, image.size
            assert np.abs(ours - expected).max() <= TOLERANCE, image.size


def _lines_first(image: Image.Image, size: tuple[int, int], *args: object) -> Image.Image:
    """Pillow's resize as all versions before 13 do it."""
    return _resize(_resize(image, (size[0], image.height), *args), size, *args)


_resize = Image.Image.resize


@for_each("name", [name for name in FAMILIES if " of " not in name])
def test_default_pixels_are_within_the_stated_levels_of_each_resize(name: str) -> None:
    rule = FAMILIES[name].rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", _lines_first)
        for image in _images(name)[1:2]:
            most = max(len(each.steps) for each in plan_image(rule, *image.size).pictures)
            fast, exact = _ours(name, image, exact=False), _ours(name, image)
            # a later resize passes on what an earlier one is off by, and overshoots
            allowed = LEVELS * most**2 / (255 * min(rule.std)) + TOLERANCE
            assert np.abs(fast - exact).max() <= allowed, image.size
            assert np.abs(fast - exact).mean() <= allowed / 20, image.size


def test_a_resized_image_is_the_picture_with_the_details() -> None:
    image = random_image(np.random.default_rng(5), 900, 500)
    sizes = {
        name: tuple(resized_image(FAMILIES[name].rule, image, plan, exact=True).shape)
        for name in ("smolvlm2", "minicpm_v", "kimi_vl", "gemma3")
        if (plan := plan_image(FAMILIES[name].rule, *image.size))
    }
    assert sizes == {
        "smolvlm2": (3, 1536, 2048),
        "minicpm_v": (3, 448, 896),
        "kimi_vl": (3, 504, 924),
        "gemma3": (3, 896, 896),
    }
