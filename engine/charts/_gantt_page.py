"""The page around Gantt charts: how it looks, and how it is zoomed. For `engine.charts.gantt`.

Zooming is CSS: a chart's positions are shares of its width, and radio buttons set that width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from balance.html_page import page

CHART_PX = 900
"""Width of a chart that is not zoomed, at least; what fits into a bar is decided for it."""
ZOOMS = (1, 3, 10, 30, 100)
"""A chart offers those at which more numbers fit than before."""

STYLE = (Path(__file__).parent / "gantt.css").read_text("utf-8")


def chart_page(title: str, sections: Sequence[str]) -> str:
    """A whole HTML document of these sections."""
    return page(title, "\n".join(sections), style=STYLE + _zoom_style())


def zoom_buttons(chart: str, zooms: Sequence[int]) -> str:
    """Radio buttons that zoom the element with class `gantt` after them; may be hidden."""
    inputs = "".join(
        f'<input class="zoom z{zoom}" type="radio" name="{chart}" id="{chart}-{zoom}"{" checked" if zoom == 1 else ""}>'
        for zoom in zooms
    )
    labels = "".join(
        f'<label for="{chart}-{zoom}" class="l{zoom}">{"whole step" if zoom == 1 else f"{zoom}x"}</label>'
        for zoom in zooms
    )
    return f'{inputs}<div class="zooms"{" hidden" if len(zooms) == 1 else ""}>zoom {labels}</div>'


def zoom_class(width_share: float, needed_px: float) -> str | None:
    """Class of what needs `needed_px` inside a bar of this share of the chart: shown from some zoom
    on; None if never.

    >>> zoom_class(0.1, 20), zoom_class(0.01, 20), zoom_class(1e-6, 20)
    ('n1', 'n3', None)
    """
    return next((f"n{zoom}" for zoom in ZOOMS if width_share * CHART_PX * zoom >= needed_px), None)


def _zoom_style() -> str:
    """Wider charts, more numbers and other ticks by the checked button."""
    rules = [".time svg.zoomed { width: 100%; min-width: " + f"{CHART_PX}px; }}"]
    rules += [f".n{zoom}, .t{zoom} {{ display: none; }}" for zoom in ZOOMS]
    for zoom in ZOOMS:
        checked = f"input.z{zoom}:checked ~"
        shown = ", ".join(f"{checked} .gantt .n{lower}" for lower in ZOOMS if lower <= zoom)
        rules.append(f"{shown}, {checked} .gantt .t{zoom} {{ display: inline; }}")
        rules.append(f"{checked} .zooms .l{zoom} {{ border-color: var(--ink); font-weight: 600; }}")
        rules.append(
            f"{checked} .gantt svg.zoomed {{ width: {zoom * 100}%; min-width: {zoom * CHART_PX}px; }}"
        )
    return "\n".join(rules)
