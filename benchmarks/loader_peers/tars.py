"""Tars in WebDataset's layout, for the two peers that read them."""

from __future__ import annotations

import io
import tarfile
from itertools import count
from pathlib import Path

import measure
import numpy as np

IMAGE, TOKENS = "jpg", "npy"
"""Extensions of a sample's members."""


NAMES = [f"shard-{number:05d}.tar" for number in range(measure.SHARDS)]


def write_tars(samples: list[measure.Sample], folder: Path) -> None:
    """One tar per name."""
    numbers = count()  # keys must differ over all tars
    for name, part in zip(NAMES, measure.shards(samples), strict=True):
        with tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample, number in zip(part, numbers, strict=False):
                array = io.BytesIO()
                np.save(array, sample.tokens)
                for extension, content in ((IMAGE, sample.image), (TOKENS, array.getvalue())):
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def read_tokens(content: bytes) -> measure.Tokens:
    """The array of a member."""
    tokens: measure.Tokens = np.load(io.BytesIO(content))
    return tokens
