"""The report as one page that needs nothing else: figures, Table 3, distributions before and after, rejected samples.

Pure: `render_html` turns a `Report` into text; `write_html` writes it. No scripts, no fonts, no links to elsewhere;
colours follow the reader's light or dark mode, and print is light.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from balance.baselines import BATCH_SIZE
from balance.metrics import step_loads
from balance.records import IntArray
from packer.charts import histogram, rank_bars
from packer.report import TABLE_3, TITLES, Loads, Method, Report
from packer.report_text import headings, shuffle_caption, shuffle_cells, shuffle_headings, table_cells

SHOWN_STEPS = 6
SHOWN_RANKS = 8
UNITS = {"llm_tokens": "LLM tokens", "vit_tokens": "ViT tokens"}

EXPLAINED = (
    "Max: tokens of the largest micro-batch. Pad ratio: share of LLM tokens that is padding. Dist ratio: share of time"
    " that ranks wait for the step's largest micro-batch."
)

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
h3 small { font-weight: 400; color: var(--soft); font-size: 13px; margin-left: 6px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 90ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(176px, 1fr)); gap: 12px; margin-top: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 20px; line-height: 1.25; white-space: nowrap; } .card span { color: var(--soft); }
.card i { font-style: normal; color: var(--random); } .card b em { font-style: normal; color: var(--ours); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: pre-line; }
th { font-weight: 600; vertical-align: bottom; color: var(--soft); line-height: 1.25; font-size: 13px; }
th:first-child, td:first-child { text-align: left; } tr.ours td { color: var(--ours); font-weight: 700; }
tr.more td { color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 0 24px; }
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


def write_html(report: Report, path: Path) -> None:
    """Write the page of `report` to `path`."""
    path.write_text(render_html(report), "utf-8")


def render_html(report: Report) -> str:
    """The page of `report`: HTML that a browser shows without network and without scripts."""
    sections = [
        _head(report),
        _cards(report),
        _table(report),
        _shuffle(report),
        _distributions(report),
        _ranks(report),
        _rejected(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Isobatch report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _head(report: Report) -> str:
    limits = report.limits
    explained = "".join(f"<p>{escape(line)}</p>" for line in report.limits_explained)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    return (
        "<h1>Isobatch report</h1>"
        f"<p>{report.num_packed:,} samples in {report.num_groups:,} groups of at most {limits.max_seq_len:,} LLM tokens"
        f" and {limits.max_vision:,} {escape(limits.unit)}; {report.methods['ours'].num_steps:,} steps on"
        f" {report.dp_world_size} data-parallel ranks.</p>{explained}{notes}"
    )


def _cards(report: Report) -> str:
    random, ours = report.methods["random"], report.methods["ours"]
    cards = [
        (f"{report.num_packed:,}", f"samples packed of {report.num_read:,} read; {report.num_rejected:,} rejected"),
        (f"{report.fill:.1%}", "of the groups' room for LLM tokens is used"),
        (_change(random.pad_ratio, ours.pad_ratio), "of LLM tokens are padding"),
        (_change(random.dist_ratio_vit, ours.dist_ratio_vit), "of ViT time is waiting for other ranks"),
        (_change(random.dist_ratio_llm, ours.dist_ratio_llm), "of LLM time is waiting for other ranks"),
    ]
    items = "".join(f'<div class="card"><b>{figure}</b><span>{escape(text)}</span></div>' for figure, text in cards)
    return f'<div class="cards">{items}</div>'


def _change(before: float, after: float) -> str:
    return f"<i>{_share(before)}</i> &rarr; <em>{_share(after)}</em>"


def _share(value: float) -> str:
    if value == 0:
        return "0%"
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2%}"


def _table(report: Report) -> str:
    return (
        "<section><h2>Balance, against the samplers that trainers use</h2>"
        f"<p>Table 3 of OmniBal for this dataset. The samplers put {BATCH_SIZE} samples in a micro-batch and pad LLM"
        f" sequences to the longest; groups are packed. Vision patches are never padded. {EXPLAINED}</p>"
        f"{_rows(report, headings(), table_cells)}</section>"
    )


def _shuffle(report: Report) -> str:
    caption = shuffle_caption(report)
    return (
        f"<section><h2>What balance costs in randomness</h2><p>{escape(caption[0].upper() + caption[1:])}</p>"
        f"{_rows(report, shuffle_headings(report), shuffle_cells)}</section>"
    )


def _rows(report: Report, columns: list[str], cells: Callable[[Method, Report], list[str]]) -> str:
    """A table with one row per method."""
    head = "".join(f"<th>{escape(text)}</th>" for text in ["micro-batches", *columns])
    rows = []
    for name, method in report.methods.items():
        kind = "ours" if name == "ours" else "table3" if name in TABLE_3 else "more"
        row = "".join(f"<td>{escape(text)}</td>" for text in [TITLES[name], *cells(method, report)])
        rows.append(f'<tr class="{kind}">{row}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _distributions(report: Report) -> str:
    rows = [
        ("samples", "samples", report.samples, "Samples"),
        ("random", "micro-batches", report.loads["random"], f"Before: {BATCH_SIZE} random samples"),
        ("ours", "groups", report.loads["ours"], "After: groups"),
    ]
    columns = []
    for load, unit in UNITS.items():
        upper = max(int(_load(loads, load).max(initial=0)) for _, _, loads, _ in rows)
        charts = "".join(
            f'<h3><span class="key {series}"></span>{title}<small>{_spread(_load(loads, load))}</small></h3>'
            + histogram(_load(loads, load), upper=upper, series=series, unit=unit, counted=counted)
            for series, counted, loads, title in rows
        )
        columns.append(f"<div>{charts}</div>")
    return (
        "<section><h2>Load of a micro-batch, before and after</h2>"
        "<p>LLM loads are after padding. Height: share of samples, micro-batches or groups. Dashed: the mean."
        f' One scale per column.</p><div class="pair">{"".join(columns)}</div></section>'
    )


def _ranks(report: Report) -> str:
    dp = report.dp_world_size
    columns = []
    for load, unit in UNITS.items():
        steps = {name: step_loads(_load(report.loads[name], load), dp)[:SHOWN_STEPS] for name in ("random", "ours")}
        upper = max(int(part.max(initial=0)) for part in steps.values())
        charts = "".join(
            f'<h3><span class="key {name}"></span>{TITLES[name]}</h3>'
            + rank_bars(part[:, :SHOWN_RANKS], slowest=part.max(axis=1), upper=upper, series=name, unit=unit)
            for name, part in steps.items()
            if len(part)
        )
        columns.append(f"<div>{charts}</div>")
    ranks = f"{dp} ranks" if dp <= SHOWN_RANKS else f"{SHOWN_RANKS} of {dp} ranks"
    return (
        f"<section><h2>Work and waiting in the first {SHOWN_STEPS} steps, {ranks}</h2>"
        "<p>Solid: what a rank computes. Faint: its wait for the step's slowest rank.</p>"
        f'<div class="pair">{"".join(columns)}</div></section>'
    )


def _rejected(report: Report) -> str:
    if not report.rejected:
        return "<section><h2>Rejected samples</h2><p>None: every sample that was read is packed.</p></section>"
    most = max(report.rejected.values())
    rows = "".join(
        f"<tr><td>{escape(reason)}</td><td>{count:,}</td>"
        f'<td class="bars"><span class="bar" style="width:{count / most * 100:.1f}%"></span></td></tr>'
        for reason, count in report.rejected.items()
    )
    return (
        f"<section><h2>Rejected samples: {report.num_rejected:,} of {report.num_read:,}</h2>"
        "<p>Each is listed with its position, reason and detail in rejected.parquet.</p>"
        f"<table><thead><tr><th>reason</th><th>samples</th><th></th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _spread(values: IntArray) -> str:
    """Mean, largest, and the relative spread, which says at a glance how even the loads are."""
    if not len(values):
        return "none"
    spread = float(values.std()) / max(float(values.mean()), 1e-9)
    return f"mean {values.mean():,.0f}, largest {values.max():,}, spread {spread:.0%}"


def _load(loads: Loads, name: str) -> IntArray:
    return loads.vit_tokens if name == "vit_tokens" else loads.llm_tokens
