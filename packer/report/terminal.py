"""The report and the last lines of `packer build` as text for a terminal.

The tables serve the page (`packer.report.html`) too, so that both say the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from isobatch.balance.baseline_samplers import BATCH_SIZE
from isobatch.balance.grouping.cap_lines import GROUPS_LINE
from isobatch.common.consoles import foreign
from isobatch.common.visible_text import visible_line
from isobatch.counting.records.fields import never_read_line
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.packer.build_dir import REPORT_NAME
from isobatch.packer.format_text import counted, seconds_text, share_text, size_text
from isobatch.packer.report.build_summary import BuildSummary
from isobatch.packer.report.figures import MICRO_BATCHES, TABLE_3, TITLES, MethodFigures, Report
from isobatch.packer.report.fill_limits import fill_lines
from isobatch.packer.report.gpu_hours import GpuHours
from isobatch.shards.folders import join
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import REJECTED_NAME

LABEL_WIDTH = 10
NONE = "-"
"""What is shown for a figure that cannot be computed."""
CAPTION = (
    "max: tokens of the largest micro-batch, padded. pad: share of LLM tokens that is padding."
    " dist: share of time that ranks wait for the step's largest micro-batch."
)
SOURCE_CAPTION = (
    "labels: share of the gradient with loss_normalizer='epoch'; gradient: with 'step', where each"
    " step of k micro-batches weighs the same, whatever it holds."
)


@dataclass(frozen=True, slots=True)
class FigureTable:
    """A table with one row per method or source, as text."""

    headings: list[str]
    """Headings of the columns after the first, each in several lines."""
    rows: dict[str, list[str]]
    """Method or source -> cells."""
    first: str = "micro-batches"
    """Heading of the first column."""

    @property
    def titles(self) -> dict[str, str]:
        """What people read for a row, where that is not its name."""
        return TITLES if self.first == "micro-batches" else {}


# `packer report`


def print_report(report: Report, console: Console) -> None:
    """Print two tables: what the build does to balance, and to randomness."""
    console.print(samples_text(report), highlight=False)
    bound = f"no grouping needs fewer than {max(report.lower_bounds.values()):,}"
    console.print(f"{groups_text(report)} ({bound})", highlight=False)
    for line in report.limits_explained:
        console.print(f"[dim]{foreign(line)}[/]")
    for line in fill_lines(report.unused, report.lower_bounds, report.limits):
        console.print(f"[dim]{foreign(line)}[/]", highlight=False)
    if report.gpu_hours:
        print_hours(report.gpu_hours, console)
    _print_table(balance_table(report), console)
    console.print(f"[dim]{CAPTION}[/]")
    if is_shuffle_known(report):
        _print_table(shuffle_table(report), console)
    console.print(f"[dim]{shuffle_caption(report)}[/]")
    if report.num_sources > 1:
        _print_table(source_table(report), console)
        console.print(f"[dim]{SOURCE_CAPTION}[/]")
    for line in rejected_lines(report.rejected, report.rejected_first):
        _print(console, foreign(line))
    if unread := never_read_line(report.never_read, max_paths=None):
        _print(console, f"[yellow]note:[/] {foreign(unread)}")
    for note in report.notes:
        console.print(f"[yellow]note:[/] {foreign(note)}")


def rejected_lines(rejected: Mapping[str, int], first: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason: samples, the reason in words, and the first sample."""
    for reason, number in rejected.items():
        words = REASONS.get(reason, reason)
        yield f"{number:,} {reason}: {words}; first: {visible_line(first[reason])}"


def print_hours(hours: GpuHours, console: Console) -> None:
    """Print the prediction of GPU hours: the saving, a table, and what is assumed."""
    _print(console, f"[bold]{foreign(saving_text(hours))}[/]")
    _print_table(hours_table(hours), console)
    for line in hours.assumptions:
        console.print(f"[dim]assumed: {foreign(line)}[/]", highlight=False)


def saving_text(hours: GpuHours) -> str:
    """The prediction in a sentence."""
    price = hours.question.price
    saved, other = abs(hours.saved_hours), TITLES.get(hours.baseline, hours.baseline)
    money = "" if price is None else f", worth {amount_text(saved * price)}"
    verb = "Isobatch saves" if hours.saved_hours >= 0 else "Isobatch takes"
    more = "" if hours.saved_hours >= 0 else " more"
    few = "" if hours.num_steps else "; ranks are idle: the build has fewer groups than ranks"
    return (
        f"predicted: {verb} {amount_text(saved)} GPU hours{more} in an epoch"
        f" ({share_text(abs(hours.saved_share))}){money}, against {other}, the fastest of the"
        f" others; {hours.model} on {counted(hours.question.num_gpus, 'GPUs')}"
        f" ({hours.description.partition(',')[0]}){few}"
    )


def hours_table(hours: GpuHours) -> FigureTable:
    """GPU hours of an epoch by method, and what they cost."""
    price = hours.question.price
    headings = ["GPU\nhours", *["cost"] * (price is not None), "time\nwaiting", "FLOPs\npadding"]
    rows = {}
    for name, method in hours.methods.items():
        costs = [] if price is None else [amount_text(method.gpu_hours * price)]
        shares = (share_text(method.waiting), share_text(method.padding))
        rows[name] = [amount_text(method.gpu_hours), *costs, *shares]
    return FigureTable(headings, rows)


def amount_text(amount: float) -> str:
    """Hours or money with three digits, or all of a whole number.

    >>> amount_text(0.01234), amount_text(12.34), amount_text(12345.6), amount_text(5e-6)
    ('0.0123', '12.3', '12,346', '0.000005')
    """
    if abs(amount) >= 100:
        return f"{amount:,.0f}"
    return np.format_float_positional(amount, 3, fractional=False, trim="-")


def print_comparison(places: Sequence[str], table: FigureTable, console: Console) -> None:
    """Print the table of several builds, and which is which."""
    for letter, place in zip(table.headings, places, strict=True):
        _print(console, f"[bold]{letter}[/]  {foreign(place)}")
    _print_table(table, console)


def samples_text(report: Report) -> str:
    """The sum that must come out: every sample read is packed or rejected. Markup of rich."""
    repeated = f" + {report.num_repeated:,} repeated" if report.num_repeated else ""
    reasons = ", ".join(f"{foreign(reason)} {count:,}" for reason, count in report.rejected.items())
    read = f"{counted(report.num_read, 'samples')} read{repeated}"
    rejected = f"{report.num_rejected:,} rejected{f' ({reasons})' if reasons else ''}"
    return f"{read} = [bold]{report.num_packed:,} packed[/] + {rejected}"


def groups_text(report: Report) -> str:
    """The groups and how full they are."""
    return (
        f"{counted(report.num_groups, 'groups')} of at most"
        f" {counted(report.limits.max_seq_len, 'tokens')} and"
        f" {counted(report.limits.max_vision, report.limits.unit)}, {report.fill:.1%} full;"
        f" {counted(report.num_steps, 'steps')} on {counted(report.dp_world_size, 'ranks')}"
    )


def balance_table(report: Report) -> FigureTable:
    """OmniBal's Table 3 for this build."""
    # what matters most comes first: a narrow screen shows no more
    headings = ["dist\nViT", "dist\nLLM", "pad\nratio", "avg\nsize", "max\nViT", "max\nLLM"]
    rows = {
        name: [
            f"{method.dist_ratio_vit:.4f}",
            f"{method.dist_ratio_llm:.4f}",
            f"{method.pad_ratio:.3f}",
            f"{method.avg_batch_size:.2f}",
            f"{method.longest_vit_tokens:,}",
            f"{method.longest_seq_len:,}",
        ]
        for name, method in report.methods.items()
    }
    return FigureTable(headings, rows)


def shuffle_table(report: Report) -> FigureTable:
    """How random the steps are; the columns of sources only if there are several."""
    texts = ["corr\nViT", "corr\nLLM", "corr\nsource", "source\nmix"]
    shown = 4 if report.num_sources > 1 else 2
    headings = [f"k={number}\n{text}" for number in MICRO_BATCHES for text in texts[:shown]]
    rows = {name: _shuffle_cells(method, shown) for name, method in report.methods.items()}
    return FigureTable(headings, rows)


def is_shuffle_known(report: Report) -> bool:
    """Whether any method has steps enough, and unequal ones, to say how random they are."""
    return any(cell != NONE for row in shuffle_table(report).rows.values() for cell in row)


def _shuffle_cells(method: MethodFigures, shown: int) -> list[str]:
    cells: list[str] = []
    for figures in method.shuffle.values():
        kinds = ("vit", "llm", "source")
        correlations = [getattr(figures, f"autocorrelation_{kind}") for kind in kinds]
        # z: no minus sign before a zero
        # exactly 0 only where it cannot be computed
        texts = [f"{value:+z.2f}" if value else NONE for value in correlations]
        mix = f"{figures.source_entropy:.3f}" if figures.num_steps > 1 else NONE
        cells += [*texts, mix][:shown]
    return cells


def source_table(report: Report) -> FigureTable:
    """What each source weighs."""
    headings = ["samples", "labels", *(f"gradient\nk={number}" for number in MICRO_BATCHES)]
    rows = {
        name: [share_text(share) for share in (row.samples, row.labels, *row.gradient.values())]
        for name, row in report.sources.items()
    }
    return FigureTable(headings, rows, first="source")


def shuffle_caption(report: Report) -> str:
    """What the shuffle table's columns mean, and how epochs repeat each other."""
    if not is_shuffle_known(report):
        why = "fewer than three steps, or equal ones: give more data, or a smaller --dp"
        return f"how random steps are is not known of {why}."
    num_steps = {k: max(1, row.num_steps) for k, row in report.methods["ours"].shuffle.items()}
    chance = ", ".join(f"{steps**-0.5:.2f} at k={k}" for k, steps in num_steps.items())
    mix = ""
    if report.num_sources > 1:
        mix = ", its sources' shares (source); mix: entropy of a step's sources, 1 = random"
    again = ", ".join(f"{times:.1f} at k={k}" for k, times in report.repeated_pairs.items())
    return (
        "how random steps of k micro-batches are. corr: of a step's load with the next one's, 0 ="
        f" random, where chance alone gives about {chance}{mix}; {NONE}: for fewer than three"
        " steps, or equal ones. Two groups of a step share one in the next epoch too, relative to"
        f" chance: {again}."
    )


def _print_table(figures: FigureTable, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    titles = figures.titles
    table.add_column(figures.first, no_wrap=bool(titles))
    for heading in figures.headings:
        table.add_column(heading, justify="right")
    for name, cells in figures.rows.items():
        style = "bold green" if titles and name == "ours" else None
        style = "dim" if name in titles and name not in TABLE_3 else style
        table.add_row(foreign(titles.get(name, name)), *map(foreign, cells), style=style)
    console.print(table)


# `packer build`


def print_build(summary: BuildSummary, report: Report, console: Console) -> None:
    """Print what a build did; `report` is of the same build."""
    if summary.already_complete:
        hint = "nothing to do (--overwrite builds it again)"
        _print(console, f"{foreign(summary.out)} is a finished build of these settings; {hint}")
    _print(console, samples_text(report))
    _print(console, groups_text(report))
    console.print()
    _print_ratios(report, console)
    console.print()
    for line in (line for line in report.limits_explained if line.startswith(GROUPS_LINE)):
        _print(
            console, f"[bold]{'groups':<{LABEL_WIDTH}}[/]{foreign(line.removeprefix(GROUPS_LINE))}"
        )
    if report.limits.pad_each_to > 1:
        padding = f"each sample to a multiple of {report.limits.pad_each_to:,} tokens"
        _print(console, f"[bold]{'padding':<{LABEL_WIDTH}}[/]{padding}, which the cap holds with")
    for label, line in _lines(summary, read_manifest(summary.out).values):
        _print(console, f"[bold]{label:<{LABEL_WIDTH}}[/]{foreign(line)}")
    for note in (*_tokenizer_notes(summary), *report.notes):
        _print(console, f"[yellow]note:[/] {foreign(note)}")


def _print_ratios(report: Report, console: Console) -> None:
    before, after = report.methods["random"], report.methods["ours"]
    rows = [
        ("LLM tokens that are padding", before.pad_ratio, after.pad_ratio),
        ("ViT time that is waiting", before.dist_ratio_vit, after.dist_ratio_vit),
        ("LLM time that is waiting", before.dist_ratio_llm, after.dist_ratio_llm),
    ]
    _print(console, f"{'':<28}{'before':>8}{'after':>10}")
    for name, old, new in rows:
        new_text = f"[bold green]{share_text(new):>10}[/]"
        _print(console, f"{name:<28}{share_text(old):>8}{new_text}")
    waiting = f"waiting: for the slowest of {report.dp_world_size} ranks."
    _print(console, f"[dim]before: {BATCH_SIZE} random samples, padded. {waiting}[/]")


def _lines(summary: BuildSummary, manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text), with a label only on the first line of each subject."""
    if summary.seconds:
        stages = ", ".join(f"{name} {seconds_text(took)}" for name, took in summary.seconds.items())
        yield "time", f"{seconds_text(sum(summary.seconds.values()))}: {stages}"
    numbers = {reason: entry.number for reason, entry in summary.rejected.items()}
    first = {reason: entry.first for reason, entry in summary.rejected.items()}
    for number, line in enumerate(rejected_lines(numbers, first)):
        yield "" if number else "rejected", line
    if summary.rejected:
        yield "", f"all of them: {join(summary.out, REJECTED_NAME)}"
    if line := never_read_line(summary.never_read):
        yield "note", visible_line(line)
    shards = manifest["shards"]
    place = join(summary.out, "shards")
    size = size_text(sum(shard["size"] for shard in shards))
    yield "shards", f"{len(shards):,} in {place} ({manifest['format']}), {size}"
    yield "report", join(summary.out, REPORT_NAME)
    yield "look", f"packer inspect {summary.out}"
    yield "check", f"packer verify {summary.out}"


def _tokenizer_notes(summary: BuildSummary) -> Iterator[str]:
    if conflicts := summary.id_conflicts:
        number = counted(len(conflicts), "tokens")
        word = "ids" if len(conflicts) > 1 else "an id"
        ids = ", ".join(f"{token} {said} ({used})" for token, (said, used) in conflicts.items())
        says = (
            f"the tokenizer's config gives {number} {word} that its tokenizer.json does not: {ids}"
        )
        hint = "if your model learned those, first save the tokenizer again from its own class"
        yield f"{says}, in brackets the ids in use; {hint}"
    if summary.added_tokens:
        added = ", ".join(f"{token} = {number}" for token, number in summary.added_tokens.items())
        yield f"tokens added to the tokenizer (resize the model's embedding): {added}"


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
