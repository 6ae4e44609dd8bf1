"""Videos through the packer: ids and counts as transformers' processors have them, in every source,
and every bad one has its reason.

`ISOBATCH_TEST_DRAWS=300` asks for 300 clips.
"""

import io
import json
import os
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.models.video_rules.frames import number_words
from isobatch.models.video_tokens import VideoFacts, plan_video
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.inspect.html import render_group
from isobatch.packer.inspect.terminal import print_group
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.verify import verify_build
from support.builds.packed import build, quiet, read_samples
from support.cases import for_each
from support.clips import CODECS, make_clip
from support.corpora import BYTE_LEVEL, TOKENIZERS
from support.odd_videos import picture
from support.oracles.video_processors import ORACLES

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "10"))
RATES = (Fraction(24), Fraction(30000, 1001), Fraction(25), Fraction(8), Fraction(2))
TEMPLATES = {
    False: (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # as LLaVA-OneVision's: images first, then videos, then texts
    True: (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% for kind in ['image', 'video', 'text'] %}{% for p in m.content %}"
        "{% if p.type == kind %}{% if kind == 'image' %}IMAGE{% elif kind == 'video' %}VIDEO"
        "{% else %}{{ p.text }}{% endif %}{% endif %}{% endfor %}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}


CASES = [
    (name, parts)
    for number, name in enumerate(ORACLES)
    for parts in (False, True)
    if DRAWS > 10 or parts is bool(number % 2)
]
"""Family, and whether its chat template takes parts alone."""


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """SmolVLM's numbers: `num2words` need not be installed, and other tests put `str` there."""
    monkeypatch.setattr(processing_smolvlm, "num2words", number_words)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Samples of random clips, lists of frames and images in random order."""
    folder, rng, rows, facts = tmp_path_factory.mktemp("raw"), np.random.default_rng(7), [], {}
    for number in range(DRAWS):
        name = f"{number}.{['mp4', 'webm', 'avi', 'mov'][number % 4]}"
        codec = list(CODECS)[number % len(CODECS)]
        size = tuple(int(side) * 2 for side in rng.integers(8, 90, 2))
        turned = int(rng.integers(4)) * 90 if CODECS[codec][1] == "mp4" else 0
        rate = RATES[int(rng.integers(len(RATES)))]
        clip = make_clip(int(rng.integers(2, 50)), size, codec=codec, rate=rate, rotation=turned)
        (folder / name).write_bytes(clip.content)
        facts[name] = clip.facts
    for number in range(12):
        (folder / f"frame-{number}.png").write_bytes(picture(size=(50, 40), shade=number))
    for number in range(DRAWS):
        videos = [
            f"{each}.{['mp4', 'webm', 'avi', 'mov'][each % 4]}" for each in range(number, DRAWS)
        ]
        videos = videos[: int(rng.integers(1, 3))]
        if number % 3 == 0:
            videos.append([f"frame-{k}.png" for k in range(2, 2 + 2 * int(rng.integers(1, 5)))])
        images = ["frame-0.png"] * int(rng.integers(0, 3))
        marks = ["<video>"] * len(videos) + ["<image>"] * len(images)
        pieces = [f"{each}{rng.choice(['', ' ', chr(10), 'a'])}" for each in rng.permutation(marks)]
        turns = [("human", "".join(pieces) + f"what? {number}"), ("gpt", "An answer.")]
        rows.append(
            {
                "id": str(number),
                "conversations": [{"from": role, "value": text} for role, text in turns],
                "video": videos,
                **({"image": images} if images else {}),
            }
        )
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder, rows, facts


def facts_of(video, facts):
    return VideoFacts(50, 40, len(video)) if isinstance(video, list) else facts[video]


def make_tokenizer(name, folder, *, parts):
    model = load_model(name)
    theirs = PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / BYTE_LEVEL)
    image, video = model.image_markup, model.video_markup
    known = ["<fake_token_around_image>", "<global-img>", "<|begin_of_image|>", "<|end_of_image|>"]
    known += ["<|vision_start|>", "<|vision_end|>", "<img>", "</img>", video.token, image.token]
    theirs.add_tokens(list(dict.fromkeys(known)), special_tokens=True)
    theirs.chat_template = (
        TEMPLATES[parts].replace("IMAGE", image.template_text).replace("VIDEO", video.template_text)
    )
    theirs.save_pretrained(folder)
    return theirs


def expected_ids(name, tokenizer, row, facts, *, parts):
    """What the model's processor makes of a sample."""
    model = load_model(name)
    image, video = model.image_markup, model.video_markup
    images, videos = row.get("image", []), row["video"]
    messages = [
        {"role": role, "content": turn["value"]}
        for role, turn in zip(("user", "assistant"), row["conversations"], strict=True)
    ]
    for message in messages:
        text = message["content"]
        if parts:
            pieces = text.replace("<image>", "\0<image>\0").replace("<video>", "\0<video>\0")
            message["content"] = [
                {"type": each.strip("<>")} if each[:1] == "<" else {"type": "text", "text": each}
                for each in pieces.split("\0")
                if each
            ]
        else:
            text = text.replace("<video>", "\0").replace("<image>", image.template_text)
            message["content"] = text.replace("\0", video.template_text)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    written = [
        f"{video.prefix}{ORACLES[name](model.video, facts_of(each, facts)).text}{video.suffix}"
        for each in videos
    ]
    pieces = text.split(video.template_text)
    pieces = [_with_images(piece, model, len(images)) for piece in pieces]
    assert len(pieces) == len(written) + 1
    full = "".join(a + b for a, b in zip(pieces, [*written, ""], strict=True))
    return tokenizer(full, add_special_tokens=False)["input_ids"]


def _with_images(text, model, several):
    """A text with each image's markup, as the tests of images have it."""
    plan, markup = plan_image(model.vision, 50, 40, several), model.image_markup
    first, *rest = markup.written(plan, 0).split(markup.token)
    runs = zip(plan.runs, rest, strict=True)
    whole = first + "".join(markup.token * run + piece for run, piece in runs)
    return text.replace(markup.template_text, whole)


@for_each(("name", "parts"), CASES)
def test_ids_and_counts_equal_the_processors(raw, tmp_path, name, parts):
    folder, rows, facts = raw
    out, place = tmp_path / f"{name}-{parts}", tmp_path / f"tokenizer-{name}-{parts}"
    tokenizer, model = make_tokenizer(name, place, parts=parts), load_model(name)
    options = {"model": name, "tokenizer": str(place), "max_seq_len": 1_000_000, "workers": 1}
    totals = build(folder, out, **options).totals
    assert totals["num_packed"] == totals["num_read"] == len(rows)
    expected = {row["id"]: row for row in rows}
    counts = {row["sample_id"]: row for row in pq.read_table(out / "counts.parquet").to_pylist()}
    for sample in read_samples(out):
        row = expected[sample["sample_id"]]
        ids = expected_ids(name, tokenizer, row, facts, parts=parts)
        assert sample["input_ids"] == ids, sample["sample_id"]
        visual = [tokenizer.convert_tokens_to_ids(model.image_markup.token)]
        visual.append(tokenizer.convert_tokens_to_ids(model.video_markup.token))
        count = counts[sample["sample_id"]]
        assert count["num_image_tokens"] == sum(each in visual for each in ids)
        plans = [plan_video(model.video, facts_of(each, facts)) for each in row["video"]]
        images = row.get("image", [])
        plans += [plan_image(model.vision, 50, 40, len(images))] * len(images)
        for column in ("num_vit_tokens", "num_patches"):
            counted = count[column.replace("num_patches", "num_image_patches")]
            assert counted == sum(getattr(plan, column) for plan in plans), column
        frames = [facts_of(each, facts) for each in row["video"]]
        stored = zip(sample["image_frames"], sample["image_rates"], strict=True)
        assert [each for each in stored if each[0]] == [(each[2], each[3]) for each in frames]
        marks = re.findall("<(image|video)>", row["conversations"][0]["value"])
        order = [mark == "video" for mark in (sorted(marks) if parts else marks)]
        assert [frame > 0 for frame in sample["image_frames"]] == order


def test_inspect_shows_videos_and_verify_reads_them(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    clips = [make_clip(12, (64, 48), rotation=90), make_clip(20, (40, 30), codec="vp9")]
    raw.mkdir()
    for name, clip in zip(("a.mp4", "b.webm"), clips, strict=True):
        (raw / name).write_bytes(clip.content)
    (raw / "still.png").write_bytes(picture(size=(50, 40)))
    turns = [("human", "<video> <image> <video> what?"), ("gpt", "An answer.")]
    row = {
        "id": "s",
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "video": ["a.mp4", "b.webm"],
        "image": "still.png",
    }
    (raw / "a.jsonl").write_text(json.dumps(row))
    options = {"model": "qwen2_5_vl", "max_seq_len": 100_000, "workers": 1, "format": "refs"}
    build(raw, out, **options)
    view = inspect_group(out, tokenizer=str(demo_tokenizer_path()))
    (shown,) = view.to_json()["samples"]
    assert [each.get("num_frames") for each in shown["images"]] == [12, None, 20]
    assert [(each["width"], each["height"]) for each in shown["images"]] == [
        (48, 64),
        (50, 40),
        (40, 30),
    ]
    assert not any(each["problem"] for each in shown["images"])
    pieces = [each for each in shown["pieces"] if "file" in each]
    assert [(each["kind"], each["file"]) for each in pieces] == [
        ("video", 0),
        ("image", 1),
        ("video", 2),
    ]
    tokens = [each["num_tokens"] for each in shown["images"]]
    assert [each["num_tokens"] for each in pieces] == tokens
    text = io.StringIO()
    print_group(view, Console(file=text, width=200))
    rate = clips[0].facts.frames_per_second
    assert f"video 1: 48 x 64, 12 frames at {rate:.5g} per second" in text.getvalue()
    assert render_group(view).count("data:image/jpeg") == 3

    verify = partial(verify_build, out, quiet(), workers=1, media=True)
    assert not verify().problems
    (raw / "a.mp4").write_bytes(clips[0].content[:-100])
    (raw / "b.webm").write_bytes(make_clip(19, (40, 30), codec="vp9").content)
    cut, shorter = sorted(verify().problems)
    assert "sample 's': b.webm: 19 frames of 40 x 30 pixels" in cut + shorter
    assert "20 frames of 40 x 30 pixels" in cut + shorter
    assert "corrupt_video: a.mp4: cut short" in cut + shorter
    (broken, *_) = inspect_group(out, 0).to_json()["samples"][0]["images"]
    assert broken["problem"]
