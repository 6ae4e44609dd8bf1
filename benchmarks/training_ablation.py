"""OmniBal's, PipeTune's and OrchMLLM's ablations, measured in training.

    python benchmarks/training_ablation.py [--only omnibal,pipetune,orchmllm] [--steps 4]
    [--rounds 2]

Two worlds, each in its own processes on this machine:

- real compute: a small uneven model (`ablation/model.py`) on 2 ranks, a core each.
  Layers are profiled, partitions of BMP and recomputation tried out on the running model, as a user
  would. Something idle computes on a core whose rank waits, so that the other does not get faster
  meanwhile, as GPUs do not;
- stand-ins: InternVL's 6B + 20B and PipeTune's 13B on 8 and 4 ranks, whose stages only wait for as
  long as the cost model says: what is measured is the runtime (`ablation/stand_in.py`). Times are
  given at the model's own speed.

Each row adds to the one above. "tokens/s" are the LLM's, "MFU" the operations that samples without
padding need, of what the hardware could do (2 ranks: large matrix products on both cores at once);
"waiting" is the ranks' time without a pass to run, "memory" the most that tensors of a rank
occupied (stand-ins: by the cost model). A step is forward, backward and the sum of gradients over
replicas; the optimizer is left out. OrchMLLM's own tables, of a model that also hears, are those of
`dispatch_ablation.py`, which says what they hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import dispatch_ablation
from ablation import internvl_stand_in, pipetune_stand_in, real_omnibal, real_pipetune
from ablation.ranks import on_ranks
from papers.datasets import PIPETUNE_MIXES
from rich.console import Console
from tables import new_table

STAND_IN_SAMPLES = 12_000
console = Console(width=130)
NAMES = ("omnibal", "pipetune", "orchmllm")
HEADINGS = [
    "",
    "tokens/s",
    "speed-up",
    "MFU",
    "waiting",
    "memory, GiB",
    "predicted s",
    "measured s",
    "ratio",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of each row (default: 4)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rows take turns so often (default: 2)"
    )
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if set(names) - set(NAMES):
        parser.error(f"--only {options.only}: use {', '.join(NAMES)}")
    if "omnibal" in names:
        omnibal(options)
    if "pipetune" in names:
        pipetune(options)
    if "orchmllm" in names:
        own = ["--steps", str(options.steps)]
        return max(
            dispatch_ablation.main(own), dispatch_ablation.main(["--standin", "--ranks", "8", *own])
        )
    return 0


def omnibal(options: argparse.Namespace) -> None:
    """Tables 7 and 2."""
    for title, rows in on_ranks(
        2, real_omnibal.run, options.steps, options.rounds, apart=True
    ).items():
        show(title, rows)
    rows = on_ranks(8, internvl_stand_in.run, options.steps, STAND_IN_SAMPLES)
    show("InternVL 6B + 20B, 4 stages x 2 replicas, stand-ins (OmniBal: 2.9)", rows)
    rows = on_ranks(8, internvl_stand_in.run_data_parallel, 8 * options.steps, STAND_IN_SAMPLES)
    show("The same, data parallel on 8 ranks, stand-ins (OmniBal: 1.5)", rows)


def pipetune(options: argparse.Namespace) -> None:
    """Table 2."""
    show(
        "A frozen encoder, 2 stages, real compute",
        on_ranks(2, real_pipetune.run, options.steps, options.rounds, apart=True),
    )
    for mix in PIPETUNE_MIXES:
        rows = on_ranks(4, pipetune_stand_in.run, options.steps, mix)
        show(f"PipeTune 13B on {mix}, 4 stages, stand-ins", rows)


def show(title: str, rows: Sequence[Any]) -> None:
    """A table; each row has `name`, `tokens`, `predicted_s`, `measured_s`, `mfu`, `waiting` and
    `peak_gib`.
    """
    table = new_table(title, HEADINGS)
    speeds = [row.tokens / row.measured_s for row in rows]
    for row, speed in zip(rows, speeds, strict=True):
        table.add_row(
            row.name,
            f"{speed:,.0f}",
            f"{speed / speeds[0]:.2f}",
            "-" if row.mfu is None else f"{row.mfu:.1%}",
            f"{row.waiting:.1%}",
            f"{row.peak_gib:.3g}",
            f"{row.predicted_s:.2f}",
            f"{row.measured_s:.2f}",
            f"{row.measured_s / row.predicted_s:.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
