"""Transparent pixels of every kind against transformers' processors themselves.

Two routes: a processor is given what `load_image` makes of a file, or the opened file.
"""

import io
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from isobatch.loaders.batch._vision import VisionFields
from isobatch.loaders.batch.broken_files import BrokenFiles
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.loaders.decode.pixels import normalize
from isobatch.loaders.decode.video import decode_frames
from isobatch.loaders.online.records import with_files
from isobatch.media.frame_archive import pack_frames
from isobatch.models.presets import load_model
from isobatch.models.video_tokens import VideoFacts
from support.cases import for_each
from support.loading.extract_patches import extract_patches
from support.oracles.family_processors import Rows, families
from support.oracles.reference_processors import random_image, reference_processor

BLUE = (10, 20, 200)
TOLERANCE = 1e-6
"""One multiply and add in float32 instead of the reference's three roundings."""
SLOW = ("smolvlm2", "idefics3", "idefics3 of odd sides")
"""A quicker one has their processor and rule."""
FAMILIES = {name: family for name, family in families().items() if name not in SLOW}
PRESETS = ("llava_1_5", "llava_next", "internvl3", "qwen2_vl", "qwen3_vl")
Options = dict[str, Any]


def _pictures() -> dict[str, Image.Image]:
    rng = np.random.default_rng(0)
    colour = random_image(rng, 44, 30)
    colour.paste(BLUE, (0, 0, 16, 12))
    alpha = Image.fromarray(rng.integers(0, 256, (30, 44), dtype=np.uint8))
    found = {"RGB": colour, "L": colour.convert("L"), "1": colour.convert("1")}
    found |= {"P": colour.quantize(16), "RGBA": colour.copy(), "LA": colour.convert("L")}
    for name in ("RGBA", "LA"):
        found[name].putalpha(alpha)
    return found


@cache
def _files() -> dict[str, bytes]:
    """A file of each mode with each kind of transparency."""
    images = _pictures()
    corner = {name: image.getpixel((2, 2)) for name, image in images.items()}
    one, several = bytes([255] * 5 + [0] + [255] * 10), bytes(range(0, 256, 16))
    wanted: dict[str, tuple[str, str, Options]] = {
        "palette, one": ("P", "PNG", {"transparency": corner["P"]}),
        "palette, one of a list": ("P", "PNG", {"transparency": one}),
        "palette, several": ("P", "PNG", {"transparency": several}),
        "palette, GIF": ("P", "GIF", {"transparency": corner["P"]}),
        "grey, GIF": ("L", "GIF", {"transparency": corner["L"]}),
        "colour": ("RGB", "PNG", {"transparency": BLUE}),
        "grey": ("L", "PNG", {"transparency": corner["L"]}),
        "black": ("1", "PNG", {"transparency": 0}),
        "white": ("1", "PNG", {"transparency": 255}),
        "alpha": ("RGBA", "PNG", {}),
        "grey and alpha": ("LA", "PNG", {}),
        "alpha, WebP": ("RGBA", "WEBP", {"lossless": True}),
        "grey and alpha, TIFF": ("LA", "TIFF", {}),
    }
    files = {}
    for name, (mode, form, options) in wanted.items():
        buffer = io.BytesIO()
        images[mode].save(buffer, form, **options)
        files[name] = buffer.getvalue()
    return files


def _opened(name: str) -> Image.Image:
    return Image.open(io.BytesIO(_files()[name]))


def _given(name: str, *, on_white: bool) -> Image.Image:
    """What the processor is given on a route."""
    return _opened(name) if on_white else load_image(_opened(name))


def _ours(rule: Any, content: bytes, *, on_white: bool) -> Rows:
    image = decode(content, on_white=on_white, keep_colour=not rule.convert_rgb)
    raw = extract_patches(rule, image, exact=True)
    return normalize(rule, raw).flatten(1).numpy()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@for_each("model", [*FAMILIES, *PRESETS])
def test_pixels_equal_the_processors_for_every_kind_of_transparency(model: str) -> None:
    if model in FAMILIES:
        rule, pixels = FAMILIES[model].rule, FAMILIES[model].pixels
    else:
        preset = load_model(model)
        rule, processor = preset.vision, reference_processor(preset).image_processor

        def pixels(images: list[Image.Image]) -> list[Rows]:
            made = processor(images=images, return_tensors="np")["pixel_values"]
            return [np.asarray(made).reshape(-1, 3 * rule.patch_side**2)]

    for name, content in _files().items():
        for on_white in (False, True)[: 1 + rule.convert_rgb]:  # else it takes RGB only
            (expected,) = pixels([_given(name, on_white=on_white)])
            ours = _ours(rule, content, on_white=on_white)
            if ours.shape != expected.shape:  # repeated for all frames of a patch
                expected = expected.reshape(ours.shape)
            assert np.abs(ours - expected).max() <= TOLERANCE, (name, on_white)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_the_one_colour_lies_on_white_and_alpha_only_if_asked() -> None:
    plain = np.asarray(_pictures()["RGB"])
    hidden = np.all(plain == BLUE, axis=-1)
    found = np.asarray(decode(_files()["colour"]))
    assert (found[hidden] == 255).all()
    assert np.array_equal(found[~hidden], plain[~hidden])
    assert np.array_equal(np.asarray(decode(_files()["alpha"])), plain)
    assert not np.array_equal(np.asarray(decode(_files()["alpha"], on_white=True)), plain)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_frames_of_a_video_and_processors_without_the_step_see_the_hidden_colour() -> None:
    for name, content in _files().items():
        want = np.asarray(load_image(_opened(name)))
        facts = VideoFacts(44, 30, 2, 0.0)
        for frame in decode_frames(pack_frames([memoryview(content)] * 2), facts, [0, 1]):
            assert np.array_equal(frame, want), name
        kept = decode(content, keep_colour=True)
        assert np.array_equal(np.asarray(kept), want), name
        on_white = convert_to_rgb(kept, return_numpy=True)
        assert np.array_equal(on_white, np.asarray(decode(content))), name


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_a_loader_keeps_the_colour_where_the_models_processor_does() -> None:
    none = np.zeros(0)
    raw: Any = SimpleNamespace(
        image_sizes=none, image_frames=none, image_rates=none, images=(), input_ids=()
    )
    for model, exact in product(("gemma3", "paligemma2", "llava_1_5"), (False, True)):
        config = LoaderConfig(exact_resize=exact)
        preset = load_model(model)
        fields = VisionFields(raw, preset, config, None, BrokenFiles(raw, config))
        found = np.asarray(fields._decoded(_files()["colour"], (44, 30), None))
        assert tuple(found[2, 2]) == (BLUE if preset.name != "llava_1_5" else (255, 255, 255))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pictures_in_memory_become_files_of_the_same_pixels() -> None:
    images = _pictures()
    rgba, colour = images["RGBA"], images["RGB"]
    images |= {mode: colour.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "I", "F")}
    images |= {"RGBa": rgba.convert("RGBa"), "P of RGBA": rgba.quantize(16)}
    images["PA"] = Image.merge("PA", (images["P"], rgba.getchannel("A")))
    several = bytes([255] * 5 + [0] + [255] * 10)
    for mode, image in images.items():
        for hidden in (None, 3, 200, BLUE, several):
            given = image.copy()
            if hidden is not None:
                given.info["transparency"] = hidden
            try:
                want = convert_to_rgb(load_image(given.copy()), return_numpy=True)
            except (TypeError, ValueError):
                continue  # a colour that the mode cannot have
            content = with_files({"image": given.copy()})["image"]["bytes"]
            for decoder in (decode, decode_pixels):
                assert np.array_equal(np.asarray(decoder(content)), want), (mode, hidden)
    opened = with_files([_opened(name) for name in _files()])
    for (name, content), file in zip(_files().items(), opened, strict=True):
        for on_white in (False, True):
            found = np.asarray(decode(file["bytes"], on_white=on_white))
            want = np.asarray(decode(content, on_white=on_white))
            assert np.array_equal(found, want), (name, on_white)
