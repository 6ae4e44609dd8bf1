"""The page about a loader without a build: `write_loading_page`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobatch.common.plain_values import write_text
from isobatch.common.types import FloatArray
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.packer.html_page import render
from isobatch.packer.report.build_summary import Rejection
from isobatch.packer.report.charts import step_lines

SERIES = {"vision encoders": "samples", "LLMs": "ours"}
"""What the ranks wait for -> colour of its line."""


def write_loading_page(
    path: Path, report: dict[str, Any], ratios: FloatArray, rejected: Sequence[tuple[str, str]]
) -> None:
    """Write the page, whole or not at all.

    `report` is that of the loader, `ratios` has shape (2, steps): dist ratios of vision encoders
    and LLMs. `rejected`: reason and details of each sample that cannot be used.
    """
    write_text(path, render_loading(report, ratios, rejected))


def render_loading(
    report: dict[str, Any], ratios: FloatArray, rejected: Sequence[tuple[str, str]]
) -> str:
    """The page of these figures (see `write_loading_page`)."""
    reasons: dict[str, Rejection] = {}
    for reason, detail in rejected:
        rejection = reasons.get(reason, Rejection(0, detail))
        reasons[reason] = Rejection(rejection.number + 1, rejection.first)
    ordered = sorted(reasons.items(), key=lambda item: -item[1].number)
    lines = dict(zip(SERIES.values(), ratios, strict=True))
    return render(
        "report/loading",
        "Isobatch loader",
        sheets=("report/report", "report/loading"),
        report=report,
        series=SERIES,
        chart=step_lines(lines) if ratios.size else None,
        rejected=ordered,
        words=REASONS,
    )
