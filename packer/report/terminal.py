"""The report as text: what a build does to balance, and what that costs in randomness, in two
tables.

Headings and cells serve the page (`packer.report.html`) too, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packer.report.figures import MICRO_BATCHES, TABLE_3, TITLES, Method, Report


def print_report(report: Report, console: Console) -> None:
    """The report as a table that a person reads in ten seconds."""
    console.print(samples_text(report), highlight=False)
    needed = max(report.lower_bounds.values())
    console.print(
        f"{groups_text(report)} (no grouping needs fewer than {needed:,})", highlight=False
    )
    for line in report.limits_explained:
        console.print(f"[dim]{escape(line)}[/]")
    _print_table(report, console, headings(), table_cells)
    console.print(f"[dim]{CAPTION}[/]")
    _print_table(report, console, shuffle_headings(report), shuffle_cells)
    console.print(f"[dim]{shuffle_caption(report)}[/]")
    for note in report.notes:
        console.print(f"[yellow]note:[/] {note}")


def samples_text(report: Report) -> str:
    """The sum that must come out: every sample read is packed or rejected. Markup of rich."""
    repeated = f" + {report.num_repeated:,} repeated" if report.num_repeated else ""
    return (
        f"{report.num_read:,} samples read{repeated} = [bold]{report.num_packed:,} packed[/]"
        f" + {report.num_rejected:,} rejected{_reasons(report.rejected)}"
    )


def groups_text(report: Report) -> str:
    """The groups and how full they are."""
    return (
        f"{report.num_groups:,} groups of at most {report.limits.max_seq_len:,} tokens and"
        f" {report.limits.max_vision:,} {report.limits.unit}, {report.fill:.1%} full;"
        f" {report.methods['ours'].num_steps:,} steps on {report.dp_world_size} ranks"
    )


def share_text(value: float) -> str:
    """A share with as many digits as say something.

    >>> share_text(0), share_text(0.0056), share_text(0.503)
    ('0%', '0.56%', '50.3%')
    """
    if value == 0:
        return "0%"
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2%}"


def _print_table(
    report: Report,
    console: Console,
    columns: list[str],
    cells: Callable[[Method, Report], list[str]],
) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("micro-batches", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, row in report.methods.items():
        style = "bold green" if name == "ours" else "dim" if name not in TABLE_3 else None
        table.add_row(TITLES[name], *cells(row, report), style=style)
    console.print(table)


def headings() -> list[str]:
    """Headings of the balance table's columns after the first, in two lines each."""
    return ["avg\nsize", "max\nViT", "max\nLLM", "pad\nratio", "dist\nViT", "dist\nLLM"]


def table_cells(row: Method, report: Report) -> list[str]:
    """Text of a method's cells in the balance table, in the order of its headings."""
    return [
        f"{row.avg_batch_size:.2f}",
        f"{row.longest_vit_tokens:,}",
        f"{row.longest_seq_len:,}",
        f"{row.pad_ratio:.3f}",
        f"{row.dist_ratio_vit:.4f}",
        f"{row.dist_ratio_llm:.4f}",
    ]


CAPTION = (
    "max: tokens of the largest micro-batch, padded. pad: share of LLM tokens that is padding. dist: share of time that"
    " ranks wait for the step's largest micro-batch."
)


def shuffle_headings(report: Report) -> list[str]:
    """Headings of the shuffle table's columns after the first; without sources where there is one
    only.
    """
    texts = ["corr\nViT", "corr\nLLM", "corr\nsource", "source\nmix"]
    return [
        f"k={number}\n{text}"
        for number in MICRO_BATCHES
        for text in texts[: 4 if report.num_sources > 1 else 2]
    ]


def shuffle_cells(row: Method, report: Report) -> list[str]:
    """Text of a method's cells in the shuffle table, in the order of its headings."""
    cells = []
    for figures in row.shuffle.values():
        cells += [_signed(figures.autocorrelation_vit), _signed(figures.autocorrelation_llm)]
        if report.num_sources > 1:
            cells += [_signed(figures.autocorrelation_source), f"{figures.source_entropy:.3f}"]
    return cells


def shuffle_caption(report: Report) -> str:
    """What the shuffle table's columns mean."""
    figures = report.methods["ours"].shuffle
    chance = ", ".join(
        f"{1 / max(1, row.num_steps) ** 0.5:.2f} at k={k}" for k, row in figures.items()
    )
    mix = (
        ", its sources' shares (source); mix: entropy of a step's sources, 1 = random"
        if report.num_sources > 1
        else ""
    )
    return (
        "how random steps of k micro-batches are. corr: of a step's load with the next one's, 0 = random, where chance"
        f" alone gives about {chance}{mix}."
    )


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # adding zero turns -0.00 into +0.00


def _reasons(rejected: dict[str, int]) -> str:
    return (
        f" ({', '.join(f'{escape(reason)} {count:,}' for reason, count in rejected.items())})"
        if rejected
        else ""
    )
