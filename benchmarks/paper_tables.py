"""The papers' tables beside ours, simulated by `engine`: writes docs/results/papers.md.

    python benchmarks/paper_tables.py [--out docs/results/papers.md] [--only NAME...]

No table is measured on GPUs: every figure of ours comes from the cost model of
`engine.cost_model.analytical`, the simulator and samples that are drawn to match what the papers
tell of theirs (benchmarks/papers/datasets.py). Assumptions stand beside each table. Only search
times are clocked. Takes half a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from papers import (  # noqa: E402
    omnibal_checks,
    omnibal_partition,
    omnibal_training,
    orchmllm_figures,
    pipetune_tables,
)
from papers.page import Section  # noqa: E402
from rich.console import Console  # noqa: E402

INTRODUCTION = """# The papers' tables, simulated

Made by `python benchmarks/paper_tables.py`. **Nothing here was measured on GPUs**: times and bytes
are those of the cost model (`engine/cost_model/analytical.py`, cluster presets in
`configs/clusters`) and of the simulator, which agrees to the nanosecond with a second simulation
that shares no code with it (`tests/support/oracles/simulation_oracle.py`). One number of the cost
model is fitted to a paper: how fast narrow matrix products are on an A100, to OmniBal's 21.3 GPU
days. Where data are not published, samples are drawn to match what a paper says of them; each table
says what is assumed, and what differs.

OmniBal's Table 3 cannot be simulated beyond what Table 7 shows: its samplers are not defined, nor
its lengths published in full. [packing.md](packing.md#balance) has our own measurement on those
that are."""

SECTIONS: dict[str, Callable[[], Section]] = {
    "omnibal-checks": omnibal_checks.checks,
    "omnibal-9": omnibal_partition.table_9,
    "omnibal-4": omnibal_partition.table_4,
    "omnibal-5": omnibal_partition.table_5,
    "omnibal-7": omnibal_training.table_7,
    "omnibal-2": omnibal_training.table_2,
    "omnibal-11": omnibal_training.table_11,
    "omnibal-16": omnibal_training.table_16,
    "pipetune-2": pipetune_tables.table_2,
    "pipetune-8": pipetune_tables.figure_8,
    "orchmllm-2": orchmllm_figures.overhead,
    "orchmllm-10": orchmllm_figures.balance,
    "orchmllm-13": orchmllm_figures.volumes,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "papers.md")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME"
    )
    given = parser.parse_args(arguments)
    people, parts = Console(stderr=True), [INTRODUCTION]
    for name in given.only:
        started = time.perf_counter()
        parts.append(str(SECTIONS[name]()))
        people.print(f"{name}: {time.perf_counter() - started:.1f} s")
    given.out.write_text("\n\n".join(parts) + "\n", "utf-8")
    people.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
