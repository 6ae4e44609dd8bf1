"""The limit of decoding: Pillow decodes every image, on as many cores as a loader has workers, and nothing else.

    python run_decode.py SAMPLES WORKERS {threads,processes} [--passes N] [--seconds S]

The files are in memory before. Pixels are touched where Pillow has them, without a copy. Workers take the images
evenly, and pass nothing on but that they are done. Without workers, the process itself decodes.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import measure
import pyarrow as pa
from PIL import Image

PART = 20
"""Images that a worker takes at a time."""
RED_GREEN_BLUE = 3

files: list[bytes] = []
"""Of all samples. Processes inherit them."""


def decode_part(start: int) -> int:
    """Decode PART images; -> bytes of their pixels."""
    pixels = 0
    for data in files[start : start + PART]:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        measure.touch(pa.array(image).values.to_numpy())
        pixels += image.width * image.height * RED_GREEN_BLUE
    return pixels


def one_pass(pool: Executor | None) -> measure.Pass:
    """All images once."""
    started = time.perf_counter()
    starts = range(0, len(files), PART)
    pixels = sum(pool.map(decode_part, starts) if pool else map(decode_part, starts))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("kind", choices=["threads", "processes"])
    parser.add_argument("--passes", type=int, default=0, help="beyond the first")
    parser.add_argument("--seconds", type=float, default=0.0, help="more passes, if they fit")
    given = parser.parse_args()
    files.extend(sample.image for sample in measure.read_samples(given.samples))
    pool = open_pool(given.workers, given.kind)
    passes = measure.repeat(lambda: one_pass(pool), given.passes, given.seconds)
    if pool:
        pool.shutdown()
    print(json.dumps({"open_seconds": 0.0, "passes": passes}))


if __name__ == "__main__":
    main()
