"""Models of transformers opened for a build, and written: what is refused,
in one line.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.train.models._transformers_files import make_config, read_model, write_model
from isobatch.engine.train.models.open_model import open_model
from isobatch.loaders import StreamingLoader
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.presets import load_model
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.models.family_models import FAMILIES, IMAGE, PINPOINTS, SIDE, VOCAB

PRESETS = {"llava": "llava_1_5", "internvl": "internvl_1_5_max1", "qwen2_vl": "qwen2_vl"}


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    """By model, of builds for it."""
    root, made = tmp_path_factory.mktemp("packed"), {}
    for name, preset in PRESETS.items():
        build = write_build(
            root / name, group_samples(make_samples(4, model=preset), 4096), model=preset
        )
        made[name] = StreamingLoader(build, dp_rank=0, dp_world_size=1)
    return made


@pytest.fixture(scope="module", params=PRESETS)
def name(request):
    return request.param


@pytest.fixture
def folder(loaders, name, tmp_path):
    """A model with weights, as transformers writes it."""
    model, weights = read_model(name, None, loaders[name])
    weights.fill(model.parameters())
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(error, call, *given):
    """In one line."""
    with pytest.raises(error) as caught:
        call(*given)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_build_decides_the_model_unless_one_is_named(loaders, name):
    for given in (None, name):
        assert open_model(given, None, loaders[name]).whole.config.model_type == name
    other = next(other for other in PRESETS if other != name)
    line = refusal(ConfigError, open_model, other, None, loaders[name])
    assert line.startswith(
        f"the build is for {PRESETS[name]}, whose images are not cut for {other}: build with"
    )


@pytest.mark.parametrize(
    ("name", "change", "own", "other"),
    [
        (
            "llava",
            {"image_size": 224},
            "image_size 224, llm_tokens_per_patch 256",
            "image_size 336",
        ),
        (
            "llava",
            {"patch_size": 28},
            "image_size 336, llm_tokens_per_patch 144",
            "llm_tokens_per_patch 576",
        ),
        (
            "internvl",
            {"image_size": [224, 224]},
            "image_size 224, llm_tokens_per_patch 64",
            "image_size 448",
        ),
        (
            "qwen2_vl",
            {"patch_size": 16},
            "vit_patch_size 16, merge_size 2",
            "vit_patch_size 14, merge_size 2",
        ),
        ("qwen2_vl", {"spatial_merge_size": 1}, "merge_size 1, temporal", "merge_size 2, temporal"),
        ("qwen2_vl", {"temporal_patch_size": 1}, "temporal_patch_size 1;", "temporal_patch_size 2"),
    ],
)
def test_a_model_that_takes_other_images_is_refused_with_both_sizes(
    loaders, tmp_path, name, change, own, other
):
    config = make_config(name, loaders[name])
    for key, value in change.items():
        setattr(config.vision_config, key, value)
    config.save_pretrained(tmp_path)
    line = refusal(ConfigError, open_model, name, tmp_path / "config.json", loaders[name])
    before, behind = line.split("; the build, for ")
    assert own in f"{before};"
    assert behind.startswith(f"{PRESETS[name]}, has ")
    assert other in behind


def test_a_folder_whose_weights_do_not_fit_is_refused_with_the_place(loaders, name, folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    lost = next(key for key in weights if "layers.1." in key)
    rest = {key: value for key, value in weights.items() if key != lost}
    shape, where = list(weights[lost].shape), f"{folder}: {lost} in model.safetensors"
    changes = {
        f"{folder} lacks 1 weights that its config.json asks for, as": None,
        f"{where} has the shape [3], config.json asks for {shape}: give": torch.zeros(3),
        f"{where} is I8, which is not trained: give": torch.zeros(shape, dtype=torch.int8),
    }
    for message, value in changes.items():
        save_file(rest if value is None else {**rest, lost: value}, file)
        line = refusal(ConfigError, open_model, name, folder, loaders[name])
        assert line.startswith(message), line
        assert lost.rsplit("layers.", 1)[1] in line


def test_a_folder_that_lacks_a_file_is_refused(loaders, name, folder):
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    file.unlink()
    line = refusal(ConfigError, open_model, name, folder, loaders[name])
    assert line.startswith(f"{folder}: No such file or directory"), line
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    line = refusal(ConfigError, open_model, name, folder, loaders[name])
    assert "model-00001-of-00002.safetensors" in line
    for broken in ("{", "[]", "{}"):
        index.write_text(broken)
        line = refusal(ConfigError, open_model, name, folder, loaders[name])
        assert line.startswith(str(folder)), line


def test_tied_weights_are_not_lacking(loaders, name, folder):
    is_tied = name != "llava"  # by the defaults of their configs
    assert (
        any(key.endswith("lm_head.weight") for key in load_file(folder / "model.safetensors"))
        != is_tied
    )
    model = open_model(name, folder, loaders[name]).whole
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied


def test_tied_weights_that_differ_are_refused_by_the_rank_that_reads_them(loaders, name, folder):
    if name == "llava":
        return  # not tied by its config's default
    file = folder / "model.safetensors"
    weights = load_file(file)
    table = next(value for key, value in weights.items() if "embed_tokens" in key)
    save_file({**weights, "lm_head.weight": table.clone()}, file)
    stack = open_model(name, folder, loaders[name]).stack
    stack.load(len(stack.layers) - 1)
    assert torch.equal(stack.layers[-1].lm_head.weight, table)
    save_file({**weights, "lm_head.weight": table + 1}, file)
    stack = open_model(name, folder, loaders[name]).stack
    line = refusal(ConfigError, stack.load, len(stack.layers) - 1)
    assert line.endswith(
        "are tied by config.json, but differ: give the config.json of these weights"
    )


def test_damaged_weights_are_told_in_one_line(loaders, name, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(ConfigError, open_model, name, folder, loaders[name]).startswith(f"{folder}: ")
    file.write_bytes(b"nothing")
    assert refusal(ConfigError, open_model, name, folder, loaders[name]).startswith(f"{folder}: ")


def test_a_config_that_is_not_there_is_said(loaders, name, tmp_path):
    line = refusal(ConfigError, read_model, name, tmp_path / "none", loaders[name])
    assert line == f"--config {tmp_path / 'none'}: no such file or folder"


def test_a_model_that_cannot_be_written_is_told_in_one_line(loaders, name, tmp_path):
    model, weights = read_model(name, None, loaders[name])
    (tmp_path / "file").write_text("")
    left = iter([{key: weights.value(key) for key, _ in model.named_parameters()}, {}, {}])
    line = refusal(DataError, write_model, model, tmp_path / "file" / "model", left)
    assert line == f"{tmp_path / 'file' / 'model'}: Not a directory"
    assert list(left) == []  # what other ranks send has been received


def test_a_model_written_in_shards_is_read_by_transformers(loaders, name, tmp_path):
    folder = tmp_path / "model"
    model, weights = read_model(name, None, loaders[name])
    values = {key: weights.value(key) for key, _ in model.named_parameters()}
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for count in (3, 2, 1):  # over what an earlier export left
        shards = [dict(list(values.items())[number::count]) for number in range(count)]
        write_model(model, folder, shards)
        files = sorted(file.name for file in folder.iterdir() if "safetensors" in file.name)
        assert len(files) == (count + 1 if count > 1 else 1), files
        written = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        assert json.loads((folder / "config.json").read_text())["model_type"] == name
        for key, value in values.items():
            assert torch.equal(written[key], value), key


def test_a_config_names_any_model_that_the_pipeline_takes(tmp_path):
    square = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    native = load_model("qwen2_vl").vision
    crops = {**square, "image_size": SIDE, "vit_patch_size": 7, "vit_tokens_per_patch": 16}
    points = tuple(map(tuple, PINPOINTS))
    rules = {
        "qwen2_5_vl": replace(native, vit_patch_size=4),
        "qwen3_vl": replace(native, vit_patch_size=4),
        "llava_next": AnyresRule(**crops, grid_pinpoints=points),
        "llava_onevision": AnyresRule(**crops, grid_pinpoints=points, anyres_max=2),
        "gemma3": FixedRule(
            **square, image_size=SIDE, vit_tokens_per_patch=16, llm_tokens_per_patch=4, crop=False
        ),
    }
    for name, rule in rules.items():
        folder = tmp_path / name
        FAMILIES[name].config().save_pretrained(folder)
        preset = replace(load_model("qwen2_vl"), name="mine", vision=rule)
        source = SimpleNamespace(
            model=preset,
            image_token_id=IMAGE,
            video_token_id=None,
            audio_token_id=None,
            vocab_size=VOCAB,
        )
        opened = open_model(None, folder / "config.json", source)
        assert opened.whole.config.model_type == name
        assert [layer.kind for layer in opened.listed].count("llm_layer") == 2
        line = refusal(ConfigError, open_model, name, None, source)
        assert line.startswith(f"--model {name} needs --config"), line
        side = "vit_patch_size" if name.startswith("qwen") else "image_size"
        source.model = replace(preset, vision=replace(rule, **{side: 8}))
        line = refusal(ConfigError, open_model, None, folder / "config.json", source)
        assert f"{side} 8" in line, line
