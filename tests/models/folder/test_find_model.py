"""A model's folder gives what its files say, or one line that says why not."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Idefics3Processor

from isobatch.common.errors import ConfigError
from isobatch.models.folder import files
from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.find_model import READERS, find_model, model_from_files
from isobatch.models.folder.json_table import JsonTable
from isobatch.models.image_tokens import ImageRejected, plan_image
from isobatch.models.presets import model_from_dict, model_to_dict
from support.cases import for_each, record
from support.models.saved_folders import FAMILIES, make_processor, save_folder

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "60"))


AROUND = {"tile": 2, "row": 1, "last_row": 1, "whole": 4, "single": 3}
"""Tokens around the image tokens of a part, which the processors count too."""


def counted_by(processor: Any, name: str, size: tuple[int, int]) -> int:
    """Tokens of an image and around it, by transformers."""
    count = processor._get_num_multimodal_tokens if name != "smolvlm" else _count_splits(processor)
    (tokens,) = count([size]).num_image_tokens
    return int(tokens)


def _count_splits(processor: Any) -> Any:
    """SmolVLM's processor does not count; Idefics3's has the same settings."""
    return partial(Idefics3Processor._get_num_multimodal_tokens, processor)


# MiniCPM-V's processor does not count; tests/packer/test_model_folder.py compares its ids
@for_each("name", [name for name in FAMILIES if name != "minicpmv4_6"])
def test_a_saved_folder_counts_as_its_processor_does(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    processor = save_folder(name, folder)
    model = find_model(str(folder))
    assert model.name == name
    sizes = random.Random(name)
    for _ in range(DRAWS):
        width, height = (int(10 ** sizes.uniform(0.8, 3.6)) for _ in range(2))
        try:
            plan = plan_image(model.vision, width, height)
        except ImageRejected:
            with pytest.raises(ValueError, match=r"aspect ratio|exceeds|0 x 0"):
                counted_by(processor, name, (height, width))
            continue
        around = 2 * (name == "internvl") + sum(AROUND[part.name] for part in plan.parts)
        counted = counted_by(processor, name, (height, width))
        assert plan.num_image_tokens == counted - around, (width, height)
    record("sizes", name, DRAWS)


@pytest.mark.thorough
@for_each("name", FAMILIES)
def test_files_of_transformers_4_and_of_5_are_the_same_model(name: str, tmp_path: Path) -> None:
    save_folder(name, tmp_path / name / "new")
    save_folder(name, tmp_path / name / "old", old=True)
    new, old = (find_model(str(tmp_path / name / age)) for age in ("new", "old"))
    # the old one has no settings of videos: test_videos.py
    assert new == replace(old, video=None, video_markup=None)


def files_of(name: str, tmp_path: Path) -> ModelFiles:
    folder = tmp_path / f"files of {name}"
    save_folder(name, folder, old=True)
    names = ("config.json", "processor_config.json", "preprocessor_config.json")
    names += ("tokenizer_config.json",)
    config, processor, images, tokenizer = (json.loads((folder / n).read_text()) for n in names)
    return ModelFiles(
        where=name, config=config, processor=processor, image_processor=images, tokenizer=tokenizer
    )


def changed(files: ModelFiles, part: str, changes: dict[str, Any]) -> ModelFiles:
    parts = {key: dict(getattr(files, key)) for key in ModelFiles.__slots__ if key != "where"}
    for key, value in changes.items():
        parts[part][key] = value
        if value is ...:
            del parts[part][key]
    return ModelFiles(where=files.where, **parts)


def test_what_transformers_assumes_is_assumed(tmp_path: Path) -> None:
    """Nulls and absent keys are the class's own; so are whole parts of a config."""
    files = files_of("qwen2_5_vl", tmp_path)
    model = model_from_files(files)
    for key in ("merge_size", "patch_size", "temporal_patch_size", "image_mean", "do_resize"):
        for absent in (..., None):
            assert model_from_files(changed(files, "image_processor", {key: absent})) == model
    for given, kept in ((..., True), (True, True), (False, False), (None, False)):
        other = model_from_files(changed(files, "image_processor", {"do_convert_rgb": given}))
        assert other.vision == replace(model.vision, convert_rgb=kept)  # null is no class's own
    bare = model_from_files(changed(files, "image_processor", {"size": ...}))
    assert bare.vision.max_pixels == 28 * 28 * 1280  # type: ignore[union-attr]
    assert bare.vision.min_pixels == model.vision.min_pixels  # type: ignore[union-attr]
    empty = model_from_files(
        ModelFiles(
            where="x",
            config={"model_type": "llava"},
            image_processor={
                "feature_extractor_type": "CLIPFeatureExtractor",
                "size": 336,
                "crop_size": 336,
            },
        )
    )
    saved = model_from_files(files_of("llava", tmp_path))
    assert empty.vision == saved.vision
    assert empty.vit == saved.vit


def test_old_styles_of_sizes_are_understood(tmp_path: Path) -> None:
    files = files_of("qwen2_vl", tmp_path)
    model = model_from_files(files)
    both = {"min_pixels": 3136, "max_pixels": 12845056}
    for style in ({"size": ..., **both}, {"size": both, **both}, {"size": {}, **both}):
        assert model_from_files(changed(files, "image_processor", style)) == model, style
    # early files have the language model's keys in the config itself
    text = files.config["text_config"]
    flat = changed(files, "config", {**text, "model_type": "qwen2_vl", "text_config": ...})
    assert model_from_files(flat) == model


CLIP = "CLIPImageProcessor"


@for_each(
    ("name", "part", "changes", "message"),
    [
        (
            "llava",
            "image_processor",
            {"crop_pct": 0.9},
            "preprocessor_config.json: unknown key crop_pct",
        ),
        ("llava", "image_processor", {"do_pad": True}, "do_pad is True; only False is supported"),
        ("llava", "image_processor", {"resample": 0}, "resample is 0; only 1 or 2 or 3 is"),
        ("llava", "image_processor", {"do_resize": False}, "do_resize is False"),
        ("llava", "image_processor", {"rescale_factor": 1.0}, "rescale_factor is 1.0; only 1/255"),
        ("llava", "image_processor", {"crop_size": 224}, "size is {'shortest_edge': 336}; only a"),
        ("llava", "image_processor", {"image_mean": "half"}, "image_mean is 'half'; give three"),
        ("llava", "processor", {"slices": 3}, "processor_config.json: unknown key slices"),
        ("llava", "processor", {"patch_size": "14"}, "patch_size is '14'; give a positive integer"),
        (
            "llava_next",
            "image_processor",
            {"image_grid_pinpoints": [336]},
            "list of [height, width]",
        ),
        (
            "qwen2_vl",
            "image_processor",
            {"size": {"height": 8, "width": 8}},
            "shortest_edge and long",
        ),
        ("qwen2_vl", "image_processor", {"merge_size": 0}, "merge_size is 0; give a positive"),
        ("qwen3_vl", "image_processor", {"image_processor_type": CLIP}, f"{CLIP} is not supported"),
        ("internvl", "image_processor", {"size": {"height": 448, "width": 336}}, "only a square"),
        ("internvl", "config", {"text_config": [1]}, "text_config is [1]; give a JSON object"),
        (
            "internvl",
            "config",
            {"model_type": "mllama"},
            "mllama looks at images by cross attention",
        ),
        ("internvl", "config", {"model_type": "bark"}, "family bark has no rule of its own, and"),
    ],
)
def test_what_would_change_counts_is_one_line_that_names_file_and_key(
    name: str, part: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = changed(files_of(name, tmp_path), part, changes)
    with pytest.raises(ConfigError) as error:
        model_from_files(files)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


ODD = (-1, 0, 1.5, True, False, "", "x", "4x", [], [1, 2], {}, {"height": 0}, [[1, "a"]], 10**6)


@pytest.mark.thorough
@for_each("name", FAMILIES)
def test_odd_values_are_a_model_or_one_line(name: str, tmp_path: Path) -> None:
    files, random_ = files_of(name, tmp_path), random.Random(name)
    for _ in range(DRAWS):
        changed_files = files
        table: dict[str, Any] = json.loads(json.dumps(getattr(files, part := "config")))
        for _ in range(random_.choice((1, 1, 2))):
            part = random_.choice(("config", "processor", "image_processor"))
            table = json.loads(json.dumps(getattr(changed_files, part)))
            inner = table
            while (parts := [v for v in inner.values() if isinstance(v, dict) and v]) and (
                random_.random() < 0.7
            ):
                inner = random_.choice(parts)
            inner[random_.choice(sorted(inner))] = random_.choice(ODD)
            changed_files = replace(changed_files, **{part: table})
        problem = None
        try:
            model = model_from_files(changed_files)
        except ConfigError as error:
            problem = str(error)
        except Exception as error:
            error.add_note(f"{part}: {table}")
            raise
        if problem is None:
            assert model_from_dict(json.loads(json.dumps(model_to_dict(model)))) == model
        else:
            assert files.where in problem
            assert "\n" not in problem


def test_a_folder_that_is_no_models_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json; give a folder as transformers'"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ConfigError, match=r"has neither preprocessor_config\.json nor image_proc"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json: contains a list, not a JSON object"):
        find_model(str(tmp_path))
    for place in (str(tmp_path / "nowhere"), "./nowhere", "nowhere/at/all", "~/nowhere.d"):
        with pytest.raises(ConfigError, match=r"model .*nowhere.*: no such folder or file, nor a"):
            find_model(place)
    with pytest.raises(ConfigError, match=r"preset 'qwen9' .*; shipped: .*folder or Hub id"):
        find_model("qwen9")


def test_a_hub_id_is_fetched_file_by_file(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    save_folder("qwen3_vl", tmp_path)

    def fetch(repo_id: str, name: str, *, local_files_only: bool) -> str:
        assert repo_id == "Qwen/Qwen3-VL-8B-Instruct"
        if not (tmp_path / name).exists():
            raise hub.errors.EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert find_model("Qwen/Qwen3-VL-8B-Instruct") == find_model(str(tmp_path))

    def offline(repo_id: str, name: str, *, local_files_only: bool) -> str:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match="the Hub cannot be reached and its cache here has no"):
        find_model("Qwen/Qwen3-VL-8B-Instruct")
    assert "Retrying" not in caplog.text  # one line is enough
    logging.getLogger("huggingface_hub.utils._http").warning("later")
    assert "later" in caplog.text


def test_a_hub_out_of_reach_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    files._hub_answers.cache_clear()
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="the Hub cannot be reached and its cache here has no"):
        find_model("owner/none-such")
    files._hub_answers.cache_clear()
    assert time.monotonic() - begun < 12  # its client would try for 24 s
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_every_family_has_a_folder_that_is_tested() -> None:
    assert set(READERS) == set(FAMILIES)


def test_a_tokenizers_own_names_are_the_markup(tmp_path: Path) -> None:
    model = model_from_files(
        changed(files_of("internvl", tmp_path), "tokenizer", {"context_image_token": "<PATCH>"})
    )
    assert model.image_markup.token == "<PATCH>"
    assert make_processor("internvl").image_token == "<IMG_CONTEXT>"


def test_a_table_keeps_track_of_what_was_read() -> None:
    table = JsonTable({"a": 1, "b": None, "c": [3, 3]}, "file", {"d": 4})
    assert table.count("a") == 1
    with pytest.raises(ConfigError, match=r"file: unknown key c, which may change"):
        table.require_read(())
    assert table.count("c") == 3  # a square
    table.require_read(())
    assert table.count("d") == 4
    with pytest.raises(ConfigError, match=r"file: has no e; give a positive integer"):
        table.count("e")
