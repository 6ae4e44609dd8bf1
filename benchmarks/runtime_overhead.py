"""Overhead of the runtime per step: sleeping layers next to the simulator's prediction.

    python benchmarks/runtime_overhead.py [--ranks 2 4] [--micro-batches 12] [--pass-ms 10]
    [--rounds 5]

A stage of each rank sleeps in its forward pass, and in the gradients of its input and of its
weights, each micro-batch for a time of its own: nothing is computed, so several ranks can share a
core, and all that a step takes longer than `engine.simulator.simulate` predicts is the runtime,
torch, gloo, and late wake-ups from sleep. "passes": how much longer the passes alone took than they
should, so what is left of the ratio is what lies between them; "per pass" is the step's surplus
over the passes of one rank. Medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ablation.stand_in import stand_ins  # noqa: E402

from benchmarks.tables import console, new_table  # noqa: E402
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions  # noqa: E402
from isobatch.engine.simulator.program import make_program  # noqa: E402
from isobatch.engine.simulator.schedule import make_schedule  # noqa: E402
from isobatch.engine.simulator.simulate import simulate  # noqa: E402
from isobatch.engine.simulator.stages import StageCosts  # noqa: E402

SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "zero_bubble": 1,
    "interleaved": 2,
    "interleaved_zero_bubble": 2,
}
"""Stages per rank."""
WARM_UP = 2


def main() -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument(
        "--pass-ms", type=float, default=10.0, help="of a rank's forward pass, on average"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    table = new_table(
        f"{options.micro_batches} micro-batches, forward passes of {options.pass_ms:g} ms on "
        f"average; no computation",
        [
            "schedule",
            "ranks",
            "predicted ms",
            "measured ms",
            "measured / predicted",
            "passes",
            "us per pass",
        ],
    )
    for ranks in options.ranks:
        for name, row in measure(ranks, options).items():
            table.add_row(name, str(ranks), *row)
    console.print(table)
    return 0


def measure(ranks: int, options: argparse.Namespace) -> dict[str, list[str]]:
    """Rows of all schedules on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, (folder, ranks, options, results), nprocs=ranks)
        found: dict[str, list[str]] = results.get()
        return found


def run_rank(rank: int, folder: str, ranks: int, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    rows = {name: one_schedule(name, ranks, options) for name in SCHEDULES}
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def one_schedule(name: str, ranks: int, options: argparse.Namespace) -> list[str]:
    """Predicted and measured on this rank, as text."""
    chunks, count = SCHEDULES[name], options.micro_batches
    costs = stage_times(ranks * chunks, count, int(1e6 * options.pass_ms / chunks))
    schedule = make_schedule(name, ranks, count, chunks)
    predicted = simulate(make_program(schedule, costs))
    model = stand_ins(costs)
    pipeline = Pipeline(
        model,
        np.arange(ranks * chunks + 1),
        np.zeros(ranks * chunks, bool),
        [list(range(ranks))],
        PipelineOptions(schedule=name, stages_per_rank=chunks),
    )
    steps, passes = [], []
    for number in range(WARM_UP + options.rounds):
        dist.barrier()
        timeline = pipeline.timeline(pipeline.step(list(range(count)), 1, schedule))
        if number >= WARM_UP:
            steps.append(timeline.step_ns)
            passes.append(timeline.busy_ns.sum() / predicted.busy_ns.sum())
    step = float(np.median(steps))
    surplus = (step - predicted.step_ns) / np.diff(schedule.rank_offsets).max()
    return [
        f"{predicted.step_ns / 1e6:.2f}",
        f"{step / 1e6:.2f}",
        f"{step / predicted.step_ns:.4f}",
        f"{np.median(passes):.4f}",
        f"{surplus / 1e3:.0f}",
    ]


def stage_times(num_stages: int, count: int, mean_ns: int) -> StageCosts:
    """Uneven micro-batches, uneven stages; each gradient takes as long as the forward pass."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.6, 1.4, (1, count)) * rng.uniform(0.8, 1.2, (num_stages, 1))
    times = (mean_ns * shares).astype(np.int64)
    return StageCosts.of_times(times, times, times, np.arange(num_stages) < num_stages - 1)


if __name__ == "__main__":
    sys.exit(main())
