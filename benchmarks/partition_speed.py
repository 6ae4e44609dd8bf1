"""How long partition searches take by layers and stages, and how far their answers are from the
best.

    python benchmarks/partition_speed.py [--sizes 93x4 125x8 160x16] [--micro-batches 64] [--spread
    0 0.05 0.15]
        [--schedules 1f1b zero_bubble] [--memory 1 0.75] [--rounds 3] [--time-limit 30]

Models are generated: a vision encoder, a projector, an LLM of about as many layers, and their ends;
`--spread` is the standard deviation of a phase's load between micro-batches, `--memory` the share
that is there of what the fullest rank needs if nothing is recomputed and stages take the same time.
Times are CPU time, the least of several rounds after one that compiles. "over": how much slower a
step is than with the search's answer; "gap": how much faster than that answer another one could be
at most. Exit status 1 when a search takes 2 s more than its time limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isobatch.common.types import IntArray  # noqa: E402
from isobatch.engine.planning.bmp import greedy_anchor, search_bmp  # noqa: E402
from isobatch.engine.planning.partition import METHODS, by_step_time  # noqa: E402
from isobatch.engine.planning.recompute import InfeasiblePlan, choose_recompute  # noqa: E402
from isobatch.engine.planning.search.limits import SearchLimits  # noqa: E402
from isobatch.engine.planning.search.partition_search import (  # noqa: E402
    SearchResult,
    search_partition,
)
from isobatch.engine.simulator.evaluate import evaluate  # noqa: E402
from isobatch.engine.simulator.schedule import make_schedule  # noqa: E402
from support.costs.random_costs import vlm  # noqa: E402

MARGIN_S = 2.0
"""By which a search may exceed its time limit."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table."""

    layers: int
    stages: int
    micro_batches: int
    spread: float
    schedule: str
    memory: float
    time_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of it."""

    over: dict[str, float | None]
    """By method, how much slower its step is than the search's; None if it does not fit."""
    bmp_s: float
    recompute_s: float
    """`choose_recompute` alone, of one partition."""
    search_s: float
    found: SearchResult


def main() -> int:
    """Print the table; -> exit status."""
    options = parse()
    table = Table(
        box=box.SIMPLE,
        title=f"{options.micro_batches} micro-batches; the three methods, BMP and the search",
    )
    heads = (
        "layers x stages",
        "spread",
        "schedule",
        "memory",
        *METHODS,
        "BMP",
        "BMP s",
        "fit ms",
        "search s",
    )
    for place, head in enumerate((*heads, "gap")):
        table.add_column(head.removesuffix("-based"), justify="right" if place else "left")
    slow = []
    for size, spread, schedule, memory in product(
        options.sizes, options.spread, options.schedules, options.memory
    ):
        layers, stages = (int(number) for number in size.split("x"))
        case = Case(
            layers=layers,
            stages=stages,
            micro_batches=options.micro_batches,
            spread=spread,
            schedule=schedule,
            memory=memory,
            time_limit=options.time_limit,
        )
        row = measure(case, options.rounds)
        table.add_row(*cells(case, row))
        if row.search_s > options.time_limit + MARGIN_S:
            slow.append(
                f"{size}, spread {spread}, {schedule}: the search took {row.search_s:.1f} s"
            )
    Console(width=140).print(table)
    for line in slow:
        print(f"too slow: {line}")
    return 1 if slow else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["93x4", "125x8", "160x16"], help="layers x stages"
    )
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--spread", type=float, nargs="+", default=[0.0, 0.05, 0.15])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zero_bubble"])
    parser.add_argument("--memory", type=float, nargs="+", default=[1.0, 0.75])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=30.0, help="of a search, s")
    return parser.parse_args()


def measure(case: Case, rounds: int) -> Row:
    """Search one model's partition each way."""
    vision = (case.layers - 3) // 2
    rng = np.random.default_rng(case.layers)
    costs = vlm(rng, vision, case.layers - 3 - vision, case.micro_batches, spread=case.spread)
    schedule = make_schedule(case.schedule, case.stages, case.micro_batches)
    even = by_step_time(costs, case.stages)
    nothing = np.zeros(costs.num_layers, np.bool_)
    memory = int(case.memory * evaluate(costs, even, nothing, schedule).memory.peak_bytes.max())

    def search() -> SearchResult:
        limits = SearchLimits(deadline_s=time.monotonic() + case.time_limit)
        return search_partition(costs, schedule, memory, limits)

    search_s, found = least_s(search, rounds)

    def step_ns(borders: IntArray) -> int:
        recompute = choose_recompute(costs, borders, schedule, memory)
        return evaluate(costs, borders, recompute, schedule).step_ns

    def bmp() -> IntArray:
        try:
            return search_bmp(costs, case.stages, step_ns).best.borders
        except InfeasiblePlan:
            return greedy_anchor(costs, case.stages)  # which does not fit either

    bmp_s, bmp_borders = least_s(bmp, rounds)
    recompute_s, _ = least_s(
        lambda: choose_recompute(costs, found.borders, schedule, memory), rounds
    )
    partitions = {name: method(costs, case.stages) for name, method in METHODS.items()} | {
        "BMP": bmp_borders
    }
    return Row(
        over={name: over(step_ns, borders, found) for name, borders in partitions.items()},
        bmp_s=bmp_s,
        recompute_s=recompute_s,
        search_s=search_s,
        found=found,
    )


def over(
    step_ns: Callable[[IntArray], int], borders: IntArray, found: SearchResult
) -> float | None:
    """How much slower a partition is than the one found; None if it does not fit."""
    try:
        return step_ns(borders) / found.step_ns - 1
    except InfeasiblePlan:
        return None


def least_s(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """The least time of some rounds, and the result."""
    result, times = work(), []
    for _ in range(rounds):
        begun = time.process_time()
        result = work()
        times.append(time.process_time() - begun)
    return min(times), result


def cells(case: Case, row: Row) -> list[str]:
    """A row of the table."""
    return [
        f"{case.layers} x {case.stages}",
        f"{case.spread:.2f}",
        case.schedule,
        f"{100 * case.memory:.0f} %",
        *("too large" if part is None else f"+{100 * part:.1f} %" for part in row.over.values()),
        f"{row.bmp_s:.2f}",
        f"{1e3 * row.recompute_s:.1f}",
        f"{row.search_s:.2f}",
        f"{100 * row.found.gap:.2f} %" if row.found.gap else "0",
    ]


if __name__ == "__main__":
    sys.exit(main())
