"""Training without a build: samples per second of `BalancedLoader`, ODB and padded batches.

    python benchmarks/online_training.py [--runs 3] [--samples 512 512 256] [--odb DIR]

Two ranks over gloo, a core each, train an epoch of transformers' InternVL with small random
weights on the data of `benchmarks/online.py`: AI2D + ChartQA at 4,096 and at 16,384 tokens, and a
mixture. Tiles, texts and caps of tokens are four times smaller than there (`online_runs.records`),
so that groups hold as many samples as in full size and two cores train an epoch in seconds. Runs of
the methods follow one another; figures are medians, with the range of the ratio to ours in the same
turn.

`whole` weights are on each rank, and ranks meet once per step. `sharded` ones (FSDP2, layer by
layer) are gathered in each pass, and gradients summed, so a micro-batch has a price of its own; a
batch of text alone then encodes a blank tile, and a rank that has no batch left runs a blank one.
ODB does neither by itself; it is done for it.

The same for all: model, attention of each sample by itself, optimizer, one sum of gradients per
step, caps, JPEG files, and the functions that count, decode and cut them. ODB 0.1.2 is used as its
README shows (4 workers, prefetch of 64, exact scaling, join) with the same caps. Padded are
batches of as many samples as never exceed the caps, with gradients accumulated until a step has
about as many samples as ours: in random order, and grouped by length as Trainer does, with lengths
that are known for free.

samples/s: by CPU time: a step takes as long as the slowest rank's forward and backward passes, and
what else a rank and its workers do on its core is added. passes: the share of the first of the two.
wall: by the clock, from the first batch on, which needs a machine that nobody else uses. first:
from making the loader to the first batch, in a process that has imported all. waits: share of the
clock's time in which the training thread waits for a batch. MB: of a rank with its workers, shared
pages divided by those who share them. limit: what a line through all measured micro-batches says
of the same samples without padding, waiting or other work, in the fewest micro-batches; of sharded
weights with what a blank micro-batch waits for them on two ranks, which is less than on more.

On more ranks steps are planned, and micro-batches take what that line says. "any / it, at most":
no loader is faster than that many times on any machine, however much of a micro-batch's time goes
by tokens, by tiles and by the micro-batch itself. Exit status 1 if a goal of `GOALS` is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from online import datasets, open_odb  # noqa: E402
from online_runs.many_ranks import Cost, Predicted, fit, limit_rate, predict  # noqa: E402
from online_runs.methods import Task, loads  # noqa: E402
from online_runs.model import save_model  # noqa: E402
from online_runs.padded import best_size  # noqa: E402
from online_runs.rank import run_rank  # noqa: E402
from online_runs.records import Records, write_records  # noqa: E402
from order import Data  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from isobatch.common.types import FloatArray  # noqa: E402

RANKS, MANY_RANKS = 2, (8, 64)
WEIGHTS = WHOLE, SHARDED = "whole", "sharded"
FULL_BUFFER = "ODB, full buffer"
GOALS = {"ODB": 1.3, FULL_BUFFER: 1.3, "random": 1.5, "grouped": 1.5}
"""Samples per second of ours over a method's, at least."""
MOST_FIRST_S, MOST_WAITS = 2.0, 0.02
"""Of ours: seconds until the first batch, and share of the time that waits for batches."""
LOOK_S = 1.0
"""Between two looks at the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Figures of a run of a method."""

    rate: float
    wall_rate: float
    padding: float
    first_s: float
    passes: float
    waits: float
    memory_mb: float
    micro_steps: int
    costs: list[Cost]
    """Of each micro-batch 1, its tokens, tiles and seconds of computing."""
    price_s: float
    """What a micro-batch of sharded weights waits for them, which is not in `costs`."""
    more: dict[str, float]


def main() -> int:
    options = parse()
    console, missed = Console(width=132), []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        odb = options.odb or place / "odb"
        grouping = open_odb(odb)
        save_model(place / "model")
        for data, samples in zip(datasets(None), options.samples, strict=True):
            if not samples:
                continue
            folder = Path(tempfile.mkdtemp(dir=place))
            records = write_records(folder, data, samples, place / "model")
            for weights in options.weights:
                tasks = tasks_of(records, place / "model", odb, is_sharded=weights == SHARDED)
                runs = measure(tasks, options.runs, folder, weights, console)
                line, error = fitted(runs)
                missed += judge(records, weights, runs)
                for dp in MANY_RANKS:
                    predicted = predict(
                        data, dp, line, grouping, meets_in_batches=weights == SHARDED
                    )
                    console.print(many_ranks_table(data, dp, weights, predicted, error))
                    missed += judge_many(data, dp, weights, predicted)
    for each in missed:
        console.print(f"missed: {each}", style="red")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--samples", type=int, nargs=3, default=[512, 512, 256], help="of each dataset; 0: not it"
    )
    parser.add_argument(
        "--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="on each rank, or sharded"
    )
    parser.add_argument("--odb", type=Path, help="where ODB is, or is to be installed")
    return parser.parse_args()


def tasks_of(records: Records, folder: Path, odb: Path, *, is_sharded: bool) -> dict[str, Task]:
    """What each method is given, by name."""
    own = Task(records=records, folder=folder, method="ours", odb=odb, is_sharded=is_sharded)
    known = loads(own)
    caps = records.max_vision, records.max_tokens
    peer = replace(own, method="ODB")
    tasks = {"ours": own, "ODB": peer, FULL_BUFFER: replace(peer, warms_up=False)}
    for method in ("random", "grouped"):
        size, accumulation = best_size(method, known, caps)
        tasks[method] = replace(own, method=method, batch_size=size, accumulation=accumulation)
    return tasks


# --- runs ---


def measure(
    tasks: dict[str, Task], turns: int, folder: Path, weights: str, console: Console
) -> dict[str, list[Found]]:
    """All methods in turn, with a table after each turn."""
    runs: dict[str, list[Found]] = {name: [] for name in tasks}
    for turn in range(turns):
        for name, task in tasks.items():
            out = folder / f"{weights}-{name}-{turn}"
            out.mkdir()
            runs[name].append(found := run(task, out))
            shown = f"{task.records.name}, {weights}, {name}: {found.rate:.2f} samples/s"
            console.print(shown, style="dim")
        console.print(as_table(weights, tasks, runs))
    return runs


def run(task: Task, out: Path) -> Found:
    """An epoch of a method on all ranks, which are forked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=run_rank, args=(rank, RANKS, port, task, str(out))
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    memory = Memory([rank.pid or 0 for rank in ranks])
    for rank in ranks:
        rank.join()
    memory.ended.set()
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    samples = [name for each in found for name in each["samples"]]
    if not set(samples) == set(range(len(task.records.rows))):
        raise SystemExit(f"{task.method}: {len(set(samples))} of {len(task.records.rows)} samples")
    seconds = max(each["seconds"] for each in found)
    passes_s = sum(map(max, zip(*(each["steps"] for each in found), strict=True)))
    busy_s = passes_s + max(each["other_s"] for each in found)
    tokens, padded = (sum(each[name] for each in found) for name in ("tokens", "padded"))
    extra = {name: found[0][name] for name in ("planning_s", "first_window_s") if name in found[0]}
    return Found(
        rate=len(samples) / busy_s,
        wall_rate=len(samples) / seconds,
        padding=1 - tokens / padded,
        first_s=max(each["first_s"] for each in found),
        passes=passes_s / busy_s,
        waits=float(np.mean([each["waited_s"] / each["seconds"] for each in found])),
        memory_mb=memory.most_mb,
        micro_steps=max(each["micro_batches"] for each in found),
        costs=[cost for each in found for cost in each["costs"]],
        price_s=max(each["price_s"] for each in found),
        more=extra,
    )


class Memory:
    """The most that any of some processes has used, with all that it has started."""

    def __init__(self, roots: list[int]) -> None:
        self._roots, self.most_mb = roots, 0.0
        self.ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.ended.wait(LOOK_S):
            for root in self._roots:
                self.most_mb = max(self.most_mb, sum(map(own_mb, family(root))))


def family(root: int) -> list[int]:
    """A process and those that it has started."""
    found = [root]
    with suppress(OSError):
        for each in Path(f"/proc/{root}/task/{root}/children").read_text().split():
            found += family(int(each))
    return found


def own_mb(process: int) -> float:
    """Memory of a process in MB; of a page that several share, its part."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


# --- figures ---


def as_table(weights: str, tasks: dict[str, Task], runs: dict[str, list[Found]]) -> Table:
    records = tasks["ours"].records
    caps = f"{records.max_tokens:,} tokens and {records.max_vision} tiles of a quarter"
    title = f"{records.name}, {weights} weights: caps {caps}, {len(records.rows):,} samples"
    table = Table(title=title)
    heads = ("samples/s", "ours / it", "range", "wall", "passes", "padding", "first, s", "waits")
    for head in ("method", *heads, "MB", "micro-steps"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for name, found in runs.items():
        values = {
            field: median(getattr(each, field) for each in found)
            for field in (
                "rate",
                "wall_rate",
                "passes",
                "padding",
                "first_s",
                "waits",
                "memory_mb",
            )
        }
        ratios = ratios_of(runs, name)
        task = tasks[name]
        shown = f"{name}, {task.batch_size} x {task.accumulation}"
        table.add_row(
            shown if name in ("random", "grouped") else name,
            *(f"{values['rate']:.2f}", f"{median(ratios):.2f}"),
            f"{min(ratios):.2f} - {max(ratios):.2f}",
            f"{values['wall_rate']:.2f}",
            *(f"{values['passes']:.0%}", f"{values['padding']:.1%}"),
            *(f"{values['first_s']:.2f}", f"{values['waits']:.1%}"),
            *(f"{values['memory_mb']:.0f}", f"{found[0].micro_steps}"),
        )
    caps, line = (records.max_vision, records.max_tokens), fitted(runs)[0]
    most = limit_rate(loads(tasks["ours"]), caps, RANKS, line)
    ours = median(each.rate for each in runs["ours"])
    table.add_row("limit", f"{most:.2f}", f"{ours / most:.2f}")
    table.caption = str(runs["ours"][0].more)
    return table


def fitted(runs: dict[str, list[Found]]) -> tuple[FloatArray, float]:
    """The line through what all runs have measured, and its mean error."""
    all_runs = [own for each in runs.values() for own in each]
    line, error = fit([cost for own in all_runs for cost in own.costs])
    line[0] += median(own.price_s for own in all_runs)
    return line, error


def many_ranks_table(
    data: Data, dp: int, weights: str, found: dict[str, Predicted], error: float
) -> Table:
    title = f"{data.name}, {weights} weights: {dp} ranks, {len(data.counts):,} samples, predicted"
    table = Table(title=title, caption=f"mean error of a micro-batch's time: {error:.1%}")
    for head in ("method", "samples/s", "ours / it", "any / it, at most"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for name, each in found.items():
        ratio = found["ours"].rate / each.rate
        table.add_row(name, f"{each.rate:.1f}", f"{ratio:.2f}", f"{each.most:.2f}")
    return table


def judge_many(data: Data, dp: int, weights: str, found: dict[str, Predicted]) -> list[str]:
    """Goals that are missed on more ranks."""
    missed, place = [], f"{data.name}, {weights} weights, {dp} ranks"
    for name, each in found.items():
        least, ratio = GOALS.get(name.partition(",")[0], 0), found["ours"].rate / each.rate
        if ratio < least:
            why = f"; no loader gets above {each.most:.2f}" if each.most < least else ""
            missed.append(f"{place}: {ratio:.2f} times {name}, wanted {least}{why}")
    return missed


def ratios_of(runs: dict[str, list[Found]], name: str) -> list[float]:
    """Samples per second of ours over a method's, turn by turn."""
    return [own.rate / each.rate for own, each in zip(runs["ours"], runs[name], strict=True)]


def judge(records: Records, weights: str, runs: dict[str, list[Found]]) -> list[str]:
    """Goals that are missed."""
    missed, place = [], f"{records.name}, {weights} weights"
    for name, least in GOALS.items():
        if (ratio := median(ratios_of(runs, name))) < least:
            missed.append(f"{place}: {ratio:.2f} times {name}, wanted {least}")
    for field, most in (("first_s", MOST_FIRST_S), ("waits", MOST_WAITS)):
        if (value := median(getattr(each, field) for each in runs["ours"])) > most:
            missed.append(f"{place}: {field} {value:.3f}, wanted {most}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
