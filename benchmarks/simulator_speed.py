"""The simulator's speed by schedule and size, beside a plain event-by-event simulation of the same
step.

    python benchmarks/simulator_speed.py [--operations 1024 16384 65536] [--ranks 16] [--rounds 5]

Every time is the least of several rounds, after one that compiles. "all anew": schedule, program
and simulation with empty caches, as for a shape that was never seen; "again": program and
simulation of other costs, as in a search; "simulate": that alone. The plain simulation is the
tests' oracle (`tests/support/oracles/simulation_oracle.py`); both must agree to the last
nanosecond, or this stops. Exit status 1 when 16,384 operations take over 90 ms all anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isobatch.engine.simulator import program, schedule  # noqa: E402
from isobatch.engine.simulator.evaluate import memory_of  # noqa: E402
from isobatch.engine.simulator.program import make_program  # noqa: E402
from isobatch.engine.simulator.schedule import Schedule, make_schedule  # noqa: E402
from isobatch.engine.simulator.simulate import critical_path, simulate  # noqa: E402
from support.costs.random_steps import as_oracle, random_stages  # noqa: E402
from support.oracles.simulation_oracle import Pipeline  # noqa: E402

SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved": 4,
    "zero_bubble": 1,
    "interleaved_zero_bubble": 4,
}
"""Stages per rank."""
JUDGED_OPERATIONS, MOST_MS = 16_384, 90.0
LARGEST_ORACLE = 20_000
"""Operations; beyond, the plain simulation is left out."""


def main() -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, nargs="+", default=[1024, 16_384, 65_536])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    table = Table(
        box=box.SIMPLE,
        title=f"{options.ranks} ranks; milliseconds, and million operations per second",
    )
    heads = (
        "schedule",
        "operations",
        "all anew",
        "again",
        "simulate",
        "Mops/s",
        "memory",
        "critical path",
        "plain",
        "x",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "schedule" else "right")
    slow = []
    for name in SCHEDULES:
        for operations in options.operations:
            times = measure(name, operations, options.ranks, options.rounds)
            table.add_row(name, *row(times))
            if times["operations"] <= JUDGED_OPERATIONS and times["anew"] > MOST_MS:
                slow.append(
                    f"{name}: {times['operations']:,} operations took {times['anew']:.0f} ms all "
                    f"anew"
                )
    Console(width=120).print(table)
    for line in slow:
        print(f"too slow: {line}")
    return 1 if slow else 0


def measure(name: str, operations: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Least times in ms of one schedule at one size."""
    per_rank, kinds = SCHEDULES[name], 3 if "zero_bubble" in name else 2
    micro_batches = max(1, operations // (ranks * per_rank * kinds))
    made: Schedule = make_schedule(name, ranks, micro_batches, per_rank)
    stages = random_stages(np.random.default_rng(0), made.num_stages, micro_batches, most=10**7)
    built = make_program(made, stages)
    timeline = simulate(built)

    def anew() -> None:
        forget()
        simulate(make_program(make_schedule(name, ranks, micro_batches, per_rank), stages))

    times: dict[str, Any] = {
        "operations": len(made),
        "anew": least_ms(anew, rounds),
        "again": least_ms(lambda: simulate(make_program(made, stages)), rounds),
        "simulate": least_ms(lambda: simulate(built), rounds),
        "memory": least_ms(lambda: memory_of(made, stages), rounds),
        "path": least_ms(lambda: critical_path(timeline), rounds),
        "plain": None,
    }
    if len(made) <= LARGEST_ORACLE:
        arguments = as_oracle(made, stages)
        times["plain"] = least_ms(lambda: Pipeline(*arguments).run(), min(rounds, 2))
        ends = [end for _, end in Pipeline(*arguments).run().values()]
        if max(ends) != timeline.step_ns:
            raise SystemExit(
                f"{name}, {len(made)} operations: {timeline.step_ns} ns, the plain simulation "
                f"{max(ends)}"
            )
    return times


def forget() -> None:
    """Empty the caches of schedules and edges."""
    for cached in (schedule._schedule, program._edges):
        cached.cache_clear()


def least_ms(work: Callable[[], object], rounds: int) -> float:
    """The least time of some rounds."""
    work()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def row(times: dict[str, Any]) -> list[str]:
    """A row of the table."""
    plain = times["plain"]
    return [
        f"{times['operations']:,}",
        *(f"{times[name]:.2f}" for name in ("anew", "again", "simulate")),
        f"{times['operations'] / times['simulate'] / 1e3:.1f}",
        *(f"{times[name]:.2f}" for name in ("memory", "path")),
        "-" if plain is None else f"{plain:.0f}",
        "-" if plain is None else f"{plain / times['simulate']:,.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
