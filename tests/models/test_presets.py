"""Presets: the shipped ones load and survive a manifest; a mistake in one is an error that says
where.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.common.config import config_root, preset_names
from isobatch.common.errors import ConfigError
from isobatch.models.audio_tokens import AudioRule
from isobatch.models.image_rules import AnyresRule, FixedRule, NativeRule, TilesRule
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_dataset, load_model, model_from_dict, model_to_dict
from support.cases import for_each

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


@for_each("name", preset_names("models"))
def test_a_shipped_model_survives_a_manifest_unchanged(name: str) -> None:
    preset = load_model(name)
    assert preset.name == name
    assert model_from_dict(json.loads(json.dumps(model_to_dict(preset)))) == preset


def single_datasets() -> list[str]:
    """Mixtures are the packer's: tests/packer/test_sources_mixture.py."""
    folder = config_root() / "datasets"
    return [
        name
        for name in preset_names("datasets")
        if "[[datasets]]" not in (folder / f"{name}.toml").read_text()
    ]


@pytest.mark.parametrize("name", single_datasets())
def test_a_shipped_dataset_loads_under_its_name(name: str) -> None:
    assert load_dataset(name).name == name


def test_the_promised_models_are_shipped_with_their_rules() -> None:
    rules = {
        FixedRule: "llava_1_5 pipetune_3b pipetune_7b pipetune_13b",
        AnyresRule: "llava_next",
        NativeRule: "qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 orchmllm_10b orchmllm_18b orchmllm_84b",
        TilesRule: "internvl_1_5 internvl2_5 internvl3 internvl3_5 eva_clip_18b_internlm2_20b"
        " internvit_6b_llama3_70b internvit_6b_yi_34b tiny tiny_audio",
    }
    for rule, names in rules.items():
        for name in names.split():
            sizes = [each for each in preset_names("models") if each.startswith(name)]
            assert name in sizes
            assert {type(load_model(each).vision) for each in sizes} == {rule}
    assert [load_model(name).vision_unit for name in ("internvl_1_5", "qwen2_vl")] == [
        "image_patches",
        "vit_tokens",
    ]


AUDIO = {"audio": {"downsample": 2}, "audio_markup": {"token": "<audio>", "prefix": "<a>"}}


def test_a_model_with_audio_survives_a_manifest_and_one_without_has_no_trace_of_it() -> None:
    preset = model_from_dict(TINY | AUDIO)
    assert preset.audio == AudioRule(downsample=2)
    assert preset.audio_markup is not None
    assert preset.audio_markup.text == "<a><audio>"
    assert model_from_dict(json.loads(json.dumps(model_to_dict(preset)))) == preset
    assert set(model_to_dict(model_from_dict(TINY))) == {*TINY, "vit", "llm"}


@pytest.mark.parametrize("markup", [{"token": "<image>"}, {"token": "<a>", "prefix": "<image>"}])
def test_an_image_token_that_audio_uses_too_is_an_error(markup: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"mine: the token '<image>' has a second place"):
        model_from_dict(TINY | AUDIO | {"audio_markup": markup})


@pytest.mark.parametrize(
    ("name", "bound", "image_rate", "audio_rate", "billions"),
    [
        ("10b", 448, 1, 2, (2, 0.6, 7)),
        ("18b", 672, 4, 2, (3, 0.6, 14)),
        ("84b", 896, 4, 4, (6, 6, 72)),
    ],
)
def test_the_orchmllm_presets_have_the_papers_sizes_rates_and_bounds(
    name: str, bound: int, image_rate: int, audio_rate: int, billions: tuple[float, float, float]
) -> None:
    preset = load_model(f"orchmllm_{name}")
    assert isinstance(preset.vision, NativeRule)
    assert preset.audio is not None
    assert preset.vit is not None
    assert preset.audio_encoder is not None
    assert preset.llm is not None
    # Table 1: total parameters, in billions
    for shape, total in zip((preset.vit, preset.audio_encoder, preset.llm), billions, strict=True):
        counted = shape.num_layers * shape.layer_weights / 1e9
        assert counted == pytest.approx(total, rel=0.1), shape
        assert shape.attention_size == shape.hidden_size
    for shape, rate in ((preset.vit, image_rate), (preset.audio_encoder, audio_rate)):
        assert shape.projector[0] == shape.hidden_size * rate
        assert shape.projector[-1] == preset.llm.hidden_size
    assert preset.audio.downsample == audio_rate
    # section 8, "Input preprocessing": native size up to the bound, larger ones resized, then the
    # down-sampling
    side = bound // 14
    assert plan_image(preset.vision, bound, bound).num_vit_tokens == side * side
    assert plan_image(preset.vision, bound, bound).num_image_tokens == side * side // image_rate
    small = plan_image(preset.vision, 140, 84)
    assert (small.resized_width, small.resized_height) == (140, 84)
    assert plan_image(preset.vision, 4 * bound, 3 * bound).num_vit_tokens <= side * side
    assert plan_image(preset.vision, 5, 5).num_image_tokens == 1


@pytest.mark.parametrize("max_patches", [1, 4, 6])
def test_a_variant_differs_from_what_it_extends_only_in_its_patches(max_patches: int) -> None:
    base, variant = load_model("internvl_1_5"), load_model(f"internvl_1_5_max{max_patches}")
    assert isinstance(base.vision, TilesRule)
    assert variant.vision == replace(base.vision, max_patches=max_patches)
    assert (
        replace(variant, name=base.name, description=base.description, vision=base.vision) == base
    )


def test_a_preset_of_the_users_extends_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "internvl_1_5"\n[vision]\nmax_patches = 2\n')
    preset = load_model(str(path))
    assert preset.name == "mine"
    assert preset.vision == replace(load_model("internvl_1_5").vision, max_patches=2)


@for_each(
    ("key", "value", "message"),
    [
        ("colour", 1, r"mine: unknown key colour; known: .*context_len"),
        ("context_len", "64", r"mine: context_len is '64', but should be int"),
        ("context_len", True, r"mine: context_len is True"),
        ("vision.max_tiles", 3, r"\[vision\]: unknown key max_tiles; known: convert_rgb, crop"),
        (
            "vision.rule",
            "square",
            r"vision.rule is 'square'; use one of fixed, tiles, anyres, native",
        ),
        ("vision.image_size", 0, r"\[vision\]: image_size = 0: must be greater than 0"),
        ("vision.image_size", 33.5, r"image_size is 33.5"),
        ("vision.mean", [0.5, 0.5], r"mean is \(0.5, 0.5\)"),
        ("vision.std", [0.5, 0, 0.5], r"std = .*greater than 0"),
        ("image_markup", {}, r"\[image_markup\]: missing key token"),
        ("audio", {"downsample": 2}, r"mine: has \[audio\] but no \[audio_markup\]"),
        ("audio_markup", {"token": "<a>"}, r"mine: has \[audio_markup\] but no \[audio\]"),
        ("audio", {"downsample": 0}, r"\[audio\]: downsample = 0: must be greater than 0"),
        (
            "audio",
            {"downsample": 7},
            r"\[audio\]: window_frames = 3000: must be a multiple of .* 14",
        ),
        ("audio", {"downsample": 2, "hop": 1}, r"\[audio\]: unknown key hop; known: .*hop_length"),
        (
            "audio_encoder",
            {"layers": 3},
            r"\[audio_encoder\]: unknown key layers; known: .*frame_values",
        ),
    ],
)
def test_a_mistake_in_a_preset_is_an_error_that_says_where(
    key: str, value: object, message: str
) -> None:
    values = json.loads(json.dumps(TINY))
    table, _, name = key.rpartition(".")
    (values[table] if table else values)[name] = value
    assert model_from_dict(TINY).context_len == 64
    with pytest.raises(ConfigError, match=message):
        model_from_dict(values)


def test_an_unknown_name_lists_the_shipped_presets() -> None:
    with pytest.raises(
        ConfigError, match=r"no model preset 'lava' .*; shipped: .*internvl_1_5, .*or give a \.toml"
    ):
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
