"""The samples of benchmarks/loader_speed.py, and our own build of them; peers' formats are written
by their adapters.

A sample is a photograph-like JPEG of 448 x 448 pixels and about 52 KB, 256 image tokens and 200
tokens of text with labels: one patch of InternVL 1.5. The same number of samples gives the same
files.
"""

from __future__ import annotations

import io
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(Path(__file__).parent / "loader_peers"),
]

from measure import GROUP, read_samples  # noqa: E402

from support.builds import shard_fixture  # noqa: E402

MODEL = "internvl_1_5"
SIDE, QUALITY = 448, 88
IMAGE_TOKENS, TEXT_TOKENS = 256, 200
WAVES = (3, 12, 48, 160)
"""Detail of the pictures: noise of so many points along a side, enlarged, each half as strong as
the one before.
"""
GRAIN = 4.2
"""Standard deviation of what a sensor adds, in levels of 255: makes 52 KB of the rest at this
quality.
"""
SHARD_GROUPS = 50


def write_samples(folder: Path, count: int, workers: int) -> int:
    """Write the JPEG of each sample and all tokens, as `read_samples` takes them; -> bytes of the
    images.
    """
    folder.mkdir(parents=True)
    names = [str(folder / f"{number:06d}.jpg") for number in range(count)]
    with ProcessPoolExecutor(workers) as pool:
        sizes = pool.map(_write_image, names, range(count), chunksize=16)
        rng = np.random.default_rng(0)
        # tokens: (samples, [input ids, labels], tokens)
        tokens = np.full(
            (count, 2, IMAGE_TOKENS + TEXT_TOKENS), shard_fixture.IMAGE_TOKEN, np.int32
        )
        tokens[:, 0, IMAGE_TOKENS:] = rng.integers(
            8, shard_fixture.VOCAB_SIZE, (count, TEXT_TOKENS)
        )
        tokens[:, 1, :IMAGE_TOKENS] = -100
        tokens[:, 1, IMAGE_TOKENS:] = tokens[:, 0, IMAGE_TOKENS:]
        np.save(folder / "tokens.npy", tokens)
        return sum(sizes)


def _write_image(name: str, seed: int) -> int:
    data = make_jpeg(seed)
    Path(name).write_bytes(data)
    return len(data)


def make_jpeg(seed: int) -> bytes:
    """A picture with shapes of all sizes, shading and grain, in the colours that photographs
    have.
    """
    rng = np.random.default_rng(seed)
    picture = np.full((SIDE, SIDE, 3), rng.integers(70, 180, 3), np.float32)
    strength = 60.0
    for points in WAVES:
        noise = np.clip(rng.normal(128, 40, (points, points, 3)), 0, 255).astype(np.uint8)
        picture += (np.asarray(Image.fromarray(noise).resize((SIDE, SIDE)), np.float32) - 128) * (
            strength / 40
        )
        strength /= 2
    picture += rng.normal(0, GRAIN, (SIDE, SIDE, 1))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def write_build(samples: Path, folder: Path) -> None:
    """A finished build of the samples, GROUP to a group, in their own order."""
    counts = {f"num_{name}": 0 for name in shard_fixture.COUNTS}
    counts |= {"num_image_patches": 1, "num_vit_tokens": 1025, "num_image_tokens": IMAGE_TOKENS}
    counts |= {"num_text_tokens": TEXT_TOKENS, "num_loss_tokens": TEXT_TOKENS}
    stored = [
        shard_fixture.Sample(
            sample_id=f"{number:06d}",
            input_ids=sample.tokens[0].tolist(),
            labels=sample.tokens[1].tolist(),
            images=[sample.image],
            sizes=[(SIDE, SIDE)],
            counts=counts,
        )
        for number, sample in enumerate(read_samples(samples))
    ]
    groups = [stored[first : first + GROUP] for first in range(0, len(stored), GROUP)]
    shard_fixture.SHARD_GROUPS = SHARD_GROUPS
    shard_fixture.write_build(folder, groups, model=MODEL)
