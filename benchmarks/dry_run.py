"""What `packer build --dry-run` says next to what the build then takes, on three datasets.

    python benchmarks/dry_run.py [--work FOLDER] [--only NAME ...] [--repeats 3] [--workers 1]
        [--size 1] [--corpus FOLDER --tokenizer FOLDER] [--lengths FILE ...]

- `manuals`: sections of manuals with pictures (`--corpus`; without it the demo's pages), each many
  times with other endings, as a JSON array; 8,192 tokens are given, and `chosen` is the same with
  caps that are chosen.
- `mixture`: LLaVA's layout with pictures, the manuals, and pages of text, with weights.
- `text`: pages of text of very different length, as JSON lines; 8,192 tokens are given.

`--lengths` groups two per cent of known lengths instead, alone and repeated, next to all of them.

Groups, fill, bytes and rejected samples are the same in each run. Seconds are those of the whole
command, as medians of `--repeats` runs in turn; CPU seconds are of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from llava_like import write_llava_like
from rich.table import Table
from tables import console, new_table

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.balance.metrics import fill
from isobatch.common.types import IntArray
from isobatch.packer.demo.dataset import demo_tokenizer_path, write_demo
from isobatch.packer.demo.texts import passage
from isobatch.packer.group import group_counts, read_lengths
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import counts_arrays

SAMPLES = {"manuals": 20_000, "pages": 50_000, "pictures": 20_000}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder for data and builds, which stay there")
    parser.add_argument("--only", nargs="*", default=["manuals", "chosen", "mixture", "text"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--size", type=float, default=1.0, help="factor of all numbers of samples")
    parser.add_argument("--corpus", type=Path, help="folder of the manuals, in LLaVA's layout")
    parser.add_argument("--tokenizer", type=Path, default=demo_tokenizer_path())
    parser.add_argument("--lengths", nargs="*", type=Path, help="OmniBal's length files")
    options = parser.parse_args()
    if options.lengths:
        console.print(groups_of_few(options.lengths))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        places = write_datasets(work / "raw", options.corpus, options.size)
        rows = []
        for name in options.only:
            rows += compare(name, places[name], work / "out", options)
    table = new_table(
        f"{os.cpu_count()} cores, {options.workers} workers, medians of {options.repeats} runs",
        ["dataset", "figure", "dry run", "interval", "build", "error"],
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


# --- groups of few samples ---


def groups_of_few(files: list[Path]) -> Table:
    """Groups that two per cent of samples say all of them have: in 20 draws."""
    counts = counts_arrays(pa.concat_tables([read_lengths(file) for file in files]))
    options = GroupOptions(max_seq_len=4096, max_vision=15)
    unit = {"vision_unit": "image_patches", "context_len": 1 << 20}

    def grouped(rows: IntArray) -> tuple[int, float, float]:
        """(groups, fill, groups by the load of all samples)."""
        some = counts.take(rows)
        groups = group_counts(some, options, **unit).groups
        share = some.num_image_patches.sum() / counts.num_image_patches.sum()
        full = fill(groups, some.seq_len, 4096)
        return len(groups), full, len(groups) / share

    table = new_table("4,096 tokens, 15 image patches", ["samples", "groups", "fill", "error"])
    everything = np.arange(len(counts))
    number, full, _ = grouped(everything)
    table.add_row(f"all {len(counts):,}", f"{number:,}", f"{full:.2%}", "")
    few = len(counts) // 50
    for name, times in ((f"{few:,} drawn", 1), (f"{few:,} drawn, 50 times each", 50)):
        drawn = [
            grouped(np.repeat(np.random.default_rng(seed).permutation(everything)[:few], times))
            for seed in range(20)
        ]
        errors = np.array([by_load / number - 1 for *_, by_load in drawn])
        table.add_row(
            name,
            f"{np.mean([groups for groups, *_ in drawn]):,.0f}",
            f"{np.mean([full for _, full, _ in drawn]):.2%}",
            f"{errors.mean():+.2%} ± {errors.std():.2%}",
        )
    return table


# --- datasets ---


def write_datasets(folder: Path, corpus: Path | None, size: float) -> dict[str, list[str]]:
    """-> the options of each dataset; what is there already stays."""
    numbers = {name: int(number * size) for name, number in SAMPLES.items()}
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_llava_like(folder / "pictures", numbers["pictures"])
        write_manuals(folder / "manuals", corpus, numbers["manuals"])
        write_pages(folder / "pages.jsonl", numbers["pages"])
        weights = {"pictures/annotations.json": 3, "manuals/annotations.json": 2, "pages.jsonl": 1}
        parts = [
            f'[[datasets]]\ndataset = "{place}"\nweight = {weight}\n'
            for place, weight in weights.items()
        ]
        (folder / "mix.toml").write_text("\n".join(parts))
        (folder / "done").touch()
    return {
        "manuals": ["--dataset", str(folder / "manuals"), "--max-seq-len", "8192"],
        "chosen": ["--dataset", str(folder / "manuals")],
        "mixture": ["--dataset", str(folder / "mix.toml"), "--max-seq-len", "4096"],
        "text": ["--dataset", str(folder / "pages.jsonl"), "--max-seq-len", "8192"],
    }


def write_manuals(folder: Path, corpus: Path | None, number: int) -> None:
    """The corpus again and again, each record with another ending."""
    if corpus is None:
        corpus = folder.parent / "demo"
        write_demo(corpus)
    rows = json.loads((corpus / "annotations.json").read_text("utf-8"))
    draw = random.Random(1)
    folder.mkdir()
    (folder / "images").symlink_to((corpus / "images").resolve())
    varied = []
    for place in range(number):
        # sorted by manual, as the corpus is: a file in no random order
        row: dict[str, Any] = json.loads(json.dumps(rows[place % len(rows)]))
        row["id"] = f"{place}-{row['id']}"
        row["conversations"][-1]["value"] += f" {passage(draw)}" * draw.randrange(4)
        if draw.random() < 0.01:
            row["conversations"] = []
        varied.append(row)
    (folder / "annotations.json").write_text(json.dumps(varied, ensure_ascii=False), "utf-8")


def write_pages(file: Path, number: int) -> None:
    """Texts of 40 to some 10,000 words, most of them short."""
    draw = random.Random(2)
    passages = [passage(draw) for _ in range(500)]
    with file.open("w", encoding="utf-8") as lines:
        for place in range(number):
            count = min(120, 1 + int(draw.paretovariate(1.2)))
            text = " ".join(draw.choice(passages) for _ in range(count))
            lines.write(json.dumps({"id": str(place), "text": text}) + "\n")


# --- runs ---


def compare(name: str, place: list[str], out: Path, options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table: each figure of the dry run and of the build."""
    command = ["build", *place, "--model", "qwen2_5_vl", "--tokenizer", str(options.tokenizer)]
    command += ["--workers", str(options.workers), "--out", str(out), "--follow-links"]
    forecasts, builds = [], []
    for _ in range(options.repeats):
        forecasts.append(run([*command, "--dry-run"]))
        assert not out.exists()
        builds.append(run(command))
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        totals = read_manifest(str(out)).values["totals"]
        shutil.rmtree(out)
    said, report = forecasts[0][0], builds[0][0]["report"]
    seconds = [value["seconds"] for value, *_ in forecasts]
    cpu = [value["cpu_seconds"] for value, *_ in forecasts]
    rows = [
        ("num_packed", said["num_packed"], totals["num_packed"]),
        ("num_groups", said["num_groups"], totals["num_groups"]),
        ("fill", said["fill"], report["fill"]),
        ("num_rejected", said["num_rejected"], totals["num_rejected"]),
        ("num_bytes", said["num_bytes"], num_bytes),
        ("seconds", statistics.median(seconds), statistics.median(b[1] for b in builds)),
        ("CPU seconds", statistics.median(cpu), statistics.median(b[2] for b in builds)),
    ]
    own = [statistics.median(f[place] for f in forecasts) for place in (1, 2)]
    console.print(
        f"{name}: {said['num_read']:,.0f} samples, {said['num_drawn']:,} of them drawn in"
        f" {own[0]:.1f} s ({own[1]:.1f} CPU); all builds"
        f" {', '.join(f'{b[1]:.1f} ({b[2]:.1f})' for b in builds)}; all dry runs say"
        f" {', '.join(f'{s:.1f} ({c:.1f})' for s, c in zip(seconds, cpu, strict=True))}"
    )
    texts = []
    for number, (figure, value, truth) in enumerate(rows):
        interval = said["intervals"].get(figure)
        digits = ".3f" if figure == "fill" else ",.0f"
        texts.append(
            [
                name if number == 0 else "",
                figure.removeprefix("num_"),
                f"{value:{digits}}",
                "" if interval is None else f"± {interval:.1%}",
                f"{truth:{digits}}",
                f"{100 * (value / truth - 1):+.1f} %" if truth else "",
            ]
        )
    return texts


def run(command: list[str]) -> tuple[dict[str, Any], float, float]:
    """-> what the command prints, its seconds, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "isobatch.packer", *command, "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, cpu


if __name__ == "__main__":
    main()
