"""Clips -> `packer build --model FOLDER` -> loader -> model inputs, as transformers makes them."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm

from isobatch.common.errors import DataError
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import MediaMarkup
from isobatch.models.video_rules.frames import number_words
from isobatch.models.video_tokens import VideoFacts, plan_video
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.shards.manifest import read_manifest
from support.builds.packed import quiet
from support.cases import for_each
from support.models.saved_folders import make_processor
from support.models.saved_videos import HUB, save_video_folder

pytest.importorskip("av")
from support.clips import Clip, make_clip
from support.oracles.video_pixels import expected_rows
from support.oracles.video_processors import ORACLES

CLIPS = {
    "long": lambda: make_clip(70, (80, 60), rate=Fraction(24)),
    "turned": lambda: make_clip(31, (64, 48), rotation=90, rate=Fraction(30000, 1001)),
    "web": lambda: make_clip(20, (48, 64), codec="vp9", rate=Fraction(10)),
    "motion": lambda: make_clip(12, (64, 64), codec="mjpeg", rate=Fraction(5)),
}


@pytest.fixture(scope="module")
def clips() -> dict[str, Clip]:
    return {name: make() for name, make in CLIPS.items()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, clips: dict[str, Clip]) -> Path:
    """Two videos, a video and text, a list of frames, an image, and only text."""
    folder = tmp_path_factory.mktemp("raw")
    for name, clip in clips.items():
        (folder / f"{name}.bin").write_bytes(clip.content)
    for number in range(4):
        Image.new("RGB", (40, 30), (60 * number, 90, 30)).save(folder / f"{number}.png")
    rows = [
        ("two", "<video>\nand <video> differ", {"videos": ["long.bin", "turned.bin"]}),
        ("web", "What is in <video>?", {"video": "web.bin"}),
        ("motion", "<video>", {"video": "motion.bin"}),
        ("list", "frames: <video>", {"video": [f"{number}.png" for number in range(4)]}),
        ("image", "<image> is no video", {"image": "0.png"}),
        ("text", "nothing to see", {}),
    ]
    records = [
        {
            "id": name,
            "conversations": [
                {"from": "human", "value": text},
                {"from": "gpt", "value": f"answer {name}"},
            ],
            **media,
        }
        for name, text, media in rows
    ]
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


def build(dataset: Path, out: Path, folder: str, **more: Any) -> dict[str, Any]:
    options = {"dataset": str(dataset), "out": str(out), "model": folder, "workers": 1}
    config = BuildConfig(**options, max_seq_len=200_000, **more)  # type: ignore[arg-type]
    totals: dict[str, Any] = Builder(config, quiet()).build().totals
    return totals


@for_each("name", HUB)
def test_what_a_model_gets_is_what_transformers_makes(
    name: str, tmp_path: Path, dataset: Path, clips: dict[str, Clip]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if processing_smolvlm.num2words in (None, str):
            patch.setattr(processing_smolvlm, "num2words", number_words)
        _compare(name, tmp_path / name, dataset, clips)


def _compare(name: str, place: Path, dataset: Path, clips: dict[str, Clip]) -> None:
    folder = save_video_folder(name, place, {})
    model, out = find_model(folder), place / "out"
    assert build(dataset, out, folder)["num_packed"] == 6
    processor, markup = make_processor(name), model.video_markup
    assert isinstance(markup, MediaMarkup)
    oracle = ORACLES[HUB[name][0] if HUB[name][0] != "qwen2_vl" else "qwen2_5_vl"]
    facts = {each: clip.facts for each, clip in clips.items()} | {"list": VideoFacts(40, 30, 4)}
    used = {"two": ("long", "turned"), "image": (), "text": ()}
    pieces: dict[str, torch.Tensor] = {}
    for key, clip in clips.items():
        plan = plan_video(model.video, clip.facts)  # type: ignore[arg-type]
        pieces[key] = expected_rows(model.vision, model.video, clip, plan).flatten(1)
    records = {row["id"]: row for row in json.loads((dataset / "annotations.json").read_text())}
    seen = set()
    for step in StreamingLoader(out, micro_batches_per_step=1, pixel_dtype=torch.float32):
        for batch in step:
            rows = _rows_of_media(batch)
            for number, sample in enumerate(batch.sample_ids):
                seen.add(sample)
                media = used.get(sample, (sample,))
                texts = [oracle(model.video, facts[each]).text for each in media]
                start, end = batch.cu_seqlens[number : number + 2].tolist()
                if sample != "image":
                    ids = _expected_ids(processor, markup, records[sample], texts)
                    assert batch.input_ids[start:end].tolist() == ids, sample
                for each in media or ("image",) * (sample == "image"):
                    own = next(rows)
                    if each in pieces:
                        assert own.shape == pieces[each].shape, each
                        assert (own - pieces[each]).abs().max() <= 1e-6, each
            _check_inputs(name, batch, out)
    assert seen == set(records)


def test_what_is_made_in_advance_is_not_more_than_is_counted(tmp_path: Path, dataset: Path) -> None:
    folder, out = save_video_folder("qwen3_vl", tmp_path, {}), tmp_path / "out"
    build(dataset, out, folder)
    rows = json.loads((dataset / "annotations.json").read_text())
    options = {"max_tokens": 200_000, "max_vision": 10**6, "data_root": str(dataset)}
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        loaders = (
            StreamingLoader(out, pixel_dtype=dtype),
            BalancedLoader(rows, model=folder, pixel_dtype=dtype, **options),  # type: ignore[arg-type]
        )
        for loader in loaders:
            (plan,) = loader._steps.plan(1)
            task = loader._builder.task(plan, 0)
            batches = [part() for part in task.parts]
            num_bytes = sum(batch.pixel_values.nbytes for batch in batches)
            assert num_bytes < task.num_bytes < 1.05 * num_bytes, dtype
            loader.close()


def _rows_of_media(batch: Any) -> Any:
    counts = batch.patches_per_image
    if batch.image_grid_thw is not None:
        counts = batch.image_grid_thw.prod(dim=1)
    return iter(torch.split(batch.pixel_values.flatten(1), counts.tolist()))


def _expected_ids(processor: Any, markup: MediaMarkup, row: Any, texts: list[str]) -> list[int]:
    messages = [
        {
            "role": {"human": "user", "gpt": "assistant"}[turn["from"]],
            "content": turn["value"].replace("<video>", markup.template_text),
        }
        for turn in row["conversations"]
    ]
    first, *rest = processor.apply_chat_template(messages).split(markup.template_text)
    whole = [markup.prefix + text + markup.suffix for text in texts]
    text = first + "".join(made + after for made, after in zip(whole, rest, strict=True))
    ids: list[int] = processor.tokenizer(text)["input_ids"]
    return ids


def _check_inputs(name: str, batch: Any, out: Path) -> None:
    """Videos alone by their names; next to images as images, so that encoders run once."""
    if batch.video_seconds is None or not name.startswith("qwen"):
        return
    manifest = read_manifest(out)
    side = 16 if name.startswith("qwen3") else 14
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2, patch_size=side)
    config = SimpleNamespace(
        model_type=name,
        vision_config=vision,
        image_token_id=manifest.image_token_id,
        video_token_id=manifest.video_token_id,
    )
    inputs, is_video = model_inputs(batch, config), batch.video_seconds > 0
    names = ("pixel_values_videos", "video_grid_thw")
    other = ("pixel_values", "image_grid_thw")
    is_mixed = bool((~is_video).any())
    assert not set(names if is_mixed else other) & set(inputs)
    pixels, grids = (inputs[key] for key in (other if is_mixed else names))
    assert torch.equal(grids, batch.image_grid_thw)
    assert torch.equal(pixels, batch.pixel_values)
    assert bool((inputs["input_ids"] == config.video_token_id).any()) != is_mixed


def test_a_video_that_breaks_after_packing_is_skipped_or_one_line(
    tmp_path: Path, dataset: Path, clips: dict[str, Clip]
) -> None:
    folder, out, raw = save_video_folder("qwen3_vl", tmp_path, {}), tmp_path / "out", tmp_path / "r"
    shutil.copytree(dataset, raw)
    records = json.loads((raw / "annotations.json").read_text())
    files = [row for row in records if row["id"] != "list"]  # which is no file to refer to
    (raw / "annotations.json").write_text(json.dumps(files))
    build(raw, out, folder, format="refs")
    content = clips["motion"].content
    (raw / "motion.bin").write_bytes(content[:300] + bytes(len(content) - 300))
    options: dict[str, Any] = {"micro_batches_per_step": 1, "image_root": str(raw)}
    with pytest.raises(DataError, match=r"sample 'motion' .*video of .* cannot be decoded"):
        list(StreamingLoader(out, **options))
    with pytest.warns(UserWarning, match="skipped: sample 'motion'"):
        steps = list(StreamingLoader(out, on_error="skip", **options))
    batches = [batch for step in steps for batch in step]
    assert [sample for batch in batches for sample in batch.skipped] == ["motion"]
