"""A model's folder gives its videos' rule and markup, as transformers finds their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isobatch.common.errors import ConfigError
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import load_model, model_from_dict, model_to_dict
from support.cases import for_each
from support.models.saved_videos import HUB, save_video_folder


@for_each("name", HUB)
def test_a_folder_has_the_videos_of_its_preset(name: str, tmp_path: Path) -> None:
    model, preset = find_model(save_video_folder(name, tmp_path, {})), load_model(HUB[name][0])
    assert model.video == preset.video
    assert model.video_markup == preset.video_markup
    assert model_from_dict(model_to_dict(model)) == model


def test_settings_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    folder = Path(save_video_folder("qwen2_5_vl", tmp_path, {"fps": 3}))
    found = find_model(str(folder)).video
    assert found.frames_per_second == 3  # type: ignore[union-attr]
    processor = folder / "processor_config.json"
    nested = {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 4, "min_pixels": 5000}
    processor.write_text(json.dumps({"video_processor": nested}))
    found = find_model(str(folder)).video
    assert (found.frames_per_second, found.min_pixels) == (4, 5000)  # type: ignore[union-attr]
    processor.write_text("{}")
    (folder / "video_preprocessor_config.json").unlink()
    model = find_model(str(folder))
    images = model.vision  # whose file it is then
    assert model.video.min_pixels == images.min_pixels  # type: ignore[union-attr]
    assert model.video.max_pixels == images.max_pixels  # type: ignore[union-attr]


def test_videos_that_are_not_supported_leave_the_model_without(tmp_path: Path) -> None:
    for number, (name, changes) in enumerate(
        (
            ("qwen3_vl", {"video_processor_type": "OtherVideoProcessor"}),
            ("internvl", {"size": {"height": 384, "width": 384}}),
            ("llava_onevision", {"image_mean": [0.1, 0.1, 0.1]}),
            ("smolvlm", {"max_image_size": {"longest_edge": 364}}),
        )
    ):
        model = find_model(save_video_folder(name, tmp_path / str(number), changes))
        assert (model.video, model.video_markup) == (None, None)


def test_a_cap_of_the_whole_video_is_known(tmp_path: Path) -> None:
    model = find_model(save_video_folder("qwen3_vl", tmp_path, {"cap_pixels_per_frame": True}))
    assert model.video.max_video_tokens == 768  # type: ignore[union-attr]


def test_settings_that_change_videos_and_are_not_known_are_errors(tmp_path: Path) -> None:
    for number, (name, changes, message) in enumerate(
        (
            ("qwen3_vl", {"stride": 3}, "unknown key stride"),
            ("qwen3_vl", {"num_frames": 8}, "num_frames is 8; give fps instead"),
            ("qwen2_vl", {"patch_size": 16}, "patch_size is 16; patches of videos must be"),
            ("internvl", {"fps": 2}, "fps is 2; give num_frames instead"),
            ("internvl", {"initial_shift": 0.5}, "initial_shift is 0.5; only True"),
            ("llava_onevision", {"do_center_crop": True}, "do_center_crop is True; only False"),
            ("glm4v", {"max_duration": 0}, "max_duration is 0; give a number"),
            ("smolvlm", {"size": {"height": 1, "width": 1}}, "only longest_edge is supported"),
        )
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            find_model(save_video_folder(name, tmp_path / str(number), changes))
        assert "video_preprocessor_config.json" in str(caught.value)
