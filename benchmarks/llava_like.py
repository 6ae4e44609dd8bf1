"""A dataset of any size in LLaVA-665K's layout.

Shares and lengths are near those of the published annotation file (coco 364 k, vg 86 k, ocr_vqa
80 k, gqa 72 k, text only 41 k, textvqa 22 k of 665 k; some 1.5 kB per record). Images are small
JPEGs of a few hundred kinds, each in its own file. The same size and seed give the same files.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from isobatch.packer.demo.texts import passage

SOURCES = {
    "coco/train2017": 364,
    "vg/VG_100K": 86,
    "ocr_vqa/images": 80,
    "gqa/images": 72,
    "": 41,
    "textvqa/train_images": 22,
}
SAMPLES_PER_IMAGE = 3
"""LLaVA asks several conversations of the same picture."""
KINDS = 400
SIDES = [(320, 240), (240, 320), (256, 256), (336, 224), (200, 300)]
ROUNDS = {1: 30, 2: 25, 3: 20, 5: 15, 8: 10}
"""Question and answer pairs in a conversation, and how often."""


def write_llava_like(folder: Path, num_samples: int, *, seed: int = 0) -> int:
    """Write `annotations.json` and the images; -> bytes of the images."""
    kinds = [_jpeg(number) for number in range(KINDS)]
    draw = random.Random(seed)
    num_images = max(1, num_samples // SAMPLES_PER_IMAGE)
    folders = [name for name in SOURCES if name]
    for name in folders:
        (folder / name).mkdir(parents=True, exist_ok=True)
    total = 0
    for number in range(num_images):
        data = kinds[number % KINDS]
        (folder / _image_name(folders[number % len(folders)], number)).write_bytes(data)
        total += len(data)
    with (folder / "annotations.json").open("w", encoding="utf-8") as file:
        separator = "[\n"
        for record in _records(num_samples, num_images, folders, draw):
            file.write(separator + json.dumps(record, ensure_ascii=False))
            separator = ",\n"
        file.write("\n]\n")
    return total


def _records(
    num_samples: int, num_images: int, folders: list[str], draw: random.Random
) -> Iterator[dict[str, Any]]:
    passages = [passage(draw) for _ in range(2000)]
    sources, weights = list(SOURCES), list(SOURCES.values())
    rounds, often = list(ROUNDS), list(ROUNDS.values())
    for number in range(num_samples):
        source = draw.choices(sources, weights)[0]
        record: dict[str, Any] = {"id": f"{number:012d}"}
        marker = ""
        if source:
            image = draw.randrange(num_images // len(folders)) * len(folders) + folders.index(
                source
            )
            record["image"] = _image_name(source, image)
            marker = "<image>\n"
        turns = []
        for _ in range(draw.choices(rounds, often)[0]):
            question, answer = (
                draw.choice(passages),
                draw.choice(passages) + " " + draw.choice(passages),
            )
            turns.append({"from": "human", "value": marker + question[: draw.randrange(40, 160)]})
            turns.append({"from": "gpt", "value": answer[: draw.randrange(60, 700)]})
            marker = ""
        yield {**record, "conversations": turns}


def _image_name(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}.jpg"


def _jpeg(number: int) -> bytes:
    width, height = SIDES[number % len(SIDES)]
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8)).resize(
        (width, height)
    )
    noise = rng.integers(-12, 13, (height, width, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)).save(
        buffer, "JPEG", quality=70
    )
    return buffer.getvalue()
