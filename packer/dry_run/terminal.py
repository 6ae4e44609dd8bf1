"""A dry run's figures as text for a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from isobatch.common.consoles import foreign
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.packer.config import BuildConfig
from isobatch.packer.dry_run.estimate import Estimate
from isobatch.packer.format_text import counted, seconds_text, share_text, size_text

LABEL_WIDTH = 10


def print_estimate(estimate: Estimate, config: BuildConfig, console: Console) -> None:
    """Print what was measured, what is predicted, and how sure that is."""

    def line(label: str, text: str) -> None:
        console.print(
            f"[bold]{label:<{LABEL_WIDTH}}[/]{foreign(text)}", highlight=False, soft_wrap=True
        )

    def sure(name: str) -> str:
        interval = estimate.intervals.get(name)
        return f" (± {share_text(interval)})" if interval else ""

    drawn, read = estimate.num_drawn, estimate.num_read
    share = f"{share_text(drawn / max(read, 1))} of {'' if drawn == read else 'about '}{read:,}"
    line("drawn", f"{counted(drawn, 'samples')}, {share}, in {estimate.num_batches:,} batches")
    repeated = f" + {estimate.num_repeated:,} repeated" if estimate.num_repeated else ""
    packed = f"{estimate.num_packed:,} packed{sure('num_packed')}"
    rejected = f"{estimate.num_rejected:,} rejected"
    line("samples", f"{read:,} read{repeated} = {packed} + {rejected}")
    for number, (reason, count) in enumerate(estimate.rejected.items()):
        of = share_text(count / max(read, 1))
        words = REASONS.get(reason, reason)
        line("" if number else "rejected", f"{of} ({count:,}) {reason}: {words}")
    limits = estimate.limits
    caps = (
        f"of at most {counted(limits.max_seq_len, 'tokens')} and"
        f" {counted(limits.max_vision, limits.unit)}, {estimate.fill:.1%} full"
    )
    line("groups", f"{counted(estimate.num_groups, 'groups')}{sure('num_groups')} {caps}")
    size = f"{size_text(estimate.num_bytes)}{sure('num_bytes')} ({config.format})"
    line("bytes", f"{size}; {counted(estimate.num_partitions, 'partitions')}")
    stages = ", ".join(f"{name} {seconds_text(of)}" for name, of in estimate.stages.items())
    line("one core", f"{stages}; to start {seconds_text(estimate.startup_seconds)}")
    line("CPU time", seconds_text(estimate.cpu_seconds))
    console.print()
    with_cost = estimate.workers[0].cost is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("workers", "time", "core hours", *["cost"] * with_cost):
        table.add_column(heading, justify="right")
    for row in estimate.workers:
        cells = [f"{row.workers:,}", seconds_text(row.seconds), f"{row.core_hours:,.3g}"]
        table.add_row(*cells, *[f"{row.cost or 0:,.2f}"] * with_cost)
    console.print(table)
    console.print(
        "[dim]Measured: the drawn samples, on this machine, as busy as it was. All else is in"
        " proportion: ± is where the whole is in 95 of 100 draws, and each worker is assumed to"
        " have a core as fast as these were, and a store that is fast enough for all.[/]"
    )
    for note in estimate.notes:
        console.print(f"[yellow]note:[/] {foreign(note)}", highlight=False)
