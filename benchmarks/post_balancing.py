"""OrchMLLM's post-balancing and node-wise placement, from 64 to 2,560 ranks: time, balance, tokens between nodes.

    python benchmarks/post_balancing.py [--ranks 64 256 1024 2560] [--samples 16 60] [--bounds]

Lengths are log-normal (median 1,100 tokens, sigma 1), cut to 16..16,384, drawn independently per rank: the worst case
for placement, since no rank holds more of any batch. Times are the least of several runs in this process, beside
NumPy's argsort of the same lengths. `--bounds` proves by an integer program (scipy's HiGHS) how far the worst rank of
each placement can be from the best possible; it takes seconds per row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "balance")]

from nodewise_bound import inter_node_sends, node_bound, volumes_between  # noqa: E402

from balance.nodewise import place_batches  # noqa: E402
from balance.post import balance_conv, balance_padded, balance_squares, balance_sums  # noqa: E402
from balance.records import IntArray  # noqa: E402

RANKS_PER_NODE = 8
TOLERANCE = 256
ASSIGNMENT_RANKS = 1024
"""Above this the dense assignment takes half a second and more, and is left out."""

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 2560])
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 60], help="samples per rank")
    parser.add_argument("--bounds", action="store_true", help="prove how good the placements are")
    options = parser.parse_args()
    steps = [(ranks, samples, draw(ranks, samples)) for samples in options.samples for ranks in options.ranks]
    console = Console(width=100)
    console.print(balance_table(steps))
    console.print(placement_table(steps, bounds=options.bounds))


def draw(num_ranks: int, samples: int) -> IntArray:
    rng = np.random.default_rng([num_ranks, samples])
    return np.clip(rng.lognormal(7, 1, num_ranks * samples), 16, 16_384).astype(np.int64)


def best_of(run: Callable[[], Result], runs: int = 7) -> tuple[float, Result]:
    """(milliseconds of the fastest run, its result); one run before to compile."""
    result = run()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, result


def balance_table(steps: list[tuple[int, int, IntArray]]) -> Table:
    table = new_table("Post-balancing: ms, times NumPy's argsort, and largest / mean of what is balanced")
    names = ("ranks x samples", "argsort", "stable", "drawn", "sums (1)", "padded (2)", "squares (4)", "conv (5)")
    for name in names:
        table.add_column(name, justify="right")
    for ranks, samples, lengths in steps:
        sort_ms, _ = best_of(partial(np.argsort, lengths))
        stable_ms, _ = best_of(partial(np.argsort, lengths, kind="stable"))
        drawn = even(sums(lengths, np.repeat(np.arange(ranks), samples), ranks))
        cells = [f"{ranks:,} x {samples}", f"{sort_ms:.2f}", f"{stable_ms:.2f}", f"{drawn:.3f}"]
        for function, measure in (
            (partial(balance_sums, lengths, ranks), sums),
            (partial(balance_padded, lengths, ranks), padded),
            (partial(balance_squares, lengths, ranks, tolerance=TOLERANCE), squares),
            (partial(balance_conv, lengths, ranks), sums),
        ):
            ms, batches = best_of(function)
            cells.append(f"{ms:.2f} {ms / sort_ms:.1f}x\n{even(measure(lengths, batches, ranks)):.4f}")
        table.add_row(*cells)
    return table


def sums(lengths: IntArray, batches: IntArray, num_batches: int) -> IntArray:
    return np.bincount(batches, lengths, minlength=num_batches)


def squares(lengths: IntArray, batches: IntArray, num_batches: int) -> IntArray:
    return np.bincount(batches, lengths.astype(float) ** 2, minlength=num_batches)


def padded(lengths: IntArray, batches: IntArray, num_batches: int) -> IntArray:
    longest = np.zeros(num_batches, dtype=np.int64)
    np.maximum.at(longest, batches, lengths)
    return np.bincount(batches, minlength=num_batches) * longest


def even(values: IntArray) -> float:
    return float(values.max() / values.mean())


def placement_table(steps: list[tuple[int, int, IntArray]], *, bounds: bool) -> Table:
    table = new_table("Node-wise placement, 8 ranks per node: largest (average) tokens sent to other nodes by a rank")
    names = ("ranks x samples", "argsort ms", "not placed", "assignment", "ours", "ms", "proven gap")
    for name in names:
        table.add_column(name, justify="right")
    for ranks, samples, lengths in steps:
        batches, offsets = balance_sums(lengths, ranks), np.arange(ranks + 1) * samples
        volume = volumes_between(lengths, batches, offsets)
        sort_ms, _ = best_of(partial(np.argsort, lengths))
        place = partial(place_batches, lengths, batches, offsets, ranks_per_node=RANKS_PER_NODE)
        ms, placed = best_of(place, runs=5)
        sends = inter_node_sends(volume, placed, RANKS_PER_NODE)
        table.add_row(
            f"{ranks:,} x {samples}",
            f"{sort_ms:.2f}",
            show(inter_node_sends(volume, np.arange(ranks), RANKS_PER_NODE)),
            show(inter_node_sends(volume, assignment(volume), RANKS_PER_NODE)) if ranks <= ASSIGNMENT_RANKS else "-",
            show(sends),
            f"{ms:.1f}",
            f"{sends.max() / proven(volume, sends) - 1:.2%}" if bounds else "-",
        )
    return table


def assignment(volume: object) -> IntArray:
    """Rank of each batch by the best linear assignment of batches to nodes' places, by tokens already there."""
    dense = volume.toarray()  # type: ignore[attr-defined]
    num = len(dense)
    by_node = np.add.reduceat(dense, np.arange(0, num, RANKS_PER_NODE), axis=0)
    places, batch = linear_sum_assignment(np.repeat(by_node, RANKS_PER_NODE, axis=0)[:num], maximize=True)
    rank_of = np.empty(num, dtype=np.int64)
    rank_of[batch] = places
    return rank_of


def proven(volume: object, sends: IntArray) -> float:
    """Largest bound over the nodes of the worst ranks."""
    return max(
        node_bound(volume, int(node), RANKS_PER_NODE) for node in np.unique(np.argsort(-sends)[:3] // RANKS_PER_NODE)
    )


def show(sends: IntArray) -> str:
    return f"{sends.max():,.0f} ({sends.mean():,.0f})"


def new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


if __name__ == "__main__":
    main()
