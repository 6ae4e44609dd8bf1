"""What a build did, for the last lines that a person reads: totals, and the rejected samples by
reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from balance.errors import DataError
from balance.types import Limits
from packer.records.record import BY_CHOICE


@dataclass(frozen=True, slots=True)
class Rejection:
    """The samples that were rejected for one reason."""

    number: int
    first: str
    """Id of the first of them, and the particulars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSummary:
    """What a build did."""

    out: str
    """Folder or URI."""
    already_complete: bool
    totals: dict[str, int]
    rejected: dict[str, Rejection]
    """Reason -> how many samples and the first of them."""
    limits: Limits
    added_tokens: dict[str, int]
    id_conflicts: dict[str, tuple[int, int]]
    """Token -> (id that the tokenizer's config declares, id that it has)."""
    seconds: dict[str, float]
    """Stage -> time."""


def summarise_rejected(rejected: pa.Table) -> dict[str, Rejection]:
    """Reason -> rejected samples, most frequent first."""
    reasons = rejected.column("reason").to_pylist()
    summary = {}
    for reason, number in Counter(reasons).most_common():
        first = rejected.slice(reasons.index(reason), 1).to_pylist()[0]
        summary[reason] = Rejection(number, f"{first['sample_id']}: {first['detail']}")
    return summary


def require_few(rejected: pa.Table, num_read: int, max_rejected: float, path: Path) -> None:
    """Raise DataError if more of the records than the share `max_rejected` cannot be used."""
    reasons = {
        name: entry for name, entry in summarise_rejected(rejected).items() if name not in BY_CHOICE
    }
    number = sum(entry.number for entry in reasons.values())
    if number > max_rejected * num_read:
        listed = "; ".join(
            f"{entry.number:,} {name}, first {entry.first}" for name, entry in reasons.items()
        )
        raise DataError(
            f"{number:,} of {num_read:,} samples ({number / num_read:.1%}) cannot be used, more than --max-rejected"
            f" {max_rejected:g} allows: {listed}. All of them are in {path}: repair the data and"
            " add --overwrite, or raise --max-rejected"
        )


def nothing_to_pack(rejected: pa.Table) -> DataError:
    """The error of a build without a single usable sample."""
    reasons = [
        f"{r.number} {reason}, first {r.first}"
        for reason, r in summarise_rejected(rejected).items()
    ]
    return DataError(
        f"nothing to pack: all {len(rejected)} samples were rejected ({'; '.join(reasons)}); repair the"
        " data or change the settings, and add --overwrite"
    )
