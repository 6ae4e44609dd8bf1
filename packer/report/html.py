"""The report as a page: figures, tables, distributions and rejected samples.

`report.html.j2` holds the text, `report.css` the looks. Pure but for `write_html`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from isobatch.balance.baseline_samplers import BATCH_SIZE
from isobatch.balance.metrics import dist_ratio, step_loads
from isobatch.common.plain_values import write_text
from isobatch.common.types import IntArray
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.packer.format_text import counted, share_text
from isobatch.packer.html_page import render
from isobatch.packer.report.charts import histogram, rank_bars
from isobatch.packer.report.comparison import compare
from isobatch.packer.report.figures import BEFORE, TABLE_3, Report
from isobatch.packer.report.fill_limits import fill_lines
from isobatch.packer.report.terminal import (
    SOURCE_CAPTION,
    balance_table,
    hours_table,
    is_shuffle_known,
    saving_text,
    shuffle_caption,
    shuffle_table,
    source_table,
)

SHOWN_STEPS = 6
SHOWN_RANKS = 8
UNITS = {"llm_tokens": "LLM tokens", "vit_tokens": "ViT tokens"}
SERIES = {BEFORE: "random", "ours": "ours"}
"""Micro-batches before and after -> their colour."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page with its heading."""

    series: str
    """Name of its colour: samples, random or ours."""
    title: str
    note: str
    svg: Markup


def write_html(report: Report, path: Path) -> None:
    """Write the page of `report` to `path`, whole or not at all."""
    write_text(path, render_html(report))


def render_html(report: Report) -> str:
    """The page of `report`: HTML that a browser shows without network and without scripts."""
    return render(
        "report/report",
        "Isobatch report",
        report=report,
        ranks_title=_ranks_title(report),
        rank_charts=[_rank_charts(report, load, unit) for load, unit in UNITS.items()],
        distributions=[_distributions(report, load, unit) for load, unit in UNITS.items()],
        balance=balance_table(report),
        shuffle=shuffle_table(report) if is_shuffle_known(report) else None,
        shuffle_caption=shuffle_caption(report),
        sources=source_table(report),
        source_caption=SOURCE_CAPTION,
        hours=report.gpu_hours and hours_table(report.gpu_hours),
        saving=report.gpu_hours and saving_text(report.gpu_hours),
        fill_lines=fill_lines(report.unused, report.lower_bounds, report.limits),
        words=REASONS,
        table_3=TABLE_3,
        batch_size=BATCH_SIZE,
    )


def write_comparison(reports: Sequence[Report], places: Sequence[str], path: Path) -> None:
    """Write the page of several builds to `path`, whole or not at all."""
    content = render(
        "report/comparison",
        "Isobatch builds",
        sheets=("report/report",),
        table=compare(reports),
        table_3=(),
        places=places,
        report=reports[0],
    )
    write_text(path, content)


def _distributions(report: Report, load: str, unit: str) -> list[Chart]:
    """Histograms of one load: of samples, and of micro-batches before and after."""
    rows = [
        ("samples", "samples", report.samples, "Samples"),
        ("random", "micro-batches", report.loads[BEFORE], _before(report)),
        ("ours", "groups", report.loads["ours"], "After: groups"),
    ]
    upper = max(int(loads[load].max(initial=0)) for _, _, loads, _ in rows)
    return [
        Chart(
            series,
            title,
            _spread(loads[load]),
            histogram(loads[load], upper=upper, series=series, unit=unit, counted=counted),
        )
        for series, counted, loads, title in rows
    ]


def _rank_charts(report: Report, load: str, unit: str) -> list[Chart]:
    """Work and waiting of the ranks for one load, before and after."""
    steps = {name: _first_steps(report, name, load) for name in SERIES}
    titles = {
        BEFORE: f"{_before(report)} per rank, padded",
        "ours": "After: one group per rank, packed",
    }
    upper = max(int(part.max(initial=0)) for part in steps.values())
    return [
        Chart(
            SERIES[name],
            titles[name],
            _waiting(part, unit),
            rank_bars(
                part[:, :SHOWN_RANKS],
                slowest=part.max(axis=1),
                upper=upper,
                series=SERIES[name],
                unit=unit,
            ),
        )
        for name, part in steps.items()
        if len(part)
    ]


def _before(report: Report) -> str:
    group_size = max(1, round(report.num_packed / max(report.num_groups, 1)))
    return f"Before: {counted(group_size, 'random samples')}"


def _ranks_title(report: Report) -> str:
    num_steps = max(len(_first_steps(report, name, "llm_tokens")) for name in SERIES)
    steps = "the first step" if num_steps == 1 else f"the first {num_steps} steps"
    dp = report.dp_world_size
    return f"{steps}, {dp} ranks" if dp <= SHOWN_RANKS else f"{steps}, {SHOWN_RANKS} of {dp} ranks"


def _first_steps(report: Report, method: str, load: str) -> IntArray:
    """Loads of the ranks in the steps that are drawn, shape (num_steps, dp)."""
    return step_loads(report.loads[method][load], report.dp_world_size)[:SHOWN_STEPS]


def _waiting(steps: IntArray, unit: str) -> Markup:
    """Share of the ranks' time that is waiting; `steps` has shape (num_steps, dp)."""
    share = share_text(dist_ratio(steps.ravel(), steps.shape[1]))
    return Markup(f"{share} of the ranks' time for {unit} is waiting, in these steps")


def _spread(values: IntArray) -> str:
    """Mean, largest, and the relative spread, which shows how even the loads are."""
    if not len(values):
        return "none"
    spread = float(values.std()) / max(float(values.mean()), 1e-9)
    return f"mean {values.mean():,.0f}, largest {values.max():,}, spread {spread:.0%}"
