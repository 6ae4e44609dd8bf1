"""Audio of Qwen2.5-Omni and Qwen3-Omni: counts, ids and features equal transformers' processors.

A sample's clips go to the processor together, as a user's chat template does it.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.models.audio_tokens import AudioRejected, plan_audio, plan_clip
from isobatch.models.folder.find_model import find_model
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from support.builds.audio_build import RATE, write_clip
from support.builds.packed import quiet, read_samples
from support.builds.raw_data import write_dataset, write_image
from support.models.saved_folders import FAMILIES, save_folder

OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
SAMPLES = 8 * int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
LENGTHS = [1, 159, 160, 161, 200, 201, 320, 321, 480, 481, 15_999, 16_000, 16_001, 16_160, 17_280]
"""Samples: around a hop, half a frame, the least tokens, a chunk."""
TOLERANCE = 2e-5


def settings_of(name: str) -> dict[str, Any]:
    """Qwen2.5-Omni with 4 s at most, so that clips can be too long."""
    return {"feature_size": 128, "chunk_length": 4 if name == "qwen2_5_omni" else 30}


def drawn_record(folder: Path, number: int, drawn: random.Random) -> dict[str, Any]:
    """Images and clips in any order among words."""
    clips = [f"{number}-{k}.wav" for k in range(drawn.randint(0, 3))]
    images = [f"{number}-{k}.png" for k in range(drawn.randint(0, 2))]
    noise = np.random.default_rng(number)
    for clip in clips:
        length = int(10 ** drawn.uniform(2.9, 4.7))
        write_clip(folder / clip, noise.integers(-9000, 9000, length).astype("<i2"))
    for image in images:
        sides = (drawn.randint(30, 400) for _ in range(2))
        write_image(folder / image, *sides, seed=number)
    pieces = ["<image>"] * len(images) + ["<audio>\n"] * len(clips) + ["Ah", " what \n", "?"]
    drawn.shuffle(pieces)
    turns = [
        {"from": "human", "value": "".join(["Hear", *pieces])},
        {"from": "gpt", "value": f"It is {number}."},
    ]
    return {"id": f"s{number}", "conversations": turns, "image": images, "audio": clips}


def samples_of(path: Path) -> np.ndarray[Any, Any]:
    """Of a WAV file of 16-bit integers."""
    values = np.frombuffer(path.read_bytes()[44:], "<i2")
    return values.astype(np.float32) / np.float32(1 << 15)


def processed(processor: Any, folder: Path, name: str, row: dict[str, Any]) -> Any:
    """What the family's processor makes of a record."""
    marks = {"<image>": FAMILIES[name].markup, "<audio>": FAMILIES[name].audio_markup}
    messages = []
    for turn, role in zip(row["conversations"], ("user", "assistant"), strict=True):
        text = turn["value"]
        for marker, markup in marks.items():
            text = text.replace(marker, markup)
        messages.append({"role": role, "content": text})
    images = [Image.open(folder / path).convert("RGB") for path in row["image"]]
    clips = [samples_of(folder / path) for path in row["audio"]]
    return processor(
        text=[processor.apply_chat_template(messages)],
        images=[images] if images else None,
        audio=clips or None,
        return_tensors="pt",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", OMNI)
def test_a_folder_packs_clips_as_its_processor_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = replace(FAMILIES[name], audio_settings=settings_of(name))
    monkeypatch.setitem(FAMILIES, name, family)
    drawn = random.Random(name)
    rows = [drawn_record(tmp_path, number, drawn) for number in range(SAMPLES)]
    dataset, out = write_dataset(tmp_path, rows), tmp_path / "out"
    processor = save_folder(name, tmp_path / "model")
    options = {"dataset": str(dataset), "out": str(out), "model": str(tmp_path / "model")}
    config = BuildConfig(**options, max_seq_len=100_000, workers=1)
    totals = Builder(config, quiet()).build().totals
    expected = {}
    for row in rows:
        lengths = [len(samples_of(tmp_path / path)) for path in row["audio"]]
        if name == "qwen2_5_omni" and max(lengths, default=0) > 4 * RATE:
            continue
        expected[row["id"]] = processed(processor, tmp_path, name, row)
    assert totals["num_packed"] == len(expected)
    assert totals["num_rejected"] == SAMPLES - len(expected)
    packed = {sample["sample_id"]: sample["input_ids"] for sample in read_samples(out)}
    assert packed == {key: given.input_ids[0].tolist() for key, given in expected.items()}
    loader = StreamingLoader(
        out, micro_batches_per_step=1, audio="features", pixel_dtype=torch.float32
    )
    compared = 0
    for step in loader:
        for batch in step:
            frames = iter(batch.audio_values.split(batch.audio_frames.tolist()))
            for key in batch.sample_ids:
                given = expected[key]
                masks = given.get("feature_attention_mask", ())
                for mask, features in zip(masks, given.get("input_features", ()), strict=True):
                    found = next(frames)
                    wanted = features.T[mask.bool()]
                    assert found.shape == wanted.shape, key
                    assert (found - wanted).abs().max() <= TOLERANCE, key
                    compared += 1
            assert next(frames, None) is None
    assert compared > SAMPLES / 2


@pytest.mark.parametrize("name", OMNI)
def test_counts_at_every_border_are_those_of_the_processor(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by itself Qwen2.5-Omni's makes 300 s of each clip
    family = replace(FAMILIES[name], audio_settings=settings_of(name))
    monkeypatch.setitem(FAMILIES, name, family)
    processor = save_folder(name, tmp_path)
    rule = find_model(str(tmp_path)).audio
    assert rule is not None
    for length in LENGTHS:
        clip = np.ones(length, np.float32)
        try:
            counted = plan_audio(rule, length, RATE).num_audio_tokens
        except AudioRejected:
            counted = 0
        try:
            given, (text,) = processor._process_audio([clip], **audio_options(processor))
            wanted = len(text) // len(processor.audio_token)
        except RuntimeError:  # of the reflection at the start of a clip
            wanted = 0
        assert counted == wanted, length
    for lengths in ((161, 16_001), (16_000, 15_999, 50), (32_160, 32_159)):
        given, texts = processor._process_audio(
            [np.ones(length, np.float32) for length in lengths], **audio_options(processor)
        )
        counted = []
        for length in lengths:
            try:
                counted.append(plan_clip(rule, length, max(lengths)).num_audio_tokens)
            except AudioRejected:
                counted.append(0)
        assert counted == [len(text) // len(processor.audio_token) for text in texts]
        assert given["num_audio_tokens"].tolist() == counted


def audio_options(processor: Any) -> dict[str, Any]:
    """What the processor gives its feature extractor."""
    return {**type(processor).audio_kwargs, "return_tensors": "pt"}


def test_settings_that_change_audio_and_are_not_known_are_one_line(tmp_path: Path) -> None:
    save_folder("qwen3_omni_moe", tmp_path)
    path, config = tmp_path / "processor_config.json", tmp_path / "config.json"
    whole, model = json.loads(path.read_text()), json.loads(config.read_text())
    for key, value, message in (
        ("sampling_rate", 8000, "sampling_rate is 8000; only 16000 is supported"),
        ("feature_size", 80, "feature_size is 80; only 128 is supported"),
        ("dither", 0.1, "dither is 0.1; only 0 is supported"),
        ("padding_side", "left", "padding_side is 'left'; only 'right' is supported"),
        ("do_normalize", True, "unknown key do_normalize"),
        ("feature_extractor_type", "Other", "feature_extractor_type is 'Other'; only"),
    ):
        changed = {**whole, "feature_extractor": {**whole["feature_extractor"], key: value}}
        path.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            find_model(str(tmp_path))
    path.write_text(json.dumps(whole))
    for key, value in (("n_window", 40), ("n_window_infer", 850)):
        part = model["thinker_config"]["audio_config"]
        config.write_text(
            json.dumps({**model, "thinker_config": {"audio_config": {**part, key: value}}})
        )
        with pytest.raises(ConfigError, match=f"{key} is {value}"):
            find_model(str(tmp_path))
    del whole["feature_extractor"]
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="has no feature_extractor_type; only"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", OMNI)
def test_old_folders_have_the_same_rule(tmp_path: Path, name: str) -> None:
    save_folder(name, tmp_path / "new")
    save_folder(name, tmp_path / "old", old=True)
    path = tmp_path / "old" / "processor_config.json"
    values = json.loads(path.read_text())
    audio = values.pop("feature_extractor")
    path.write_text(json.dumps(values))
    path = tmp_path / "old" / "preprocessor_config.json"
    path.write_text(json.dumps({**audio, **json.loads(path.read_text())}))
    new, old = (find_model(str(tmp_path / each)) for each in ("new", "old"))
    assert (new.audio, new.audio_markup, new.vision) == (old.audio, old.audio_markup, old.vision)
