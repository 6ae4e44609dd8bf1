"""Two builds next to each other: one table for the terminal and for a page. Pure."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from isobatch.packer.format_text import share_text
from isobatch.packer.report.figures import Report
from isobatch.packer.report.gpu_hours import GpuHours
from isobatch.packer.report.terminal import NONE, FigureTable, amount_text

LETTERS = "AB"
"""Names of builds in headings; what they stand for is next to the table."""

ROWS: dict[str, Callable[[Report], str]] = {
    "model": lambda report: report.model or NONE,
    "samples packed": lambda report: f"{report.num_packed:,}",
    "samples rejected": lambda report: f"{report.num_rejected:,}",
    "groups": lambda report: f"{report.num_groups:,}",
    "samples per group": lambda report: f"{report.methods['ours'].avg_batch_size:.2f}",
    "cap: LLM tokens": lambda report: f"{report.limits.max_seq_len:,}",
    "cap: vision": lambda report: f"{report.limits.max_vision:,} {report.limits.unit}",
    "LLM tokens used": lambda report: share_text(report.fill),
    "unused: vision is full": lambda report: share_text(report.unused["vision"]),
    "unused: one sample": lambda report: share_text(report.unused["alone"]),
    "steps": lambda report: f"{report.num_steps:,}",
    "LLM padding before": lambda report: share_text(report.methods["random"].pad_ratio),
    "LLM padding": lambda report: share_text(report.methods["ours"].pad_ratio),
    "ViT waiting before": lambda report: share_text(report.methods["random"].dist_ratio_vit),
    "ViT waiting": lambda report: share_text(report.methods["ours"].dist_ratio_vit),
    "LLM waiting before": lambda report: share_text(report.methods["random"].dist_ratio_llm),
    "LLM waiting": lambda report: share_text(report.methods["ours"].dist_ratio_llm),
}
"""Row -> its cell of a build; before: random samples in micro-batches of four."""


def compare(reports: Iterable[Report]) -> FigureTable:
    """A column for each build; a row for each figure, source, reason and key that was not read."""
    reports = tuple(reports)
    rows = {name: [cell(report) for report in reports] for name, cell in ROWS.items()}
    hours = [report.gpu_hours for report in reports if report.gpu_hours]
    rows |= _hours(hours) if len(hours) == len(reports) else {}
    for title, tables in (
        ("source: ", [_texts({k: v.samples for k, v in r.sources.items()}) for r in reports]),
        ("rejected: ", [{k: f"{v:,}" for k, v in r.rejected.items()} for r in reports]),
        ("never read: ", [_unread(report) for report in reports]),
    ):
        names = dict.fromkeys(chain.from_iterable(tables))
        rows |= {f"{title}{name}": [table.get(name, NONE) for table in tables] for name in names}
    return FigureTable([*LETTERS[: len(reports)]], rows, first="")


def _hours(predicted: list[GpuHours]) -> dict[str, list[str]]:
    rows = {
        "GPU hours": [amount_text(hours.methods["ours"].gpu_hours) for hours in predicted],
        "GPU hours saved": [amount_text(hours.saved_hours) for hours in predicted],
        "saved against": [hours.baseline for hours in predicted],
    }
    if (price := predicted[0].question.price) is not None:
        costs = [amount_text(hours.methods["ours"].gpu_hours * price) for hours in predicted]
        rows["cost of an epoch"] = costs
    return rows


def _texts(shares: Mapping[str, float]) -> dict[str, str]:
    return {name: share_text(share) for name, share in shares.items()}


def _unread(report: Report) -> dict[str, str]:
    """Key -> records of all sources that have it."""
    sums: dict[str, int] = {}
    for paths in report.never_read.values():
        for path, (number, _) in paths.items():
            sums[path] = sums.get(path, 0) + (number or 0)
    return {path: f"{number:,} records" if number else "a column" for path, number in sums.items()}
