"""The built-in demo: a drawn dataset in LLaVA's layout, and its tokenizer.

For `packer build --dataset demo`, examples and tests. Questions and answers are true of the drawn
pictures, so that even a tiny model can learn something. Sizes, aspect ratios, text lengths and
images per sample spread as widely as in real mixtures, because packing is about that spread. The
same seed gives the same bytes (with the same versions of Pillow and NumPy).
"""

import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from isobatch.packer.demo._pictures import Picture, draw_picture
from isobatch.packer.demo.texts import passage, text_task

_IMAGES_PER_SAMPLE = {0: 250, 1: 520, 2: 100, 3: 50, 4: 30, 5: 20, 6: 10, 7: 10, 8: 10}
_ROUNDS = {1: 55, 2: 25, 3: 12, 4: 8}
_MIN_SIDE, _MAX_SIDE = 32, 1200
_MAX_ASPECT = 6.0
_EXIF_ORIENTATION = 0x0112
_QUARTER_TURN = 6
"""EXIF: the stored image is to be turned clockwise by a quarter, as phones store upright photos."""

Choice = TypeVar("Choice")
Fact = tuple[str, str]
"""A question, and the true answer."""


def demo_tokenizer_path() -> Path:
    """Folder of the shipped tokenizer, made by `scripts/make_demo_tokenizer.py`."""
    return Path(__file__).parent / "tokenizer"


DEMO_SAMPLES = 1000


def write_demo(folder: Path, *, num_samples: int = DEMO_SAMPLES, seed: int = 0) -> None:
    """Write `annotations.json` and `images/` into `folder`."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, content in draw_demo(num_samples, seed=seed):
        (folder / name).write_bytes(content)


def draw_demo(num_samples: int, *, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files: of the pictures, then `annotations.json`.

    1,000 samples are about 12 MB and 2.5 s of one core. Sample i depends on `seed` and i alone, so
    a larger demo begins with the smaller one.
    """
    lines = []
    with ThreadPoolExecutor() as pool:  # Pillow encodes outside the interpreter lock
        for record, files in pool.map(partial(_draw_sample, seed), range(num_samples)):
            lines.append(json.dumps(record, ensure_ascii=False))
            yield from files.items()
    yield "annotations.json", ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def demo_texts(num_samples: int, *, seed: int) -> list[str]:
    """All turns of the demo's conversations, for training the tokenizer; writes no image."""
    records = [_sample(seed, index)[0] for index in range(num_samples)]
    return [turn["value"] for record in records for turn in record["conversations"]]


def _draw_sample(seed: int, index: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    record, files = _sample(seed, index)
    return record, {name: _encode(picture) for name, picture in files.items()}


def _sample(seed: int, index: int) -> tuple[dict[str, Any], dict[str, Picture]]:
    """One LLaVA record, and its pictures by file name."""
    rng = random.Random(f"{seed}/{index}")
    pictures = [draw_picture(rng, *_size(rng)) for _ in range(_weighted(rng, _IMAGES_PER_SAMPLE))]
    suffixes = ("jpg" if picture.photo else "png" for picture in pictures)
    names = (f"images/{index:06d}-{k}.{suffix}" for k, suffix in enumerate(suffixes))
    files = dict(zip(names, pictures, strict=True))
    if pictures:
        facts = _facts(rng, pictures)
    else:
        facts = [text_task(rng) for _ in range(_weighted(rng, _ROUNDS))]
    turns = [
        {"from": speaker, "value": text}
        for question_and_answer in facts
        for speaker, text in zip(("human", "gpt"), question_and_answer, strict=True)
    ]
    turns[0]["value"] = _with_markers(rng, len(pictures), turns[0]["value"])
    record: dict[str, Any] = {"id": f"demo-{index:06d}"}
    if pictures:
        record["image"] = next(iter(files)) if len(files) == 1 else list(files)
    return {**record, "conversations": turns}, files


def _facts(rng: random.Random, pictures: list[Picture]) -> list[Fact]:
    """What is asked in each round: different facts, each about one of the pictures."""
    pool = [(k, fact) for k, picture in enumerate(pictures, start=1) for fact in picture.facts]
    asked = rng.sample(pool, min(len(pool), _weighted(rng, _ROUNDS)))
    several = len(pictures) > 1
    facts = [(f"Look at picture {k}. {q}" if several else q, answer) for k, (q, answer) in asked]
    if rng.random() < 0.08:  # a long text next to a picture, as in document data
        question, answer = facts[0]
        extra = f"The text beside it, which does not matter here:\n{passage(rng)}"
        facts[0] = f"{question}\n\n{extra}", answer
    return facts


def _with_markers(rng: random.Random, num_pictures: int, question: str) -> str:
    """The first question with a marker per picture: mostly before it."""
    if num_pictures == 0:
        return question
    if num_pictures > 1:
        return "".join(f"Picture {k}: <image>\n" for k in range(1, num_pictures + 1)) + question
    forms = {"<image>\n{}": 80, "{}\n<image>": 15, "This is the picture <image> that I mean. {}": 5}
    return _weighted(rng, forms).format(question)


def _size(rng: random.Random) -> tuple[int, int]:
    """(width, height) in pixels: from icons to full pages, aspect ratios from 1:6 to 6:1."""
    low = rng.choice((math.log(_MIN_SIDE), math.log(300)))
    long_side = round(math.exp(rng.uniform(low, math.log(_MAX_SIDE))))
    spread = 1.0 if rng.random() < 0.15 else 0.35
    aspect = math.exp(rng.uniform(0, spread * math.log(_MAX_ASPECT)))
    short_side = max(min(long_side, _MIN_SIDE), round(long_side / aspect))
    return (long_side, short_side) if rng.random() < 0.65 else (short_side, long_side)


def _encode(picture: Picture) -> bytes:
    """The file's bytes: PNG for drawings, JPEG for photos, some turned, with an EXIF tag."""
    buffer = BytesIO()
    if not picture.photo:
        picture.image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
    image, exif = picture.image, Image.Exif()
    if picture.sideways:
        exif[_EXIF_ORIENTATION] = _QUARTER_TURN
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.convert("RGB").save(buffer, "JPEG", quality=80, exif=exif)
    return buffer.getvalue()


def _weighted(rng: random.Random, weights: dict[Choice, int]) -> Choice:
    return rng.choices(list(weights), list(weights.values()))[0]
