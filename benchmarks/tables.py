"""What the benchmarks that mirror the paper's tables share: streams of groups, their figures, the
look of a table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from isobatch.balance.metrics import dist_ratio, pad_ratio, padded_loads  # noqa: E402
from isobatch.balance.order.step_order import epoch_steps  # noqa: E402
from isobatch.common.types import Counts, Groups, Limits  # noqa: E402

console = Console(width=100)


@dataclass(frozen=True, slots=True)
class DistRatios:
    """Share of the ranks' time that is waiting, vision encoder and LLM."""

    vit: float
    llm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to fill micro-batches, measured here or printed in the paper; None where the paper
    says nothing.
    """

    name: str
    avg_batch_size: float
    most_vit_tokens: int | None = None
    """Of one micro-batch."""
    most_llm_tokens: int | None = None
    pad_ratio: float | None = None
    dist_ratios: DistRatios


def method_of(
    name: str, stream: Groups, counts: Counts, dp: int, *, padded: bool = False
) -> Method:
    """The figures of a stream of micro-batches, packed or padded to each one's longest sample."""
    vit_tokens = stream.sum(counts.num_vit_tokens)
    llm_tokens = padded_loads(stream, counts.seq_len) if padded else stream.sum(counts.seq_len)
    return Method(
        name=name,
        avg_batch_size=len(stream.samples) / len(stream),
        most_vit_tokens=int(vit_tokens.max()),
        most_llm_tokens=int(llm_tokens.max()),
        pad_ratio=pad_ratio(stream, counts.seq_len) if padded else 0.0,
        dist_ratios=DistRatios(dist_ratio(vit_tokens, dp), dist_ratio(llm_tokens, dp)),
    )


def dist_ratios(stream: Groups, counts: Counts, dp: int) -> DistRatios:
    """Of packed groups in stream order: step s, rank r runs group s * dp + r."""
    return DistRatios(
        dist_ratio(stream.sum(counts.num_vit_tokens), dp),
        dist_ratio(stream.sum(counts.seq_len), dp),
    )


def shuffled(groups: Groups, seed: int) -> Groups:
    """The groups in random order: how the paper's authors run theirs."""
    return groups.take(np.random.default_rng(seed).permutation(len(groups)))


def as_loaded(groups: Groups, counts: Counts, limits: Limits, *, dp: int, seed: int) -> Groups:
    """The groups in the order in which the loader's first epoch gives them to `dp` ranks."""
    loads = groups.sum(limits.vision_load(counts)), groups.sum(counts.seq_len)
    taken = epoch_steps(loads, (dp, 1), seed=seed).ravel()
    return groups.take(taken[taken >= 0])


def new_table(title: str, headings: Iterable[str]) -> Table:
    """A table of right-aligned columns, the first one left-aligned."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table
