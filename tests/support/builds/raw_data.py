"""A small dataset in LLaVA layout with everything that can go wrong in it, and the tokenizer that
ships with us.
"""

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

from isobatch.counting.records.reading import DEFAULT_READING
from isobatch.counting.records.schemas import parse_records
from isobatch.packer.demo.dataset import demo_tokenizer_path

SIZES = [(40, 40), (200, 90), (90, 200), (640, 480), (33, 300)]


def write_image(path: Path, width: int, height: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    # of noise nothing better is found by trying longer
    Image.fromarray(pixels).save(path, quality=60, compress_level=1)


def record(number, images=(), text="What is it?", answer="A picture."):
    value = {
        "id": f"s{number}",
        "conversations": [
            {"from": "human", "value": "<image>\n" * len(images) + f"{text} ({number})"},
            {"from": "gpt", "value": f"{answer} {number}"},
        ],
    }
    return value | ({"image": images[0] if len(images) == 1 else list(images)} if images else {})


def parse_record(record, source, reading=DEFAULT_READING):
    """The first sample in a record."""
    return parse_records(record, source, reading)[0]


def good_records(folder: Path, count=60):
    """Records with 0 to 3 images and texts of very different length; their images are written under
    `folder`.
    """
    rng = np.random.default_rng(5)
    rows = []
    for number in range(count):
        images = []
        for k in range(int(rng.integers(0, 4)) if number % 3 else 0):
            name = f"images/{number:03d}-{k}.{'jpg' if k % 2 else 'png'}"
            write_image(folder / name, *SIZES[int(rng.integers(len(SIZES)))], seed=number * 10 + k)
            images.append(name)
        rows.append(record(number, images, answer="word " * int(rng.integers(1, 120))))
    return rows


def write_dataset(folder: Path, rows, *, lines=False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("annotations.jsonl" if lines else "annotations.json")
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return folder


def options(folder: Path, out: Path, **changes):
    """Options of a build of the dataset at `folder`, as BuildConfig takes them."""
    values = {
        "dataset": str(folder),
        "out": str(out),
        "model": "tiny",
        "tokenizer": str(demo_tokenizer_path()),
        "workers": 1,
        "chunk_records": 16,
    }
    return values | changes


# --- a dataset of several partitions ---

SAMPLES = 2600
UNUSABLE = {"s100", "s2000"}
CUT = {"partition_samples": 1000, "max_seq_len": 1024, "shard_mb": 1, "chunk_records": 256}


def write_partitioned(folder):
    """Few records with images and many with text alone, two of which cannot be used."""
    draw = random.Random(3)
    rows = good_records(folder, 40)
    rows += [
        record(number, text="word " * draw.randrange(20), answer="word " * draw.randrange(1, 20))
        for number in range(40, SAMPLES)
    ]
    rows[100]["conversations"] = []
    rows[2000]["image"] = "images/none.png"
    for place, row in enumerate(rows):
        row["score"] = place / 2 if place % 2 else place
    return write_dataset(folder, rows, lines=True)
