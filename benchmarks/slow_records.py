"""Records that are slow in Python: `BalancedLoader`'s threads and processes, DataLoader and ODB.

    python benchmarks/slow_records.py [--runs 3] [--samples 600] [--odb DIR]

Two datasets. `python`: each record takes 20 ms of CPU in a Python loop, which holds the
interpreter's lock, and `encode=` gives its tokens. `JPEG`: records of one JPEG file each, counted
and cut into tiles by the product, which releases the lock where it decodes. All methods get each
sample from the same functions; peers pad batches. Nothing trains: batches are taken and dropped.
DataLoader has 2 workers, persistent, of 16 samples a batch in random order. ODB 0.1.2 is as in
`benchmarks/online_training.py`, of one rank, with 2 workers.

samples/s: an epoch by the clock, from when the workers are open. start: from the call until then.
CPU: seconds of all processes per 1,000 samples. busiest: of the process that used most, per 1,000
samples. at best: samples/s that this CPU time allows on two cores, of which a process of the Python
loop uses one; it hardly depends on what else the machine does. load: when the run began.
Runs of the methods follow one another; figures are medians, ratios those of the same turn. Exit
status 1 if a goal of `GOALS` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from isobatch.loaders import BalancedLoader, Encoded  # noqa: E402

RECORD_S, CORES, WORKERS, BATCH = 0.02, 2, 2, 16
METHODS = ("threads", "1 process", "2 processes", "DataLoader", "ODB")
DATA = ("python", "JPEG")
OURS = {"threads": 0, "1 process": 1, "2 processes": 2}
GOALS = {"python": 1.8, "JPEG": 1.0}
"""Of two processes over threads, at least: samples/s by the clock or by CPU time, as others may
use the machine.
"""
MAX_TOKENS, MAX_VISION = 2_048, 64
WORDS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--odb", type=Path, help="where ODB is, or is to be installed")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(*options.run, options)))
        return 0
    from odb_groups import open_odb  # noqa: PLC0415  imports what a run does not need

    console, missed = Console(width=120), []
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = Path(temporary)
        options.odb = options.odb or options.folder / "odb"
        open_odb(options.odb)
        write_pictures(options.folder, options.samples)
        for data in options.data:
            runs: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
            for _ in range(options.runs):
                for method in METHODS:
                    runs[method].append(in_new_process(data, method, options))
            console.print(as_table(data, runs))
            missed += judge(data, runs)
    for line in missed:
        console.print(f"missed: {line}", style="red")
    return 1 if missed else 0


def in_new_process(data: str, method: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", data, method, "--folder", str(options.folder)]
    command += ["--samples", str(options.samples), "--odb", str(options.odb)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(said.splitlines()[-1])
    return figures


def as_table(data: str, runs: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title=f"{data}: samples of an epoch without training")
    for name in ("", "samples/s", "/ threads", "start s", "CPU s", "busiest s", "at best", "load"):
        table.add_column(name, justify="left" if not name else "right")
    for method, found in runs.items():
        by_threads = ratios(runs, method, "rate")
        table.add_row(
            method,
            f"{median(each['rate'] for each in found):.1f}",
            f"{median(by_threads):.2f} ({min(by_threads):.2f} to {max(by_threads):.2f})",
            *(f"{median(e[key] for e in found):.1f}" for key in ("start_s", "cpu_s", "busiest_s")),
            f"{median(e['best'] for e in found):.1f}",
            f"{median(each['load'] for each in found):.1f}",
        )
    return table


def ratios(runs: dict[str, list[dict[str, float]]], method: str, key: str) -> list[float]:
    pairs = zip(runs[method], runs["threads"], strict=True)
    return [own[key] / threads[key] for own, threads in pairs]


def judge(data: str, runs: dict[str, list[dict[str, float]]]) -> list[str]:
    found = {key: median(ratios(runs, "2 processes", key)) for key in ("rate", "best")}
    if max(found.values()) >= GOALS[data]:
        return []
    return [
        f"{data}: 2 processes give {found['rate']:.2f} times the samples/s of threads, by CPU "
        f"time {found['best']:.2f}; the goal is {GOALS[data]}"
    ]


# --- one run ---


def run(data: str, method: str, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one epoch."""
    load, begun = os.getloadavg()[0], time.perf_counter()
    torch.set_num_threads(1)
    samples = ours if method in OURS else peer
    counts = samples(data, method, options)
    next(counts)  # all is open
    ready, before = time.perf_counter(), cpu_times()
    total, after = 0, before
    for count in counts:
        total, after = total + count, after | cpu_times()  # before processes end
    seconds = time.perf_counter() - ready
    used = [value - before.get(pid, 0.0) for pid, value in after.items()]
    cpu_s, busiest_s = 1000 * sum(used) / total, 1000 * max(used) / total
    if total != options.samples:
        raise SystemExit(f"{method} gave {total} samples of {options.samples}")
    # what one process has to do alone: all, where it holds the lock
    alone_s = busiest_s if data == "python" else 0.0
    return {
        "rate": total / seconds,
        "start_s": ready - begun,
        "cpu_s": cpu_s,
        "busiest_s": busiest_s,
        "best": 1000 / max(alone_s, cpu_s / CORES),
        "load": load,
    }


def cpu_times() -> dict[int, float]:
    """Process -> CPU seconds, of this one and those that it has started."""
    pids = [os.getpid()]
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended, and has started no process
            pids += map(int, (task / "children").read_text().split())
    ticks = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids}
    per_s = os.sysconf("SC_CLK_TCK")
    return {pid: (int(values[11]) + int(values[12])) / per_s for pid, values in ticks.items()}


class SlowRecords(Dataset[dict[str, Any]]):
    """Records that take CPU time in Python."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        end = time.thread_time() + RECORD_S
        while time.thread_time() < end:
            pass
        ids = torch.arange(40 + 37 * number % 300)
        return {"id": str(number), "input_ids": ids, "labels": ids, "odb_n_patches": 1}


def encode(record: dict[str, Any]) -> Encoded:
    return Encoded(record["input_ids"])


def rows_of(folder: Path, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    turns = [
        [
            {"from": "human", "value": "<image>\n" + "what is this " * int(rng.integers(1, 40))},
            {"from": "gpt", "value": "a picture " * int(rng.integers(1, 40))},
        ]
        for _ in range(count)
    ]
    names = [str(folder / f"{number % WORDS}.jpg") for number in range(count)]
    return [
        {"id": str(number), "image": name, "conversations": turn}
        for number, (name, turn) in enumerate(zip(names, turns, strict=True))
    ]


def write_pictures(folder: Path, count: int) -> None:
    from loader_data import make_jpeg  # noqa: PLC0415  of the first process alone
    from online_runs.model import save_model  # noqa: PLC0415

    save_model(folder / "model")
    for number in range(min(count, WORDS)):
        (folder / f"{number}.jpg").write_bytes(make_jpeg(number))


def ours(data: str, method: str, options: argparse.Namespace) -> Iterator[int]:
    """Nothing when all is open, then the samples of each step."""
    dataset: Any = SlowRecords(options.samples)
    how: dict[str, Any] = {"encode": encode}
    if data == "JPEG":
        dataset = rows_of(options.folder, options.samples)
        how = {"model": options.folder / "model"}
    size = OURS[method]
    caps = {"max_tokens": MAX_TOKENS, "max_vision": MAX_VISION}
    loader = BalancedLoader(dataset, processes=size, **how, **caps)
    while size and loader._pool._queue.num_open < size:
        time.sleep(0.02)
    yield 0
    for step in loader:
        yield sum(batch.num_samples for batch in step)
    loader.close()


def peer(data: str, method: str, options: argparse.Namespace) -> Iterator[int]:
    """The same of a DataLoader."""
    dataset: Any = SlowRecords(options.samples)
    if data == "JPEG":
        from online_runs.methods import Processed, Task  # noqa: PLC0415  imports transformers
        from online_runs.records import Records  # noqa: PLC0415

        rows = rows_of(options.folder, options.samples)
        records = Records(name=data, rows=rows, max_tokens=MAX_TOKENS, max_vision=MAX_VISION)
        dataset = Processed(Task(records=records, folder=options.folder / "model", method=method))
    if method == "DataLoader":
        loader: Any = DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            collate_fn=pad,
            persistent_workers=True,
        )
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sys.path.insert(0, str(options.odb))
        import odb as package  # noqa: PLC0415  installed for this run

        loader = package.ODBDataLoader(
            dataset,
            token_budget=MAX_TOKENS,
            max_patches=MAX_VISION,
            batch_size=1,
            sampler=DistributedSampler(dataset, num_replicas=1, rank=0),
            num_workers=WORKERS,
            prefetch_factor=64,
            collate_fn=pad,
            loss_scaling="exact",
            join=True,
        )
    yield 0
    for batch in loader:
        yield len(batch["input_ids"])


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch, each sample padded to the longest."""
    ids = [torch.as_tensor(each["input_ids"]) for each in samples]
    batch = {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}
    if "pixel_values" in samples[0]:
        batch["pixel_values"] = torch.cat([each["pixel_values"] for each in samples])
    sums = ("total_batch_size", "odb_total_tokens")
    return batch | {name: samples[0][name] for name in sums if name in samples[0]}


if __name__ == "__main__":
    sys.exit(main())
