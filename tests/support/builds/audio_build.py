"""A small build with images, clips and texts: uneven samples that have some of them, all, or text
alone.
"""

import io
import wave
from pathlib import Path

import numpy as np
from rich.console import Console

from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from support.builds.raw_data import SIZES, options, write_dataset, write_image

KINDS = {"text": (0, 0), "seen": (6, 0), "heard": (0, 3), "both": (3, 2)}
"""What samples are called by: images and clips at most."""
PER_KIND, MAX_SEQ_LEN = 24, 320
RATE, SHORTEST_S, LONGEST_S = 16_000, 0.06, 4.0
"""Of clips."""


def build_heard(folder: Path) -> Path:
    """-> where the build is."""
    rng = np.random.default_rng(3)
    rows = [
        sample(folder, rng, f"{kind}-{number}", *KINDS[kind])
        for number in range(PER_KIND)
        for kind in KINDS
    ]
    given = options(
        write_dataset(folder, rows), folder / "build", model="tiny_audio", max_seq_len=MAX_SEQ_LEN
    )
    Builder(BuildConfig(**given), StageProgress(Console(file=io.StringIO()))).build()
    return folder / "build"


def sample(
    folder: Path, rng: np.random.Generator, name: str, most_images: int, most_clips: int
) -> dict[str, object]:
    """A record; its files are written."""
    images = [
        f"{name}-{at}.png" for at in range(int(rng.integers(most_images)) + 1 if most_images else 0)
    ]
    clips = [
        f"{name}-{at}.wav" for at in range(int(rng.integers(most_clips)) + 1 if most_clips else 0)
    ]
    for image in images:
        write_image(folder / image, *SIZES[int(rng.integers(3))], seed=int(rng.integers(1 << 30)))
    for clip in clips:
        seconds = min(LONGEST_S, SHORTEST_S + float(rng.lognormal(-0.8, 1.0)))
        write_clip(folder / clip, rng.integers(-9000, 9000, int(seconds * RATE)).astype("<i2"))
    words = "word " * int(rng.integers(1, 60))
    markers = "<image>\n" * len(images) + "<audio>\n" * len(clips)
    turns = [
        {"from": "human", "value": f"{markers}What is it?"},
        {"from": "gpt", "value": f"{words}{name}"},
    ]
    return {"id": name, "conversations": turns, "image": images, "audio": clips}


def write_clip(path: Path, values: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(values.tobytes())
