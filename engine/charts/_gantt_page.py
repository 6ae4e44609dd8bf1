"""The page around Gantt charts: how it looks, and how it is zoomed. For `engine.charts.gantt`.

Zooming is CSS: a chart's positions are shares of its width, and radio buttons set that width.
"""

from __future__ import annotations

from collections.abc import Sequence

from balance.html_page import page

CHART_PX = 900
"""Width of a chart that is not zoomed, at least; what fits into a bar is decided for it."""
ZOOMS = (1, 3, 10, 30, 100)
"""A chart offers those at which more numbers fit than before."""

STYLE = """
:root { --bar-ink: #fff; --forward: #14776a; --backward: #b4541a; --weight: #7a4ea3;
  --encode: #2563a8; --again: #7d3509; --send: #8a94a0; --memory: #14776a; --over: #c22f2f; }
@media (prefers-color-scheme: dark) { :root { --bar-ink: #101214; --forward: #3db6a4;
  --backward: #e08a4f; --weight: #b48ee0; --encode: #6ea8e6; --again: #b9622a; --send: #89929c;
  --memory: #3db6a4; --over: #f07070; } }
body { max-width: 1400px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card span { font-size: 13px; }
th, td { padding: 5px 10px; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; font-size: 13px; color: var(--soft); }
.legend span { white-space: nowrap; }
.key { width: 14px; }
.zooms { display: inline-flex; align-items: center; gap: 4px; font-size: 13px; color: var(--soft); margin: 4px 0 8px; }
input.zoom { position: absolute; opacity: 0; pointer-events: none; }
.zooms[hidden] { display: none; }
.zooms label { border: 1px solid var(--line); border-radius: 6px; padding: 1px 9px; cursor: pointer;
  background: var(--card); color: var(--ink); }
.gantt { display: flex; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
.names { flex: none; width: 196px; border-right: 1px solid var(--line); font-size: 12px; line-height: 15px;
  color: var(--soft); font-variant-numeric: tabular-nums; background: var(--card); }
.names div { padding: 2px 8px; overflow: hidden; white-space: nowrap; display: flex; flex-direction: column;
  justify-content: center; }
.names b { color: var(--ink); } .names i { font-style: normal; color: var(--over); }
.time { flex: 1; min-width: 0; }
.time svg { display: block; } .memory svg { border-bottom: 1px solid var(--line); box-sizing: content-box; }
.below { margin-top: 14px; }
.time text { font-size: 10px; pointer-events: none; font-variant-numeric: tabular-nums; }
.time .tick { fill: var(--soft); font-size: 11px; } .time line { stroke: var(--line); stroke-width: 1; }
.time .number { fill: var(--bar-ink); text-anchor: middle; }
.forward { fill: var(--forward); background: var(--forward); } .again { fill: var(--again); background: var(--again); }
.backward, .input { fill: var(--backward); background: var(--backward); }
.weight { fill: var(--weight); background: var(--weight); }
.encode { fill: var(--encode); background: var(--encode); } .send { fill: var(--send); background: var(--send); }
.critical { fill: var(--ink); background: var(--ink); } .key.critical, .key.send { height: 4px; vertical-align: 3px; }
.odd { opacity: .78; } .live { fill: var(--memory); opacity: .45; } .limit { stroke: var(--over) !important; }
.time rect.forward, .time rect.backward, .time rect.input, .time rect.weight, .time rect.encode { stroke: var(--page);
  stroke-width: .6; }
"""


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
