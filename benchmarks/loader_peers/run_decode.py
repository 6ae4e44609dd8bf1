"""The limit of decoding: every image is decoded, on as many cores as a loader has workers, and
nothing else is done.

    python run_decode.py SAMPLES {pillow,simplejpeg} WORKERS {threads,processes} [--passes N]
    [--seconds S]

The files are in memory before. Pixels are touched where Pillow has them, without a copy; simplejpeg
writes them into memory for HELD images, each into its own place, because somebody is to get them.
Workers take the images evenly, and pass nothing on but that they are done. Without workers, the
process itself decodes.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path

import measure
import numpy as np
import pyarrow as pa
import simplejpeg
from PIL import Image

PART = 20
"""Images that a worker takes at a time."""
RED_GREEN_BLUE = 3

files: list[bytes] = []
"""Of all samples. Processes inherit them."""


HELD = 32
"""Images of each worker that are in memory at a time: four batches, decoded ahead or in use."""

memory = threading.local()
"""Of simplejpeg's pixels."""


def by_pillow(data: bytes) -> int:
    """Decode and touch an image; -> bytes of its pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    measure.touch(pa.array(image).values.to_numpy().reshape(image.height, image.width, -1))
    return image.width * image.height * RED_GREEN_BLUE


def by_simplejpeg(data: bytes) -> int:
    """The same."""
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    if not hasattr(memory, "places"):
        memory.places = cycle(
            [np.empty((height, width, RED_GREEN_BLUE), np.uint8) for _ in range(HELD)]
        )
    pixels = next(memory.places)
    simplejpeg.decode_jpeg(data, "RGB", buffer=pixels)
    return measure.touch(pixels)


DECODERS: dict[str, Callable[[bytes], int]] = {"pillow": by_pillow, "simplejpeg": by_simplejpeg}


def decode_part(name: str, start: int) -> int:
    """Decode PART images; -> bytes of their pixels."""
    return sum(map(DECODERS[name], files[start : start + PART]))


def one_pass(name: str, pool: Executor | None) -> measure.Pass:
    """All images once."""
    started = time.perf_counter()
    starts = range(0, len(files), PART)
    part = partial(decode_part, name)
    pixels = sum(pool.map(part, starts) if pool else map(part, starts))
    return measure.Pass(time.perf_counter() - started, 0.0, len(files), pixels, 0)


def open_pool(workers: int, kind: str) -> Executor | None:
    """The workers; None if there are none."""
    if workers == 0:
        return None
    if kind == "threads":
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))


def main() -> None:
    """Print one line of JSON, as `measure.main`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", type=Path)
    parser.add_argument("decoder", choices=[*DECODERS])
    parser.add_argument("workers", type=int)
    parser.add_argument("kind", choices=["threads", "processes"])
    parser.add_argument("--passes", type=int, default=0, help="beyond the first")
    parser.add_argument("--seconds", type=float, default=0.0, help="more passes, if they fit")
    given = parser.parse_args()
    files.extend(sample.image for sample in measure.read_samples(given.samples))
    pool = open_pool(given.workers, given.kind)
    passes = measure.repeat(lambda: one_pass(given.decoder, pool), given.passes, given.seconds)
    if pool:
        pool.shutdown()
    print(json.dumps({"open_seconds": 0.0, "passes": passes}))


if __name__ == "__main__":
    main()
