"""Totals of a build, rejected samples by reason, and when they are too many."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from isobatch.common.errors import DataError
from isobatch.common.types import Limits
from isobatch.counting.records.fields import NeverRead
from isobatch.counting.records.reject_reasons import BY_CHOICE, where_missing
from isobatch.packer.table_queries import as_frame, count_reasons


@dataclass(frozen=True, slots=True)
class Rejection:
    """The samples that were rejected for one reason."""

    number: int
    first: str
    """Id of the first of them, and the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSummary:
    """What a build did."""

    out: str
    already_complete: bool
    totals: dict[str, int]
    rejected: dict[str, Rejection]
    limits: Limits
    added_tokens: dict[str, int]
    id_conflicts: dict[str, tuple[int, int]]
    """Token -> (id that the tokenizer's config declares, id that it has)."""
    never_read: dict[str, NeverRead]
    """Source -> keys of its records that nothing reads."""
    seconds: dict[str, float]


def count_rejected(tables: Iterable[pa.Table]) -> dict[str, Rejection]:
    """Reason -> rejected samples of all tables, most frequent first; one table is read at a time.

    They are those of one `rejected.parquet`, in order.
    """
    reasons: dict[str, Rejection] = {}
    for table in filter(len, tables):  # polars is loaded only if there are any
        rows = count_reasons(as_frame(table)).collect().iter_rows()
        for name, number, first, detail in rows:
            before = reasons.setdefault(name, Rejection(0, f"{first}: {detail}"))
            reasons[name] = replace(before, number=before.number + number)
    return dict(sorted(reasons.items(), key=lambda reason: -reason[1].number))


def require_few(
    rejected: Mapping[str, Rejection],
    num_read: int,
    max_rejected: float,
    path: Path,
    again: str = "--overwrite",
) -> None:
    """Raise DataError if more of the records than the share `max_rejected` cannot be used.

    `path`: where all of them are; `again`: option with which repaired data is packed.
    """
    reasons = {name: entry for name, entry in rejected.items() if name not in BY_CHOICE}
    number = sum(entry.number for entry in reasons.values())
    if number > max_rejected * num_read:
        raise DataError(
            f"{number:,} of {num_read:,} samples ({number / num_read:.1%}) cannot be used,"
            f" more than --max-rejected {max_rejected:g} allows: {_listed(reasons)}. All of them"
            f" are in {path}: repair the data and add {again}, or raise --max-rejected"
        )


def nothing_to_pack(rejected: Mapping[str, Rejection]) -> DataError:
    """The error of a build without a single usable sample."""
    return DataError(
        f"nothing to pack: all {sum(of.number for of in rejected.values())} samples were rejected"
        f" ({_listed(rejected)}); repair the data or change the settings, and"
        " add --overwrite"
    )


def _listed(reasons: Mapping[str, Rejection]) -> str:
    entries = (f"{entry.number:,} {name}, first {entry.first}" for name, entry in reasons.items())
    return "; ".join(entries) + where_missing(reasons, "--data-root")
