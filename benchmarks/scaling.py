"""Time and memory of grouping and order from ten thousand to 100 million samples, each size in a
process of its own.

    python benchmarks/scaling.py [--lengths FILE...] [--sizes N...] [--what fit isf order]
    [--max-vision 15]

Samples are drawn with replacement from the files' lengths, or generated, and held as uint8 and
uint16. "peak" is the largest resident memory of the process, less what it had before the samples
were drawn (Python, NumPy, compiled code); "order" is all steps of an epoch, for 64 ranks of 8
micro-batches, of the groups that fit makes: its seconds are the order's alone, its peak is that of
grouping and order together. "x least" is the time per sample relative to the least of all sizes.
One run each, after one on a thousand samples that compiles. Exit status 1 when a peak is over 2 GB
(2 * 10^9 bytes) at up to 100 million samples, or when more samples take over 10 times the least
time per sample (the table shows where).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from grouping import generate, read
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.types import Limits

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
CHUNK = 1 << 20
ORDER_SHAPE = 64, 8
"""Ranks, and micro-batches of a step."""
MOST_BYTES, UP_TO_SAMPLES = 2_000_000_000, 100_000_000
MOST_PER_SAMPLE = 10
"""Time per sample relative to the least: caches cost several times as much; n^2 would be a thousand
times.
"""


def main() -> int:
    options = parse()
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in (
        "",
        "samples",
        "seconds",
        "samples/s",
        "x least",
        "peak MB",
        "samples MB",
        "groups",
        "x sums",
    ):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    missed = []
    for what in options.what:
        measured = [measure_apart(what, size) for size in options.sizes]
        least = min(each["seconds"] / each["samples"] for each in measured)
        for each in measured:
            table.add_row(*row(what, each, least))
            missed += judge(what, each, least)
        table.add_section()
    Console(width=100).print(table)
    print("\n".join(missed))
    return 1 if missed else 0


def measure_apart(what: str, size: int) -> dict[str, float]:
    """One size of one kind, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--child",
        "--sizes",
        str(size),
        "--what",
        what,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def judge(what: str, measured: dict[str, float], least: float) -> list[str]:
    """What misses its goal, a line each."""
    missed, samples = [], int(measured["samples"])
    if measured["peak_mb"] * 1e6 > MOST_BYTES and samples <= UP_TO_SAMPLES:
        missed.append(
            f"MISSED: {what}, {samples:,} samples: {measured['peak_mb']:,.0f} MB, wanted at most "
            f"2,000"
        )
    if measured["seconds"] / samples > MOST_PER_SAMPLE * least and measured["seconds"] > 1:
        missed.append(
            f"MISSED: {what}, {samples:,} samples: over {MOST_PER_SAMPLE} times the least time per "
            f"sample"
        )
    return missed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=Path, nargs="+", help="length files; default: generated samples"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of samples"
    )
    parser.add_argument(
        "--what", nargs="+", choices=("fit", "isf", "order"), default=["fit", "isf", "order"]
    )
    parser.add_argument("--max-seq-len", type=int, default=4096, help="Q_t, LLM tokens of a group")
    parser.add_argument("--max-vision", type=int, default=15, help="Q_v, image patches of a group")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One size of one kind, in this process."""
    limits = Limits(
        max_seq_len=options.max_seq_len,
        max_vision=options.max_vision,
        min_seq_len=options.max_seq_len - 128,
        min_vision=options.max_vision,
    )
    what, size = options.what[0], options.sizes[0]
    lengths = read(options.lengths) if options.lengths else generate(30_000)
    run(what, *draw(lengths, 1000, limits), limits)  # compile
    before = peak_mb()
    vision, tokens = draw(lengths, size, limits)
    seconds, num_groups = run(what, vision, tokens, limits)
    sums = max(vision.sum() / max(limits.max_vision, 1), tokens.sum() / limits.max_seq_len)
    return {
        "samples": size,
        "seconds": seconds,
        "peak_mb": peak_mb() - before,
        "samples_mb": (vision.nbytes + tokens.nbytes) / 1e6,
        "groups": num_groups,
        "of_sums": num_groups / sums,
    }


def draw(
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]], size: int, limits: Limits
) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Samples drawn chunk by chunk, so that nothing wide is ever held."""
    fits = (lengths[0] <= limits.max_vision) & (lengths[1] <= limits.max_seq_len)
    narrow_vision, narrow_tokens = (
        lengths[0][fits].astype(np.uint8),
        lengths[1][fits].astype(np.uint16),
    )
    vision, tokens = np.empty(size, np.uint8), np.empty(size, np.uint16)
    rng = np.random.default_rng(0)
    for start in range(0, size, CHUNK):
        drawn = rng.integers(0, len(narrow_vision), min(CHUNK, size - start))
        vision[start : start + CHUNK], tokens[start : start + CHUNK] = (
            narrow_vision[drawn],
            narrow_tokens[drawn],
        )
    return vision, tokens


def run(
    what: str, vision: NDArray[np.uint8], tokens: NDArray[np.uint16], limits: Limits
) -> tuple[float, int]:
    """(seconds, groups); for the order, only the order's seconds count."""
    start = time.perf_counter()
    groups = (group_isf if what == "isf" else group_best_fit)(vision, tokens, limits, seed=0)
    if what == "order":
        start = time.perf_counter()
        epoch_steps((groups.sum(vision), groups.sum(tokens)), ORDER_SHAPE)
    return time.perf_counter() - start, len(groups)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def row(what: str, measured: dict[str, float], least: float) -> list[str]:
    seconds, samples = measured["seconds"], int(measured["samples"])
    return [
        what,
        f"{samples:,}",
        f"{seconds:.3f}",
        f"{samples / seconds:,.0f}",
        f"{seconds / samples / least:.1f}",
        f"{measured['peak_mb']:,.0f}",
        f"{measured['samples_mb']:,.0f}",
        f"{int(measured['groups']):,}",
        f"{measured['of_sums']:.4f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
