"""Measurements on one GPU: layer profiles, and a model of 2 B under memory budgets.

    python benchmarks/gpu_training.py profile [--tiny] [--out benchmarks/results]
    python benchmarks/gpu_training.py train [--tiny] [--out benchmarks/results]

`profile`: layers of InternViT-6B and InternLM2-20B in bf16 at OmniBal's caps (9 tiles, 4,096
tokens), beside the analytical model; a profile for `engine.cost_model.profile_table`; the paper's
Table 4 and its nine models of Table 9 on measured layers. `train`: adaptive recomputation against
full, packed against padded micro-batches, tokens/s, MFU and peak memory beside what the planner
predicts from a profile. Both keep JSON and text in `--out`; docs/results/gpu.md says how to read
them. `--tiny` runs the same on a CPU with shapes of a few numbers: it proves the path, not the
figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu import load_run, profile_run, train_run
from gpu.device import open_bench
from gpu.report import Report

from isobatch.common.errors import IsobatchError, first_line

COMMANDS = {"profile": profile_run, "train": train_run, "load": load_run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; -> exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        own = commands.add_parser(name, help=(module.__doc__ or "").split(": ", 1)[-1])
        own.add_argument("--tiny", action="store_true", help="tiny shapes in float32 on the CPU")
        own.add_argument("--cluster", help="preset of the GPU's data sheet (default: by its name)")
        own.add_argument(
            "--out",
            type=Path,
            default=Path(__file__).parent / "results",
            help="folder for what is kept",
        )
        module.add_options(own)
    options = parser.parse_args(given)
    if options.tiny:
        torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    try:
        bench = open_bench(tiny=options.tiny, cluster=options.cluster)
        report = Report(bench, options.command, given, options.out)
        COMMANDS[options.command].run(bench, report, options)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"the GPU has too little memory (80 GB do): {first_line(error)}", file=sys.stderr)
        return 1
    report.save()
    print(f"kept: {report.path('json')} and .txt", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
