"""The HTML document around a report or a chart: it needs nothing else, and how it looks.

No scripts, no fonts, no links to elsewhere; colours follow the reader's light or dark mode.
"""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light; --page: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8;
  --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --page: #14171a; --ink: #e8eaed;
  --soft: #a2abb5; --line: #30363d; --card: #1d2125; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; padding: 32px 24px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 25px; margin: 0; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 90ch; }
.cards { display: grid; gap: 12px; margin: 12px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; }
.card b { display: block; font-size: 17px; line-height: 1.35; }
.card span { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child, .left { text-align: left; }
.key { display: inline-block; height: 11px; border-radius: 2px; margin-right: 6px; }
"""
"""Rules that every page shares; a page adds its own after them."""


def page(title: str, body: str, *, style: str = "") -> str:
    """A whole HTML document with this body; `style` holds rules of its own."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
