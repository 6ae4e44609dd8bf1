"""Counting and writing of partitions on two workers: Ray's against local processes.

    python benchmarks/packing_on_ray.py [--samples 40000] [--partitions 8] [--runs 3]

A dataset in LLaVA-665K's layout (`llava_like.py`), built in turns by both executors, each in a new
process. Ray and its workers have started before; figures are of the stage that counts, groups and
writes. CPU: of all processes of the build, by /proc, which hardly depends on what else the machine
does. Ratios are of local processes over Ray, of the same turn; exit status 1 if the median by the
clock and that by CPU time are both below `GOAL`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from llava_like import write_llava_like

from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.partitions.run import connect_ray
from isobatch.packer.progress import RunningStage, StageProgress

GOAL, WORKERS, LOOK_S = 0.9, 2, 0.1
MARK = "ISOBATCH_MEASURED_BUILD"
"""In the environment of all processes of a build."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--build", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(json.dumps(build(*options.build)))
        return 0
    runs: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with TemporaryDirectory() as folder:
        write_llava_like(Path(folder, "raw"), options.samples)
        size = str(options.samples // options.partitions)
        for turn in range(options.runs):
            for executor, found in runs.items():
                command = [sys.executable, __file__, "--build", folder, executor, size]
                told = {**os.environ, MARK: f"{os.getpid()}-{turn}-{executor}"}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=told)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(title=f"{options.samples:,} samples, {options.partitions} partitions, 2 workers")
    for name in ("executor", "samples/s", "local / it", "CPU ms per sample", "local / it"):
        table.add_column(name, justify="right")
    medians = {}
    for executor, found in runs.items():
        cells = [executor]
        for key in ("seconds", "cpu_s"):
            of = [each[key] for each in found]
            by_local = [a[key] / b for a, b in zip(runs["local"], of, strict=True)]
            medians[key] = median(by_local)
            value = options.samples / median(of) if key == "seconds" else median(of)
            per_sample = 1000 * value / options.samples
            cells += [f"{value:,.0f}" if key == "seconds" else f"{per_sample:.2f}"]
            cells += [f"{medians[key]:.2f} ({min(by_local):.2f} to {max(by_local):.2f})"]
        table.add_row(*cells)
    Console(width=100).print(table)
    return int(max(medians.values()) < GOAL)


def build(folder: str, executor: str, size: str) -> dict[str, float]:
    """Seconds of the stage that packs, by the clock and of CPUs."""
    with TemporaryDirectory(dir=folder) as out:
        config = BuildConfig(
            dataset=str(Path(folder, "raw")),
            out=str(Path(out, "packed")),
            model="internvl_1_5",
            tokenizer=str(demo_tokenizer_path()),
            max_seq_len=4096,
            executor="ray" if executor == "ray" else "local",
            workers=WORKERS,
            partition_samples=int(size),
        )
        if executor == "ray":
            connect_ray(WORKERS)
        with Measured() as progress:
            Builder(config, progress).build()
    return {"seconds": progress.seconds["pack"], "cpu_s": progress.cpu_s}


class Measured(StageProgress):
    """Notes what the stage that packs takes of CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = 0.0
        self._times: dict[int, float] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "Measured":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextmanager
    def stage(
        self, name: str, total: float | None, unit: str = "samples"
    ) -> Iterator[RunningStage]:
        before = self._cpu_s()
        with super().stage(name, total, unit) as running:
            yield running
        if name == "pack":
            self.cpu_s = self._cpu_s() - before

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):  # who has ended keeps what was seen last
            self._cpu_s()

    def _cpu_s(self) -> float:
        mark = f"{MARK}={os.environ[MARK]}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if int(place.name) in self._times or mark in (place / "environ").read_bytes():
                    values = (place / "stat").read_text().rpartition(")")[2].split()
                    ticks = int(values[11]) + int(values[12])
                    self._times[int(place.name)] = ticks / os.sysconf("SC_CLK_TCK")
        return sum(self._times.values())


if __name__ == "__main__":
    sys.exit(main())
