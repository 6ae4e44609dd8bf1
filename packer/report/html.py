"""The report as one page that needs nothing else: figures, Table 3, distributions before and after,
rejected samples.

Pure: `render_html` turns a `Report` into text; `write_html` writes it. No scripts, no fonts, no
links to elsewhere; colours follow the reader's light or dark mode, and print is light.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from balance.baseline_samplers import BATCH_SIZE
from balance.metrics import dist_ratio, step_loads
from balance.types import IntArray
from packer.html_page import page
from packer.report._charts import histogram, rank_bars
from packer.report.figures import TABLE_3, TITLES, Loads, Method, Report
from packer.report.terminal import (
    headings,
    share_text,
    shuffle_caption,
    shuffle_cells,
    shuffle_headings,
    table_cells,
)

SHOWN_STEPS = 6
SHOWN_RANKS = 8
UNITS = {"llm_tokens": "LLM tokens", "vit_tokens": "ViT tokens"}
RANK_CHARTS = {
    "random": f"Before: {BATCH_SIZE} random samples per rank, padded",
    "ours": "After: one group per rank, packed",
}

EXPLAINED = (
    "Max: tokens of the largest micro-batch. Pad ratio: share of LLM tokens that is padding. Dist ratio: share of time"
    " that ranks wait for the step's largest micro-batch."
)


def write_html(report: Report, path: Path) -> None:
    """Write the page of `report` to `path`, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render_html(report), "utf-8")
    temporary.replace(path)


def render_html(report: Report) -> str:
    """The page of `report`: HTML that a browser shows without network and without scripts."""
    sections = [
        _head(report),
        _cards(report),
        _ranks(report),
        _distributions(report),
        _table(report),
        _shuffle(report),
        _caps(report),
        _rejected(report),
    ]
    return page("Isobatch report", sections)


def _head(report: Report) -> str:
    limits = report.limits
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    return (
        "<h1>Isobatch report</h1>"
        f"<p>{report.num_packed:,} samples in {report.num_groups:,} groups of at most {limits.max_seq_len:,} LLM tokens"
        f" and {limits.max_vision:,} {escape(limits.unit)}; {report.methods['ours'].num_steps:,} steps on"
        f" {report.dp_world_size} data-parallel ranks.</p>{notes}"
    )


def _cards(report: Report) -> str:
    random, ours = report.methods["random"], report.methods["ours"]
    repeated = f" and {report.num_repeated:,} repeated" if report.num_repeated else ""
    cards = [
        (
            f"{report.num_packed:,}",
            f"samples packed of {report.num_read:,} read{repeated}; {report.num_rejected:,} rejected",
        ),
        (f"{report.fill:.1%}", "of the groups' room for LLM tokens is used"),
        (_change(random.pad_ratio, ours.pad_ratio), "of LLM tokens are padding"),
        (
            _change(random.dist_ratio_vit, ours.dist_ratio_vit),
            "of ViT time is waiting for other ranks",
        ),
        (
            _change(random.dist_ratio_llm, ours.dist_ratio_llm),
            "of LLM time is waiting for other ranks",
        ),
    ]
    items = "".join(
        f'<div class="card"><b>{figure}</b><span>{escape(text)}</span></div>'
        for figure, text in cards
    )
    return f'<div class="cards">{items}</div>'


def _change(before: float, after: float) -> str:
    return f"<i>{share_text(before)}</i> &rarr; <em>{share_text(after)}</em>"


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
    num_steps = 0
    columns = []
    for load, unit in UNITS.items():
        steps = {
            name: step_loads(_load(report.loads[name], load), dp)[:SHOWN_STEPS]
            for name in RANK_CHARTS
        }
        num_steps = max(num_steps, *map(len, steps.values()))
        upper = max(int(part.max(initial=0)) for part in steps.values())
        charts = "".join(
            f'<h3><span class="key {name}"></span>{RANK_CHARTS[name]}<small>{_waiting(part, unit)}</small></h3>'
            + rank_bars(
                part[:, :SHOWN_RANKS], slowest=part.max(axis=1), upper=upper, series=name, unit=unit
            )
            for name, part in steps.items()
            if len(part)
        )
        columns.append(f"<div>{charts}</div>")
    steps_text = "the first step" if num_steps == 1 else f"the first {num_steps} steps"
    ranks = f"{dp} ranks" if dp <= SHOWN_RANKS else f"{SHOWN_RANKS} of {dp} ranks"
    return (
        f"<section><h2>Work and waiting in {steps_text}, {ranks}</h2>"
        "<p>A bar is what one rank computes; the faint part above it is its wait for the step's slowest rank. A group"
        f" holds {report.methods['ours'].avg_batch_size:.1f} samples on average."
        f' One scale per column.</p><div class="pair">{"".join(columns)}</div></section>'
    )


def _waiting(steps: IntArray, unit: str) -> str:
    """Share of all ranks' time in these steps that is waiting, shape of `steps` (num_steps, dp)."""
    share = share_text(dist_ratio(steps.ravel(), steps.shape[1]))
    return f"{share} of the ranks' time for {unit} is waiting, in these steps"


def _caps(report: Report) -> str:
    if not report.limits_explained:
        return ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in report.limits_explained)
    return f"<section><h2>How the caps were chosen</h2>{lines}</section>"


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
