"""Counting and writing against their physical limits, and their memory.

    python benchmarks/counting.py [--samples 665000] [--tokenizer FOLDER] [--work FOLDER]
    python benchmarks/counting.py --families [MODEL ...] [--samples 60000]

In one run: the dataset is written (`benchmarks/llava_like.py`), `packer build` packs it in its own
process, and the limits are measured on the same data and cores.

- Counting is compared with the tokenizer on the same texts (`encode_batch` of `tokenizers`, its own
  threads) and after that the image headers (Pillow's open, one process per core). This is measured
  before and after the build, and the mean counts. Counting encodes with `gigatoken` if that is
  installed, and is to take half of that time; else it is to take no more than 1.4 times of it.
- Writing can be no faster than copying the same bytes: every image file in the shards' order, read
  and appended to files of a shard's size, with the shards' token arrays, one process per core.
- Memory is the sum of the proportional set sizes of all processes of the build, sampled. The
  reader's is the peak of a process that only reads the annotations.

`--families` counts the same data for a model of each rule, or for those that are named, and prints
a line for each: nothing but counting, next to that limit. A folder is counted with its tokenizer.

Exit status 1 when counting is below what is wanted or writing below 0.6 of its limit, or memory
above 3 GB (reader: 300 MB).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
from llava_like import write_llava_like
from PIL import Image
from tables import console, new_table
from tokenizers import Tokenizer

from isobatch.counting.text.chat_tokenizer import IMAGE_MARKER
from isobatch.models.presets import load_model, model_to_dict
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.sources.dataset import find_dataset

MODEL = "internvl_1_5"
FAMILIES = (
    *("llava_1_5", "gemma3", "llava_next", "llava_onevision", "internvl3", "qwen2_5_vl", "glm4v"),
    *("smolvlm2", "idefics3", "mistral3"),
)
TEXTS = 60_000
"""Conversations that the tokenizer's limit is measured on, taken evenly."""
BATCH = 1024
TOKEN_SAMPLE = 8 << 20
"""Bytes of real token arrays that are copied again and again instead of all of them."""
SETTLE_SECONDS = 30
"""Pause between deleting the shards and copying.

A virtual machine pays for memory at its first use, and returns free memory within seconds. Memory
that was freed just now costs nothing, and the copy must pay what the build has paid.
"""
LEAST_COUNTING = 2.0 if find_spec("gigatoken") else 0.7
LEAST_WRITING = 0.6
MOST_MEMORY, MOST_READER = 3 * 10**9, 300 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRun:
    """What a build took."""

    seconds: dict[str, float]
    num_packed: int
    peak_bytes: int


def main(arguments: list[str] | None = None) -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=665_000)
    parser.add_argument(
        "--tokenizer", type=Path, default=demo_tokenizer_path(), help="folder; default: the demo's"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        help="folder for data and build; default: a temporary one",
    )
    parser.add_argument("--families", nargs="*", metavar="MODEL", help="presets or folders")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        if options.families is not None:
            models = options.families or FAMILIES
            return count_families(Path(scratch), models, options.samples, options.tokenizer)
        return run(Path(scratch), options.samples, options.tokenizer)


def run(folder: Path, samples: int, tokenizer: Path) -> int:
    """Everything, in `folder`."""
    raw, out, workers = folder / "raw", folder / "out", len(os.sched_getaffinity(0))
    image_bytes = write_llava_like(raw, samples)
    annotation_bytes = (raw / "annotations.json").stat().st_size
    console.print(
        f"{samples:,} samples, {annotation_bytes / 1e6:,.0f} MB of annotations,"
        f" {image_bytes / 1e6:,.0f} MB of images; {workers} cores"
    )
    before = counting_seconds(raw, tokenizer, samples, workers)
    built = build(raw, out, tokenizer, workers)
    # machines are faster at one time than at another
    counting = (before + counting_seconds(raw, tokenizer, samples, workers)) / 2
    writing, num_bytes = copy_seconds(raw, out, folder / "copy", workers)
    reader = reader_peak(raw)
    rows = [
        ("counting", built.seconds["count"], counting, LEAST_COUNTING),
        ("writing", built.seconds["write"], writing, LEAST_WRITING),
    ]
    table = new_table("", ["stage", "seconds", "samples/s", "limit, s", "of the limit", "wanted"])
    for stage, seconds, limit, least in rows:
        table.add_row(
            stage,
            f"{seconds:,.1f}",
            f"{samples / seconds:,.0f}",
            f"{limit:,.1f}",
            f"{limit / seconds:.2f}",
            f"{least}",
        )
    console.print(table)
    others = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in built.seconds.items())
    console.print(
        f"all stages: {others}; {num_bytes / 1e6:,.0f} MB of shards,"
        f" {built.num_packed:,} samples packed"
    )
    wanted = f"{built.peak_bytes / 1e6:,.0f} MB (wanted: {MOST_MEMORY / 1e6:,.0f})"
    alone = f"{reader / 1e6:,.0f} MB (wanted: {MOST_READER / 1e6:,.0f})"
    console.print(f"peak memory: all processes {wanted}, the reader alone {alone}")
    reached = all(limit / seconds >= least for _, seconds, limit, least in rows)
    return 0 if reached and built.peak_bytes <= MOST_MEMORY and reader <= MOST_READER else 1


def count_families(folder: Path, models: Sequence[str], samples: int, tokenizer: Path) -> int:
    """Count the data for each model."""
    raw, workers = folder / "raw", len(os.sched_getaffinity(0))
    write_llava_like(raw, samples)
    limit, rows = counting_seconds(raw, tokenizer, samples, workers), []
    for number, model in enumerate(models):
        config = BuildConfig(
            dataset=str(raw),
            model=model,
            tokenizer=None if Path(model).is_dir() else str(tokenizer),
            out=str(folder / f"out-{number}"),
            workers=workers,
        )
        builder = Builder(config)
        builder.count()
        rule = model_to_dict(builder.model)["vision"]["rule"]
        rows.append((builder.model.name, rule, builder.progress.seconds["count"]))
    # machines are faster at one time than at another
    limit = (limit + counting_seconds(raw, tokenizer, samples, workers)) / 2
    table = new_table(
        f"{samples:,} samples, {workers} cores; the limit takes {limit:,.1f} s",
        ["model", "rule", "seconds", "samples/s", "of the limit"],
    )
    for name, rule, seconds in rows:
        rate = f"{samples / seconds:,.0f}"
        table.add_row(name, rule, f"{seconds:,.1f}", rate, f"{limit / seconds:.2f}")
    console.print(table)
    return 0


def build(raw: Path, out: Path, tokenizer: Path, workers: int) -> BuildRun:
    """Run `packer build` as a process and watch its memory and that of its children."""
    options = {
        "dataset": raw,
        "model": MODEL,
        "tokenizer": tokenizer,
        "out": out,
        "workers": workers,
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    script = "from isobatch.packer.cli import main; main()"
    command = [sys.executable, "-c", script, "build", *given, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        watch = MemoryWatch(process.pid)
        printed, _ = process.communicate()
        peak = watch.stop()
    if process.returncode:
        raise SystemExit(f"packer build ended with status {process.returncode}")
    summary = json.loads(printed)
    return BuildRun(
        seconds=summary["seconds"], num_packed=summary["totals"]["num_packed"], peak_bytes=peak
    )


class MemoryWatch:
    """Samples the proportional set size of a process and all below it."""

    def __init__(self, pid: int, interval: float = 1.0) -> None:
        self._pid, self._interval = pid, interval
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._peak = max(self._peak, sum(map(_pss, _tree(self._pid))))

    def stop(self) -> int:
        """End; -> the peak in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # it ended after it was listed, and its memory is free
        return 0
    return 0


def counting_seconds(raw: Path, tokenizer: Path, samples: int, workers: int) -> float:
    """The tokenizer and then the image headers, and nothing else."""
    return header_seconds(raw, workers) + token_seconds(raw, tokenizer, samples)


def token_seconds(raw: Path, tokenizer: Path, samples: int) -> float:
    """The tokenizer alone on the texts of all samples, by those of evenly taken batches."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    markup = load_model(MODEL).image_markup
    backend.add_special_tokens([markup.prefix, markup.suffix, markup.token])
    wanted = min(samples, TEXTS)
    every = max(1, samples // wanted)
    seconds, texts = 0.0, 0
    (part,) = find_dataset(str(raw), None).parts
    for number, chunk in enumerate(part.open().chunks(BATCH, lambda _: None)):
        if number % every:
            continue
        batch = [chat(record.value["conversations"], markup.text) for record in chunk.records()]
        started = time.perf_counter()
        backend.encode_batch(batch, add_special_tokens=False)
        seconds += time.perf_counter() - started
        texts += len(batch)
    return seconds / texts * samples


def chat(turns: list[dict[str, str]], image: str) -> str:
    """A conversation in ChatML."""
    roles = {"human": "user", "gpt": "assistant"}
    return "".join(
        f"<|im_start|>{roles[turn['from']]}\n"
        f"{turn['value'].replace(IMAGE_MARKER, image)}<|im_end|>\n"
        for turn in turns
    )


def header_seconds(raw: Path, workers: int) -> float:
    """Pillow's open on the image of every sample, as often as samples have it, on all cores."""
    (part,) = find_dataset(str(raw), None).parts
    chunks = part.open().chunks(BATCH * 8, lambda _: None)
    names = [
        [record.value["image"] for record in chunk.records() if "image" in record.value]
        for chunk in chunks
    ]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_nothing, range(workers)))
        started = time.perf_counter()
        list(pool.map(_open_all, [str(raw)] * len(names), names))
        return time.perf_counter() - started


def _nothing(_: int) -> None:
    pass


def _open_all(raw: str, names: list[str]) -> int:
    pixels = 0
    for name in names:
        with Image.open(f"{raw}/{name}") as image:
            pixels += image.width * image.height
    return pixels


def copy_seconds(raw: Path, out: Path, target: Path, workers: int) -> tuple[float, int]:
    """(seconds, bytes) of copying the shards' files and token arrays to one file per shard."""
    target.mkdir()
    images = {}
    (part,) = find_dataset(str(raw), None).parts
    for chunk in part.open().chunks(BATCH, lambda _: None):
        images.update({record.value["id"]: record.value.get("image") for record in chunk.records()})
    jobs, total, sample = [], 0, b""
    for shard in sorted((out / "shards").iterdir()):
        with pa.memory_map(str(shard)) as source:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            ids = [name for batch in batches for name in batch.column("sample_id").to_pylist()]
            arrays = [
                batch.column(name).flatten()
                for batch in batches
                for name in ("input_ids", "labels")
            ]
            # zeros would be cheaper to write: some disks notice them
            sample = (
                sample or b"".join(array.to_numpy().tobytes() for array in arrays)[:TOKEN_SAMPLE]
            )
        num_tokens = sum(map(len, arrays))
        names = [images[name] for name in ids if images[name]]
        jobs.append((str(raw), names, num_tokens * 4, sample, str(target / shard.name)))
        total += shard.stat().st_size
    shutil.rmtree(out / "shards")  # both at once may not fit
    os.sync()
    time.sleep(SETTLE_SECONDS)
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_nothing, range(workers)))
        started = time.perf_counter()
        list(pool.map(_copy, jobs))
        return time.perf_counter() - started, total


def _copy(job: tuple[str, list[str], int, bytes, str]) -> None:
    raw, names, token_bytes, sample, target = job
    with open(target, "wb") as file:
        for name in names:
            with open(f"{raw}/{name}", "rb", buffering=0) as image:
                file.write(image.readall())
        for start in range(0, token_bytes, len(sample)):
            file.write(sample[: token_bytes - start])


def reader_peak(raw: Path) -> int:
    """Peak memory in bytes of a process that reads all records and keeps none."""
    script = (
        "import sys\nfrom isobatch.packer.sources.dataset import find_dataset\n"
        "(part,) = find_dataset(sys.argv[1], None).parts\n"
        "for chunk in part.open().chunks(1024, lambda _: None): pass\n"
        # not ru_maxrss, which begins with what the parent had
        "status = [line.split() for line in open('/proc/self/status')]\n"
        "print(next(words[1] for words in status if words[0] == 'VmHWM:'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(raw)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    return int(done.stdout) * 1024


if __name__ == "__main__":
    sys.exit(main())
