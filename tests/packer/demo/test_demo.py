"""The demo is repeatable, spread as real data is, in LLaVA's layout, and says only what is true of
its pictures.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from isobatch.packer.demo._pictures import COLOURS, Picture, draw_picture
from isobatch.packer.demo.dataset import demo_tokenizer_path, write_demo
from isobatch.packer.demo.texts import passage, text_task

NUM_SAMPLES = 300


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, num_samples=NUM_SAMPLES)
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((folder / "annotations.json").read_text("utf-8"))
    return loaded


def images(record: dict[str, Any]) -> list[str]:
    image = record.get("image", [])
    return [image] if isinstance(image, str) else list(image)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def upright(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def test_same_seed_same_bytes_and_a_larger_demo_begins_with_the_smaller_one(
    tmp_path: Path, demo: Path
) -> None:
    write_demo(tmp_path / "again", num_samples=40)
    write_demo(tmp_path / "other", num_samples=40, seed=1)
    again, whole = digests(tmp_path / "again"), digests(demo)
    again.pop("annotations.json")
    assert again == {name: whole[name] for name in again}
    assert records(tmp_path / "again") == records(demo)[:40]
    assert records(tmp_path / "other") != records(demo)[:40]


def test_every_marker_has_its_file_and_every_file_is_used_once(demo: Path) -> None:
    listed = []
    for record in records(demo):
        text = "".join(turn["value"] for turn in record["conversations"])
        assert text.count("<image>") == len(images(record))
        assert [turn["from"] for turn in record["conversations"]] == ["human", "gpt"] * (
            len(record["conversations"]) // 2
        )
        assert all(turn["value"].strip() for turn in record["conversations"])
        listed += images(record)
    on_disk = {str(path.relative_to(demo)) for path in (demo / "images").iterdir()}
    assert sorted(listed) == sorted(on_disk)
    assert len({record["id"] for record in records(demo)}) == NUM_SAMPLES


def test_sizes_counts_and_lengths_spread_as_in_real_mixtures(demo: Path) -> None:
    rows = records(demo)
    per_sample = Counter(len(images(row)) for row in rows)
    assert 0.18 < per_sample[0] / NUM_SAMPLES < 0.32
    assert max(per_sample) == 8
    assert {len(row["conversations"]) // 2 for row in rows} == {1, 2, 3, 4}
    words = sorted(sum(len(turn["value"].split()) for turn in row["conversations"]) for row in rows)
    assert words[0] <= 8
    assert words[-1] > 400
    assert words[NUM_SAMPLES // 2] < 60
    sizes = np.array([Image.open(demo / name).size for row in rows for name in images(row)])
    aspects = sizes[:, 0] / sizes[:, 1]
    assert sizes.min() == 32
    assert 1000 < sizes.max() <= 1200
    assert aspects.min() < 1 / 4
    assert aspects.max() > 4
    assert (np.abs(np.log(aspects)) <= np.log(6.1)).all()


def test_files_are_real_jpegs_and_pngs_some_of_them_turned_by_exif(demo: Path) -> None:
    formats: Counter[tuple[str | None, int]] = Counter()
    for path in (demo / "images").iterdir():
        with Image.open(path) as image:
            formats[image.format, image.getexif().get(0x0112, 1)] += 1
    assert set(formats) == {("PNG", 1), ("JPEG", 1), ("JPEG", 6)}
    assert formats["JPEG", 1] > 50


def test_the_brightest_side_of_an_upright_photo_is_the_one_named(demo: Path) -> None:
    checked = 0
    for record in records(demo):
        answer = record["conversations"][1]["value"]
        if (
            len(images(record)) != 1
            or "Which side of the photo" not in record["conversations"][0]["value"]
        ):
            continue
        light = np.asarray(upright(demo / images(record)[0]).convert("L"), dtype=float)
        height, width = light.shape
        sides = {
            "left": light[:, : width // 3], "right": light[:, -(width // 3) :],
            "top": light[: height // 3], "bottom": light[-(height // 3) :],
        }  # fmt: skip
        assert answer == f"The {max(sides, key=lambda side: sides[side].mean())}."
        checked += 1
    assert checked >= 10


def pictures(question: str) -> list[tuple[Picture, str]]:
    """Drawn pictures that can be asked `question`, with the answers."""
    rng = random.Random(7)
    drawn = [draw_picture(rng, rng.randint(32, 500), rng.randint(32, 500)) for _ in range(120)]
    return [
        (picture, answer)
        for picture in drawn
        for asked, answer in picture.facts
        if asked == question
    ]


def test_the_colours_named_are_exactly_those_drawn() -> None:
    found = pictures("Which colours occur?")
    assert len(found) > 10
    for picture, answer in found:
        drawn = {pixel for _, pixel in picture.image.convert("RGB").getcolors(1 << 20) or []}
        assert (
            answer
            == ", ".join(sorted(name for name, pixel in COLOURS.items() if pixel in drawn)) + "."
        )


def test_the_highest_bar_is_the_one_named() -> None:
    found = pictures("Which bar is the highest?")
    assert len(found) > 10
    for picture, answer in found:
        facts = dict(picture.facts)
        table = [
            line.split(": ")
            for line in facts["Write the values of the chart as a table."].splitlines()
        ]
        month, value = max(table, key=lambda row: int(row[1]))
        assert f", {month}, with {value}." in answer
        bar = COLOURS[
            facts["Which colour are the bars?"].removeprefix("They are ").removesuffix(".")
        ]
        pixels = (np.asarray(picture.image.convert("RGB")) == bar).all(axis=2)
        if bar != COLOURS["black"]:  # the labels are black, too
            place = int(pixels.sum(axis=0).argmax() * len(table) / picture.image.width)
            assert table[place][0] == month


def test_text_tasks_state_the_truth() -> None:
    rng = random.Random(3)
    tasks = [text_task(rng) for _ in range(300)]
    sums = [task for task in tasks if " + " in task[0]]
    counts = [task for task in tasks if task[0].startswith("How often")]
    assert min(len(sums), len(counts)) > 20
    for question, answer in sums:
        a, b = question.removesuffix(" = ?").split(" + ")
        assert int(a) + int(b) == int(answer)
    for question, answer in counts:
        word = question.split('"')[1]
        text = question.split("\n\n", 1)[1].lower().replace(".", " ").replace("!", " ").split()
        number = text.count(word)
        assert answer == {0: "Never.", 1: "Once.", 2: "Twice."}.get(number, f"{number} times.")


def test_passages_have_a_long_tail_up_to_about_600_words() -> None:
    rng = random.Random(0)
    lengths = sorted(len(passage(rng).split()) for _ in range(500))
    assert lengths[250] < 90
    assert lengths[-5] > 300
    assert lengths[-1] <= 600


def test_the_demo_tokenizer_is_small_and_knows_the_demos_words(demo: Path) -> None:
    path = demo_tokenizer_path() / "tokenizer.json"
    assert path.stat().st_size < 120_000
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == 2000
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        1997,
        1998,
        1999,
    ]
    texts = [turn["value"] for record in records(demo) for turn in record["conversations"]]
    num_tokens = sum(len(encoding) for encoding in tokenizer.encode_batch(texts))
    assert num_tokens < 1.6 * sum(len(text.split()) for text in texts)
    assert all(
        tokenizer.decode(tokenizer.encode(text).ids) == text for text in [*texts, "任意 🙂 \x00"]
    )
