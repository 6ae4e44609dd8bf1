"""Context parallelism: images dealt to ranks, groups on as many as they need.

    python benchmarks/context_parallel.py [--dataset FOLDER --tokenizer PATH] [--ranks 32]
                                          [--tokens-per-rank 2048] [--steps 50] [--seed 0]

Image sizes and lengths are real (FOLDER in LLaVA's layout; default: the demo), counted by
Qwen2.5-VL's rule; times are simulated from FLOPs, without what is sent. About a minute.

First table: rows of --row-tokens, on 2, 4 and 8 context-parallel ranks. `over the bound`: ViT
tokens of the busiest rank, summed over rows, over the larger of mean and largest image; 0 cannot
always be reached. `by number`: contiguous runs of equally many images, as Megatron-Bridge's
Qwen3-VL deals them.

Second table: a step has about four rows' worth of tokens per rank. Groups: our grouping of samples
up to --tokens-per-rank, longer ones alone. `one size`: all on as many ranks as the longest sample
needs, in groups as large as those hold together. `copies`: how often keys and values of a token are
sent, on average. `over the bound`: time of the steps over that of equally busy ranks that send
nothing, if each rank more takes 1 % of a group's time for sending that is not hidden (about what
NVLink takes), and 7 % (InfiniBand). `Megatron`: `BalancedCPScheduler` of megatron-core on the same
samples one by one, unmodified, if it is installed. It takes squares of lengths for loads and all
ranks wait after each of its groups; `squares`: by these loads, nothing for sending.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from resolutions import Samples, count, read
from rich.table import Table
from tables import console, new_table

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.balance.steps.context_groups import plan_context_groups
from isobatch.common.errors import DataError, IsobatchError
from isobatch.common.types import Counts, FloatArray, Groups, IntArray
from isobatch.loaders.batch.context_images import deal_images
from isobatch.models.flops import FlopsModel
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.packer.demo.dataset import DEMO_SAMPLES
from isobatch.packer.group import group_counts

MODEL = "qwen2_5_vl"
SIZES = 2, 4, 8
ROWS_PER_RANK = 4
SENDING = 0.01, 0.07


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", help="in LLaVA's layout; default: the demo")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; default: the demo's")
    parser.add_argument("--demo-samples", type=int, default=DEMO_SAMPLES, help="of the demo")
    parser.add_argument("--row-tokens", type=int, nargs="+", default=[8192, 16_384])
    parser.add_argument("--ranks", type=int, default=32, help="data x context parallel")
    parser.add_argument("--tokens-per-rank", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    samples = read(options)
    counts, refused = count(samples, load_model(MODEL).vision)
    if len(refused):
        raise DataError(f"{len(refused):,} samples have images that {MODEL} refuses")
    console.print(
        f"{len(counts):,} samples, {len(samples.widths):,} images, longest "
        f"{int(counts.seq_len.max()):,} tokens",
        highlight=False,
    )
    console.print(images_table(samples, counts, options))
    console.print(steps_table(counts, options))
    return 0


def groups_of(counts: Counts, max_seq_len: int, seed: int) -> Groups:
    """Our groups, and each longer sample alone."""
    fits = np.flatnonzero(counts.seq_len <= max_seq_len)
    options = GroupOptions(seed=seed, max_seq_len=max_seq_len)
    packed = group_counts(
        counts.take(fits), options, vision_unit="vit_tokens", context_len=max_seq_len
    )
    alone = np.flatnonzero(counts.seq_len > max_seq_len)
    rows = fits[packed.groups.samples]
    over = fits[[place for place, *_ in packed.over]]
    sizes = [packed.groups.sizes, np.ones(len(alone) + len(over), np.int64)]
    offsets = np.concatenate([[0], np.concatenate(sizes).cumsum()])
    return Groups(np.concatenate([rows, alone, over]), offsets)


# --- Images ---


def images_table(samples: Samples, counts: Counts, options: argparse.Namespace) -> Table:
    """ViT tokens of the busiest rank over the bound, by tokens per row and number of ranks."""
    rule = load_model(MODEL).vision
    tokens = np.array(
        [
            plan_image(rule, width, height).num_vit_tokens
            for width, height in zip(samples.widths.tolist(), samples.heights.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    first = np.concatenate([[0], samples.num_images.cumsum()])
    table = new_table(
        "Whole images on context-parallel ranks",
        ["row tokens", "rows", "CP", "over the bound\nby ViT tokens", "\nby number"],
    )
    for row_tokens in options.row_tokens:
        rows = groups_of(counts, row_tokens, options.seed)
        loads = [
            np.concatenate([tokens[first[i] : first[i + 1]] for i in row] or [tokens[:0]])
            for row in rows
        ]
        loads = [row for row in loads if len(row)]
        for size in SIZES:
            bound = sum(max(float(row.sum()) / size, float(row.max())) for row in loads)
            dealt = sum(
                max(int(row[images].sum()) for images in deal_images(row.tolist(), size))
                for row in loads
            )
            by_number = sum(
                max(int(part.sum()) for part in np.array_split(row, size)) for row in loads
            )
            table.add_row(
                f"{row_tokens:,}",
                f"{len(loads):,}",
                str(size),
                f"{dealt / bound - 1:.1%}",
                f"{by_number / bound - 1:.1%}",
            )
        table.add_section()
    return table


# --- Steps ---


def steps_table(counts: Counts, options: argparse.Namespace) -> Table:
    """Waiting and copies of each way, over steps drawn with replacement."""
    flops = FlopsModel.of(load_model(MODEL))
    loads = flops.train_flops(flops.loads(counts))
    seq_len = counts.seq_len
    per_rank, ranks = options.tokens_per_rank, options.ranks
    size = 1
    while size * per_rank < int(seq_len.max()):
        size *= 2
    if ranks % size:
        raise DataError(
            f"{int(seq_len.max()):,} tokens need {size} ranks of {per_rank:,}; give more --ranks"
        )
    small = groups_of(counts, per_rank, options.seed)
    large = groups_of(counts, per_rank * size, options.seed)
    ways: dict[str, list[tuple[float, ...]]] = {}
    rng = np.random.default_rng(options.seed)
    for _ in range(options.steps):
        rows = rng.permutation(len(small))
        filled = np.cumsum(small.sum(seq_len)[rows])
        step = rows[filled <= ROWS_PER_RANK * ranks * per_rank]
        step_loads, tokens = small.sum(loads)[step], small.sum(seq_len)[step]
        for sending in SENDING:
            plan = plan_context_groups(
                step_loads, tokens, num_ranks=ranks, tokens_per_rank=per_rank, sending=sending
            )
            times = [
                float(plan.rank_loads.max()) if sending == other else np.nan for other in SENDING
            ]
            name = f"Isobatch: a size per group, sending {sending:.0%}"
            ways.setdefault(name, []).append(row_of(times, step_loads, tokens, plan.sizes))
        drawn = rng.permutation(len(large))[: ROWS_PER_RANK * ranks // size]
        drawn_loads = large.sum(loads)[drawn]
        # equally many for each context-parallel group, in the order drawn
        longest = np.bincount(np.arange(len(drawn)) % (ranks // size), drawn_loads / size).max()
        times = [longest * (1 + sending * (size - 1)) for sending in SENDING]
        sizes = np.full(len(drawn), size)
        row = row_of(times, drawn_loads, large.sum(seq_len)[drawn], sizes)
        ways.setdefault(f"one size: {size}", []).append(row)
        members = small.take(step).samples
        if (placed := of_megatron(seq_len[members], per_rank, ranks)) is not None:
            squares = seq_len[members].astype(np.float64) ** 2
            for name, values in (("", loads[members]), (", squares", squares)):
                times, sizes = times_of(placed, values, SENDING if not name else (0.0, 0.0))
                row = row_of(times, values, seq_len[members], sizes)
                ways.setdefault(f"Megatron{name}", []).append(row)
    table = new_table(
        f"{options.steps} steps on {ranks} ranks, {per_rank:,} tokens each",
        ["", "copies", *(f"over the bound,\nsending {sending:.0%}" for sending in SENDING)],
    )
    for name, values in ways.items():
        copies, *over = np.mean(values, axis=0)
        cells = ("-" if np.isnan(value) else f"{value * ranks - 1:.1%}" for value in over)
        table.add_row(name, f"{copies:.2f}", *cells)
    if "Megatron" not in ways:
        console.print("megatron-core is not installed: its scheduler is left out")
    return table


def row_of(
    times: Sequence[float], loads: FloatArray, tokens: IntArray, sizes: IntArray
) -> tuple[float, ...]:
    """Copies per token, and each time as a share of what one rank would take for all."""
    copies = float((tokens * (sizes - 1)).sum() / tokens.sum())
    return copies, *(time / float(loads.sum()) for time in times)


def of_megatron(lengths: IntArray, per_rank: int, ranks: int) -> list[list[list[int]]] | None:
    """Samples of each rank in each of its groups, between which all ranks wait."""
    try:
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import (  # noqa: PLC0415
            BalancedCPScheduler,
        )
    except ImportError:
        return None
    scheduler = BalancedCPScheduler(per_rank, SimpleNamespace(size=lambda: ranks))
    numbered = list(enumerate(lengths.tolist()))
    return list(scheduler.get_groups_and_subsamples(numbered, None)[1])


def times_of(
    placed: list[list[list[int]]], loads: FloatArray, shares: Sequence[float]
) -> tuple[list[float], IntArray]:
    """(time of a step in which all wait after each group, by share for sending; ranks of each
    sample).
    """
    sizes = np.zeros(len(loads), np.int64)
    for group in placed:
        for samples in group:
            sizes[samples] += 1
    times = []
    for share in shares:
        each = loads / sizes * (1 + share * (sizes - 1))
        times.append(sum(max(float(each[part].sum()) for part in group) for group in placed))
    return times, sizes


if __name__ == "__main__":
    try:
        sys.exit(main())
    except IsobatchError as problem:
        sys.exit(f"error: {problem}")
