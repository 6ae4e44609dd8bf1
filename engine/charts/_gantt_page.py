"""The page around Gantt charts: one HTML document that needs nothing else, how it looks, and how it
is zoomed.

For `engine.charts.gantt`. No scripts, no fonts, no links to elsewhere; colours follow the reader's
light or dark mode, as the packer's pages do. Zooming is CSS: a chart's positions are shares of its
width, and radio buttons set that width.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CHART_PX = 900
"""Width of a chart that is not zoomed, at least; what fits into a bar is decided for it."""
ZOOMS = (1, 3, 10, 30, 100)
"""A chart offers those at which more numbers fit than before."""

STYLE = """
:root { color-scheme: light; --page: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8; --card: #f6f7f9;
  --bar-ink: #fff; --forward: #14776a; --backward: #b4541a; --weight: #7a4ea3; --encode: #2563a8; --again: #7d3509;
  --send: #8a94a0; --memory: #14776a; --over: #c22f2f; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --page: #14171a; --ink: #e8eaed; --soft: #a2abb5;
  --line: #30363d; --card: #1d2125; --bar-ink: #101214; --forward: #3db6a4; --backward: #e08a4f; --weight: #b48ee0;
  --encode: #6ea8e6; --again: #b9622a; --send: #89929c; --memory: #3db6a4; --over: #f07070; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; max-width: 1400px; padding: 32px 24px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 90ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 12px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.card b { display: block; font-size: 17px; line-height: 1.35; } .card span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child, .left { text-align: left; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; font-size: 13px; color: var(--soft); }
.legend span { white-space: nowrap; }
.key { display: inline-block; width: 14px; height: 11px; border-radius: 2px; margin-right: 6px; }
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


def page(title: str, sections: Sequence[str]) -> str:
    """A whole HTML document of these sections."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{_zoom_style()}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def zoom_buttons(chart: str, zooms: Sequence[int]) -> str:
    """Radio buttons, to stand just before the element with class `gantt` that they zoom; hidden if
    there is one.
    """
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
