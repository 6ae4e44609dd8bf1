"""Time and memory of what a loader does once per build, epoch or step, at eleven million groups.

    python benchmarks/loader_scale.py [--groups 11000000] [--builds 3] [--dp 64] [--micro-batches 8]
    [--only TEXT] [--folder FOLDER]

Generates one build of `--groups` groups, and `--builds` that have as many together, in a temporary
folder: manifest and index alone, because nothing here reads a shard. Each row is measured in a
process of its own, after the same on small builds, which compiles. "CPU s" is what to compare on a
machine that does other work as well. "peak" is the largest memory of the process alone, less what
it had before; "mapped" are pages of the index, which are in memory once for all processes of a
machine. The index is in the page cache: it was just written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from tables import console, new_table

from balance.order.global_shuffle import DEFAULT_BALANCE
from balance.presets import load_model, model_to_dict
from balance.types import COUNT_COLUMNS, IntArray, Limits
from loaders.plan.epoch_groups import StoredGroups
from loaders.plan.mixed_groups import MixedGroups
from loaders.plan.steps import StepConfig, Steps
from loaders.read.build import Build, open_builds
from shards.folders import open_folder
from shards.index import BATCH_ROWS, INDEX_NAME, INDEX_SCHEMA, find_batches
from shards.manifest import BuildFile, write_manifest

GROUP_BYTES = 200_000
SMALL = 5_000
"""Groups of the builds that only compile."""
POLL_S = 0.002
MB = 1e6
LIMITS = Limits(max_seq_len=8_192, max_vision=24, min_seq_len=0, min_vision=0)


def main() -> int:
    options = parse()
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    table = new_table(
        f"{options.groups:,} groups, {options.builds} builds where several, "
        f"{options.dp} ranks x {options.micro_batches} micro-batches",
        ("", "seconds", "CPU s", "peak MB", "mapped MB"),
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for label, groups in (("small", SMALL), ("large", options.groups)):
            write_build(Path(folder, label, "whole"), groups, seed=0)
            for number in range(options.builds):
                part = Path(folder, label, f"part-{number}")
                write_build(part, groups // options.builds, seed=number + 1)
        for name in CASES:
            if options.only in name:
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
    parser.add_argument("--builds", type=int, default=3)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--folder", help="where the builds are generated; 120 bytes per group")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- generated builds ---


def write_build(folder: Path, num_groups: int, seed: int) -> None:
    """Index and manifest of a build of groups sorted by vision load, without its shards."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with (
        pa.OSFile(str(folder / INDEX_NAME), "wb") as sink,
        pa.ipc.new_file(sink, INDEX_SCHEMA) as writer,
    ):
        for first in range(0, num_groups, BATCH_ROWS):
            rows = np.arange(first, min(first + BATCH_ROWS, num_groups))
            columns = make_rows(rows, num_groups, rng)
            arrays = [pa.array(columns[field.name]).cast(field.type) for field in INDEX_SCHEMA]
            writer.write_batch(pa.record_batch(arrays, schema=INDEX_SCHEMA))
    file = BuildFile.of(open_folder(str(folder)), INDEX_NAME).to_json()
    batches = [batch.to_json() for batch in find_batches(folder / INDEX_NAME)]
    shard = BuildFile(name="shards/none", size=GROUP_BYTES * num_groups, checksum="")
    manifest = {
        "format": "arrow",
        "model": model_to_dict(load_model("internvl_1_5")),
        "tokenizer": {"image_token_id": 3, "vocab_size": 100, "hash": str(seed)},
        "limits": asdict(LIMITS),
        "totals": {"num_groups": num_groups},
        "shards": [shard.to_json()],
        "files": [{**file, "batches": batches}],
    }
    write_manifest(folder, manifest)


def make_rows(rows: IntArray, num_groups: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """Columns of the index for some groups."""
    patches = LIMITS.max_vision * rows // num_groups
    tokens = rng.integers(LIMITS.max_seq_len // 2, LIMITS.max_seq_len, len(rows))
    nothing = np.zeros_like(rows)
    return dict.fromkeys(COUNT_COLUMNS, nothing) | {
        "shard": nothing,
        "offset": GROUP_BYTES * rows,
        "length": np.full_like(rows, GROUP_BYTES),
        "checksum": nothing,
        "num_samples": rng.integers(1, 17, len(rows)),
        "num_image_patches": patches,
        "num_vit_tokens": 1_025 * patches,
        "num_image_tokens": 256 * patches,
        "num_text_tokens": np.maximum(tokens - 256 * patches, 1),
        "num_loss_tokens": tokens // 4,
    }


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
    source.epoch(0)
    return lambda: source.epoch(1)


def prepared_epoch(folder: Path, options: argparse.Namespace) -> Callable[[], object]:
    """The groups of epoch 1, prepared while epoch 0 runs."""
    source = source_of(opened(parts_of(folder)))
    source.epoch(0)
    source.prepare(1)
    while any(thread.name.startswith("isobatch-epoch") for thread in threading.enumerate()):
        time.sleep(0.01)
    return lambda: source.epoch(1)


CASES: dict[str, Case] = {
    "column, all groups in random order": random_rows(1),
    "column, a tenth of the groups": random_rows(0.1),
    "one build: open, first epoch": open_one,
    "one build: first step": first_step_of_one,
    "several builds: open, first epoch": open_several,
    "several builds: first step": first_step_of_several,
    "several builds: next epoch": next_epoch,
    "several builds: next epoch, prepared": prepared_epoch,
    # regrouping and the order's own cases go here
}


def opened(places: Sequence[Path]) -> list[Build]:
    """Builds as a loader opens them."""
    return open_builds([str(place) for place in places])


def parts_of(folder: Path) -> list[Path]:
    """The builds that are read as one stream."""
    return sorted(folder.glob("part-*"))


def source_of(builds: Sequence[Build]) -> StoredGroups | MixedGroups:
    """Epochs of one build, or of several with weights 1, .5, .25, ..."""
    parts = [StoredGroups(build, place) for place, build in enumerate(builds)]
    if len(parts) == 1:
        return parts[0]
    return MixedGroups(parts, [2.0**-place for place in range(len(parts))], seed=0)


def steps(builds: Sequence[Build], options: argparse.Namespace) -> Steps:
    """Steps as a loader's, of rank 0."""
    config = StepConfig(
        dp_rank=0,
        dp_world_size=options.dp,
        micro_batches=options.micro_batches,
        seed=0,
        remainder="pad",
        balance=DEFAULT_BALANCE,
    )
    return Steps(source_of(builds), config)


def measure(options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Seconds, CPU seconds, peak of the process's own memory in MB, and MB of mapped files."""
    case = CASES[options.child]
    case(Path(options.folder, "small"), options)()
    run = case(Path(options.folder, "large"), options)
    before, mapped = memory("RssAnon"), memory("RssFile")
    peak, done = [before], threading.Event()
    watcher = threading.Thread(target=watch, args=(peak, done))
    watcher.start()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    kept = run()
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    done.set()
    watcher.join()
    mapped = memory("RssFile") - mapped
    del kept  # not before: it holds what is mapped
    return seconds, cpu_s, (max(peak) - before) / MB, mapped / MB


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
