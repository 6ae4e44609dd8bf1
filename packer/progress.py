"""Progress of long work on a terminal: what is done, how fast, and the time left."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, process_time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from isobatch.packer.format_text import counted


@dataclass(slots=True)
class RunningStage:
    """One stage of the work while it runs."""

    bar: Progress
    task: TaskID
    started: float = field(default_factory=perf_counter)
    done: int = 0
    unit: str = "samples"

    def advance(self, work: float) -> None:
        """Add to the finished part of the stage's total."""
        self.bar.advance(self.task, work)

    def count(self, items: int) -> None:
        """Add finished items of the unit, for the rate."""
        self.done += items
        rate = self.done / max(perf_counter() - self.started, 1e-9)
        self.bar.update(self.task, detail=f"{self.done:,} {self.unit}, {rate:,.0f}/s")


@dataclass(slots=True)
class StageProgress:
    """Shows stages one after the other and remembers how long each took."""

    console: Console = field(default_factory=partial(Console, quiet=True))
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """Of this process alone."""

    @contextmanager
    def stage(
        self, name: str, total: float | None, unit: str = "samples"
    ) -> Iterator[RunningStage]:
        """Run one stage with this total (None: unknown); prints one line when it is done."""
        columns = (
            TextColumn("{task.description:<7}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
        )
        # in a log file a bar is noise: the line at the end is enough there
        disabled = not self.console.is_terminal
        cpu_before = process_time()
        with Progress(*columns, console=self.console, transient=True, disable=disabled) as bar:
            stage = RunningStage(bar, bar.add_task(name, total=total, detail=""), unit=unit)
            yield stage
        took = perf_counter() - stage.started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        cpu = process_time() - cpu_before
        self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + cpu
        rate = f", {stage.done / max(took, 1e-9):,.0f}/s" if stage.done else ""
        done = f"{counted(stage.done, stage.unit):>17} in {took:,.1f} s{rate}"
        self.console.print(f"[bold]{name:<7}[/] {done}", highlight=False)
