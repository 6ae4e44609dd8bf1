"""How long a new user waits: the first build, commands and imports, each next to its limit.

    python benchmarks/cold_start.py [--repeats 3] [--work FOLDER]

`cold` is with an empty cache of kernels and no drawn demo, as after an install, `warm` with both.
Python keeps its bytecode, as after an install. numba and pyarrow load SciPy, awkward and pandas
where they are installed, which a new user does not need: run it by the Python of an environment
with Isobatch alone, too. Each figure is the least of `--repeats` runs in new processes: the clock
(which other work on the machine slows down), and CPU seconds of all processes.

The first batch is that of a `StreamingLoader` of the demo's build, decoded, from its construction
on, when torch is imported. torch, and streaming libraries where they are installed, are there to
compare.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tables import console, new_table

PEERS = ("torch", "streaming", "litdata", "datasets", "webdataset")
FIRST_BATCH = """
import resource, sys, time, torch
from isobatch import StreamingLoader
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
begun, used = time.perf_counter(), cpu()
next(iter(StreamingLoader(sys.argv[1])))
print(time.perf_counter() - begun, cpu() - used)
"""

Times = tuple[float, float]
"""Seconds by the clock, and of all processors."""
Row = tuple[str, tuple[Times | None, float | None], tuple[Times, float | None]]
"""What it is, cold times with their limit, and warm ones."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for builds and caches")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        rows = measure(Path(folder), arguments.repeats)
    table = new_table(
        "cold and warm starts, seconds",
        ["what", "cold", "CPU", "limit", "warm", "CPU", "limit"],
    )
    for name, *both in rows:
        pairs = [pair for times, limit in both for pair in cells(times, limit)]
        table.add_row(name, *pairs)
    console.print(table)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load {load}; least of {arguments.repeats} runs")


def cells(times: Times | None, limit: float | None) -> list[str]:
    """Both times, and the limit of the clock; empty ones for what is not measured."""
    shown = [f"{value:.2f}" for value in times] if times else ["", ""]
    return [*shown, f"{limit:g}" if limit else ""]


def measure(folder: Path, repeats: int) -> list[Row]:
    """All rows of the table."""
    packer = [sys.executable, "-m", "packer"]
    out, cache = folder / "out", folder / "cache"
    build = [*packer, "build", "--dataset", "demo", "--out", str(out)]
    both = []
    for clear in ((out, cache), (out,)):
        both.append(least([run(build, cache, clear) for _ in range(repeats)]))
    rows: list[Row] = [("packer build --dataset demo", (both[0], 5.0), (both[1], 2.0))]
    # a loader's kernels are others: a cache without them is full after its first run
    first = [sys.executable, "-c", FIRST_BATCH, str(out)]
    both = []
    for clear in ((cache,), ()) if find_spec("torch") else ():
        both.append(least([run(first, cache, clear, inside=True) for _ in range(repeats)]))
    if both:
        rows.append(("first batch of StreamingLoader", (both[0], None), (both[1], 0.3)))
    commands = {
        "packer --help": ([*packer, "--help"], 0.3),
        "packer --version": ([*packer, "--version"], 0.3),
        "import isobatch": ([sys.executable, "-c", "import isobatch"], 0.1),
    }
    for peer in filter(find_spec, PEERS):
        commands[f"import {peer}"] = ([sys.executable, "-c", f"import {peer}"], None)
    for name, (command, limit) in commands.items():
        times = least([run(command, cache) for _ in range(repeats)])
        rows.append((name, (None, None), (times, limit)))
    return rows


def least(times: list[Times]) -> Times:
    """The least of each."""
    seconds, cpu = zip(*times, strict=True)
    return min(seconds), min(cpu)


def run(
    command: list[str], cache: Path, clear: tuple[Path, ...] = (), *, inside: bool = False
) -> Times:
    """Run a command without some folders; `inside`: it prints its times itself."""
    for folder in clear:
        shutil.rmtree(folder, ignore_errors=True)
    caches = {"NUMBA_CACHE_DIR": str(cache / "kernels"), "XDG_CACHE_HOME": str(cache / "user")}
    environment = {**os.environ, **caches, "PYTHONDONTWRITEBYTECODE": ""}
    before, begun = children_cpu(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    times = time.perf_counter() - begun, children_cpu() - before
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])}: {done.stderr}")
    return tuple(map(float, done.stdout.split())) if inside else times  # type: ignore[return-value]


def children_cpu() -> float:
    """CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
