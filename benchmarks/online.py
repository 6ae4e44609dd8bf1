"""Packing without a build: `BalancedLoader`'s plans next to ODB's, on 8 simulated ranks.

    python benchmarks/online.py [--lengths FILE...] [--dp 8] [--windows 512 2048 8192] [--odb DIR]
                                [--automodel DIR] [--more] [--train]

`--train` then measures training on real compute, by `benchmarks/online_training.py`.

Data: AI2D + ChartQA at 4,096 and 16,384 tokens, and a mixture of text alone (35 %), one image
(55 %) and two to five (10 %) at 16,384. Ours are the product's windows, in the order in which the
loader gives them, one micro-batch per step; ODB's are its own `grouping_data`, unmodified, with a
buffer of 256 and of 1,024 samples per rank, the same caps, and ranks that never end early, which is
better than it does. The package, pinned in peers-odb.txt, is installed into `--odb` for this run.
With `--automodel`, NeMo Automodel's packs of the whole dataset too (peers-automodel.txt): from
exact lengths in its order and without its shuffle, and from its estimates, where "lost" samples do
not fit the pack that they are put into.

Rows named "padded" are `packing=False`, of as many samples as ODB's ranks hold in all; "own" is
`measure="own"`, where each rank packs 256 samples that it has loaded.

micro-steps: also relative to the least possible. dist: share of the ranks' time that waits for the
slowest of a micro-step; padding counts as LLM tokens. entropy: of sources per step, relative to
a random order. label: the largest factor between a source's share of labels and of the gradient,
with the loader's constant divisor, and with ODB's weights by input tokens (`exact`). plan: time per
sample on this machine. Exit status 1 if the default window misses the goals of `GOALS`, or padded
batches are not better than ODB's in every column but the last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from automodel_groups import automodel_steps, open_automodel
from odb_groups import Steps, odb_steps, open_odb
from order import Data, published, with_caps
from order import datasets as order_datasets
from rich.console import Console
from rich.table import Table

from isobatch.balance.metrics import (
    dist_ratio,
    longest,
    lower_bounds,
    pad_ratio,
    padded_loads,
    source_entropy,
)
from isobatch.balance.order.rank_rounds import deal
from isobatch.common.types import BoolArray, Groups, IntArray, Limits
from isobatch.loaders.online.config import BALANCE
from isobatch.loaders.steps.window_groups import WindowSettings
from isobatch.loaders.steps.windows import WindowSource
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import load_model

MODEL = "internvl_1_5"
DEFAULT_WINDOW, ODB_BUFFERS = 2_048, (256, 1_024)
NAME = "window {:,}"
GOALS = {"steps": 1.01, "entropy": 0.95, "label": 1.01, "times_below_odb": 10.0}
"""Micro-steps over the bound and the largest factor of label shares at most; entropy, and how many
times its dist ratios are below those of ODB's larger buffer, at least.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Figures of one method."""

    name: str
    num_steps: int
    dist_llm: float
    dist_time: float
    """Of the LLM with its attention, by FLOPs."""
    dist_vit: float
    padding: float
    entropy: float
    label: float
    plan_us: float
    lost: float = 0.0
    """Share of the samples that are in no step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=Path, help="OmniBal's length files")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--windows", nargs="+", type=int, default=[512, DEFAULT_WINDOW, 8_192])
    parser.add_argument("--odb", type=Path, help="where ODB is, or is to be installed")
    parser.add_argument("--automodel", type=Path, help="where NeMo Automodel is, or is to be")
    parser.add_argument("--more", action="store_true", help="other data too, which is not judged")
    parser.add_argument("--counts", nargs="*", type=Path, default=[], help="of it, counts.parquet")
    parser.add_argument("--train", action="store_true", help="measure training on real compute too")
    options = parser.parse_args()
    console, missed = Console(width=120), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.odb or Path(temporary)
        grouping = open_odb(folder)
        packing = open_automodel(options.automodel) if options.automodel else None
        wanted = datasets(options.lengths)
        for data in [*wanted, *(others(options) if options.more else [])]:
            bound = max(lower_bounds(*data.loads, data.limits).values()) / options.dp
            found = [odb(data, options.dp, size, grouping) for size in ODB_BUFFERS]
            sizes = [size * options.dp for size in ODB_BUFFERS]
            padded = [ours(data, options.dp, size, packing=False) for size in sizes]
            for own, peer in zip(padded, found, strict=True):
                missed += judge_padded(data, own, peer)
            found += [*padded, *(ours(data, options.dp, window) for window in options.windows)]
            found.append(ours(data, options.dp, ODB_BUFFERS[0] * options.dp, is_own=True))
            if lost := [each.name for each in found if each.lost]:
                raise SystemExit(f"{data.name}: samples are lost by {', '.join(lost)}")
            if packing is not None:
                found += automodel(data, options.dp, packing)
            console.print(as_table(data, found, bound))
            default = next((f for f in found if f.name == NAME.format(DEFAULT_WINDOW)), None)
            if default and any(data is each for each in wanted):
                missed += judge(data, default, found[len(ODB_BUFFERS) - 1], bound)
        training = Path(__file__).with_name("online_training.py")
        command = [sys.executable, str(training), "--odb", str(folder)]
        status = subprocess.call(command) if options.train else 0
    for line in missed:
        console.print(f"missed: {line}", style="red")
    return 1 if missed else status


def datasets(lengths: list[Path] | None) -> list[Data]:
    rng = np.random.default_rng(0)
    tiles, tokens, sources = published(lengths)
    answers = 6 + rng.integers(0, 30, len(tokens))
    data = [
        with_caps("AI2D + ChartQA", tiles, tokens, answers, sources, cap) for cap in (4096, 16_384)
    ]
    return [*data, mixture(tiles, tokens, len(tokens), rng)]


def others(options: argparse.Namespace) -> list[Data]:
    """Those of `benchmarks/order.py`: long documents, three sources, and what is given."""
    given = argparse.Namespace(lengths=options.lengths, counts=options.counts, samples=48_000)
    return list(order_datasets(given))[2:]


def mixture(tiles: IntArray, tokens: IntArray, count: int, rng: np.random.Generator) -> Data:
    """35 % text alone, 10 % of two to five images, and one image each."""
    kinds = rng.choice(3, count, p=[0.35, 0.55, 0.1])
    drawn = rng.integers(0, len(tiles), count)
    several = np.array([rng.integers(1, 14, size=rng.integers(2, 6)).sum() for _ in range(count)])
    text = np.minimum(np.exp(rng.normal(6.2, 1, count)).astype(np.int64) + 16, 6_000)
    patches = np.choose(kinds, [np.zeros(count, np.int64), tiles[drawn], several])
    lengths = np.choose(kinds, [text, tokens[drawn], np.minimum(several * 256 + text, 16_384)])
    answers = np.choose(kinds, [text // 2, rng.integers(6, 36, count), text // 4 + 1])
    return with_caps("mixture", patches, lengths, answers, kinds, 16_384)


# --- ours ---


class Measured:
    """Lengths that are known already."""

    model = load_model(MODEL)

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data.counts)

    def measure(self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: int) -> BoolArray:
        return np.ones(len(samples), np.bool_)

    def column(self, name: str, samples: IntArray) -> IntArray:
        return getattr(self._data.counts, name)[samples]

    def sorted_sources(self, samples: IntArray) -> IntArray:
        return self._data.sources[samples]

    def choose_limits(self, samples: IntArray) -> Limits:
        return self._data.limits

    def within(self, samples: IntArray) -> IntArray:
        return samples


class Loaded(Measured):
    """The same, of samples that only one rank has."""

    def __init__(self, data: Data, dp: int) -> None:
        super().__init__(data)
        self.owners, self.are_reading = np.zeros(len(data.counts), np.int64), np.ones(dp, np.bool_)

    def restart(self, epoch: int, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def of(self, samples: IntArray) -> IntArray:
        return self.owners[samples]

    def deal(self, size: int, carried: IntArray, in_order: Callable[[int], IntArray]) -> IntArray:
        samples, ranks = in_order(size), len(self.are_reading)
        carries = np.bincount(self.of(carried), minlength=ranks).tolist()
        self.owners[samples] = np.repeat(np.arange(ranks), deal(len(samples), carries))
        return samples


def ours(data: Data, dp: int, window: int, *, packing: bool = True, is_own: bool = False) -> Found:
    """Figures of an epoch as the loader gives it."""
    steps, planning_s = our_steps(data, dp, window, packing=packing, is_own=is_own)
    micros = 1e6 * planning_s / len(data.counts)
    name = NAME.format(window) + ("" if packing else ", padded") + (", own" if is_own else "")
    return figures(name, steps, data, micros, padded=not packing)


def our_steps(
    data: Data, dp: int, window: int, *, packing: bool = True, is_own: bool = False
) -> tuple[Steps, float]:
    """The steps of an epoch as the loader gives them, and the time that planning takes."""
    settings = WindowSettings(
        window=window,
        first_window=min(window, 256),
        seed=0,
        balance=BALANCE,
        step_groups=dp,
        loss_weights="token",
        packing=packing,
        ranks=dp,
    )
    owners = Loaded(data, dp) if is_own else None
    source = WindowSource(owners or Measured(data), settings, {}, owners)
    epoch, order = source.begin(0, {}, 1)

    def loads(groups: IntArray) -> tuple[IntArray, IntArray]:
        tokens = [epoch.column(f"num_{kind}_tokens", groups) for kind in ("image", "text", "audio")]
        return epoch.column("num_image_patches", groups), np.sum(tokens, axis=0)

    steps: Steps = []
    while order.remaining:
        step = order.take_step(dp, 1, loads).ravel()
        steps.append([epoch.members(step[i : i + 1])[0] if step[i] >= 0 else [] for i in range(dp)])
    return steps, source.run.figures.grouping_s


def odb(data: Data, dp: int, buffer: int, grouping: Any) -> Found:
    """Figures of an epoch."""
    steps, planning_s = odb_steps(data, dp, buffer, grouping)
    micros = 1e6 * planning_s / len(data.counts)
    name = f"ODB, {buffer:,} per rank"
    return figures(name, steps, data, micros, padded=True, by_tokens=True)


def automodel(data: Data, dp: int, packing: Any) -> list[Found]:
    """Figures of an epoch of its packs, in three ways."""
    found = []
    for name, options in (
        ("Automodel", {}),
        ("Automodel, no shuffle", {"shuffle": False}),
        ("Automodel, estimates", {"estimates": True}),
    ):
        steps, planning_s = automodel_steps(data, dp, packing, **options)
        micros = 1e6 * planning_s / len(data.counts)
        found.append(figures(name, steps, data, micros, padded=False))
    return found


# --- figures ---


def figures(
    name: str,
    steps: Steps,
    data: Data,
    plan_us: float,
    *,
    padded: bool,
    by_tokens: bool = False,
) -> Found:
    """Figures of micro-steps; `by_tokens` as `label_factor` takes it."""
    batches = [batch for step in steps for batch in step]
    samples = np.array([sample for batch in batches for sample in batch])
    if len(np.unique(samples)) < len(samples):
        raise SystemExit(f"{name}: some samples come twice")
    borders = np.concatenate([[0], np.cumsum([len(batch) for batch in batches])])
    groups, dp = Groups(samples, borders), len(steps[0])
    vision, tokens = data.loads
    loads = padded_loads(groups, tokens) if padded else groups.sum(tokens)
    return Found(
        name=name,
        num_steps=len(steps),
        dist_llm=dist_ratio(loads, dp),
        dist_time=dist_ratio(loads + attention_of(groups, tokens, padded=padded), dp),
        dist_vit=dist_ratio(groups.sum(vision), dp),
        padding=pad_ratio(groups, tokens) if padded else 0.0,
        entropy=source_entropy(groups, data.sources, dp),
        label=label_factor(groups, data, dp, by_tokens=by_tokens),
        plan_us=plan_us,
        lost=1 - len(samples) / len(data.counts),
    )


def attention_of(groups: Groups, tokens: IntArray, *, padded: bool) -> IntArray:
    """Attention of each micro-batch, as tokens that cost as much without it."""
    flops = FlopsModel.of(load_model(MODEL))
    if padded:
        return groups.sizes * flops.attention_tokens(longest(groups, tokens))
    return groups.sum(flops.attention_tokens(tokens))


def label_factor(groups: Groups, data: Data, dp: int, *, by_tokens: bool) -> float:
    """The largest factor between a source's share of the gradient and its share of labels."""
    labels, owners = data.counts.num_loss_tokens, np.repeat(np.arange(len(groups)), groups.sizes)
    own = labels[groups.samples].astype(np.float64)
    weights = own
    if by_tokens:
        # each rank's mean over its labels counts as its input tokens, of the step's
        tokens = groups.sum(data.counts.seq_len).astype(np.float64)
        of_step = np.repeat(tokens.reshape(-1, dp).sum(axis=1), dp)
        weights = (
            own * (tokens / np.maximum(1, of_step) / np.maximum(1, groups.sum(labels)))[owners]
        )
    sources = data.sources[groups.samples]
    share = [np.bincount(sources, each) / each.sum() for each in (weights, own)]
    return float(np.max(np.maximum(share[0] / share[1], share[1] / share[0])))


def as_table(data: Data, found: list[Found], bound: float) -> Table:
    heads = (
        "micro-steps",
        "over bound",
        "dist LLM",
        "with attn",
        "dist ViT",
        "padding",
        "entropy",
        "label",
        "lost",
    )
    caps = f"{data.limits.max_seq_len:,} tokens, {data.limits.max_vision} patches"
    table = Table(title=f"{data.name}, {caps}, {len(data.counts):,} samples")
    for head in ("method", *heads, "plan"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for each in found:
        table.add_row(
            *(each.name, f"{each.num_steps:,}", f"{each.num_steps / bound - 1:.1%}"),
            *(f"{each.dist_llm:.4f}", f"{each.dist_time:.4f}", f"{each.dist_vit:.4f}"),
            f"{each.padding:.1%}",
            *(f"{each.entropy:.3f}", f"{each.label:.3f}", f"{each.lost:.1%}"),
            f"{each.plan_us:.0f} us",
        )
    return table


def judge(data: Data, own: Found, peer: Found, bound: float) -> list[str]:
    """Goals that the default window misses."""
    values = {
        "micro-steps over the bound": (own.num_steps / bound, GOALS["steps"]),
        "1 / entropy": (1 / own.entropy, 1 / GOALS["entropy"]),
        "labels": (own.label, GOALS["label"]),
        "dist LLM": (own.dist_llm, peer.dist_llm / GOALS["times_below_odb"]),
        "dist ViT": (own.dist_vit, peer.dist_vit / GOALS["times_below_odb"]),
    }
    return [
        f"{data.name}, {data.limits.max_seq_len:,} tokens: {name} {value:.4f}, wanted {most:.4f}"
        for name, (value, most) in values.items()
        if value > most
    ]


def judge_padded(data: Data, own: Found, peer: Found) -> list[str]:
    """In what padded batches are no better than those of ODB, of as many samples."""
    values = {
        "micro-steps": (own.num_steps, peer.num_steps),
        "dist LLM": (own.dist_llm, peer.dist_llm),
        "dist ViT": (own.dist_vit, peer.dist_vit),
        "padding": (own.padding, peer.padding),
        "1 / entropy": (1 / own.entropy, 1 / peer.entropy),
        "labels": (own.label, peer.label),
    }
    return [
        f"{data.name}, {own.name}: {name} {value:.4f}, {peer.name} {other:.4f}"
        for name, (value, other) in values.items()
        if value >= other
    ]


if __name__ == "__main__":
    sys.exit(main())
