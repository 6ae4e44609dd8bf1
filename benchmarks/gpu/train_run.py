"""`gpu_training.py train`: a model of 2 B, packed against padded, adaptive recomputation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
from ablation.data import Sizes, Steps, balanced_steps, random_steps
from ablation.ranks import GIB
from papers.datasets import internvl_samples

from gpu.device import Bench, matmul_flops, one_rank
from gpu.presets import counts_for, sizes_of, tiny_of, two_billion
from gpu.report import Report
from gpu.trainer import Ran, Trainer, Way
from isobatch.common.types import Counts
from isobatch.engine.cost_model.profile_table import misfit, write_profile

HEADINGS = (
    *(
        "",
        "tokens/s",
        "speed-up",
        "MFU",
        "of products",
        "recomputed",
        "peak GiB",
        "planned",
        "ratio",
        "passes ms",
    ),
    *("planned", "ratio", "optimizer ms"),
)
SAMPLES = 3_000
SEQ_LEN, TILES = 4096, 9
TINY_SIDE = 4
"""Squares of a tiny tile by as many."""
SHARES = (0.25, 0.5, 0.75)
"""Memory budgets: so much of the way from everything recomputed to nothing."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument(
        "--steps", type=int, default=4, help="of each way to train (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="each way runs so often (default: %(default)s)"
    )
    parser.add_argument(
        *("--budgets", "--shares"),
        dest="shares",
        type=float,
        nargs="+",
        default=SHARES,
        help="memory: shares of the way from all recomputed to nothing (default: %(default)s)",
    )


def run(bench: Bench, report: Report, options: argparse.Namespace) -> None:
    """Train in every way, print and note."""
    begun = time.perf_counter()
    preset = two_billion()
    if bench.tiny:
        preset = tiny_of(preset, num_layers=3, tile_side=TINY_SIDE)
    counts = counts_for(internvl_samples(SAMPLES), preset, tiny=bench.tiny)
    sizes = sizes_of(preset, SEQ_LEN // 16 if bench.tiny else SEQ_LEN, TILES)
    random, balanced = steps_of(counts, sizes, options)
    with one_rank(bench.device):
        limit = matmul_flops(bench)
        trainer = Trainer(preset, counts, sizes, [(random, True), (balanced, False)], bench)
        report.line(
            f"{preset.name}: {trainer.num_params / 1e9:.3g} B parameters, {len(trainer.kinds)} "
            f"layers; {options.steps} steps of {options.micro_batches} micro-batches, random ones "
            f"of 4 padded samples"
        )
        note_profile(trainer, report)
        rows: list[Ran] = []
        for way in ways(trainer, random, balanced, report, options.shares):
            rows.append(trainer.run(way, options.rounds))
            report.figures["ways"] = [asdict(row) for row in rows]
            report.save()
    peak = bench.cluster.peak_flops_per_s
    title = "Each row trains the same model; 'planned': the planner's prediction from the profile"
    report.table(title, HEADINGS, [row_of(row, rows[0], peak, limit) for row in rows])
    report.figures |= {
        "num_params": trainer.num_params,
        "matmul_flops_per_s": limit,
        "seconds": time.perf_counter() - begun,
    }
    report.line(f"{report.figures['seconds']:.0f} s")


def steps_of(counts: Counts, sizes: Sizes, options: argparse.Namespace) -> tuple[Steps, Steps]:
    """Random micro-batches, and balanced groups."""
    random = random_steps(counts, 1, options.micro_batches, options.steps)
    return random, balanced_steps(counts, sizes, 1, options.micro_batches, options.steps)


def note_profile(trainer: Trainer, report: Report) -> None:
    """Keep what layers took."""
    path = report.path("profile.json")
    write_profile(trainer.profile, path)
    report.figures |= {"profile": path.name, "misfit": misfit(trainer.profile)}
    report.line(
        f"Forward and backward times of a kind are fitted to {misfit(trainer.profile):.1%} at "
        f"worst."
    )


def ways(
    trainer: Trainer, random: Steps, balanced: Steps, report: Report, shares: Sequence[float]
) -> Iterator[Way]:
    """Padded and packed with everything recomputed, packed with as little as budgets allow, and
    with nothing.
    """
    everything = np.ones(len(trainer.kinds), np.bool_)
    padded = Way(name="padded, all recomputed", steps=random, padded=True, recompute=everything)
    packed = replace(padded, name="packed, all recomputed", steps=balanced, padded=False)
    nothing = replace(packed, name="packed, nothing recomputed", recompute=~everything)
    yield from (padded, packed)
    least, most = trainer.peak_bytes(packed), trainer.peak_bytes(nothing)
    if least is None:
        report.line(
            "Packed micro-batches do not fit even with everything recomputed: use a GPU with more "
            "memory."
        )
        return
    for share in shares:
        limit = int(least + share * ((most or trainer.free_bytes()) - least))
        way = replace(packed, name=f"packed, adaptive in {limit / GIB:.3g} GiB", limit_bytes=limit)
        recompute, runs = trainer.adapted(way)
        planned = trainer.planned(way)
        report.figures.setdefault("budgets", []).append(
            {
                "limit_bytes": limit,
                "runs": runs,
                "adapted": trainer.count(recompute),
                "planned": None if planned is None else trainer.count(planned),
            }
        )
        said = "nothing that fits" if planned is None else trainer.count(planned)
        report.line(
            f"{limit / GIB:.3g} GiB: {runs} runs choose {trainer.count(recompute)}; the planner "
            f"{said}"
        )
        yield replace(way, recompute=recompute)
    yield nothing


def row_of(row: Ran, first: Ran, peak_flops: float, product_flops: float) -> list[str]:
    """A row of the table; what ran out of memory has no times."""
    recomputed = sum(row.recomputed.values())
    if not row.passes_s:
        return [
            row.name,
            *["-"] * 4,
            str(recomputed),
            "out of memory",
            f"{row.predicted_bytes / GIB:.3g}",
            *["-"] * 5,
        ]
    speed = row.tokens / row.seconds
    passes, predicted = sum(row.passes_s), sum(row.predicted_s)
    gib, planned = ((row.peak_bytes or 0) / GIB, row.predicted_bytes / GIB)
    base = first.tokens / first.seconds if first.passes_s else None
    return [
        *(row.name, f"{speed:,.0f}", f"{speed / base:.2f}" if base else "-"),
        *(
            f"{row.flops / row.seconds / peak_flops:.1%}",
            f"{row.flops / row.seconds / product_flops:.1%}",
        ),
        *(str(recomputed), f"{gib:.4g}", f"{planned:.4g}", f"{gib / planned:.3f}"),
        *(
            f"{1e3 * passes / len(row.passes_s):,.1f}",
            f"{1e3 * predicted / len(row.passes_s):,.1f}",
        ),
        *(f"{passes / predicted:.3f}", f"{1e3 * row.optimizer_s / len(row.passes_s):,.1f}"),
    ]
