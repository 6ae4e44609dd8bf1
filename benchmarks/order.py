"""What each way to make and order groups costs: balance, groups, randomness, fairness of the loss.

    python benchmarks/order.py [--lengths FILE...] [--counts FILE...] [--dp 8 64] [--speed]

Datasets: AI2D + ChartQA (FILE: the length files of OmniBal's authors; by default resampled ones),
long documents and a mixture of three sources, which are generated here, and any counts.parquet
(`--counts`), each a dataset of its own. Exit status 1 when the default order misses what `judge`
says of it.

Dist ratio: share of the time that ranks wait for the step's slowest, of vision encoder, LLM tokens
and attention (sum of squared lengths); one micro-batch per step. The last row is a bound: what no
grouping into as many groups undercuts in random order (`most_even`). Groups: over sum(tokens) /
cap. Entropy: of a step's sources, relative to the same groups in random order. Meet: share of
a group's step mates that meet it again in the next epoch. Gradient: how far a source's share of the
gradient is from its share of labels at most, where each step is divided by its own labels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from isobatch.balance.baseline_samplers import as_groups, random_batches  # noqa: E402
from isobatch.balance.grouping.best_fit import group_best_fit  # noqa: E402
from isobatch.balance.grouping.caps import GroupOptions, choose_limits  # noqa: E402
from isobatch.balance.grouping.even_out import group_balanced  # noqa: E402
from isobatch.balance.grouping.isf import group_isf  # noqa: E402
from isobatch.balance.metrics import (  # noqa: E402
    dist_ratio,
    gradient_shares,
    meeting_again,
    padded_loads,
    source_entropy,
)
from isobatch.balance.order.step_order import (  # noqa: E402
    DEFAULT_BALANCE,
    GlobalShuffle,
    epoch_steps,
)
from isobatch.common.types import Counts, Groups, IntArray, Limits  # noqa: E402
from isobatch.packer.group import read_lengths  # noqa: E402
from isobatch.shards.tables import counts_arrays, source_numbers  # noqa: E402

BATCH_SIZE = 4
DEFAULT, MOST = "balanced, balance .9 (default)", "balanced, balance .999"
PADDED = "random, padded"
ENTROPY, MEETING = 0.95, 0.05
"""Of random's entropy at least; share of step mates that meet again, above a random order's, at
most.
"""
MOST_DIST = {"vit": 0.01, "llm": 0.005}
"""Dist ratios of the default at most, where the bound is below."""
ROUNDING = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Samples and their caps."""

    name: str
    counts: Counts
    sources: IntArray
    limits: Limits

    @property
    def loads(self) -> tuple[IntArray, IntArray]:
        """Vision loads and tokens of the samples."""
        return self.limits.vision_load(self.counts), self.counts.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Groups of one method in the order of two epochs, for each number of ranks."""

    name: str
    groups: Groups
    orders: dict[int, tuple[IntArray, IntArray]]


def main() -> int:
    options = parse()
    console = Console(width=170)
    failures = []
    for data in datasets(options):
        table = new_table(data, options.dp)
        found = {method.name: figures(method, data) for method in methods(data, options.dp)}
        for name, values in found.items():
            table.add_row(name, *cells(values, options.dp))
        least = least_figures(data, round(found[DEFAULT]["groups"] * bound(data)), options.dp)
        table.add_row("bound, random order", *cells(least, options.dp))
        console.print(table)
        failures += judge(data, found, least, options.dp)
    if options.speed:
        show_speed(console)
    for failure in failures:
        console.print(f"missed: {failure}", style="red")
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=Path, help="OmniBal's length files")
    parser.add_argument("--counts", nargs="*", type=Path, default=[], help="counts.parquet")
    parser.add_argument("--dp", nargs="+", type=int, default=[8, 64], help="data-parallel ranks")
    parser.add_argument("--samples", type=int, default=48_000, help="of generated datasets")
    parser.add_argument("--speed", action="store_true", help="time a step of up to 4,096 ranks")
    return parser.parse_args()


# --- datasets ---


def datasets(options: argparse.Namespace) -> Iterator[Data]:
    rng = np.random.default_rng(0)
    tiles, tokens, sources = published(options.lengths)
    answers = 6 + rng.integers(0, 30, len(tokens))
    yield with_caps("AI2D + ChartQA", tiles, tokens, answers, sources, 4_096)
    yield with_caps("AI2D + ChartQA", tiles, tokens, answers, sources, 16_384)
    yield long_documents(options.samples // 2, rng)
    yield mixture(tiles, tokens, options.samples, rng)
    for path in options.counts:
        table = read_lengths(path)
        counts, sources = counts_arrays(table), source_numbers(table)
        limits = choose_limits(
            counts, GroupOptions(), vision_unit="image_patches", context_len=32_768
        ).limits
        fits = counts.seq_len <= limits.max_seq_len
        rows = np.flatnonzero(fits & (limits.vision_load(counts) <= limits.max_vision))
        name = path.parent.name
        yield Data(name=name, counts=counts.take(rows), sources=sources[rows], limits=limits)


def published(paths: list[Path] | None) -> tuple[IntArray, IntArray, IntArray]:
    """(tiles, tokens, source) of each sample."""
    if paths:
        parts = [counts_arrays(read_lengths(path)) for path in paths]
        lengths = [(part.num_image_patches, part.seq_len) for part in parts]
    else:
        with np.load(ROOT / "tests/data/lengths/resampled.npz") as files:
            names = sorted({name.partition("/")[0] for name in files})
            lengths = [(files[f"{n}/image_flags"], files[f"{n}/token_num"]) for n in names]
    tiles, tokens = (np.concatenate(each).astype(np.int64) for each in zip(*lengths, strict=True))
    return tiles, tokens, np.repeat(np.arange(len(lengths)), [len(one) for one, _ in lengths])


def long_documents(num_samples: int, rng: np.random.Generator) -> Data:
    """One large image and much text each, in three sources: most are above half of the cap."""
    tiles = rng.integers(9, 14, num_samples)
    text = np.exp(rng.normal(7.2, 0.5, num_samples)).astype(np.int64)
    tokens = np.minimum(tiles * 256 + text, 8_192)
    answers = rng.integers(50, 500, num_samples)
    sources = rng.integers(0, 3, num_samples)
    return with_caps("long documents", tiles, tokens, answers, sources, 8_192)


def mixture(tiles: IntArray, tokens: IntArray, num_samples: int, rng: np.random.Generator) -> Data:
    """Text alone, one image each (drawn from the published lengths), and several images."""
    third = num_samples // 3
    text = np.minimum(np.exp(rng.normal(6.2, 1, third)).astype(np.int64) + 16, 6_000)
    drawn = rng.integers(0, len(tokens), third)
    several = np.array([rng.integers(1, 7, size=rng.integers(2, 9)).sum() for _ in range(third)])
    long = several * 256 + np.exp(rng.normal(5.5, 0.7, third)).astype(np.int64)
    return with_caps(
        "mixture of three sources",
        np.concatenate([np.zeros(third, np.int64), tiles[drawn], several]),
        np.concatenate([text, tokens[drawn], long]),
        np.concatenate([text // 2, rng.integers(6, 36, third), rng.integers(20, 200, third)]),
        np.repeat(np.arange(3), third),
        16_384,
    )


def with_caps(
    name: str,
    tiles: IntArray,
    tokens: IntArray,
    answers: IntArray,
    sources: IntArray,
    max_seq_len: int,
) -> Data:
    counts = Counts(
        num_image_patches=tiles,
        num_vit_tokens=tiles * 1025,
        num_image_tokens=tiles * 256,
        num_text_tokens=tokens - tiles * 256,
        num_audio_tokens=np.zeros_like(tiles),
        num_loss_tokens=answers,
    )
    options = GroupOptions(max_seq_len=max_seq_len)
    limits = choose_limits(
        counts, options, vision_unit="image_patches", context_len=max_seq_len
    ).limits
    name = f"{name}, {max_seq_len:,} tokens"
    return Data(name=name, counts=counts, sources=sources, limits=limits)


# --- methods ---


def methods(data: Data, ranks: list[int]) -> Iterator[Method]:
    vision, tokens = data.loads
    drawn = as_groups(random_batches(tokens, 1, BATCH_SIZE, 0))
    yield in_random_order(PADDED, drawn, ranks)
    yield in_random_order("ISF, random", group_isf(vision, tokens, data.limits, seed=0), ranks)
    packed = group_best_fit(vision, tokens, data.limits, seed=0)
    yield in_random_order("fewest groups, random", packed, ranks)
    even = group_balanced(vision, tokens, data.limits, seed=0)
    loads = even.sum(vision), even.sum(tokens)
    balances = {"balanced, balance 0": 0.0, "balanced, balance .5": 0.5}
    for name, balance in (balances | {DEFAULT: DEFAULT_BALANCE, MOST: 0.999}).items():
        orders = {}
        for dp in ranks:
            first, second = (
                epoch_steps(loads, (dp, 1), balance=balance, epoch=epoch).ravel()
                for epoch in (0, 1)
            )
            orders[dp] = first[first >= 0], second[second >= 0]
        yield Method(name=name, groups=even, orders=orders)


def in_random_order(name: str, groups: Groups, ranks: list[int]) -> Method:
    first, second = (np.random.default_rng(epoch).permutation(len(groups)) for epoch in (0, 1))
    return Method(name=name, groups=groups, orders=dict.fromkeys(ranks, (first, second)))


# --- figures ---


def figures(method: Method, data: Data) -> dict[str, float]:
    vision, tokens = data.loads
    found = {"groups": len(method.groups) / bound(data)}
    for dp, (first, second) in method.orders.items():
        stream = method.groups.take(first)
        if method.name == PADDED:
            longest = padded_loads(stream, tokens) // np.maximum(stream.sizes, 1)
            llm, attention = padded_loads(stream, tokens), stream.sizes * longest**2
        else:
            llm, attention = stream.sum(tokens), stream.sum(tokens**2)
        loads = {"vit": stream.sum(vision), "llm": llm, "attention": attention}
        found |= {f"{name} {dp}": dist_ratio(load, dp) for name, load in loads.items()}
        if dp == min(method.orders):
            found["entropy"] = source_entropy(stream, data.sources, dp)
            found["gradient"] = gradient_error(stream, data, dp)
        found[f"meet {dp}"] = meeting_again(first, second, dp)
    return found


def bound(data: Data) -> float:
    """Groups that any grouping needs: sum(tokens) / cap."""
    return int(data.loads[1].sum()) / data.limits.max_seq_len


def gradient_error(stream: Groups, data: Data, dp: int) -> float:
    """How far a source's share of the gradient is from its share of labels, of that, at most."""
    labels = data.counts.num_loss_tokens
    own = gradient_shares(stream, data.sources, labels, len(stream))
    found = gradient_shares(stream, data.sources, labels, dp)
    return float(np.max(np.abs(found[own > 0] / own[own > 0] - 1), initial=0.0))


def least_figures(data: Data, num_groups: int, ranks: list[int]) -> dict[str, float]:
    """Dist ratios that no grouping into `num_groups` undercuts in random order."""
    loads = {"vit": data.loads[0], "llm": data.loads[1]}
    even = {name: most_even(load, num_groups) for name, load in loads.items()}
    return {f"{name} {dp}": random_dist(load, dp) for dp in ranks for name, load in even.items()}


def most_even(load: IntArray, num_groups: int) -> IntArray:
    """The most even loads that groups of these samples could have, int64, shape (num_groups,).

    Whole numbers. Fewer than two samples per group leave some groups with one, at best the largest
    ones; and a sample above what is left for the others is in a group above it. Whatever sums the
    groups have, these are majorized by them, and so is the largest of some drawn at random.

    >>> most_even(np.array([9, 1, 1, 1, 1, 1]), 3).tolist()
    [9, 3, 2]
    """
    largest, left = np.sort(load)[::-1], int(load.sum())
    made = np.zeros(num_groups, np.int64)
    for number in range(min(num_groups, len(largest))):
        is_alone = number < 2 * num_groups - len(largest)
        if not is_alone and largest[number] * (num_groups - number) <= left:
            break
        made[number] = largest[number]
        left -= int(largest[number])
    else:
        return made
    rest = num_groups - number
    made[number:] = (left + np.arange(rest)[::-1]) // rest
    return made


def random_dist(load: IntArray, dp: int) -> float:
    """Dist ratio of steps of `dp` groups drawn at random: 1 - mean / expected largest."""
    below = np.arange(len(load) + 1) / max(1, len(load))
    return 1 - float(load.mean() / (np.diff(below**dp) @ np.sort(load)))


def judge(
    data: Data, found: dict[str, dict[str, float]], least: dict[str, float], ranks: list[int]
) -> list[str]:
    """What the default order and the most balanced one miss, a line each."""
    ours, missed = found[DEFAULT], []
    if data.sources.any() and ours["entropy"] < ENTROPY:
        missed.append(f"{data.name}: entropy {ours['entropy']:.3f} of random's, at least {ENTROPY}")
    for dp in ranks:
        for name, most in MOST_DIST.items():
            if least[f"{name} {dp}"] <= most < ours[f"{name} {dp}"]:
                missed.append(f"{data.name}: {name} {ours[f'{name} {dp}']:.4f} at dp {dp}")
        if ours[f"meet {dp}"] > found["balanced, balance 0"][f"meet {dp}"] + MEETING:
            missed.append(f"{data.name}: {ours[f'meet {dp}']:.1%} meet again at dp {dp}")
        most, default = (
            found[key][f"vit {dp}"] + found[key][f"llm {dp}"] for key in (MOST, DEFAULT)
        )
        if most > default + ROUNDING:
            missed.append(
                f"{data.name}: {most:.4f} at dp {dp} when most balanced, {default:.4f} by default"
            )
    return missed


def new_table(data: Data, ranks: list[int]) -> Table:
    title = f"{data.name}, at most {data.limits.max_vision} patches"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    dist = [f"{name}, dp {dp}" for dp in ranks for name in ("ViT", "LLM", "attn")]
    for heading in ("groups", *dist, "entropy", *(f"meet, {dp}" for dp in ranks), "gradient"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def cells(found: dict[str, float], ranks: list[int]) -> list[str]:
    loads = ("vit", "llm", "attention")
    formats = {"groups": ".4f", **{f"{name} {dp}": ".4f" for dp in ranks for name in loads}}
    formats |= {"entropy": ".3f", **{f"meet {dp}": ".2%" for dp in ranks}, "gradient": ".1%"}
    return [format(found[key], form) if key in found else "" for key, form in formats.items()]


def show_speed(console: Console) -> None:
    """Time to plan a step, and size of the state, of groups of nearly equal loads."""
    rng = np.random.default_rng(0)
    vision, tokens = rng.integers(55, 62, 1 << 20), rng.integers(16_000, 16_384, 1 << 20)
    for dp, micro_batches in ((8, 1), (64, 8), (512, 8), (4_096, 8)):
        order = GlobalShuffle(num_groups=len(vision), seed=0, epoch=0, balance=DEFAULT_BALANCE)
        times = []
        for _ in range(8):
            begun = time.perf_counter()
            order.take_step(dp, micro_batches, lambda groups: (vision[groups], tokens[groups]))
            times.append(time.perf_counter() - begun)
        waiting = len(order.state()["spare"])
        shape = f"dp {dp} x {micro_batches} micro-batches"
        console.print(f"{shape}: {min(times) * 1e3:.2f} ms per step, {waiting:,} groups wait")


if __name__ == "__main__":
    sys.exit(main())
