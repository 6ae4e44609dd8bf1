"""Folders of families that take videos, with the settings of their repositories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.models.saved_folders import save_folder

HUB: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", {}),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2VLVideoProcessor", {"fps": 2}),
    "qwen3_vl": (
        "qwen3_vl",
        "Qwen3VLVideoProcessor",
        {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "do_sample_frames": True},
    ),
    "glm4v": ("glm4v", "Glm4vVideoProcessor", {"num_frames": 16}),
    "internvl": ("internvl3", "InternVLVideoProcessor", {"size": {"height": 448, "width": 448}}),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionVideoProcessor", {}),
    "smolvlm": (
        "smolvlm2",
        "SmolVLMVideoProcessor",
        {
            "max_image_size": {"longest_edge": 512},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
    ),
}
"""Family -> preset, class and settings as in the family's repository."""


def save_video_folder(name: str, place: Path, changes: dict[str, Any]) -> str:
    """A family's folder with a `video_preprocessor_config.json`; ... removes a setting."""
    folder = place / name
    save_folder(name, folder, old=True)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    colours = {key: images[key] for key in ("image_mean", "image_std")}
    _, kind, settings = HUB[name]
    values = {"video_processor_type": kind, **colours, **settings, **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(values))
    processor = folder / "processor_config.json"
    plain = json.loads(processor.read_text())
    plain.pop("video_processor", None)
    processor.write_text(json.dumps(plain))
    return str(folder)
