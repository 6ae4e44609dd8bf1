"""Presets: the shipped ones load and survive a manifest; a mistake in one is an error that says where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from balance.errors import ConfigError
from balance.presets import (
    AnyresRule,
    FixedRule,
    NativeRule,
    TilesRule,
    load_dataset,
    load_model,
    model_from_dict,
    model_to_dict,
    preset_names,
)

TINY = {
    "name": "mine",
    "description": "a model of mine",
    "context_len": 64,
    "image_markup": {"token": "<image>"},
    "vision": {
        "rule": "fixed",
        "image_size": 28,
        "vit_tokens_per_patch": 4,
        "llm_tokens_per_patch": 4,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
}


@pytest.mark.parametrize("name", preset_names("models"))
def test_a_shipped_model_survives_a_manifest_unchanged(name: str) -> None:
    preset = load_model(name)
    assert preset.name == name
    assert model_from_dict(json.loads(json.dumps(model_to_dict(preset)))) == preset


@pytest.mark.parametrize("name", preset_names("datasets"))
def test_a_shipped_dataset_loads_under_its_name(name: str) -> None:
    assert load_dataset(name).name == name


def test_the_promised_models_are_shipped_with_their_rules() -> None:
    rules = {name: type(load_model(name).vision) for name in preset_names("models")}
    assert rules == {
        "internvl_1_5": TilesRule,
        "internvl_1_5_max1": TilesRule,
        "internvl_1_5_max4": TilesRule,
        "internvl_1_5_max6": TilesRule,
        "llava_1_5": FixedRule,
        "llava_next": AnyresRule,
        "qwen2_vl": NativeRule,
        "tiny": TilesRule,
    }
    assert [load_model(name).vision_unit for name in ("internvl_1_5", "qwen2_vl")] == ["image_patches", "vit_tokens"]


@pytest.mark.parametrize("max_patches", [1, 4, 6])
def test_a_variant_differs_from_what_it_extends_only_in_its_patches(max_patches: int) -> None:
    base, variant = load_model("internvl_1_5"), load_model(f"internvl_1_5_max{max_patches}")
    assert isinstance(base.vision, TilesRule)
    assert variant.vision == replace(base.vision, max_patches=max_patches)
    assert replace(variant, name=base.name, description=base.description, vision=base.vision) == base


def test_a_preset_of_the_users_extends_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "internvl_1_5"\n[vision]\nmax_patches = 2\n')
    preset = load_model(str(path))
    assert preset.name == "mine"
    assert preset.vision == replace(load_model("internvl_1_5").vision, max_patches=2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("colour", 1, r"mine: unknown key colour; known: .*context_len"),
        ("context_len", "64", r"mine: context_len is '64', but should be int"),
        ("context_len", True, r"mine: context_len is True"),
        ("vision.max_tiles", 3, r"\[vision\]: unknown key max_tiles; known: image_size"),
        ("vision.rule", "square", r"vision.rule is 'square'; use one of fixed, tiles, anyres, native"),
        ("vision.image_size", 0, r"\[vision\]: image_size = 0: must be greater than 0"),
        ("vision.image_size", 33.5, r"image_size is 33.5"),
        ("vision.mean", [0.5, 0.5], r"mean is \(0.5, 0.5\)"),
        ("vision.std", [0.5, 0, 0.5], r"std = .*greater than 0"),
        ("image_markup", {}, r"\[image_markup\]: missing key token"),
    ],
)
def test_a_mistake_in_a_preset_is_an_error_that_says_where(key: str, value: object, message: str) -> None:
    values = json.loads(json.dumps(TINY))
    table, _, name = key.rpartition(".")
    (values[table] if table else values)[name] = value
    assert model_from_dict(TINY).context_len == 64
    with pytest.raises(ConfigError, match=message):
        model_from_dict(values)


def test_an_unknown_name_lists_the_shipped_presets() -> None:
    with pytest.raises(ConfigError, match=r"no model preset 'lava'; shipped: internvl_1_5, .*or give a \.toml"):
        load_model("lava")


def test_broken_toml_is_one_line_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_presets_that_extend_each_other_are_an_error(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(f'extends = "{second}"\n')
    second.write_text(f'extends = "{first}"\n')
    with pytest.raises(ConfigError, match=r"in a circle: .*first.* -> .*second.* -> .*first"):
        load_model(str(first))
