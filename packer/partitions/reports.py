"""How far partitions are: told by who packs them, added up by who leads.

A report replaces the one before it, so one that is lost, or comes twice, changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from isobatch.packer.format_text import counted
from isobatch.packer.progress import RunningStage

TELL_S = 1.0
"""Time between two reports of a partition, at least."""
LOOK_S = 120.0
"""Time between two looks at what other jobs have done: of a store, a request each 1,000 files."""


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """How far a partition is."""

    place: int
    """Number of the partition."""
    part: float
    """Of its work that is done: 1 when all is, and its results are brought."""
    samples: int
    """Of those it has, as many as the work that is done."""
    node: str = ""
    """Machine of a cluster that packs it."""


Tell = Callable[[PartitionReport], None]


@dataclass(slots=True)
class Reporter:
    """Tells how far a partition is, whenever a stage of it gets on."""

    place: int
    tell: Tell
    counting: float
    """Part of its work that counting is; what an earlier run has counted takes none."""
    _counted: int = 0
    _told: float = 0.0

    def __call__(self, stage: RunningStage) -> None:
        """`stage`: the one that runs."""
        task = stage.task
        done = task.completed / task.total if task.total else 0.0
        if task.description == "count":
            part, samples = self.counting * done, self.counting * stage.done
        elif task.description == "write":
            writing = 1 - self.counting
            part = self.counting + writing * done
            samples = self.counting * self._counted + writing * stage.done
        else:  # grouping takes next to nothing
            self._counted = stage.done
            return
        now = monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            self.tell(PartitionReport(self.place, min(part, 1.0), int(samples)))


@dataclass(slots=True)
class Tally:
    """What the reports of all partitions come to, shown by a stage."""

    stage: RunningStage
    number: int
    """Partitions in all."""
    before: int = 0
    """Of them done by earlier runs."""
    look: Callable[[], str] | None = None
    """Text of what all jobs have done, for a line every LOOK_S."""
    _latest: dict[int, PartitionReport] = field(default_factory=dict)
    _looked: float = field(default_factory=monotonic)

    def hear(self, report: PartitionReport) -> None:
        """Take a report and show all; one that comes after the end of its partition is late."""
        known = self._latest.get(report.place)
        if known is None or known.part < 1 or report.part == 1:
            self._latest[report.place] = report
        reports = self._latest.values()
        done = self.before + sum(each.part == 1 for each in reports)
        nodes = {each.node for each in reports if each.part < 1 and each.node}
        note = f"{done:,} of {self.number:,} partitions, "
        if nodes:
            note += f"{counted(len(nodes), 'nodes')}, "
        work = self.before + sum(each.part for each in reports)
        self.stage.show(sum(each.samples for each in reports), work, note)
        if self.look is not None and monotonic() - self._looked >= LOOK_S:
            self._looked = monotonic()
            self.stage.bar.console.print(f"all jobs: {self.look()}", highlight=False)
