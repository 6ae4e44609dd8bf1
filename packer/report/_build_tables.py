"""The tables of a build as the report needs them, checked against each other.

Reads a finished build (`manifest.json`) or the output of `packer group` (`limits.json`). The check
is the design's first guarantee: every sample is in exactly one group or rejected.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balance.config import build_config
from balance.errors import DataError
from balance.order.block_shuffle import OrderConfig, choose_order
from balance.types import COUNT_COLUMNS, Counts, Groups, IntArray, Limits
from packer.group_command import LIMITS_NAME
from packer.table_queries import count_reasons, query_table
from shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    read_groups,
    read_table,
    source_numbers,
)

TABLE_NAMES = (MANIFEST_NAME, COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)
"""What a report reads of a finished build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTables:
    """The tables of a build: groups hold row numbers of `counts`, in path order."""

    counts: Counts
    sources: IntArray
    """Number of each sample's source, from 0, shape (num_samples,)."""
    groups: Groups
    rejected: dict[str, int]
    """Reason -> samples, most frequent first."""
    num_repeated: int
    """Copies beyond the first of each sample in a mixture; packed or rejected like the others."""
    limits: Limits
    limits_explained: tuple[str, ...]
    """Lines on how the caps were chosen; none when the build does not say."""
    order: OrderConfig


def read_tables(out: Path) -> BuildTables:
    """The tables of a build. DataError when one is missing, unreadable or does not add up."""
    if not out.is_dir():
        raise DataError(
            f"{out} is not a folder; give the --out of `packer build` or `packer group`"
        )
    columns = ("position", "source", *COUNT_COLUMNS)
    counts = query_table(out / COUNTS_NAME, lambda table: table.select(columns))
    groups = read_groups(read_table(out / GROUPS_NAME))
    rejected = query_table(out / REJECTED_NAME, lambda table: table.select("position"))
    reasons = query_table(out / REJECTED_NAME, count_reasons)

    positions = counts["position"].to_numpy()
    _check_samples(out, groups, np.isin(positions, rejected["position"].to_numpy()))
    if (out / MANIFEST_NAME).exists():
        manifest = read_manifest(out)
        limits, order = manifest.limits, manifest.order
        explained = tuple(map(str, manifest.values.get("limits_explained", ())))
        found = {
            "num_packed": len(groups.samples),
            "num_rejected": len(rejected),
            "num_groups": len(groups),
        }
        _check_totals(manifest, found)
    else:
        limits, explained = _read_limits(out)
        order = choose_order(len(groups))

    table = counts.to_arrow()
    return BuildTables(
        counts=counts_arrays(table),
        sources=source_numbers(table),
        groups=groups,
        num_repeated=len(counts) - counts["position"].n_unique(),
        rejected=dict(zip(reasons["reason"], reasons["number"], strict=True)),
        limits=limits,
        limits_explained=explained,
        order=order,
    )


def _check_samples(out: Path, groups: Groups, is_rejected: NDArray[np.bool_]) -> None:
    """Every row of the counts is in exactly one group, or else rejected."""
    num_samples = len(is_rejected)
    if groups.samples.max(initial=-1) >= num_samples:
        raise DataError(
            f"{out / GROUPS_NAME} names samples that {COUNTS_NAME} does not have; build again"
        )
    uses = np.bincount(groups.samples, minlength=num_samples) + is_rejected
    wrong = np.flatnonzero(uses != 1)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{out}: {len(wrong)} samples are not in exactly one group or else rejected (first: "
            f"row {row} of {COUNTS_NAME}, {uses[row]} times); build again with --overwrite"
        )


def _check_totals(manifest: Manifest, found: dict[str, int]) -> None:
    said = {name: manifest.values["totals"][name] for name in found}
    if said != found:
        raise DataError(
            f"{manifest.place}: {MANIFEST_NAME} says {said}, but the tables hold {found}; "
            "build again with --overwrite"
        )


def _read_limits(out: Path) -> tuple[Limits, tuple[str, ...]]:
    """The caps that `packer group` chose, and the lines that explain them."""
    path = out / LIMITS_NAME
    try:
        values = json.loads(path.read_text("utf-8"))
        explained = values.pop("limits_explained", [])
    except FileNotFoundError:
        raise DataError(
            f"{out} has neither {MANIFEST_NAME} nor {LIMITS_NAME}: the build is unfinished; run it "
            "to its end"
        ) from None
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: not a JSON object ({error}); run `packer group` again") from None
    return build_config(Limits, values, where=str(path)), tuple(map(str, explained))
