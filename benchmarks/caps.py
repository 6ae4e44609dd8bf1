"""What caps and filter targets cost: groups, fill, predicted time; OmniBal's Table 6.

    python benchmarks/caps.py FILE... [--dp 8] [--model internvl_1_5] [--iterations 10]

FILE: a counts.parquet, or a length file as the OmniBal authors publish them (docs/results/ shows
AI2D and ChartQA of their repository). One core, half a minute. Caps are shown for the default
grouping and for ISF.

Assumptions: times are `models.flops` with its default speeds, so trust ratios, not milliseconds. A
rank's micro-batch takes its encoder's and its LLM's time one after the other. A step takes as long
as its slowest rank, with one micro-batch per rank; idle ranks count. `default`: steps are
those of the loader; `random`: the same groups shuffled, as in the paper.
"ratio" marks the cap of the paper's rule, "chosen" that of `choose_limits` for this grouping, whose
reasons are below the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.cap_lines import cap_lines
from isobatch.balance.grouping.caps import (
    GroupOptions,
    LimitChoice,
    choose_limits,
    choose_limits_omnibal,
)
from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.metrics import dist_ratio, epoch_ms, fill
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.types import Counts, Groups, Limits
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import load_model
from isobatch.packer.group import read_lengths
from isobatch.shards.tables import counts_arrays

TOKEN_CAPS = (2048, 4096, 8192)
VISION_CAPS = (5, 6, 7, 8, *range(9, 17), 18, 20, 22, 24, 26, 28, 29, 30, 31)
TARGETS_Q_T = 4096
SEEDS = range(4)
console = Console(width=110)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every row of a table has in common."""

    counts: Counts
    cost: FlopsModel
    dp: int
    iterations: int

    def group(self, limits: Limits, grouping: str, seed: int = 0) -> Groups:
        vision, tokens = self.counts.num_image_patches, self.counts.seq_len
        if grouping == "fit":
            return group_best_fit(vision, tokens, limits, seed=seed)
        return group_isf(vision, tokens, limits, seed=seed, iterations=self.iterations)

    def choose(self, q_t: int, grouping: str) -> LimitChoice:
        options = GroupOptions(max_seq_len=q_t, grouping=grouping, isf_iterations=self.iterations)
        return choose_limits(
            self.counts,
            options,
            vision_unit="image_patches",
            context_len=q_t,
            predictor=self.cost,
        )

    def orders(self, groups: Groups) -> dict[str, Groups]:
        vision, tokens = groups.sum(self.counts.num_image_patches), groups.sum(self.counts.seq_len)
        order = epoch_steps((vision, tokens), (self.dp, 1)).ravel()
        shuffled = np.random.default_rng(0).permutation(len(groups))
        return {
            "default": groups.take(order[order >= 0]),
            "random": groups.take(shuffled),
        }

    def ms_per_sample(self, stream: Groups, overhead_ms: float) -> float:
        each = self.cost.compute_ms(self.cost.loads(self.counts).sum(stream)) + overhead_ms
        return self.dp * epoch_ms(each, self.dp) / len(stream.samples)


def main() -> int:
    options = parse()
    counts = counts_arrays(
        pa.concat_tables([read_lengths(path) for path in options.files]).combine_chunks()
    )
    cost = FlopsModel.of(load_model(options.model))
    setting = Setting(counts=counts, cost=cost, dp=options.dp, iterations=options.iterations)
    work = float(cost.compute_ms(cost.loads(counts)).mean())
    console.print(
        f"{len(counts):,} samples, {int(counts.seq_len.sum()):,} tokens; {cost.name} "
        f"({cost.speed}): {work:,.1f} GPU-ms per sample without waiting or overhead; dp "
        f"{setting.dp}; ISF of {setting.iterations} iterations"
    )
    for grouping in ("fit", "isf"):
        console.print(caps_table(setting, grouping))
        for line in cap_lines(setting.choose(TARGETS_Q_T, grouping)):
            console.print(line)
        console.print()
    console.print(targets_table(setting))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument(
        "--model", default="internvl_1_5", help="model preset that times are predicted for"
    )
    parser.add_argument("--iterations", type=int, default=10, help="ISF iterations at most")
    return parser.parse_args()


def caps_table(setting: Setting, grouping: str) -> Table:
    """A row per pair of caps, without vision caps above what Q_t tokens can hold."""
    heading = ["Q_t", "Q_v", "groups", "x bound", "fill"]
    orders = [f"{order}\n+{overhead} ms" for order in ("default", "random") for overhead in (0, 10)]
    title = f"Caps, {grouping}: predicted GPU-ms per sample by order and overhead per micro-batch"
    table = new_table(title, [*heading, *orders])
    tokens, patches = int(setting.counts.seq_len.sum()), setting.counts.num_image_patches
    for q_t in TOKEN_CAPS:
        chosen = setting.choose(q_t, grouping).limits.max_vision
        ratio = by_ratio(setting, q_t)
        never_binds = int((patches * q_t // np.maximum(setting.counts.seq_len, 1)).max())
        for q_v in (cap for cap in VISION_CAPS if patches.max() <= cap <= never_binds):
            limits = Limits(max_seq_len=q_t, max_vision=q_v, min_seq_len=q_t - 128, min_vision=q_v)
            groups = setting.group(limits, grouping)
            streams = setting.orders(groups).values()
            times = [
                setting.ms_per_sample(stream, overhead)
                for stream in streams
                for overhead in (0, 10)
            ]
            shown = [f"{len(groups):,}", f"{len(groups) * q_t / tokens:.3f}"]
            filled = fill(groups, setting.counts.seq_len, q_t)
            mark = " ratio" * (q_v == ratio) + " chosen" * (q_v == chosen)
            row = [
                f"{q_t:,}",
                f"{q_v}{mark}",
                *shown,
                f"{filled:.3f}",
                *(f"{ms:,.1f}" for ms in times),
            ]
            table.add_row(*row, style="bold" if q_v == chosen else None)
        table.add_section()
    return table


def by_ratio(setting: Setting, q_t: int) -> int:
    """The vision cap of the paper's ratio."""
    paper = choose_limits_omnibal(
        setting.counts, vision_unit="image_patches", context_len=q_t, max_seq_len=q_t
    )
    return paper.max_vision


def targets_table(setting: Setting) -> Table:
    """OmniBal's Table 6: the same caps, other targets of ISF's filter; means of four seeds."""
    ratios = [f"{order}\ndist {side}" for order in ("default", "random") for side in ("ViT", "LLM")]
    table = new_table(
        f"Targets of ISF's filter (OmniBal, Table 6), Q_t {TARGETS_Q_T:,}",
        ["Q_v", "Q'_v", "Q'_t", "groups", *ratios],
    )
    chosen = setting.choose(TARGETS_Q_T, "isf").limits
    for q_v in (15, 14, 9):
        targets = [(q_v, 64), (q_v, 128), (q_v, 256), (q_v, 512), (q_v - 1, 128), (q_v + 1, 128)]
        if q_v == chosen.max_vision:
            targets.append((chosen.min_vision, TARGETS_Q_T - chosen.min_seq_len))
        for min_vision, slack in targets:
            limits = Limits(
                max_seq_len=TARGETS_Q_T,
                max_vision=q_v,
                min_seq_len=TARGETS_Q_T - slack,
                min_vision=min_vision,
            )
            never = "never" if min_vision > q_v else str(min_vision)
            mark = " chosen" if limits == chosen else ""
            table.add_row(
                str(q_v), never, f"Q_t - {slack}{mark}", *target_cells(setting, limits, "isf")
            )
        table.add_row(str(q_v), "fit", "none", *target_cells(setting, limits, "fit"))
        table.add_section()
    return table


def target_cells(setting: Setting, limits: Limits, grouping: str) -> list[str]:
    means = np.mean([target_figures(setting, limits, grouping, seed) for seed in SEEDS], axis=0)
    return [f"{means[0]:,.0f}", *(f"{mean:.4f}" for mean in means[1:])]


def target_figures(setting: Setting, limits: Limits, grouping: str, seed: int) -> list[float]:
    """Groups, then dist ratios ViT and LLM in the default order and in random order."""
    groups = setting.group(limits, grouping, seed)
    figures = [float(len(groups))]
    for stream in setting.orders(groups).values():
        loads = stream.sum(setting.counts.num_vit_tokens), stream.sum(setting.counts.seq_len)
        figures += [dist_ratio(load, setting.dp) for load in loads]
    return figures


def new_table(title: str, headings: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
