"""The last lines of `packer build`: what a person reads in ten seconds.

Samples read and where they went, groups and how full they are, waiting and padding before and
after, where the time went, what was rejected, and where everything lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

from balance.baseline_samplers import BATCH_SIZE
from packer.build_dir import REPORT_NAME
from packer.inspect.terminal import size_text, visible
from packer.records.record import REASONS
from packer.report.figures import Report
from packer.report.summary import BuildSummary
from packer.report.terminal import groups_text, samples_text, share_text
from shards.folders import join
from shards.manifest import read_manifest
from shards.tables import REJECTED_NAME

LABEL_WIDTH = 10


def print_build(summary: BuildSummary, report: Report, console: Console) -> None:
    """Print what a finished build did; `report` is of the same build."""
    if summary.already_complete:
        place = escape(summary.out)
        _print(
            console,
            f"{place} is a finished build of these settings; nothing to do (--overwrite builds it anew)",
        )
    _print(console, samples_text(report))
    _print(console, groups_text(report))
    console.print()
    _print_ratios(report, console)
    console.print()
    for label, line in _lines(summary, read_manifest(summary.out)):
        _print(console, f"[bold]{label:<{LABEL_WIDTH}}[/]{escape(line)}")
    for note in (*_tokenizer_notes(summary), *report.notes):
        _print(console, f"[yellow]note:[/] {escape(note)}")


def _print_ratios(report: Report, console: Console) -> None:
    before, after = report.methods["random"], report.methods["ours"]
    rows = [
        ("LLM tokens that are padding", before.pad_ratio, after.pad_ratio),
        ("ViT time that is waiting", before.dist_ratio_vit, after.dist_ratio_vit),
        ("LLM time that is waiting", before.dist_ratio_llm, after.dist_ratio_llm),
    ]
    console.print(f"{'':<28}{'before':>8}{'after':>10}", highlight=False)
    for name, old, new in rows:
        console.print(
            f"{name:<28}{share_text(old):>8}[bold green]{share_text(new):>10}[/]", highlight=False
        )
    ranks = report.dp_world_size
    _print(
        console,
        f"[dim]before: {BATCH_SIZE} random samples, padded. waiting: for the slowest of {ranks} ranks.[/]",
    )


def _lines(summary: BuildSummary, manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text), a label only in front of the first line of each."""
    if summary.seconds:
        stages = ", ".join(
            f"{stage} {seconds_text(took)}" for stage, took in summary.seconds.items()
        )
        yield "time", f"{seconds_text(sum(summary.seconds.values()))}: {stages}"
    for number, (reason, entry) in enumerate(summary.rejected.items()):
        words = REASONS.get(reason, reason)
        yield (
            "" if number else "rejected",
            f"{entry.number:,} {reason}: {words}; first: {visible(entry.first)}",
        )
    if summary.rejected:
        yield "", f"all of them: {join(summary.out, REJECTED_NAME)}"
    shards = manifest["shards"]
    size = size_text(sum(shard["size"] for shard in shards))
    yield (
        "shards",
        f"{len(shards):,} in {join(summary.out, 'shards')} ({manifest['format']}), {size}",
    )
    yield "report", join(summary.out, REPORT_NAME)
    yield "look", f"packer inspect {summary.out}"
    yield "check", f"packer verify {summary.out}"


def _tokenizer_notes(summary: BuildSummary) -> Iterator[str]:
    for token, (declared, used) in summary.id_conflicts.items():
        yield (
            f"the tokenizer's config gives {token} the id {declared}, its tokenizer.json makes it {used};"
            " if your model was trained with the former, save the tokenizer anew from its own class first"
        )
    if summary.added_tokens:
        added = ", ".join(f"{token} = {number}" for token, number in summary.added_tokens.items())
        yield f"tokens added to the tokenizer (resize the model's embedding): {added}"


def seconds_text(seconds: float) -> str:
    """Time as people read it.

    >>> seconds_text(0.34), seconds_text(75), seconds_text(7325)
    ('0.3 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
