"""Progress of long work on the terminal: what is done, how fast, how long it will still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@dataclass(slots=True)
class Stage:
    """One stage under way."""

    bar: Progress
    task: TaskID
    started: float = field(default_factory=perf_counter)
    done: int = 0
    unit: str = "samples"

    def advance(self, work: float) -> None:
        """So much of the stage's total is done."""
        self.bar.advance(self.task, work)

    def count(self, items: int) -> None:
        """So many more items of the unit are done, for the rate."""
        self.done += items
        rate = self.done / max(perf_counter() - self.started, 1e-9)
        self.bar.update(self.task, detail=f"{self.done:,} {self.unit}, {rate:,.0f}/s")


@dataclass(slots=True)
class StageProgress:
    """Shows stages one after the other and remembers how long each took."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str = "samples") -> Iterator[Stage]:
        """A stage of so much work (None: unknown); leaves one line behind when it is done."""
        columns = (
            TextColumn("{task.description:<7}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
        )
        # in a log file a bar is noise: there the line at the end must do
        disabled = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=disabled) as bar:
            stage = Stage(bar, bar.add_task(name, total=total, detail=""), unit=unit)
            yield stage
        took = perf_counter() - stage.started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        rate = f", {stage.done / max(took, 1e-9):,.0f}/s" if stage.done else ""
        self.console.print(
            f"[bold]{name:<7}[/] {stage.done:>9,} {stage.unit} in {took:,.1f} s{rate}",
            highlight=False,
        )
