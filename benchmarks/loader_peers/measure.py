"""What every loader of benchmarks/loader_speed.py is measured by, in a process and an environment
of its own.

An adapter (`run_NAME.py` beside this file) says how one loader's data are written and how it is
opened, and hands both to `main`. It is called in one of two ways, and prints one line of JSON:

    python run_NAME.py write SAMPLES FOLDER
    python run_NAME.py read PLACE {raw,decoded} WORKERS SAMPLES CACHE [--passes N] [--seconds S]

Only NumPy, Pillow and torch may be imported here: peers' environments have no Isobatch.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

Tokens = NDArray[np.int32]
BATCH = 8
"""Samples of a batch."""
GROUP = 8
"""Samples of a group of our own build: a batch."""
SHARDS = 8
"""Files of a dataset, in formats whose workers take whole files."""
LINE, PAGE = 64, 4096
"""One byte of so many is read of what arrives. Of files and tokens each cache line, as a copy or a
decoder would; of pixels each page, so that they are there: to read all of them would take a tenth
of the time of decoding, for which a trainer's copy to a GPU needs no core.
"""
MAX_PASSES = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One training example."""

    image: bytes
    """A JPEG."""
    tokens: Tokens
    """int32, (2, tokens): input ids, labels."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a loader is to do."""

    place: str
    """The folder that `write` has filled, or an s3:// URL that holds the same files."""
    decoded: bool
    """Images arrive as uint8 RGB arrays or tensors; else as the bytes of the JPEG."""
    workers: int
    num_samples: int
    cache: Path
    """An empty folder for whatever the loader keeps on disk."""

    @property
    def remote(self) -> bool:
        return self.place.startswith("s3://")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all samples, and what arrived."""

    seconds: float
    first_seconds: float
    """Until the first batch was there."""
    images: int
    image_bytes: int
    tokens: int
    """Input ids and labels."""


Batch = Any
Parts = Callable[[Batch], tuple[Sequence[Any], Sequence[Any]]]
"""Batch -> its images and its arrays of tokens."""
Write = Callable[[list[Sample], Path], None]
Open = Callable[[Task], Iterable[Batch]]
"""The loader: each iteration over it is one pass over all samples."""


def shards(samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each of SHARDS files, in order."""
    size = -(-len(samples) // SHARDS)
    return [samples[first : first + size] for first in range(0, len(samples), size)]


class Packed(NamedTuple):
    """A batch as a trainer takes it: what Isobatch gives, and therefore what everybody is to
    give.
    """

    images: list[Any]
    """One by one, because images of a real dataset have many sizes."""
    input_ids: torch.Tensor
    """int64, (tokens,), one sample behind the other, as `labels` and `position_ids`."""
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32, (samples + 1,)."""


def pack(samples: Sequence[tuple[Any, Tokens]]) -> Packed:
    """The batch of (image, tokens)."""
    rows = [tokens for _, tokens in samples]
    lengths = [tokens.shape[1] for tokens in rows]
    tokens = torch.from_numpy(np.concatenate(rows, axis=1, dtype=np.int64))
    counted = np.arange(max(lengths))
    return Packed(
        images=[image for image, _ in samples],
        input_ids=tokens[0],
        labels=tokens[1],
        position_ids=torch.from_numpy(np.concatenate([counted[:length] for length in lengths])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
    )


def parts_of(batch: Packed) -> tuple[list[Any], list[Any]]:
    """The parts of a packed batch."""
    return batch.images, [batch.input_ids, batch.labels]


def decode(image: bytes) -> torch.Tensor:
    """uint8, (height, width, 3). A tensor, because DataLoaders pass tensors between processes by
    shared memory.
    """
    return torch.from_numpy(np.array(Image.open(io.BytesIO(image)).convert("RGB")))


def image_of(task: Task, image: bytes) -> Any:
    """What is to arrive of a JPEG."""
    return decode(image) if task.decoded else image


def touch(values: Any) -> int:
    """Read one byte of every cache line, or of every page of an image's pixels; -> the number of
    bytes.
    """
    if isinstance(values, torch.Tensor):
        values = values.numpy()
    is_image = isinstance(values, np.ndarray) and values.ndim == len(("height", "width", "channel"))
    flat = (
        values.reshape(-1).view(np.uint8)
        if isinstance(values, np.ndarray)
        else np.frombuffer(values, np.uint8)
    )
    flat[:: PAGE if is_image else LINE].sum()
    return len(flat)


def one_pass(loader: Iterable[Batch], parts: Parts) -> Pass:
    """Take all batches, and touch all that is in them."""
    started, first_seconds = time.perf_counter(), 0.0
    images = image_bytes = tokens = 0
    for batch in loader:
        first_seconds = first_seconds or time.perf_counter() - started
        files, arrays = parts(batch)
        images += len(files)
        image_bytes += sum(map(touch, files))
        for array in arrays:
            tokens += touch(array) // array.itemsize
    return Pass(time.perf_counter() - started, first_seconds, images, image_bytes, tokens)


def repeat(once: Callable[[], Pass], passes: int, seconds: float) -> list[dict[str, Any]]:
    """The first pass and `passes` more, or as many more as fit into `seconds` if these are more."""
    started = time.perf_counter()
    done = [once()]
    while len(done) <= passes or (
        len(done) < MAX_PASSES and time.perf_counter() - started < seconds
    ):
        done.append(once())
    return [asdict(each) for each in done]


def read(
    open_loader: Open, parts: Parts, task: Task, passes: int, seconds: float
) -> dict[str, Any]:
    """What is to be printed of a loader."""
    started = time.perf_counter()
    loader = open_loader(task)
    opened = time.perf_counter() - started
    return {
        "open_seconds": opened,
        "passes": repeat(lambda: one_pass(loader, parts), passes, seconds),
    }


def read_samples(folder: Path) -> Iterator[Sample]:
    """The samples that `loader_data.write_samples` wrote."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")  # (samples, 2, tokens)
    for number, row in enumerate(tokens):
        yield Sample((folder / f"{number:06d}.jpg").read_bytes(), np.array(row))


def main(write: Write, open_loader: Open, *, package: str = "", parts: Parts = parts_of) -> None:
    """Do what the command line says. `package`: whose version is told."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("samples", type=Path)
    writing.add_argument("folder", type=Path)
    reading = commands.add_parser("read")
    reading.add_argument("place")
    reading.add_argument("work", choices=["raw", "decoded"])
    reading.add_argument("workers", type=int)
    reading.add_argument("num_samples", type=int)
    reading.add_argument("cache", type=Path)
    reading.add_argument("--passes", type=int, default=0, help="beyond the first")
    reading.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    if given.command == "write":
        write(list(read_samples(given.samples)), given.folder)
        print(json.dumps({"version": version(package)}))
        return
    task = Task(given.place, given.work == "decoded", given.workers, given.num_samples, given.cache)
    print(json.dumps(read(open_loader, parts, task, given.passes, given.seconds)))
