"""How fast ISF converges: groups and balance by number of iterations (OmniBal, figure 4 and
appendix G).

    python benchmarks/convergence.py [--lengths FILE...] [--samples N] [--dp 8] [--max-seq-len 4096]
    [--max-vision Q_v]

FILE: a counts.parquet, or a length file as the OmniBal authors publish them; several are one
dataset of as many sources. Without one: generated samples with the spread of a mixed InternVL
dataset. One core, a few seconds.

"random order": the groups shuffled, which is the paper's setting. "loader's order": the same groups
in the steps of Isobatch's loader, by default. Figures are means over seeds; "ms" is the fastest of
the seeds' runs. The last row is what `packer` makes by default; its time includes the choice of the
vision cap. ISF here stops at the pass that gives the fewest
groups, so more iterations never need more; in the paper's form they can.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tables import DistRatios, as_loaded, console, dist_ratios, new_table, shuffled

from isobatch.balance.grouping.caps import GroupOptions, over_limits
from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.metrics import fill
from isobatch.common.types import Counts, Groups, IntArray, Limits
from isobatch.packer.group import (
    LLM_TOKENS_PER_TILE,
    VIT_TOKENS_PER_TILE,
    Grouping,
    group_counts,
    read_lengths,
)
from isobatch.shards.tables import counts_arrays, source_numbers

ITERATIONS = (*range(1, 11), 15, 20, 50)
NO_CONTEXT = 1 << 30
"""Lengths do not say which model they are for: only --max-seq-len caps a group."""
PAPER = (
    "OmniBal, appendix G (LLaVA-665K, InternVL-1.2M, LCS-558K; a figure without numbers): the dist "
    "ratio\ndrops significantly after one iteration and is stable after five; ten in practice, in "
    "less than a\nminute. Table 3, after ten: .02 / .14 on InternVL-1.2M, which is not public in "
    "full."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Samples, and the caps that every row has in common."""

    counts: Counts
    """Of the samples that fit the caps."""
    sources: IntArray
    limits: Limits
    num_over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One grouping, means over seeds."""

    name: str
    num_groups: float
    fill: float
    random_order: DistRatios
    loader_order: DistRatios
    milliseconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    counts, sources = read(options.lengths) if options.lengths else generate(options.samples)
    packer_options = GroupOptions(max_seq_len=options.max_seq_len, max_vision=options.max_vision)
    data = under_caps(counts, sources, packer_options)
    rows = measure(data, dp=options.dp, seeds=range(options.seeds))
    show(rows, data, options.dp, options.seeds)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=Path, nargs="+", metavar="FILE", help="length files; default: generated"
    )
    parser.add_argument("--samples", type=int, default=30_000, help="number of generated samples")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="Q_t, LLM tokens of a group")
    parser.add_argument(
        "--max-vision", type=int, help="Q_v, image patches of a group; default: from the data"
    )
    parser.add_argument("--seeds", type=int, default=4, help="seeds that figures are means over")
    return parser.parse_args(arguments)


def read(paths: list[Path]) -> tuple[Counts, IntArray]:
    """Counts of all samples of the files, and their source numbers."""
    table = pa.concat_tables([read_lengths(path) for path in paths]).combine_chunks()
    return counts_arrays(table), source_numbers(table)


def generate(num_samples: int) -> tuple[Counts, IntArray]:
    """Two sources: text-only, single-tile and tiled samples, 256 LLM tokens per tile and log-normal
    text.
    """
    rng = np.random.default_rng(0)
    sources = rng.integers(2, size=num_samples)
    tiles = rng.choice([0, 1, 3, 4, 5], num_samples, p=[0.05, 0.2, 0.15, 0.02, 0.58]).astype(
        np.int64
    )
    text = np.minimum(rng.lognormal(4.2 + 0.4 * sources, 0.8).astype(np.int64) + 33, 2_000)
    zeros = np.zeros(num_samples, np.int64)
    counts = Counts(
        num_image_patches=tiles,
        num_vit_tokens=tiles * VIT_TOKENS_PER_TILE,
        num_image_tokens=tiles * LLM_TOKENS_PER_TILE,
        num_text_tokens=text,
        num_audio_tokens=zeros,
        num_loss_tokens=zeros,
    )
    return counts, sources


def under_caps(counts: Counts, sources: IntArray, options: GroupOptions) -> Data:
    """Choose the caps as the packer does, and leave out the samples over them."""
    limits = group_counts(
        counts, options, vision_unit="image_patches", context_len=NO_CONTEXT
    ).limits
    fits = np.ones(len(counts), dtype=bool)
    fits[np.concatenate(over_limits(counts, limits))] = False
    rows = np.flatnonzero(fits)
    return Data(
        counts=counts.take(rows),
        sources=sources[rows],
        limits=limits,
        num_over=len(counts) - len(rows),
    )


def measure(data: Data, *, dp: int, seeds: Iterable[int]) -> list[Row]:
    """A row per number of iterations, and one for the packer's default grouping."""
    seeds = list(seeds)
    vision, tokens = data.limits.vision_load(data.counts), data.counts.seq_len
    group_isf(vision[:10], tokens[:10], data.limits, seed=0)  # compile
    rows = []
    for number in ITERATIONS:

        def isf(seed: int, iterations: int = number) -> Groups:
            return group_isf(vision, tokens, data.limits, seed=seed, iterations=iterations)

        rows.append(_row(f"ISF, {number}", isf, data, dp=dp, seeds=seeds))

    def default(seed: int) -> Grouping:
        options = GroupOptions(
            seed=seed, max_seq_len=data.limits.max_seq_len, max_vision=data.limits.max_vision
        )
        return group_counts(
            data.counts,
            options,
            vision_unit=data.limits.vision_unit,
            context_len=data.limits.max_seq_len,
        )

    rows.append(_row("default", default, data, dp=dp, seeds=seeds))
    return rows


def _row(
    name: str, group: Callable[[int], Groups | Grouping], data: Data, *, dp: int, seeds: list[int]
) -> Row:
    figures, times = [], []
    for seed in seeds:
        start = time.perf_counter()
        made = group(seed)
        times.append(time.perf_counter() - start)
        groups = made.groups if isinstance(made, Grouping) else made
        random = dist_ratios(shuffled(groups, seed), data.counts, dp)
        in_order = as_loaded(groups, data.counts, data.limits, dp=dp, seed=seed)
        loaded = dist_ratios(in_order, data.counts, dp)
        filled = fill(groups, data.counts.seq_len, data.limits.max_seq_len)
        figures.append((len(groups), filled, *astuple(random), *astuple(loaded)))
    mean = np.mean(figures, axis=0).tolist()
    return Row(
        name=name,
        num_groups=mean[0],
        fill=mean[1],
        random_order=DistRatios(*mean[2:4]),
        loader_order=DistRatios(*mean[4:6]),
        milliseconds=1e3 * min(times),
    )


def show(rows: list[Row], data: Data, dp: int, num_seeds: int) -> None:
    least = -(-int(data.counts.seq_len.sum()) // data.limits.max_seq_len)
    console.print(
        f"{len(data.counts):,} samples ({data.num_over:,} over the caps left out); Q_t "
        f"{data.limits.max_seq_len:,}, Q_v {data.limits.max_vision:,};\nsum of tokens / Q_t: "
        f"{least:,} groups; means of {num_seeds} seeds",
        highlight=False,
    )
    headings = [
        "iterations",
        "groups",
        "fill",
        "random order\nViT / LLM",
        "loader's order\nViT / LLM",
        "ms",
    ]
    table = new_table(f"ISF by iteration, dist ratio at dp {dp}", headings)
    for row in rows:
        if row.name == "default":
            table.add_section()
        ratios = [
            f"{ratio.vit:.4f} / {ratio.llm:.4f}" for ratio in (row.random_order, row.loader_order)
        ]
        table.add_row(
            row.name,
            f"{row.num_groups:,.0f}",
            f"{row.fill:.4f}",
            *ratios,
            f"{row.milliseconds:,.1f}",
        )
    console.print(table)
    console.print(PAPER, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
