"""What the HTML pages of `packer` share: one document that needs nothing else, and how it looks.

No scripts, no fonts, no links to elsewhere; colours follow the reader's light or dark mode, and
print is light.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light; --page: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8; --card: #f6f7f9;
  --plain: #8a94a0; --random: #c8692c; --ours: #14776a; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --page: #14171a; --ink: #e8eaed; --soft: #a2abb5;
  --line: #30363d; --card: #1d2125; --plain: #89929c; --random: #e08a4f; --ours: #3db6a4; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #ccc; --card: #fff;
  --plain: #777; --random: #c8692c; --ours: #14776a; } section { break-inside: avoid; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; max-width: 1120px; padding: 32px 24px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 18px; margin: 40px 0 4px; }
h3 { font-size: 14px; margin: 12px 0 2px; }
h3 small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; margin-left: 17px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 90ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-top: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 17px; line-height: 1.35; } .card span { color: var(--soft); }
.card i { font-style: normal; color: var(--random); } .card b em { font-style: normal; color: var(--ours); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: pre-line; }
th { font-weight: 600; vertical-align: bottom; color: var(--soft); line-height: 1.25; font-size: 13px; }
th:first-child, td:first-child { text-align: left; } tr.ours td { color: var(--ours); font-weight: 700; }
tr.more td { color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 0 24px; }
svg { display: block; width: 100%; height: auto; margin-bottom: 4px; }
svg .samples, .key.samples { fill: var(--plain); background: var(--plain); }
svg .random, .key.random { fill: var(--random); background: var(--random); }
svg .ours, .key.ours { fill: var(--ours); background: var(--ours); } svg .wait { opacity: .25; }
svg .axis { stroke: var(--soft); fill: none; } svg .grid { stroke: var(--line); stroke-width: .7; fill: none; }
svg .mean { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 4 3; fill: none; }
svg text { font-size: 11px; fill: var(--soft); text-anchor: middle; } svg .end { text-anchor: end; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.bars { width: 60%; text-align: left; }
.bar { display: inline-block; height: 10px; background: var(--random); border-radius: 2px; }
.note { border-left: 3px solid var(--random); padding-left: 10px; color: var(--ink); }
"""


def page(title: str, sections: Sequence[str], *, style: str = "") -> str:
    """A whole HTML document of these sections, with rules of its own behind the common ones."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )
