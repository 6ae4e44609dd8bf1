"""Frames of videos against decoding everything, and pixels against transformers' cutting.

`ISOBATCH_TEST_DRAWS=300` asks for 300 clips.
"""

from __future__ import annotations

import os
import random
import sys
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.decode import video as video_module
from isobatch.loaders.decode.pixels import (
    empty_patches,
    normalize,
    num_rows,
    patch_memory,
    write_frames,
)
from isobatch.loaders.decode.video import decode_frames
from isobatch.media.frame_archive import pack_frames
from isobatch.models.presets import load_model
from isobatch.models.video_tokens import VideoFacts, VideoRejected, plan_video
from support.cases import for_each

pytest.importorskip("av")
from support.clips import CODECS, Clip, make_clip
from support.oracles.video_pixels import by_pillow, by_torch, expected_rows

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "6"))
TOLERANCE = 1e-6
"""One multiply and add in float32 instead of the reference's two roundings."""
RATES = (Fraction(24000, 1001), Fraction(25), Fraction(30), Fraction(15, 2), Fraction(60))


def random_clip(drawn: random.Random) -> Clip:
    codec = drawn.choice(list(CODECS))
    size = (2 * drawn.randint(8, 60), 2 * drawn.randint(8, 60))
    rotation = drawn.choice([0, 90, -90, 180]) if codec == "h264" else 0
    return make_clip(
        drawn.choice([1, drawn.randint(2, 20), drawn.randint(40, 150)]),
        size,
        codec=codec,
        rate=drawn.choice(RATES),
        rotation=rotation,
        seed=drawn.randrange(1000),
    )


def test_chosen_frames_are_those_of_decoding_everything() -> None:
    """Also wherever frames in between are not decoded."""
    drawn = random.Random(5)
    for _ in range(DRAWS):
        clip = random_clip(drawn)
        every = clip.decoded()
        assert len(every) == clip.facts.num_frames
        for count in (1, 3, 12):
            indices = sorted(drawn.choices(range(len(every)), k=count))
            found = [frame.copy() for frame in decode_frames(clip.content, clip.facts, indices)]
            for index, frame in zip(indices, found, strict=True):
                assert np.array_equal(frame, every[index]), (clip.facts, index)


def test_frames_far_apart_are_decoded_from_keyframes(monkeypatch: pytest.MonkeyPatch) -> None:
    for codec in CODECS:
        clip = make_clip(120, codec=codec)
        numbers: list[int] = []
        sought = video_module._sought

        def recorded(*args: Any, _sought: Any = sought, _numbers: list[int] = numbers) -> Any:
            for number, frame in _sought(*args):
                _numbers.append(number)
                yield number, frame

        with monkeypatch.context() as patch:
            patch.setattr(video_module, "_sought", recorded)
            assert len(list(decode_frames(clip.content, clip.facts, [0, 60, 119]))) == 3
        assert len(numbers) < 60, codec


def test_a_video_without_times_is_decoded_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container has no times, or others than its frames."""
    clip = make_clip(60)
    every = clip.decoded()
    monkeypatch.setattr(video_module._Times, "of", lambda *_: None)
    found = list(decode_frames(clip.content, clip.facts, [3, 59]))
    assert np.array_equal(found[1], every[59])

    def lost(*_: object) -> Any:
        yield from ()

    monkeypatch.setattr(video_module, "_sought", lost)
    (last,) = decode_frames(clip.content, clip.facts, [59])
    assert np.array_equal(last, every[59])


def test_lists_of_images_are_decoded_as_images() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 30, 20, 3), dtype=np.uint8)
    files = []
    for frame in frames:
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        files.append(buffer.getvalue())
    facts = VideoFacts(20, 30, 5)
    found = decode_frames(memoryview(pack_frames(files)), facts, (0, 2, 2, 4))
    for index, frame in zip((0, 2, 2, 4), found, strict=True):
        assert np.array_equal(frame, frames[index])
    with pytest.raises(DataError, match="4 images, but had 5 when"):
        list(decode_frames(pack_frames(files[:4]), facts, (0,)))
    with pytest.raises(DataError, match="20 x 30 pixels, but had 21 x 30"):
        list(decode_frames(pack_frames(files), facts._replace(width=21), (0,)))


def test_videos_that_cannot_be_decoded_are_one_line() -> None:
    clip = make_clip(30)
    content, facts = clip.content, clip.facts
    for broken, counted, reason in (
        (content[: len(content) // 3], facts, "cannot be decoded: "),
        (b"", facts, "cannot be decoded: "),
        (b"not a video at all" * 20, facts, "cannot be decoded: "),
        (content, facts._replace(num_frames=40), "frame 39 is not there"),
        (content, facts._replace(width=62), "64 x 48 pixels, but had 62 x 48"),
        (make_clip(30, rotation=90).content, facts, "48 x 64 pixels, but had 64 x 48"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            list(decode_frames(broken, counted, (0, counted.num_frames - 1)))
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, VideoRejected)


def test_damaged_files_are_one_line_or_decode() -> None:
    """Bytes that are changed, cut off, blanked or added, most of them in the headers."""
    drawn, lines = random.Random(8), list[str]()
    clips = [make_clip(30, codec=codec) for codec in CODECS]
    for _ in range(20 * DRAWS):
        clip = drawn.choice(clips)
        content = bytearray(clip.content)
        place = drawn.randrange(drawn.choice([600, len(content)]))
        match drawn.randrange(4):
            case 0:
                content[place : place + 3] = drawn.randbytes(3)
            case 1:
                del content[place:]
            case 2:
                content[place : place + 400] = bytes(len(content[place : place + 400]))
            case _:
                content[place:place] = drawn.randbytes(drawn.randrange(1, 100))
        try:
            frames = list(decode_frames(bytes(content), clip.facts, (0, 7, 8, 29)))
        except DataError as error:
            lines.append(str(error))
        else:
            assert [frame.shape for frame in frames] == [(48, 64, 3)] * 4
    assert len(lines) > 5 * DRAWS
    assert not any("\n" in line for line in lines)


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install av"):
        list(decode_frames(b"", VideoFacts(1, 1, 1, 1.0), (0,)))


def cut(name: str, clip: Clip, *, exact: bool) -> tuple[Any, torch.Tensor]:
    """Plan and raw rows, as the loader makes them."""
    preset = load_model(name)
    assert preset.video is not None
    plan = plan_video(preset.video, clip.facts)
    patches = empty_patches(preset.vision, num_rows(preset.vision, plan), videos=True)
    memory = patch_memory(preset.vision, patches)
    frames = decode_frames(clip.content, clip.facts, plan.frame_indices)
    filter_ = preset.video.resample
    write_frames(memory, preset.vision, frames, plan, resample=filter_, exact=exact)
    return plan, patches


@for_each("name", ["qwen2_5_vl", "qwen3_vl", "internvl3", "llava_onevision", "smolvlm2"])
def test_pixels_equal_torchvisions_and_exact_ones_pillows(name: str) -> None:
    """Of a clip with an odd number of frames."""
    clip = make_clip(9, (100, 76), rate=Fraction(3), seed=3)
    preset = load_model(name)
    rule = preset.vision
    for exact, resize in ((False, by_torch), (True, by_pillow)):
        plan, raw = cut(name, clip, exact=exact)
        ours = normalize(rule, raw).flatten(1)
        expected = expected_rows(preset.vision, preset.video, clip, plan, resize).flatten(1)
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= TOLERANCE
