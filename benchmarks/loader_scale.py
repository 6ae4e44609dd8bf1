"""Time and memory of what a loader does once per build, epoch or step, at eleven million groups.

    python benchmarks/loader_scale.py [--groups 11000000] [--builds 3] [--dp 64] [--micro-batches 8]
    [--only TEXT] [--folder FOLDER]

Generates one build of `--groups` groups, and `--builds` that have as many together, in a temporary
folder: manifest and index alone, because nothing here reads a shard. For regrouping, one of
`--regrouped` groups of samples like InternVL-1.2M's. Each row is measured in a process of its own,
after the same on small builds, which compiles. "CPU s" is what to compare on a machine that does
other work as well. "peak" is the largest memory of the process alone, less what it had before;
"mapped" are pages of the index, which are in memory once for all processes of a machine. The index
is in the page cache: it was just written.

The last row is a node: eight processes, each of which opens the builds and plans steps until nearly
every page of the columns that it needs is mapped. Its memory is the sum of their proportional set
sizes, in which a page that they share counts once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scale_builds import write_build, write_sampled_build
from tables import console, new_table

from isobatch.balance.order.step_order import DEFAULT_BALANCE, GlobalShuffle
from isobatch.common.types import IntArray
from isobatch.loaders.read.build import Build, open_builds
from isobatch.loaders.steps.build_groups import BuildSource
from isobatch.loaders.steps.mixture import MixedSource
from isobatch.loaders.steps.steps import StepConfig, Steps

SMALL = 5_000
"""Groups of the builds that only compile."""
LARGE_DP, LARGE_MICRO_BATCHES = 4_096, 8
"""A step of many ranks."""
NODE = 8
"""Processes of a node."""
NODE_STEPS = 200
"""Steps that each plans."""
WINDOW_GROUPS = 4_096
POLL_S = 0.002
MB = 1e6


def main() -> int:
    options = parse()
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    chosen = [name for name in ROWS if options.only in name]
    table = new_table(
        f"{options.groups:,} groups, {options.builds} builds where several, "
        f"{options.dp} ranks x {options.micro_batches} micro-batches",
        ("", "seconds", "CPU s", "peak MB", "mapped MB"),
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for label in ("small", "large"):
            write_builds(Path(folder, label), options, label == "small", chosen)
        for name in chosen:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            done = subprocess.run(
                [*command, "--folder", folder], check=True, stdout=subprocess.PIPE, text=True
            )
            wall_s, cpu_s, peak, mapped = json.loads(done.stdout)
            times = f"{wall_s:.3f}", f"{cpu_s:.3f}"
            table.add_row(name, *times, f"{peak:,.0f}", f"{mapped:,.0f}")
    console.print(table)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=11_000_000)
    parser.add_argument("--regrouped", type=int, default=1_000_000)
    parser.add_argument("--builds", type=int, default=3)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--folder", help="where the builds are generated; 120 bytes per group")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_builds(
    folder: Path, options: argparse.Namespace, small: bool, rows: Sequence[str]
) -> None:
    """The builds that the rows read."""
    groups, regrouped = (SMALL, SMALL) if small else (options.groups, options.regrouped)
    needed = {ROWS[name].builds for name in rows}
    if "whole" in needed:
        write_build(folder / "whole", groups, seed=0)
    if "part" in needed:
        for number in range(options.builds):
            write_build(folder / f"part-{number}", groups // options.builds, seed=number + 1)
    if "sampled" in needed:
        write_sampled_build(folder / "sampled", regrouped, seed=0)


# --- what is measured ---

Case = Callable[[Path, argparse.Namespace], Callable[[], object]]
"""Prepares in a folder of builds; -> what is measured."""


def random_rows(share: float) -> Case:
    """A column for random groups."""

    def case(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
        index = opened([folder / "whole"])[0].index
        groups = np.random.default_rng(0).permutation(len(index))[: int(share * len(index))]
        return lambda: index.column("num_loss_tokens", groups)

    return case


def open_one(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """A build, and its first epoch."""
    return lambda: steps(opened([folder / "whole"]), options)


def open_several(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """Builds in one stream, and its first epoch."""
    return lambda: steps(opened(parts_of(folder)), options)


def first_step_of_one(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The plan of one rank's first step."""
    begun = steps(opened([folder / "whole"]), options)
    return lambda: begun.plan(1)


def first_step_of_several(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The plan of one rank's first step."""
    begun = steps(opened(parts_of(folder)), options)
    return lambda: begun.plan(1)


def next_epoch(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The groups of epoch 1, made when they are asked for."""
    source = source_of(opened(parts_of(folder)))
    source.table(0)
    return lambda: source.table(1)


def prepared_epoch(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The groups of epoch 1, prepared while epoch 0 runs."""
    source = source_of(opened(parts_of(folder)))
    source.table(0)
    source.prepare(1)
    while any(thread.name.startswith("isobatch-epoch") for thread in threading.enumerate()):
        time.sleep(0.01)
    return lambda: source.table(1)


def regrouped(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The groups of epoch 1, made when they are asked for."""
    (build,) = opened([folder / "sampled"])
    source = BuildSource(build, window_groups=WINDOW_GROUPS)
    source.table(0)
    return lambda: source.table(1)


def order_step(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """Groups of a step of many ranks, after one that reads the index."""
    (build,) = opened([folder / "whole"])
    index = build.index
    order = GlobalShuffle(num_groups=len(index), seed=0, epoch=0, balance=DEFAULT_BALANCE)

    def loads(groups: IntArray) -> tuple[IntArray, IntArray]:
        kinds = ("image", "text", "audio")
        tokens = sum(index.column(f"num_{kind}_tokens", groups) for kind in kinds)
        return index.column("num_image_patches", groups), tokens

    def step() -> object:
        return order.take_step(LARGE_DP, LARGE_MICRO_BATCHES, loads)

    step()
    return step


def large_step(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The plan of a rank's step among many, after one that reads the index."""
    options = argparse.Namespace(dp=LARGE_DP, micro_batches=LARGE_MICRO_BATCHES)
    begun = steps(opened([folder / "whole"]), options)
    begun.plan(1)
    return lambda: begun.plan(1)


class Row(NamedTuple):
    """A row of the table."""

    case: Case | None
    """None: a node."""
    builds: str
    """Which it reads: "whole", "part" or "sampled"."""
    times: int = 1
    """Runs, whose mean counts."""


LARGE = f"{LARGE_DP:,} ranks x {LARGE_MICRO_BATCHES}"
ROWS = {
    "column, all groups in random order": Row(random_rows(1), "whole"),
    "column, a tenth of the groups": Row(random_rows(0.1), "whole"),
    "one build: open, first epoch": Row(open_one, "whole"),
    "one build: first step": Row(first_step_of_one, "whole"),
    f"one build: order of a step, {LARGE}": Row(order_step, "whole", 20),
    f"one build: plan of a step, {LARGE}": Row(large_step, "whole", 20),
    "several builds: open, first epoch": Row(open_several, "part"),
    "several builds: first step": Row(first_step_of_several, "part"),
    "several builds: next epoch": Row(next_epoch, "part"),
    "several builds: next epoch, prepared": Row(prepared_epoch, "part"),
    "several builds: a node of 8 processes": Row(None, "part"),
    "regrouping a build of fewer groups": Row(regrouped, "sampled"),
}


def opened(places: Sequence[Path]) -> list[Build]:
    """Builds as a loader opens them."""
    return open_builds([str(place) for place in places])


def parts_of(folder: Path) -> list[Path]:
    """The builds that are read as one stream."""
    return sorted(folder.glob("part-*"))


def source_of(builds: Sequence[Build]) -> BuildSource | MixedSource:
    """Epochs of one build, or of several with weights 1, .5, .25, ..."""
    parts = [
        BuildSource(build, number, balance=DEFAULT_BALANCE) for number, build in enumerate(builds)
    ]
    if len(parts) == 1:
        return parts[0]
    weights = [2.0**-number for number in range(len(parts))]
    return MixedSource(parts, weights, 0, DEFAULT_BALANCE)


def steps(builds: Sequence[Build], options: argparse.Namespace) -> Steps:
    """Steps as a loader's."""
    config = StepConfig(
        dp_rank=getattr(options, "rank", 0),
        dp_world_size=options.dp,
        micro_batches=options.micro_batches,
        seed=0,
        remainder="pad",
    )
    return Steps(source_of(builds), config)


def measure(options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Seconds, CPU seconds, peak of the process's own memory in MB, and MB of mapped files."""
    case, _, times = ROWS[options.child]
    if case is None:
        return measure_node(options)
    case(Path(options.folder, "small"), options)()
    run = case(Path(options.folder, "large"), options)
    before, mapped = memory("RssAnon"), memory("RssFile")
    peak, done = [before], threading.Event()
    watcher = threading.Thread(target=watch, args=(peak, done))
    watcher.start()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    kept = [run() for _ in range(times)]
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    done.set()
    watcher.join()
    mapped = memory("RssFile") - mapped
    del kept  # not before: it holds what is mapped
    return seconds / times, cpu_s / times, (max(peak) - before) / MB, mapped / MB


def measure_node(options: argparse.Namespace) -> tuple[float, float, float, float]:
    """The same of all processes of a node: the slowest's seconds, and sums of the rest."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NODE + 1)
    processes = [
        context.Process(target=run_rank, args=(options, rank, barrier)) for rank in range(NODE)
    ]
    for process in processes:
        process.start()
    barrier.wait()  # the small builds are open
    pids = [process.pid for process in processes if process.pid is not None]
    before = [node_memory(pids, kind) for kind in ("Pss_Anon", "Pss_File")]
    cpu_before = sum(map(cpu_seconds, pids))
    begun = time.perf_counter()
    barrier.wait()
    barrier.wait()  # all steps are planned
    seconds, cpu_s = time.perf_counter() - begun, sum(map(cpu_seconds, pids)) - cpu_before
    after = [node_memory(pids, kind) for kind in ("Pss_Anon", "Pss_File")]
    barrier.wait()
    for process in processes:
        process.join()
    own, mapped = (now - then for now, then in zip(after, before, strict=True))
    return seconds, cpu_s, own / MB, mapped / MB


def run_rank(options: argparse.Namespace, rank: int, barrier: Barrier) -> None:
    """A process of a node: it opens the builds and plans steps."""
    ranked = argparse.Namespace(**vars(options), rank=rank)
    open_several(Path(options.folder, "small"), ranked)()
    barrier.wait()
    barrier.wait()
    begun = steps(opened(parts_of(Path(options.folder, "large"))), ranked)
    for _ in range(NODE_STEPS):
        begun.plan(1)
    barrier.wait()
    barrier.wait()


def node_memory(pids: Sequence[int], kind: str) -> int:
    """Bytes of a kind of the processes' memory, of which shared pages count once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in pids]
    return sum(int(text.partition(f"{kind}:")[2].split()[0]) for text in texts) * 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(peak: list[int], done: threading.Event) -> None:
    """Note the process's own memory until it is done."""
    while not done.wait(POLL_S):
        peak.append(memory("RssAnon"))


def memory(field: str) -> int:
    """Bytes of a kind of this process's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
