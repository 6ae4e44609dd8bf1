"""Records whose lengths are those of a dataset of `benchmarks/online.py`, four times smaller.

An image patch is a tile of 224 pixels and 64 LLM tokens instead of 448 and 256; texts, answers and
the cap of tokens are divided by four, so a group holds as many samples as in full size.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loader_data import make_jpeg
from order import Data
from PIL import Image
from transformers import PreTrainedTokenizerFast

FACTOR = 4
SIDE, TILE_TOKENS = 448 // 2, 256 // FACTOR
MOST_TILES = 13
"""Of an image: 12 and a thumbnail."""
MARKUP = 12
"""Tokens of the chat's and the image's markup, about."""
PICTURES = 6
"""Different pictures of a shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Records as the loader takes them, and their caps."""

    name: str
    rows: list[dict[str, Any]]
    max_tokens: int
    max_vision: int


def write_records(folder: Path, data: Data, count: int, tokenizer: Path) -> Records:
    """`count` records drawn from `data`, with their images in `folder`."""
    rng = np.random.default_rng(1)
    words = single_tokens(tokenizer)
    pictures = _Pictures(folder)
    counts, rows = data.counts, []
    for number, sample in enumerate(rng.choice(len(counts), count, replace=False).tolist()):
        tiles = images_of(int(counts.num_image_patches[sample]))
        answer = max(1, int(counts.num_loss_tokens[sample]) // FACTOR)
        text = int(counts.num_text_tokens[sample]) // FACTOR - MARKUP - answer
        question = "<image>\n" * len(tiles) + " ".join(rng.choice(words, max(1, text)))
        rows.append(
            {
                "id": str(number),
                "image": [pictures.path(each, number % PICTURES) for each in tiles],
                "conversations": [
                    {"from": "human", "value": question},
                    {"from": "gpt", "value": " ".join(rng.choice(words, answer))},
                ],
            }
        )
    limits = data.limits
    return Records(
        name=data.name,
        rows=rows,
        max_tokens=limits.max_seq_len // FACTOR,
        max_vision=limits.max_vision,
    )


def images_of(tiles: int) -> list[int]:
    """Tiles of each image of a sample; an image has one, or three and more with its thumbnail.

    >>> images_of(20)
    [10, 10]
    """
    number = -(-tiles // MOST_TILES)
    parts = [tiles // number + (place < tiles % number) for place in range(number)]
    return [3 if part == 2 else part for part in parts]


def single_tokens(tokenizer: Path) -> list[str]:
    """Words that are one token each where a space is before them."""
    opened = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    names = [token[1:] for token in opened.get_vocab() if token[:1] == "\u0120"]
    return sorted(name for name in names if name.isascii() and name.isalpha() and name.islower())


class _Pictures:
    """JPEG files of so many tiles, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain = [
            Image.open(io.BytesIO(make_jpeg(seed))).convert("RGB") for seed in range(PICTURES)
        ]

    def path(self, tiles: int, number: int) -> str:
        """An image of that many tiles."""
        path = self._folder / f"{tiles}-{number}.jpg"
        if not path.exists():
            columns, rows = shape(max(1, tiles - 1))
            size = columns * SIDE, rows * SIDE
            self._plain[number].resize(size).save(path, quality=85)
        return str(path)


def shape(tiles: int) -> tuple[int, int]:
    """Columns and rows, as square as possible.

    >>> shape(6)
    (3, 2)
    """
    rows = max(each for each in range(1, int(tiles**0.5) + 1) if tiles % each == 0)
    return tiles // rows, rows
