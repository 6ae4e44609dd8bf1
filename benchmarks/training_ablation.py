"""OmniBal's, PipeTune's and OrchMLLM's ablations, measured in training.

    python benchmarks/training_ablation.py --only internvl [--idle] [--steps 2] [--runs 3]

Each table is made by one command, `--only` and its name:

- internvl, qwen: models of their shapes, scaled down (`ablation/shapes.py`), in 4 stages with real
  compute, by the CPU's clock (`ablation/ranks.py`): profiled, planned, tuned and trained;
- wall: InternVL's in 2 stages, by the clock on the wall, a core for each rank;
- data: InternVL's on 4 data-parallel ranks, by the CPU's clock;
- pipetune: Qwen2.5-VL's shape with a frozen encoder in 2 stages, by the clock on the wall;
- internvl-stand-ins, data-stand-ins, pipetune-stand-ins: the real InternVL 6B + 20B and PipeTune's
  13B on 8 and 4 ranks, whose stages only wait for as long as the cost model says
  (`ablation/stand_in.py`): what is measured is the runtime, at the model's own speed;
- simulated: the real InternVL and Qwen2.5-VL on A100-80G, by the cost model; nothing runs;
- orchmllm: `dispatch_ablation.py`.

While a rank waits, something idle computes on its core, so that the others do not get faster
meanwhile, as GPUs do not; `--idle` leaves that out.

Both baselines come first (`ablation/plans.py`). From the third on each row adds to the one above.
"tokens/s" are the LLM's; "of bound" is the share of what ranks would reach that never wait and
recompute nothing; "waiting" the ranks' time without a pass to run; "GiB" the most that tensors of a
rank occupied (stand-ins: by the cost model). A step is forward, backward and the sum of gradients
over replicas; the optimizer is left out. Figures are medians of the runs; "range" is that of
"x careful" over the runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import dispatch_ablation
from ablation import internvl_stand_in, pipetune_stand_in, real_omnibal, real_pipetune
from ablation.data import true_tokens
from ablation.plans import ways_to_train
from ablation.ranks import GIB, Machine, Row, on_ranks
from ablation.shapes import SHAPES
from papers.datasets import PIPETUNE_MIXES
from rich.console import Console
from tables import new_table

from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model

STAND_IN_SAMPLES = 12_000
STAGES = 4
console = Console(width=160)
HEADINGS = [
    "",
    "tokens/s",
    "x papers'",
    "x careful",
    "range",
    "of bound",
    "waiting",
    "recomputed",
    "GiB",
    "predicted s",
    "measured s",
    "ratio",
]
Runs = Sequence[Sequence[Row]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TABLES), help="default: %(default)s")
    parser.add_argument("--idle", action="store_true", help="nothing computes where ranks wait")
    parser.add_argument("--steps", type=int, default=2, help="of each row (default: 2)")
    parser.add_argument("--runs", type=int, default=3, help="of each table (default: 3)")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if set(names) - set(TABLES):
        parser.error(f"--only {options.only}: use {', '.join(TABLES)}")
    for name in names:
        TABLES[name](options)
    return 0


def internvl(options: argparse.Namespace) -> None:
    """Table 7 with real compute."""
    real("internvl", STAGES, options)


def qwen(options: argparse.Namespace) -> None:
    """The same for Qwen2.5-VL."""
    real("qwen", STAGES, options)


def wall(options: argparse.Namespace) -> None:
    """The same in 2 stages, each with a core of its own."""
    real("internvl", 2, options, cpu_clock=False)


def real(shape: str, stages: int, options: argparse.Namespace, *, cpu_clock: bool = True) -> None:
    """A shape's table."""
    machine = Machine(apart=True, busy=not options.idle, cpu_clock=cpu_clock)
    runs = [
        on_ranks(stages, real_omnibal.run, shape, options.steps, machine=machine)
        for _ in range(options.runs)
    ]
    clock = "CPU clock" if cpu_clock else "clock on the wall"
    load = "waiting cores idle" if options.idle else "waiting cores busy"
    title = f"{SHAPES[shape].name}: {stages} stages, real compute, {clock}, {load}"
    show(title, runs, stages)
    if not cpu_clock:
        shares = [row.replayed_s / row.measured_s for own in runs for row in own]
        console.print(f"passes alone: {min(shares):.3f} to {max(shares):.3f} of these times")


def data(options: argparse.Namespace) -> None:
    """Table 2 with real compute."""
    machine = Machine(apart=True, busy=not options.idle, cpu_clock=True)
    runs = [
        on_ranks(
            STAGES, real_omnibal.run_data_parallel, "internvl", 6 * options.steps, machine=machine
        )
        for _ in range(options.runs)
    ]
    show(f"Data parallel on {STAGES} ranks, real compute, CPU clock", runs, STAGES)


def internvl_stand_ins(options: argparse.Namespace) -> None:
    """Table 7."""
    runs = [
        on_ranks(8, internvl_stand_in.run, options.steps, STAND_IN_SAMPLES)
        for _ in range(options.runs)
    ]
    show("InternVL 6B + 20B, 4 stages x 2 replicas, stand-ins (OmniBal: 2.9)", runs, 8)


def data_stand_ins(options: argparse.Namespace) -> None:
    """Table 2."""
    runs = [
        on_ranks(8, internvl_stand_in.run_data_parallel, 8 * options.steps, STAND_IN_SAMPLES)
        for _ in range(options.runs)
    ]
    show("The same, data parallel on 8 ranks, stand-ins (OmniBal: 1.5)", runs, 8)


def pipetune(options: argparse.Namespace) -> None:
    """PipeTune's Table 2 with real compute."""
    machine = Machine(apart=True, busy=not options.idle)
    runs = [
        on_ranks(2, real_pipetune.run, options.steps, machine=machine) for _ in range(options.runs)
    ]
    show("A frozen encoder, 2 stages, real compute, clock on the wall", runs, 2)


def pipetune_stand_ins(options: argparse.Namespace) -> None:
    """PipeTune's Table 2."""
    for mix in PIPETUNE_MIXES:
        runs = [on_ranks(4, pipetune_stand_in.run, options.steps, mix) for _ in range(options.runs)]
        show(f"PipeTune 13B on {mix}, 4 stages, stand-ins", runs, 4)


def simulated(options: argparse.Namespace) -> None:
    """The same ways to train the real models."""
    for shape in ("internvl", "qwen"):
        setting = real_omnibal.real_setting(SHAPES[shape], STAGES)
        setting = replace(setting, num_steps=options.steps)
        usable = load_cluster(real_omnibal.CLUSTER).usable_memory_bytes
        rows = []
        for way in ways_to_train(setting, usable):
            steps = [one for step in way.simulated(setting.costs_of) for one in step]
            predicted = setting.predicted_s(way)
            busy = sum(setting.work_s(way))
            rows.append(
                Row(
                    name=way.name,
                    tokens=true_tokens(way.steps, setting.counts),
                    predicted_s=predicted,
                    measured_s=predicted,
                    waiting=1 - busy / (predicted * STAGES),
                    peak_gib=max(int(one.memory.peak_bytes.max()) for one in steps) / GIB,
                    work_s=setting.work_s(way)[0],
                    recomputed=f"{int(way.recompute.sum())} of {len(way.recompute)}",
                )
            )
        name = load_model(SHAPES[shape].preset).name
        show(f"{name}, {STAGES} stages, simulated, not measured", [rows], STAGES)


def orchmllm(options: argparse.Namespace) -> None:
    """OrchMLLM's phases."""
    own = ["--steps", str(2 * options.steps), "--runs", str(options.runs)]
    dispatch_ablation.main(own)
    dispatch_ablation.main(["--standin", "--ranks", "8", *own])


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "internvl": internvl,
    "qwen": qwen,
    "wall": wall,
    "data": data,
    "internvl-stand-ins": internvl_stand_ins,
    "data-stand-ins": data_stand_ins,
    "pipetune": pipetune,
    "pipetune-stand-ins": pipetune_stand_ins,
    "simulated": simulated,
    "orchmllm": orchmllm,
}


def show(title: str, runs: Runs, ranks: int) -> None:
    """A table; rows of all runs, of which the first two are the baselines."""
    table = new_table(title, HEADINGS)
    speeds = [[row.tokens / row.measured_s for row in own] for own in runs]
    # of packed rows, whose passes differ by what the machine does meanwhile
    bounds = [median(row.tokens * ranks / row.work_s for row in own[1:]) for own in runs]
    for place, rows in enumerate(zip(*runs, strict=True)):
        table.add_row(
            rows[0].name,
            *compared([own[place] for own in speeds], speeds),
            f"{median(own[place] / most for own, most in zip(speeds, bounds, strict=True)):.0%}",
            f"{median(row.waiting for row in rows):.1%}",
            "/".join(dict.fromkeys(row.recomputed for row in rows)),
            f"{max(row.peak_gib for row in rows):.3g}",
            f"{median(row.predicted_s for row in rows):.2f}",
            f"{median(row.measured_s for row in rows):.2f}",
            f"{median(row.measured_s / row.predicted_s for row in rows):.3f}",
        )
    table.add_row("bound: nothing waits", *compared(bounds, speeds))
    console.print(table)


def compared(own: Sequence[float], speeds: Sequence[Sequence[float]]) -> tuple[str, ...]:
    """Cells: speed, relative to both baselines, and the range of the last figure over all runs."""
    papers, careful = (
        [one / speed[baseline] for one, speed in zip(own, speeds, strict=True)]
        for baseline in (0, 1)
    )
    return (
        f"{median(own):,.0f}",
        f"{median(papers):.2f}",
        f"{median(careful):.2f}",
        f"{min(careful):.2f}-{max(careful):.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
