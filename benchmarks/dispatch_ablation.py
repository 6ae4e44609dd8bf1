"""OrchMLLM's ablations (figures 10 to 13) on a model of three modalities, data parallel.

    python benchmarks/dispatch_ablation.py [--ranks 2] [--steps 5] [--samples 12] [--runs 3]
    python benchmarks/dispatch_ablation.py --standin [--ranks 4 8] [--step-ms 300]

Without `--standin` everything is computed, on gloo ranks of one core each. With it layers wait for
the time that their FLOPs would take, padding included, so that more ranks than cores can run;
features really travel, and dearer than where each rank has a core: what ranks do at once takes
turns. All variants run the same steps in turn, and their losses must agree. A loader plans in its
prefetch and reads inputs where they are needed; planning counts here. Two settings: weights
replicated, so that ranks wait for each other in exchanges and for gradients; and phases that begin
on all ranks at once, as where weights are shared out and every layer is gathered (the paper's FSDP;
here ranks only wait for each other, no weights travel). "by FLOPs": the ratio that the ranks' FLOPs
give, padding included, without exchanges; MFU counts no padding. Limit: what the ranks computed,
divided evenly. Tables are of the last run; the one after them has medians of all runs, over no
balance and over what a careful user does (whole samples, by all their FLOPs), and their range.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch.multiprocessing as mp
from dispatching.clock import COMPUTING
from dispatching.data import DataShape
from dispatching.model import ModelShape, Tower
from dispatching.runs import (
    CAREFUL,
    NOT_BALANCED,
    Measured,
    RunOptions,
    draw,
    phase_loads,
    run_rank,
    slowest_flops,
    steps_of,
    variants,
)
from rich.console import Console
from rich.table import Table
from tables import new_table

from isobatch.balance.metrics import FloatArray, dist_ratio
from isobatch.engine.dispatching.dispatch import PHASES

LOSSES_AGREE = 1e-5
"""Relative difference of the variants' losses, at most."""
SETTINGS = {False: "weights replicated", True: "phases begin together (weights shared out)"}
TINY = ModelShape(
    data=DataShape(patch_values=12, frame_values=8, vocabulary=64),
    vision=Tower(layers=1, width=16, heads=2),
    audio=Tower(layers=1, width=16, heads=2),
    llm=Tower(layers=1, width=16, heads=2),
)
MB = 1e6
TIMES = (
    "balanced",
    "tokens/s",
    "ratio",
    "by FLOPs",
    "MFU",
    "step ms",
    "waiting",
    "plan ms",
    "exchange ms",
    "overhead",
)

console = Console(width=170)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; -> exit status, 1 if the variants' losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--standin", action="store_true", help="layers that wait for their modelled time"
    )
    parser.add_argument(
        "--ranks", type=positive, nargs="+", help="default: 2, with --standin 4 and 8"
    )
    parser.add_argument("--steps", type=positive, default=5, help="measured, in each setting")
    parser.add_argument(
        "--samples", type=positive, default=12, help="that each rank draws for a step"
    )
    parser.add_argument(
        "--step-ms",
        type=positive,
        default=300,
        help="with --standin: a rank's share of an even step",
    )
    parser.add_argument("--runs", type=positive, default=1, help="of everything (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny", action="store_true", help="a model of no size, to see that everything runs"
    )
    options = parser.parse_args(arguments)
    agree = [run(ranks, options) for ranks in options.ranks or ([4, 8] if options.standin else [2])]
    return 0 if all(agree) else 1


def run(ranks: int, chosen: argparse.Namespace) -> bool:
    """All variants on so many ranks; -> whether their losses agree."""
    options = RunOptions(
        ranks=ranks,
        ranks_per_node=1 if ranks % 2 else ranks // 2,
        per_rank=chosen.samples,
        steps=chosen.steps,
        memory_steps=0 if chosen.standin else min(2, chosen.steps),
        shape=TINY if chosen.tiny else ModelShape(),
        seed=chosen.seed,
    )
    if chosen.standin:
        even = draw(options, chosen.seed).flops.sum() / ranks
        options = replace(options, rate=float(even / (chosen.step_ms / 1e3)))
    slowest(options, 0)  # compiles the planner's kernels, which else every rank does for itself
    runs = [measure(options) for _ in range(chosen.runs)]
    agree = True
    for number, together in enumerate(options.settings):
        every = [
            {name: found for (setting, name), found in measured.items() if setting == together}
            for _, measured in runs
        ]
        show(options, number, runs[-1][0], every[-1])
        if chosen.runs > 1:
            console.print(compared(every, SETTINGS[together]))
        agree &= all(losses_agree(own) for own in every)
    return agree


def measure(options: RunOptions) -> tuple[float, dict[tuple[bool, str], Measured]]:
    """-> (FLOPs per second of a rank at its peak, what each variant took in each setting)."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, (folder, options, results), nprocs=options.ranks)
        found: tuple[float, dict[tuple[bool, str], Measured]] = results.get()
    return found


def compared(runs: Sequence[dict[str, Measured]], setting: str) -> Table:
    """Both baselines over each variant: medians of the runs, and their range."""
    table = new_table(
        f"{len(runs)} runs; {setting}",
        ["balanced", f"x {NOT_BALANCED}", "range", "x careful", "range"],
    )
    for name in runs[0]:
        cells = []
        for baseline in (NOT_BALANCED, CAREFUL):
            ratios = [own[baseline].step_s / own[name].step_s for own in runs]
            cells += [f"{median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
        table.add_row(name, *cells)
    return table


def show(options: RunOptions, setting: int, peak: float, measured: dict[str, Measured]) -> None:
    """Both tables of a setting."""
    steps = steps_of(options, setting)[1:]
    tokens = float(np.mean([step.num_tokens for step in steps]))
    flops = float(np.mean([step.flops.sum() for step in steps]))
    kind = (
        "computed" if options.rate is None else "stand-in layers, waiting for their modelled time"
    )
    times = new_table(
        f"{options.ranks} ranks, {kind}; {SETTINGS[options.settings[setting]]}\n{len(steps)} steps "
        f"of {options.ranks} x {options.per_rank} samples, {tokens:,.0f} LLM tokens each; "
        f"{'peak' if options.rate is None else 'modelled rate'} {peak / 1e9:.1f} GFLOP/s per rank; "
        f"{shares(measured)}",
        [*TIMES, "gradients"],
    )
    base, planned = measured[NOT_BALANCED].step_s, slowest(options, setting)
    limit = min(own.computing_s for own in measured.values())

    def row(name: str, step_s: float, slowest_flops: float, rest: list[str]) -> None:
        ratios = f"{base / step_s:.2f}x", f"{planned[NOT_BALANCED] / slowest_flops:.2f}x"
        used = flops / (step_s * options.ranks * peak)
        times.add_row(
            name, f"{tokens / step_s:,.0f}", *ratios, percent(used), f"{1e3 * step_s:,.0f}", *rest
        )

    for name, own in measured.items():
        spent = [f"{1e3 * own.seconds[kind].mean():.2f}" for kind in ("planning", "exchange")]
        shares_of_time = [
            percent(own.share("planning", "exchange")),
            percent(own.share("gradients")),
        ]
        row(
            name,
            own.step_s,
            planned[name],
            [percent(own.share("waiting")), *spent, *shares_of_time],
        )
    times.add_section()
    row("limit: computing, divided evenly", limit, flops / options.ranks, ["-"] * 5)
    console.print(times)
    console.print(balance_table(options, setting, measured))


def balance_table(options: RunOptions, setting: int, measured: dict[str, Measured]) -> Table:
    """How even each phase is, what travels, and what is alive."""
    table = new_table(
        f"tokens with padding; per rank and step, {options.ranks_per_node} ranks to a node",
        [
            *(
                "balanced",
                "dist ratio: vision",
                "audio",
                "LLM",
                "sent MB",
                "to other nodes",
                "at most",
            ),
            *("peak MB, largest", "mean of ranks"),
        ],
    )
    for variant in variants(options.ranks_per_node):
        own = measured[variant.name]
        ratios = dist_ratios(options, setting, variant.name)
        table.add_row(
            *(variant.name, *(f"{ratio:.3f}" for ratio in ratios)),
            *(f"{own.sent_bytes.mean() / MB:.2f}", f"{own.abroad_bytes.mean() / MB:.2f}"),
            f"{own.abroad_bytes.max(axis=0).mean() / MB:.2f}",
            *(
                [f"{own.peak_bytes.max() / MB:.0f}", f"{own.peak_bytes.mean() / MB:.0f}"]
                if options.memory_steps
                else "--"
            ),
        )
    return table


def slowest(options: RunOptions, setting: int) -> dict[str, float]:
    """By variant, FLOPs of the ranks that are waited for, mean of the measured steps."""
    steps, together = steps_of(options, setting)[1:], options.settings[setting]
    return {
        variant.name: float(
            np.mean([slowest_flops(options, step, variant, together=together) for step in steps])
        )
        for variant in variants(options.ranks_per_node)
    }


def peaks(measured: Measured) -> list[str]:
    """Most that was alive, on the rank with most and on average; stand-ins keep nothing for the
    backward pass.
    """
    alive = measured.peak_bytes
    return [f"{alive.max() / MB:.0f}", f"{alive.mean() / MB:.0f}"] if alive.size else ["-", "-"]


def dist_ratios(options: RunOptions, setting: int, name: str) -> list[float]:
    """Of each phase, over the measured steps."""
    variant = next(own for own in variants(options.ranks_per_node) if own.name == name)
    steps = [phase_loads(step, variant) for step in steps_of(options, setting)[1:]]
    return [
        dist_ratio(np.concatenate([step[phase].tokens for step in steps]), options.ranks)
        for phase in steps[0]
    ]


def losses_agree(measured: dict[str, Measured]) -> bool:
    """Whether all variants trained on the same samples; says by how much they differ."""
    losses: FloatArray = np.array([own.losses for own in measured.values()])
    off = np.ptp(losses, axis=0) / np.abs(losses).mean(axis=0)
    agree = bool(off.max() <= LOSSES_AGREE)
    console.print(
        f"losses {losses[0, 0]:.4f} to {losses[0, -1]:.4f}, the same for all variants to "
        f"{off.max():.1e}"
        + ("" if agree else f": more than {LOSSES_AGREE:.0e}, something is wrong")
        + "\n"
    )
    return agree


def shares(measured: dict[str, Measured]) -> str:
    """What each phase is of the computing of the unbalanced variant."""
    own = measured[NOT_BALANCED]
    return ", ".join(
        f"{phase} {percent(own.share(phase) / own.share(*COMPUTING))}" for phase in PHASES
    )


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
