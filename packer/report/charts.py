"""SVG charts for reports: histogram, loads of the ranks, and shares by step.

Pure: arrays in, SVG out. Shapes have CSS classes (`axis`, `grid`, `mean`, `wait` and the series'
name) instead of colours, so the page decides how they look in light, dark and print.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from markupsafe import Markup, escape

from isobatch.common.types import FloatArray, IntArray

# in user units; the page scales them
WIDTH, HEIGHT = 520, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 34
PLOT_WIDTH = WIDTH - LEFT - RIGHT
FLOOR = HEIGHT - BOTTOM
"""y of the x axis."""
NUM_BINS = 48
MOST_POINTS = 240
"""Points of a line."""


def histogram(values: IntArray, *, upper: float, series: str, unit: str, counted: str) -> Markup:
    """Share of `values` in each of 48 bins from 0 to `upper`; `unit`, `counted`: labels."""
    upper = max(upper, 1)
    shares = np.histogram(values, bins=NUM_BINS, range=(0, upper))[0] / max(len(values), 1)
    top = max(float(shares.max(initial=0)), 0.01)
    bar = PLOT_WIDTH / NUM_BINS
    bars = "".join(
        _bar(LEFT + place * bar, FLOOR, _y(share, top), bar * 0.9)
        for place, share in enumerate(shares.tolist())
        if share > 0
    )
    mean = float(values.mean()) if len(values) else 0.0
    mean_x = LEFT + mean / upper * PLOT_WIDTH
    largest = int(values.max(initial=0))
    body = (
        f'{_y_axis(top, _percent)}<path class="{series}" d="{bars}"/>'
        f'<path class="mean" d="M{mean_x:.1f} {TOP}V{FLOOR}"/>{_x_axis(upper, unit)}'
    )
    label = f"{unit} of {len(values):,} {counted}: mean {mean:,.0f}, largest {largest:,}"
    return _svg(body, label)


def rank_bars(
    steps: IntArray, *, slowest: IntArray, upper: float, series: str, unit: str
) -> Markup:
    """Load of each rank in a few steps, shape (num_steps, ranks); faint is waiting.

    `slowest` is each step's largest load, shape (num_steps,); its rank may not be shown.
    """
    num_steps, ranks = steps.shape
    slot = PLOT_WIDTH / max(num_steps, 1)
    bar = slot * 0.86 / max(ranks, 1)
    work, wait, names = [], [], []
    for step, loads in enumerate(steps.tolist()):
        slot_x, top = LEFT + (step + 0.07) * slot, _y(int(slowest[step]), upper)
        for rank, load in enumerate(loads):
            x, y = slot_x + rank * bar, _y(load, upper)
            work.append(_bar(x, FLOOR, y, bar * 0.9))
            wait.append(_bar(x, y, top, bar * 0.9))
        names.append(_text(slot_x + slot * 0.43, FLOOR + 15, f"step {step + 1}"))
    bars = (
        f'<path class="{series}" d="{"".join(work)}"/>'
        f'<path class="wait {series}" d="{"".join(wait)}"/>'
    )
    axes = f"{_baseline()}{''.join(names)}{_title(f'{unit} of each rank')}"
    label = f"{unit} of {ranks} ranks in {num_steps} steps"
    return _svg(f"{_y_axis(upper, tick_label)}{bars}{axes}", label)


def step_lines(series: Mapping[str, FloatArray]) -> Markup:
    """Shares by step, all of equal length: a line per series, of means where steps are many."""
    steps = max(map(len, series.values()))
    blocks = np.array_split(np.arange(steps), min(steps, MOST_POINTS))
    means = {
        name: np.array([values[block].mean() for block in blocks])
        for name, values in series.items()
    }
    top = max(*(float(line.max()) for line in means.values()), 0.001)
    places = [LEFT + (block.mean() + 0.5) / steps * PLOT_WIDTH for block in blocks]
    paths = []
    for name, line in means.items():
        points = (f"{x:.1f} {_y(y, top):.1f}" for x, y in zip(places, line.tolist(), strict=True))
        paths.append(f'<path class="line {name}" d="M{"L".join(points)}"/>')
    body = f"{_y_axis(top, _percent)}{''.join(paths)}{_x_axis(steps, 'step')}"
    return _svg(body, f"shares of {steps:,} steps, at most {top:.2%}")


def tick_label(value: float) -> str:
    """A number as an axis shows it: thousands as K, millions as M.

    >>> [tick_label(value) for value in (0, 250, 1000, 2500, 40_000, 1_500_000)]
    ['0', '250', '1K', '2.5K', '40K', '1.5M']
    """
    for size, suffix in ((1_000_000, "M"), (1_000, "K")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def ticks(upper: float, at_most: int = 6) -> list[float]:
    """At most `at_most` round values from 0 to `upper`.

    >>> ticks(7_328), ticks(3)
    ([0.0, 2000.0, 4000.0, 6000.0], [0.0, 1.0, 2.0, 3.0])
    """
    if upper <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(upper / at_most))
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if upper / (power * m) < at_most)
    return [step * i for i in range(int(upper / step) + 1)]


def _percent(share: float) -> str:
    return f"{share * 100:g}%"


def _x_axis(upper: float, unit: str) -> str:
    parts = [_baseline()]
    for value in ticks(upper):
        x = LEFT + value / max(upper, 1) * PLOT_WIDTH
        parts.append(f'<path class="axis" d="M{x:.1f} {FLOOR}v4"/>')
        parts.append(_text(x, FLOOR + 15, tick_label(value)))
    return "".join([*parts, _title(unit)])


def _y_axis(upper: float, label: Callable[[float], str]) -> str:
    parts = []
    for value in ticks(upper, 4):
        y = _y(value, upper)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{PLOT_WIDTH}"/>')
        parts.append(f'<text class="end" x="{LEFT - 5}" y="{y + 3.5:.1f}">{label(value)}</text>')
    return "".join(parts)


def _bar(x: float, bottom: float, top: float, width: float) -> str:
    return f"M{x:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"


def _baseline() -> str:
    return f'<path class="axis" d="M{LEFT} {FLOOR}h{PLOT_WIDTH}"/>'


def _title(text: str) -> str:
    return f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 4}">{escape(text)}</text>'


def _text(x: float, y: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{text}</text>'


def _svg(body: str, label: str) -> Markup:
    head = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    return Markup(f"<svg {head}>{body}</svg>")


def _y(value: float, upper: float) -> float:
    return FLOOR - value / max(upper, 1e-9) * (FLOOR - TOP)
