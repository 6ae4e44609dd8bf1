"""Kinds of files that users write or bring, each with what reads it and what then uses it.

`KINDS[kind](rng, folder, own)` writes a damaged file into an empty folder and gives a function
without arguments that reads and uses it; `own` are whole files to damage (`WholeFiles`).
"""

import hashlib
import json
import shutil
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.config import config_root, load_config, preset_names
from isobatch.common.errors import MediaRejected
from isobatch.common.types import COUNT_COLUMNS, Counts
from isobatch.counting.text.chat_tokenizer import ChatTokenizer, Turn
from isobatch.engine.plan_config import PlanConfig
from isobatch.engine.planning.plan import read_plan
from isobatch.loaders import StreamingLoader
from isobatch.models.audio_tokens import plan_audio
from isobatch.models.clusters import load_cluster
from isobatch.models.flops import FlopsModel
from isobatch.models.folder.find_model import find_model
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_dataset, load_model, model_from_dict, model_to_dict
from isobatch.models.video_rules.base import VideoFacts
from isobatch.models.video_tokens import plan_video
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.mixture_sampling import copies_per_sample
from isobatch.packer.group import group_files
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.sources.dataset import find_dataset
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import hash_json
from support import ROOT
from support.damaged.changes import (
    ONLY_JSON,
    damaged_bytes,
    damaged_json,
    damaged_toml,
    damaged_values,
)

SIZES = ((1, 1), (640, 480), (3000, 20), (10_000, 10_000))
"""Width and height of images that a model is asked about."""
CONVERSATION = [Turn("user", "What is <image> this?"), Turn("assistant", "A cat.")]
PLAN = ROOT / "tests" / "data" / "plan_version_1.json"
TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
MODEL_FILES = ("config.json", "processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.json",
)


@dataclass(frozen=True)
class WholeFiles:
    """What is damaged: folders of models, and a build."""

    models: tuple[Path, ...]
    build: Path


def _write(path, content):
    path.write_bytes(content)
    return str(path)


@cache
def _preset(kind, name):
    return tomllib.loads((config_root() / kind / f"{name}.toml").read_text("utf-8"))


def use_model(model):
    """Count images, videos and clips of a model, predict their time, and keep it in a manifest."""
    plans = []
    for (width, height), images in product(SIZES, (1, 2)):
        with suppress(MediaRejected):
            plans.append(plan_image(model.vision, width, height, images))
        if model.video is not None:
            with suppress(MediaRejected):
                plan_video(model.video, VideoFacts(width, height, 300, 30.0))
    if model.audio is not None:
        with suppress(MediaRejected):
            plan_audio(model.audio, 160_000, 16_000)
    columns = {name: np.zeros(len(plans), np.int64) for name in COUNT_COLUMNS}
    columns["num_vit_tokens"] = np.array([plan.num_vit_tokens for plan in plans], np.int32)
    columns["num_image_tokens"] = np.array([plan.num_image_tokens for plan in plans], np.int32)
    columns["num_image_patches"] = np.array([plan.num_patches for plan in plans], np.int32)
    if model.has_dimensions:
        flops = FlopsModel.of(model)
        flops.micro_batch_ms(flops.loads(Counts(**columns)))
    assert model_from_dict(json.loads(json.dumps(model_to_dict(model)))) == model


def mixture(rng, folder, own):
    for name in ("a", "b"):
        rows = [{"id": str(number), "text": "x"} for number in range(5)]
        _write(folder / f"{name}.json", json.dumps(rows).encode())
    key = rng.choice(("weight", "repeat", "limit"))
    parts = [{"dataset": f"{name}.json", "name": name, key: 2} for name in ("a", "b")]
    values = {"name": "mine", "description": "two", "datasets": parts}
    if key == "weight":
        values["num_samples"] = 12
    place = _write(folder / "mixture.toml", damaged_toml(values, rng))

    def use():
        dataset = find_dataset(place, None)
        copies_per_sample(dataset, np.repeat(np.arange(len(dataset.parts)), 5), 0)

    return use


def meta(rng, folder, own):
    _write(folder / "a.json", b'[{"text": "x"}]')
    entry = {"root": str(folder), "annotation": "a.json", "repeat_time": 2, "length": 5}
    values = {"one": entry, "two": {**entry, "annotation": str(folder / "a.json")}}
    place = _write(folder / "meta.json", damaged_json(json.dumps(values), rng))

    def use():
        dataset = find_dataset(place, None)
        copies_per_sample(dataset, np.repeat(np.arange(len(dataset.parts)), 5), 0)

    return use


def model_preset(rng, folder, own):
    values = _preset("models", rng.choice(preset_names("models")))
    place = _write(folder / "mine.toml", damaged_toml(values, rng))
    return lambda: use_model(load_model(place))


def dataset_preset(rng, folder, own):
    name = rng.choice(("llava665k", "lcs558k", "datamix1"))
    place = _write(folder / "mine.toml", damaged_toml(_preset("datasets", name), rng))
    if name == "datamix1":
        for part in ("mmc4", "coyo", "flan"):
            (folder / part).mkdir()
            _write(folder / part / "a.jsonl", b'{"text": "x"}')
        return lambda: find_dataset(place, str(folder))
    return lambda: load_dataset(place)


def cluster_preset(rng, folder, own):
    values = _preset("clusters", rng.choice(preset_names("clusters")))
    place = _write(folder / "mine.toml", damaged_toml(values, rng))
    return lambda: load_cluster(place)


def build_config(rng, folder, own):
    values = {
        **{"dataset": "demo", "out": str(folder / "out"), "model": "tiny", "seed": 1},
        **{"max_seq_len": 2048, "max_vision": 20, "memory_gib": 1.5, "workers": 1},
        **{"keep_columns": ["a,b"], "max_rejected": 0.1, "follow_links": True, "format": "refs"},
    }
    path = folder / "config.toml"
    _write(path, damaged_toml(values, rng))
    options = {"dataset": "demo", "out": "x"}
    return lambda: load_config(BuildConfig, path, options, command="packer build").group_options


def plan_options(rng, folder, own):
    values = {
        **{"model": "internvl_1_5", "images": 4, "seq_len": 2048, "tp": 1, "pp": 2, "dp": 1},
        **{"micro_batches": 4, "cluster": "a100_80g", "time_limit": 1.0, "frozen": ["vision"]},
    }
    path = folder / "config.toml"
    _write(path, damaged_toml(values, rng))
    return lambda: load_config(PlanConfig, path, {}, command="engine plan")


def model_folder(rng, folder, own):
    source = rng.choice(own.models)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    there = [name for name in MODEL_FILES if (folder / name).exists()]
    path = folder / rng.choice(there)
    _write(path, damaged_json(path.read_text("utf-8"), rng))
    return lambda: use_model(find_model(str(folder)))


def tokenizer_folder(rng, folder, own):
    source = rng.choice((TOKENIZERS / "byte_level", TOKENIZERS / "byte_fallback"))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    more = {"content": "<x>", "lstrip": False, "special": True}
    config |= {"added_tokens_decoder": {"400": more, "401": {**more, "content": "<y>"}}}
    config |= {"extra_special_tokens": {"image_token": "<i>"}, "additional_special_tokens": ["<z>"]}
    _write(folder / "tokenizer_config.json", json.dumps(config).encode())
    _write(folder / "special_tokens_map.json", b'{"bos_token": "<s>", "eos_token": "</s>"}')
    _write(folder / "chat_template.json", json.dumps({"chat_template": "{{ messages }}"}).encode())
    path = folder / rng.choice(TOKENIZER_FILES)
    _write(path, damaged_json(path.read_text("utf-8"), rng))

    def use():
        markup = load_model("tiny").image_markup
        ChatTokenizer.load(str(folder), markup).encode_batch([CONVERSATION])

    return use


def lengths(rng, folder, own):
    rows = [{"vit_num": 2, "token_num": 900 + n, "image_flags": 2} for n in range(4)]
    path = folder / "lengths.json"
    _write(path, damaged_json(json.dumps(rows), rng))
    options = GroupOptions(max_seq_len=2048)
    out = folder / "out"
    out.mkdir()
    return lambda: group_files([path], out, options, StageProgress(), vision_unit="image_patches")


def use_build(place):
    """Report, inspect, verify and load a build."""
    make_report(place)
    inspect_group(place, 0)
    require_intact(verify_build(place, StageProgress(), workers=1))
    loader = StreamingLoader(place, workers=0, dp_rank=0, dp_world_size=1)
    try:
        next(iter(loader))
    finally:
        loader.close()


def manifest(rng, folder, own):
    shutil.copytree(own.build, folder, dirs_exist_ok=True, copy_function=_link)
    path = folder / "manifest.json"
    content = damaged_json(path.read_text("utf-8"), rng)
    path.unlink()
    with suppress(ValueError, TypeError, RecursionError):  # what has a hash to be damaged
        values = json.loads(content)
        values["content_hash"] = hash_json({k: v for k, v in values.items() if k != "content_hash"})
        content = json.dumps(values).encode()
    _write(path, content)
    return lambda: use_build(str(folder))


def tables(rng, folder, own):
    shutil.copytree(own.build, folder, dirs_exist_ok=True, copy_function=_link)
    names = [path for path in sorted(folder.rglob("*")) if path.suffix in (".parquet", ".arrow")]
    path = rng.choice(names)
    content = damaged_bytes(path.read_bytes(), rng)
    path.unlink()
    _write(path, content)
    return lambda: use_build(str(folder))


def _link(source, target):
    Path(target).hardlink_to(source)


def plan_file(rng, folder, own):
    content = damaged_json(PLAN.read_text("utf-8"), rng)
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        values = json.loads(content)
        inputs = json.dumps(values["inputs"], sort_keys=True).encode()
        values["inputs_hash"] = hashlib.sha256(inputs).hexdigest()
        content = json.dumps(values).encode()
    place = _write(folder / "plan.json", content)
    return lambda: read_plan(place)


def loader_state(rng, folder, own):
    loader = StreamingLoader(str(own.build), workers=0, dp_rank=0, dp_world_size=1)
    state = damaged_values(loader.state_dict(), rng, ONLY_JSON)

    def use():
        try:
            loader.load_state_dict(state)
            next(iter(loader))
        finally:
            loader.close()

    return use


KINDS = {
    kind.__name__: kind
    for kind in (
        *(mixture, meta, model_preset, dataset_preset, cluster_preset, build_config),
        *(plan_options, model_folder, tokenizer_folder, lengths, manifest, tables, plan_file),
        loader_state,
    )
}
