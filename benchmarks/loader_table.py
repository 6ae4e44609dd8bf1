"""What benchmarks/loader_speed.py has measured: the best figure of each loader in each column,
tables, verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tables import console, new_table


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every loader."""

    remote: bool
    heading: str
    unit: str = "samples/s"

    @property
    def more_is_better(self) -> bool:
        return self.unit == "samples/s"

    def text(self, value: float) -> str:
        """The value as it is printed."""
        return f"{value:,.2f}" if self.unit == "s" else f"{value:,.0f}"

    def __str__(self) -> str:
        return f"{'S3' if self.remote else 'local'}, {self.heading}"


@dataclass(frozen=True, slots=True)
class Work:
    """What a loader is to do, from where, and with how many workers; its rate is a column."""

    remote: bool
    decoded: bool
    workers: int

    @property
    def column(self) -> Column:
        return Column(self.remote, f"{'decoded' if self.decoded else 'raw'}, {self.workers}")


WORKS = [
    Work(remote, decoded, workers)
    for remote in (False, True)
    for decoded in (False, True)
    for workers in (0, 2)
]
FIRST_BATCH = {remote: Column(remote, "first, s", "s") for remote in (False, True)}
MEMORY = Column(False, "MB", "MB")
COLUMNS = [
    *(work.column for work in WORKS if not work.remote),
    *(FIRST_BATCH[False], MEMORY),
    *(work.column for work in WORKS if work.remote),
    FIRST_BATCH[True],
]


@dataclass(slots=True)
class Results:
    """The best of every figure, and what could not be measured."""

    values: dict[Column, dict[str, float]] = field(default_factory=dict)
    """Column -> row -> figure."""
    failed: dict[tuple[str, Column], str] = field(default_factory=dict)
    """(row, column) -> why."""

    def add(self, row: str, column: Column, value: float) -> None:
        """Keep the better of this and what was measured before."""
        found = self.values.setdefault(column, {})
        better = max if column.more_is_better else min
        found[row] = better(found.get(row, value), value)

    def get(self, row: str, column: Column) -> float | None:
        """The best figure; None if there is none."""
        return self.values.get(column, {}).get(row)


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a limit is wanted of us."""

    limit: str
    column: Column
    wanted: float


def print_tables(results: Results, rows: Iterable[str], ours: str, shares: Iterable[Share]) -> None:
    """One table per place, the limits and our share of them in the first; then what failed."""
    rows, shares = list(rows), list(shares)
    for remote, title in (
        (False, "from disk, samples/s"),
        (True, "from SeaweedFS on the same cores, samples/s"),
    ):
        columns = [column for column in COLUMNS if column.remote == remote]
        if not any(results.values.get(column) for column in columns):
            continue
        table = new_table(title, ["", *(column.heading for column in columns)])
        limits = [] if remote else list(dict.fromkeys(share.limit for share in shares))
        for row in [*limits, *rows]:
            values = [results.get(row, column) for column in columns]
            table.add_row(
                row, *(_text(column, value) for column, value in zip(columns, values, strict=True))
            )
        if not remote:
            of_limit = {share.column: _share(results, ours, share) for share in shares}
            given = [of_limit.get(column) for column in columns]
            table.add_row(
                f"{ours}, of the limit",
                *("" if value is None else f"{value:.2f}" for value in given),
            )
        console.print(table)
    for (row, column), reason in results.failed.items():
        console.print(f"{row}, {column}: {reason}", highlight=False, markup=False)


def verdict(
    results: Results, peers: Iterable[str], ours: str, shares: Iterable[Share]
) -> list[str]:
    """Where we are behind a peer or below what is wanted, and what could not be compared; a line
    each.
    """
    lines = [f"not measured: {row}, {column}" for row, column in results.failed]
    for column, values in results.values.items():
        if ours not in values:
            continue
        for peer in peers:
            if peer in values and not _ahead(column, values[ours], values[peer]):
                compared = (
                    f"{column.text(values[ours])} to {column.text(values[peer])} {column.unit}"
                )
                lines.append(f"behind {peer}: {column}: {compared}")
    for share in shares:
        found = _share(results, ours, share)
        if found is not None and found < share.wanted:
            lines.append(
                f"below the limit's share: {share.column}: {found:.2f}, wanted {share.wanted}"
            )
    return lines


def _ahead(column: Column, ours: float, peer: float) -> bool:
    return ours > peer if column.more_is_better else ours < peer


def _share(results: Results, ours: str, share: Share) -> float | None:
    value, limit = results.get(ours, share.column), results.get(share.limit, share.column)
    return None if value is None or limit is None else value / limit


def _text(column: Column, value: float | None) -> str:
    return "-" if value is None else column.text(value)
