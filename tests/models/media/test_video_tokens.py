"""Video rules against transformers' processors: frames, grids, texts and counts.

`ISOBATCH_TEST_DRAWS=5000` asks for 5,000 videos of each family.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from transformers.models.smolvlm import processing_smolvlm

from isobatch.common.errors import ConfigError, DataError
from isobatch.media.frame_archive import is_frame_archive, pack_frames, unpack_frames
from isobatch.models.presets import load_model, model_from_dict, model_to_dict
from isobatch.models.video_rules import ClockRule, NativeVideoRule, VideoRule
from isobatch.models.video_rules.frames import number_words
from isobatch.models.video_tokens import VideoFacts, VideoRejected, plan_video
from support.cases import for_each
from support.oracles.video_processors import ORACLES, own_text

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "60"))
RATES = (24000 / 1001, 24.0, 25.0, 30000 / 1001, 30.0, 50.0, 60.0, 15.0, 10.0, 1.0, 0.5, 120.0)


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's numbers: `num2words` need not be installed, and other tests put `str` there."""
    monkeypatch.setattr(processing_smolvlm, "num2words", number_words)


def random_facts(seed: int, count: int = DRAWS) -> list[VideoFacts]:
    """Sizes as of images; few, many and very many frames, usual and odd rates, and lists."""
    rng = np.random.default_rng(seed)
    found = []
    for place in range(count):
        width, height = np.exp(rng.uniform(np.log(8), np.log(4_000), 2)).astype(int).tolist()
        if place % 5 == 0:
            width, height = 28 * rng.integers(1, 60, 2) + rng.integers(-1, 2, 2)
        frames = int(np.exp(rng.uniform(0, np.log([40, 2_000, 60_000][place % 3]))))
        rate = RATES[rng.integers(len(RATES))] if place % 2 else float(rng.uniform(0.3, 120))
        if place % 7 == 0:
            frames, rate = min(frames, 90), 0.0
        found.append(VideoFacts(int(width), int(height), frames, rate))
    return found


def rule_of(name: str) -> VideoRule:
    rule = load_model(name).video
    assert rule is not None
    return rule


@pytest.mark.thorough
@for_each("name", ORACLES)
def test_frames_texts_and_counts_equal_the_processors(name: str) -> None:
    rules, accepted = [rule_of(name)], 0
    if isinstance(rules[0], NativeVideoRule) and name != "glm4v":
        few = {"max_video_tokens": 300, "max_frames": 21, "min_pixels": 50_000}
        rules.append(replace(rules[0], **few, frames_per_second=1.3))  # type: ignore[arg-type]
    for number, facts in enumerate(random_facts(seed=len(name))):
        rule = rules[number % len(rules)]
        try:
            expected = ORACLES[name](rule, facts)
        except (ValueError, ZeroDivisionError):
            with pytest.raises(VideoRejected):
                plan_video(rule, facts)
            continue
        plan = plan_video(rule, facts)
        assert list(plan.frame_indices) == expected.indices, facts
        assert own_text(name, plan) == expected.text, facts
        if expected.grid:
            assert (plan.num_patches, plan.rows, plan.columns) == expected.grid, facts
        if expected.seconds_per_grid:
            assert plan.seconds_per_grid == expected.seconds_per_grid, facts
        if expected.resized:
            assert plan.pictures[0].steps[0][:2] == expected.resized, facts
        accepted += 1
    assert accepted > DRAWS // 2


def test_plans_hold_together() -> None:
    for name in ORACLES:
        for facts in random_facts(seed=3, count=20):
            try:
                plan = plan_video(rule_of(name), facts)
            except VideoRejected:
                continue
            assert plan.num_image_tokens == sum(plan.runs)
            assert plan.num_vit_tokens % plan.num_patches == 0
            assert 0 <= plan.frame_indices[0] <= plan.frame_indices[-1] < facts.num_frames
            assert list(plan.frame_indices) == sorted(plan.frame_indices)


def test_videos_that_a_model_refuses_have_a_reason() -> None:
    native, clock = rule_of("qwen3_vl"), rule_of("smolvlm2")
    for rule, facts, reason in (
        (native, VideoFacts(0, 10, 5, 25.0), "empty_video"),
        (native, VideoFacts(10, 10, 0, 25.0), "empty_video"),
        (clock, VideoFacts(10, 10, 5, float("nan")), "frame_rate"),
        (clock, VideoFacts(10, 10, 5, -1.0), "frame_rate"),
        (native, VideoFacts(640, 360, 1, 25.0), "short_video"),
        (rule_of("qwen2_5_vl"), VideoFacts(640, 360, 1, 25.0), "short_video"),
        (native, VideoFacts(9_000, 33, 60, 25.0), "aspect_ratio"),
    ):
        with pytest.raises(VideoRejected) as caught:
            plan_video(rule, facts)
        assert caught.value.reason == reason


def test_numbers_in_words_are_those_of_num2words() -> None:
    expected = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    expected |= {119: "one hundred and nineteen", 240: "two hundred and forty", 1000: "1000"}
    expected[999] = "nine hundred and ninety-nine"
    assert {number: number_words(number) for number in expected} == expected


def test_presets_with_videos_survive_their_manifests() -> None:
    for name in ORACLES:
        preset = load_model(name)
        assert model_from_dict(model_to_dict(preset)) == preset
    values = model_to_dict(load_model("qwen3_vl"))
    without = {key: each for key, each in values.items() if key != "video_markup"}
    with pytest.raises(ConfigError, match=r"has \[video\] but no \[video_markup\]"):
        model_from_dict(without)
    with pytest.raises(ConfigError, match=r"video.rule is 'x'"):
        model_from_dict({**values, "video": {"rule": "x"}})
    with pytest.raises(ConfigError, match=r"video_markup.parts are none; give frame"):
        model_from_dict({**values, "video_markup": {"token": "<v>"}})
    with pytest.raises(ConfigError, match="num_frames = 1000"):
        replace(rule_of("smolvlm2"), num_frames=1000)
    assert isinstance(rule_of("smolvlm2"), ClockRule)


def test_a_list_of_images_is_one_file_and_comes_back() -> None:
    images = [bytes([number]) * (number % 7) for number in range(120)]
    packed = pack_frames(images)
    assert packed == pack_frames(map(memoryview, images))
    assert is_frame_archive(packed)
    assert not is_frame_archive(b"\0\0\0\x1cftypisom")
    assert unpack_frames(memoryview(packed)) == images
    flipped = bytearray(packed)
    flipped[packed.index(images[5]) + 1] ^= 1
    for damaged in (packed[:-30], packed[:40], bytes(flipped)):
        with pytest.raises(DataError, match="list of frames of"):
            unpack_frames(damaged)
    with pytest.raises(ValueError, match="no images"):
        pack_frames([])
