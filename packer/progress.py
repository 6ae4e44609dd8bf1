"""Progress of long work: what is done, how fast, and the time left.

A bar on a terminal. In a log, where that would be noise, a line a minute and one at the end. In a
log for machines (`--log json`) events: `stage`, `progress` every second, `stage_end`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn

from isobatch.common.consoles import SafeConsole, foreign
from isobatch.packer.format_text import counted, seconds_text

LINE_S = 60.0
"""Time between lines in a log."""
EVENT_S = 1.0
"""Time between events of a stage in a log for machines."""
SPEED_S = 900.0
"""Time by whose speed the time left is told: of many partitions, which first count, then write."""


@dataclass(slots=True)
class RunningStage:
    """One stage of the work while it runs."""

    bar: Progress
    unit: str = "samples"
    on_change: "Callable[[RunningStage], None] | None" = None
    started: float = field(default_factory=perf_counter)
    said: float = field(default_factory=perf_counter)
    """When a line was written."""
    done: int = 0

    def advance(self, work: float) -> None:
        """Add to the finished part of the stage's total."""
        self.show(self.done, self.task.completed + work)

    def count(self, items: int) -> None:
        """Add finished items of the unit, for the rate."""
        self.show(self.done + items)

    def show(self, done: int, work: float | None = None, note: str = "") -> None:
        """All items that are done, and the finished part of the total; `note` goes first."""
        self.done = done
        now = perf_counter()
        rate = self.done / max(now - self.started, 1e-9)
        detail = f"{note}{self.done:,} {self.unit}, {rate:,.0f}/s" if done or note else ""
        self.bar.update(self.task.id, completed=work, detail=detail)
        if self.on_change is not None:
            self.on_change(self)
        every = EVENT_S if _is_log(self.bar.console) else LINE_S
        if self.bar.disable and now - self.said >= every:
            self.said = now
            left = self.task.time_remaining
            if _is_log(self.bar.console):
                self._progress(now, left)
                return
            ends = "" if left is None else f", {seconds_text(left)} left"
            line = f"{self.task.description:<7} {detail}{ends}"
            self.bar.console.print(line, highlight=False, markup=False)

    def _progress(self, now: float, left: float | None) -> None:
        """Write the event of how far the stage is."""
        _event(
            self.bar.console,
            "progress",
            stage=self.task.description,
            done=self.done,
            unit=self.unit,
            completed=self.task.completed,
            total=self.task.total,
            seconds=round(now - self.started, 3),
            seconds_left=left,
        )

    @property
    def task(self) -> Task:
        """What the bar knows of it."""
        return self.bar.tasks[0]


@dataclass(slots=True)
class StageProgress:
    """Shows stages one after the other and remembers how long each took."""

    console: Console = field(default_factory=partial(Console, quiet=True))
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """Of this process alone."""
    on_change: Callable[[RunningStage], None] | None = None
    """Called with the stage that runs, whenever it gets on."""

    def note(self, text: str) -> None:
        """Say something next to the progress."""
        self.console.print(foreign(text), highlight=False, soft_wrap=True)

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
        cpu_before = process_time()
        with Progress(
            *columns,
            console=self.console,
            transient=True,
            disable=_is_log(self.console) or not self.console.is_terminal,
            speed_estimate_period=SPEED_S,
        ) as bar:
            bar.add_task(name, total=total, detail="")
            stage = RunningStage(bar, unit, self.on_change)
            _event(self.console, "stage", stage=name, total=total, unit=unit)
            yield stage
        took = perf_counter() - stage.started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        cpu = process_time() - cpu_before
        self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + cpu
        rate = f", {stage.done / max(took, 1e-9):,.0f}/s" if stage.done else ""
        if _is_log(self.console):
            ended = {"stage": name, "done": stage.done, "unit": unit, "seconds": round(took, 3)}
            _event(self.console, "stage_end", **ended)
            return
        done = f"{counted(stage.done, stage.unit):>17} in {took:,.1f} s{rate}"
        self.console.print(f"[bold]{name:<7}[/] {done}", highlight=False)


def _is_log(console: Console) -> bool:
    """Whether a console prints for machines."""
    return isinstance(console, SafeConsole) and console.is_log


def _event(console: Console, name: str, **values: Any) -> None:
    """Write an event to a log for machines."""
    if isinstance(console, SafeConsole):
        console.event(name, **values)
