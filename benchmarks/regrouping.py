"""What `regroup="epoch"` costs and brings: balance, pairs of samples that meet again, time.

    python benchmarks/regrouping.py [--lengths FILE...] [--samples 48000] [--windows 1024 4096]

The datasets of `order.py`, and its mixture at 32,768 tokens, in groups of about equal cost in
random order. Dist ratio: share of the time that ranks wait for the step's slowest in the default
order, one micro-batch per step; a window of 0 are the stored groups. "stored" and "again": share of
the pairs of samples in a group that share a stored one, and one in the next epoch, too. CPU time is
per million samples.
Exit status 1 if regrouped groups are less even than stored ones by more than .001.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from order import Data, datasets, with_caps
from tables import console, new_table

from isobatch.balance.grouping.even_out import group_balanced
from isobatch.balance.metrics import dist_ratio
from isobatch.balance.order.regroup import regroup
from isobatch.balance.order.step_order import epoch_steps
from isobatch.balance.rng import SHUFFLE, random_permutation
from isobatch.common.types import Groups, IntArray

LONG = 32_768
SPARE = 0.001


def main() -> int:
    options = parse()
    heads = [f"{load}, {dp}" for dp in options.dp for load in ("ViT", "LLM")]
    failures = 0
    for data in with_longer(options):
        table = new_table(data.name, ("window", "groups", *heads, "stored", "again", "CPU s/M"))
        groups = group_balanced(*data.loads, data.limits, seed=0)
        stored = groups.take(random_permutation(len(groups), 0, SHUFFLE))
        before = ratios(stored, data, options.dp)
        table.add_row("0", f"{len(stored):,}", *map(percent, before), "", "", "")
        for window in options.windows:
            (first, second), cpu_s = epochs(stored, data, window)
            after = ratios(first, data, options.dp)
            failures += any(new > old + SPARE for old, new in zip(before, after, strict=True))
            pairs = (f"{shared_pairs(first, other):.5f}" for other in (stored, second))
            table.add_row(
                f"{window:,}", f"{len(first):,}", *map(percent, after), *pairs, f"{cpu_s:.2f}"
            )
        console.print(table)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=Path, help="OmniBal's length files")
    parser.add_argument("--windows", nargs="+", type=int, default=[1_024, 4_096])
    parser.add_argument("--dp", nargs="+", type=int, default=[8, 64], help="data-parallel ranks")
    parser.add_argument("--samples", type=int, default=48_000, help="of generated datasets")
    parser.set_defaults(counts=[])
    return parser.parse_args()


def with_longer(options: argparse.Namespace) -> Iterator[Data]:
    """The datasets, and the last of them with longer groups."""
    for data in datasets(options):
        yield data
    counts = data.counts
    loads = counts.num_image_patches, counts.seq_len, counts.num_loss_tokens
    yield with_caps("mixture of three sources", *loads, data.sources, LONG)


def epochs(stored: Groups, data: Data, window: int) -> tuple[list[Groups], float]:
    """Two epochs, and CPU seconds of one per million samples."""
    options = {"window_groups": window, "seed": 0}
    regroup(data.loads, stored, data.limits, **options, epoch=2)  # compiles
    begun = time.process_time()
    made = [regroup(data.loads, stored, data.limits, **options, epoch=epoch) for epoch in (0, 1)]
    return made, (time.process_time() - begun) / 2 / len(stored.samples) * 1e6


def ratios(groups: Groups, data: Data, ranks: list[int]) -> list[float]:
    """Dist ratios of both loads for each number of ranks."""
    loads = tuple(groups.sum(load) for load in data.loads)
    found = []
    for dp in ranks:
        order = epoch_steps(loads, (dp, 1)).ravel()
        stream = order[order >= 0]
        found += [dist_ratio(load[stream], dp) for load in loads]
    return found


def shared_pairs(groups: Groups, others: Groups) -> float:
    """Share of the pairs of samples in a group of `groups` that also share one of `others`."""
    owner = np.empty(len(others.samples), np.int64)
    owner[others.samples] = np.repeat(np.arange(len(others)), others.sizes)
    group = np.repeat(np.arange(len(groups)), groups.sizes)
    together = np.unique(group * len(others) + owner[groups.samples], return_counts=True)[1]
    return num_pairs(together) / max(1, num_pairs(groups.sizes))


def num_pairs(sizes: IntArray) -> int:
    return int((sizes * (sizes - 1)).sum()) // 2


def percent(ratio: float) -> str:
    return f"{100 * ratio:.2f}"


if __name__ == "__main__":
    sys.exit(main())
