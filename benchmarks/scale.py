"""What a rank needs to open a build of up to 300 million groups and to begin it.

    python benchmarks/scale.py [--groups 1000000 300000000] [--dp 8 64 512] [--work FOLDER]
        [--mixture 100000000] [--base BUILD]

Generates builds of so many groups (`scale_index.py`: the packer's own index, whose rows repeat
those of a real build) and opens each as the last of `--dp` ranks with the loader that users have,
in a process of its own that has opened a small build before. A build takes 35 bytes per group in
`--work`, and is deleted before the next one.

"begin" is all that a rank does until it has its first batch: "open", "order" (its part of the first
step) and "batch" (the group is read, checked and decoded). "step" is the order of a step, the mean
of the next 50. "resume" is the same as "begin" from a state in the middle of the epoch, and "epoch"
a first batch of the next epoch by a loader that is open. CPU seconds are of all three columns of
"begin". "memory" is the peak of the process's own memory, less what it had before; "mapped" are
pages of the index, which all processes of a machine share. The index is in the page cache.

Of the largest build also: "cold", with the index dropped from the page cache; a host of 8 ranks
that begin together, of which memory is their sum, shared pages counted once; and what an epoch that
was resumed in its middle needs to check at its end that it had every sample (a tenth of the groups,
measured; it is linear). `--mixture N`: three builds of N groups with weights 1, .5 and .25.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from rich.console import Console
from scale_index import SAMPLES, pack_base, repeat_build
from tables import new_table

from isobatch.balance.order.step_order import DEFAULT_BALANCE, GlobalShuffle
from isobatch.loaders import StreamingLoader
from isobatch.loaders.steps.build_groups import samples_left
from isobatch.shards.index import INDEX_NAME

HOST_RANKS = 8
STEPS = 50
"""Steps whose order is timed."""
CHECKED = 0.1
"""Share of an epoch whose check is timed."""
POLL_S = 0.002
MB = 1e6
console = Console(width=140)
WEIGHTS = (1.0, 0.5, 0.25)
COLUMNS = ("open", "order", "batch", "begin", "CPU s", "step, ms", "resume", "epoch")


def main() -> int:
    options = parse()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        base = options.base or pack_base(Path(work), options.samples)
        heads = ("groups", "ranks", "balance", *COLUMNS, "memory MB", "mapped MB")
        table = new_table("A rank begins: seconds", heads)
        for number in options.groups:
            begun = time.perf_counter()
            place = Path(work, "build")
            groups = repeat_build(base, place, number)
            size = sum(file.stat().st_size for file in place.iterdir())
            console.print(
                f"{groups:,} groups, {size / MB:,.0f} MB, {time.perf_counter() - begun:.0f} s"
            )
            for dp in options.dp:
                for balance in (DEFAULT_BALANCE, 0.0):
                    row = run_child("begin", base, [place], dp, balance)
                    table.add_row(f"{groups:,}", f"{dp}", f"{balance}", *cells(row))
            if number == max(options.groups):
                extra(options, base, place)
            shutil.rmtree(place)
        console.print(table)
        if options.mixture:
            mixture(options, base, Path(work))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = [1_000_000, 10_000_000, 100_000_000, 300_000_000]
    parser.add_argument("--groups", type=int, nargs="*", default=default)
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--mixture", type=int, default=0)
    parser.add_argument("--work", help="folder of the builds; 35 bytes per group")
    parser.add_argument("--base", type=Path, help="the build to repeat; default: one is packed")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the build that is packed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--places", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rank-balance", nargs=2, type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def extra(options: argparse.Namespace, base: Path, place: Path) -> None:
    """What is measured of the largest build only."""
    dp = max(options.dp)
    dropped = drop_from_cache(place / INDEX_NAME)
    row = run_child("begin", base, [place], dp, DEFAULT_BALANCE)
    console.print(f"cold, {dp} ranks ({dropped / MB:,.0f} MB dropped): begin {row['begin']:.2f} s")
    row = run_child("host", base, [place], dp, DEFAULT_BALANCE)
    console.print(
        f"host of {HOST_RANKS} of {dp} ranks: all begin {row['begin']:.2f} s, {row['cpu']:.1f} CPU"
        f" s; after {STEPS} steps {row['memory']:,.0f} MB, and {row['mapped']:,.0f} MB mapped"
    )
    row = run_child("check", base, [place], dp, DEFAULT_BALANCE)
    console.print(
        f"check of {CHECKED:.0%} of an epoch: {row['begin']:.1f} s, {row['cpu']:.1f} CPU s,"
        f" {row['memory']:,.0f} MB"
    )


def mixture(options: argparse.Namespace, base: Path, work: Path) -> None:
    """Three builds in one stream."""
    places = [work / f"build-{number}" for number in range(len(WEIGHTS))]
    groups = [repeat_build(base, place, options.mixture) for place in places]
    table = new_table(f"three builds of {groups[0]:,} groups", ("ranks", *COLUMNS, "MB", "mapped"))
    for dp in options.dp:
        row = run_child("begin", base, places, dp, DEFAULT_BALANCE)
        table.add_row(f"{dp}", *cells(row))
    console.print(table)


def cells(row: dict[str, float]) -> list[str]:
    """A row of the table."""
    times = [f"{row[name]:.2f}" for name in ("open", "order", "batch", "begin", "cpu")]
    times += [f"{1000 * row['step']:.1f}", f"{row['resume']:.2f}", f"{row['epoch']:.2f}"]
    return [*times, f"{row['memory']:,.0f}", f"{row['mapped']:,.0f}"]


def run_child(what: str, base: Path, places: list[Path], dp: int, balance: float) -> Any:
    """What a process of its own measures."""
    command = [sys.executable, __file__, "--child", what]
    command += ["--rank-balance", str(dp), str(balance)]
    command += ["--places", str(base), *map(str, places)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def drop_from_cache(path: Path) -> int:
    """Drop a file from the page cache; -> its bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.stat().st_size


# --- in a process of its own ---


def opened(places: list[str], dp: int, balance: float, rank: int) -> StreamingLoader:
    """The loader of a rank."""
    url: Any = places[0] if len(places) == 1 else list(zip(places, WEIGHTS, strict=True))
    options: dict[str, Any] = {"dp_rank": rank, "dp_world_size": dp, "balance": balance}
    return StreamingLoader(url, check_ranks=False, **options)


def warmed(options: argparse.Namespace) -> tuple[list[str], int, float]:
    """The places, ranks and balance, after a small build was read."""
    base, *places = options.places
    dp, balance = int(options.rank_balance[0]), options.rank_balance[1]
    loader = opened([base], 2, balance, 0)
    next(iter(loader))
    loader.close()
    return places, dp, balance


def begin(options: argparse.Namespace) -> dict[str, float]:
    """A rank begins, goes on, resumes in the middle, and begins the next epoch."""
    places, dp, balance = warmed(options)
    times: dict[str, float] = {}
    with peak_memory() as peak:
        started, cpu = time.perf_counter(), time.process_time()
        with timed(times, "open"):
            loader = opened(places, dp, balance, dp - 1)
        with timed(times, "order"):
            loader._steps.copy().plan(1)
        with timed(times, "batch"):
            next(iter(loader))
        times["begin"] = time.perf_counter() - started
        times["cpu"] = time.process_time() - cpu
        middle = state_in_the_middle(loader)
        steps = loader._steps.copy()
        with timed(times, "step"):
            for _ in range(STEPS):
                steps.plan(1)
        times["step"] /= STEPS
        with timed(times, "epoch"):
            loader.set_epoch(1)
            next(iter(loader))
        loader.close()
        times |= {"memory": peak.now("RssAnon"), "mapped": peak.now("RssFile")}
    with timed(times, "resume"):
        loader = opened(places, dp, balance, dp - 1)
        loader.load_state_dict(middle)
        next(iter(loader))
    return times | {"memory": peak.largest}


def state_in_the_middle(loader: StreamingLoader) -> dict[str, Any]:
    """The state after some steps from the middle of the epoch on."""
    steps = loader._steps.copy()
    state = steps.state()
    state["stream"] |= {"consumed": len(steps._groups) // 2, "spare": [], "passed": 0}
    if "taken" in state["stream"]:
        state["stream"]["taken"] = []
    steps.load(state)
    steps.plan(3)
    return steps.state()


def check(options: argparse.Namespace) -> dict[str, float]:
    """The check at the end of an epoch that was resumed."""
    places, dp, balance = warmed(options)
    steps = opened(places, dp, balance, dp - 1)._steps
    number = len(steps._groups)
    order = GlobalShuffle(
        num_groups=number, seed=0, epoch=0, balance=balance, consumed=int(number * (1 - CHECKED))
    )
    times: dict[str, float] = {}
    cpu = time.process_time()
    with peak_memory() as peak, timed(times, "begin"):
        samples_left(steps._groups, order)
    return times | {"cpu": time.process_time() - cpu, "memory": peak.largest}


def host(options: argparse.Namespace) -> dict[str, float]:
    """Several ranks of a machine that begin at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(HOST_RANKS + 1)
    ranks = [
        context.Process(target=run_rank, args=(options, rank, barrier))
        for rank in range(HOST_RANKS)
    ]
    for process in ranks:
        process.start()
    pids = [process.pid for process in ranks if process.pid is not None]
    barrier.wait()
    before = [shared_memory(pids, kind) for kind in ("Pss_Anon", "Pss_File")]
    cpu_before = sum(map(cpu_seconds, pids))
    started = time.perf_counter()
    barrier.wait()
    barrier.wait()  # all have their first batch
    seconds, cpu = time.perf_counter() - started, sum(map(cpu_seconds, pids)) - cpu_before
    barrier.wait()
    barrier.wait()  # all have planned steps
    after = [shared_memory(pids, kind) for kind in ("Pss_Anon", "Pss_File")]
    barrier.wait()
    for process in ranks:
        process.join()
    memory, mapped = (now - then for now, then in zip(after, before, strict=True))
    return {"begin": seconds, "cpu": cpu, "memory": memory / MB, "mapped": mapped / MB}


def run_rank(options: argparse.Namespace, rank: int, barrier: Barrier) -> None:
    """One of them."""
    places, dp, balance = warmed(options)
    barrier.wait()
    barrier.wait()
    loader = opened(places, dp, balance, rank)
    next(iter(loader))
    barrier.wait()
    barrier.wait()
    steps = loader._steps.copy()
    for _ in range(STEPS):
        steps.plan(1)
    barrier.wait()
    barrier.wait()


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of what is inside."""
    started = time.perf_counter()
    yield
    times[name] = time.perf_counter() - started


class peak_memory:  # noqa: N801  (used as a function)
    """The largest `RssAnon` while inside, less what was there before, in MB."""

    def __enter__(self) -> peak_memory:
        self._before = {kind: memory(kind) for kind in ("RssAnon", "RssFile")}
        self._peak = self._before["RssAnon"]
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def now(self, kind: str) -> float:
        """What has been added of a kind, in MB."""
        return (memory(kind) - self._before[kind]) / MB

    @property
    def largest(self) -> float:
        """The peak, in MB."""
        return (self._peak - self._before["RssAnon"]) / MB

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self._peak = max(self._peak, memory("RssAnon"))


def memory(kind: str) -> int:
    """Bytes of a kind of this process's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


def shared_memory(pids: list[int], kind: str) -> int:
    """Bytes of a kind of the processes' memory, of which shared pages count once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in pids]
    return sum(int(text.partition(f"{kind}:")[2].split()[0]) for text in texts) * 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "begin": begin,
    "host": host,
    "check": check,
}

if __name__ == "__main__":
    sys.exit(main())
