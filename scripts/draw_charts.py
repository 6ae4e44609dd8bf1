"""Draws the charts of README and docs/results from a build and from the tables on those pages.

    python scripts/draw_charts.py [BUILD]

Writes SVG files to `docs/results/charts`. BUILD, a folder of `packer build`, is drawn as the loads
of 8 ranks; without it that picture stays as it is. Tables are found by a comment
`<!-- chart: NAME -->` in front of them, so a chart shows what its page says. Needs matplotlib:
pip install matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from isobatch.engine.planning.build_steps import read_build

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CHARTS = RESULTS / "charts"
OURS, PEERS, WAITING = "#1b6ca8", "#9aa5b1", "#eceff1"
RANKS, STEPS, BATCH = 8, 6, 4
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "isobatch",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def main() -> int:
    """Draw all charts; 0 when done."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path, nargs="?", help="folder of a build")
    args = parser.parse_args()
    CHARTS.mkdir(exist_ok=True)
    plt.rcParams.update(STYLE)
    if args.build is not None:
        draw_ranks(args.build)
    draw_bars(
        "grouping", "packing", 2, "groups above the lower bound, %", highlight="fit (default)"
    )
    draw_bars(
        "balance",
        "packing",
        3,
        "time waiting for the largest vision load, %",
        highlight="default order",
    )
    draw_bars("loading", "loading", 4, "decoded samples/s, 2 workers", highlight="Isobatch")
    draw_bars("ablation", "training", 3, "speed-up over the careful baseline", highlight="+")
    return 0


def read_table(name: str, page: str) -> list[list[str]]:
    """Rows of the Markdown table after the comment `chart: name`; header and rule left out."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- chart: {name} -->\n((?:\|.*\n)+)", text)
    if found is None:
        raise SystemExit(f"docs/results/{page}.md has no table marked `chart: {name}`")
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def draw_bars(name: str, page: str, column: int, title: str, *, highlight: str) -> None:
    """One bar per row of a table; rows without a number are left out."""
    rows = [(row[0], row[column].replace(",", "")) for row in read_table(name, page)]
    bars = [(label, float(value)) for label, value in rows if re.fullmatch(r"[\d.]+", value)]
    figure, axes = plt.subplots(figsize=(6.4, 0.3 * len(bars) + 0.7), layout="constrained")
    labels = [label for label, _ in bars]
    colours = [OURS if highlight in label else PEERS for label in labels]
    drawn = axes.barh(range(len(bars)), [value for _, value in bars], color=colours)
    axes.bar_label(drawn, fmt="{:,g}", padding=3)
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    save(name)
    plt.close(figure)


def draw_ranks(place: Path) -> None:
    """LLM and ViT tokens of each rank in a few steps: random padded batches, and packed groups."""
    build = read_build(place)
    how = {"dp": RANKS, "micro_batches": 1, "steps": STEPS, "seed": 0}
    methods = {
        f"random batches of {BATCH} samples, padded": build.random_steps(**how, batch_size=BATCH),
        "Isobatch": build.stream_steps(**how),
    }
    figure, grid = plt.subplots(2, 2, figsize=(8, 3.2), sharey="row", layout="constrained")
    for column, (title, loads) in enumerate(methods.items()):
        for row, (what, phase) in enumerate((("LLM", loads.llm), ("ViT", loads.vision))):
            axes = grid[row][column]
            waits = draw_steps(axes, phase.tokens / 1000)
            axes.set_title(f"{title if row == 0 else ''}\n{what}: {waits:.1%} waiting", loc="left")
            if column == 0:
                axes.set_ylabel("thousand tokens")
    figure.supxlabel(f"{STEPS} steps of {RANKS} GPUs; light: waiting for the slowest")
    save("ranks")
    plt.close(figure)


def draw_steps(axes: Axes, tokens: NDArray[np.float64]) -> float:
    """Bars of the ranks, step by step; -> share of the time that they wait for the slowest."""
    steps = tokens[: STEPS * RANKS].reshape(-1, RANKS)
    slowest = steps.max(axis=1, keepdims=True)
    places = np.arange(RANKS)[None] + np.arange(len(steps))[:, None] * (RANKS + 2)
    axes.bar(places.ravel(), np.broadcast_to(slowest, steps.shape).ravel(), 1.0, color=WAITING)
    axes.bar(places.ravel(), steps.ravel(), 0.9, color=OURS)
    axes.set_xticks([])
    return float(1 - steps.sum() / (slowest.sum() * RANKS))


def save(name: str) -> None:
    """Write the figure without a date, so that the same data give the same file."""
    plt.savefig(CHARTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
