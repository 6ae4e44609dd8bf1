"""Records of a dataset that is named by its place, by the packer's sources."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.counting.columns import named_columns
from isobatch.counting.record_counter import BrokenRecord
from isobatch.counting.records.record import RawRecord
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.online._packer import RecordTable, find_records
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.per_rank.streams import (
    ShuffledPart,
    StreamRecords,
    as_stream,
    is_stream,
)
from isobatch.loaders.online.records import Records, Transform

FIRST_RECORDS, CHECKED_TOGETHER = 1024, 16
"""Records in which a column must be, and how many are looked at together."""


class PlaceRecords(Records):
    """The records that the packer's sources find, with their places."""

    places: RecordTable

    def __init__(self, places: RecordTable, transform: Transform | None) -> None:
        self.places, self._transform = places, transform

    def __len__(self) -> int:
        return len(self.places)

    def take(self, indices: IntArray) -> list[Any]:
        """`RawRecord`s by index, damaged ones too."""
        return self.take_rows(self.places.rows[indices])

    def take_rows(self, rows: IntArray) -> list[Any]:
        """The same, by their places among all records that were read."""
        return [self._record(row) for row in rows.tolist()]

    def fingerprint(self) -> str:
        """Changes when the files, the copies of records or some that `transform` gives do."""
        copies = hashlib.sha256(self.places.rows.tobytes()).hexdigest()
        return f"{self.places.identity} {copies} {super().fingerprint()}"

    def _record(self, row: int) -> RawRecord:
        record = self.places.record(row)
        if self._transform is None or record.broken:
            return record
        value = self._transformed(record.value)
        if isinstance(value, BrokenRecord):
            return replace(record, value=None, broken=value.why, reason="unreadable_record")
        return replace(record, value=value)


def open_records(
    dataset: Any, packing: PackingConfig, config: LoaderConfig, *, shows: bool
) -> Records:
    """The records of a dataset in memory or at a place; `shows`: whether progress is printed."""
    as_files = packing.encode is None
    dataset = _of_rank(dataset, packing, config)
    if packing.measure == "own" and is_stream(dataset):
        return StreamRecords(dataset, packing.transform, as_files=as_files)
    if not isinstance(dataset, str | Path):
        return Records(dataset, packing.transform, as_files=as_files)
    if packing.encode is not None:
        raise ConfigError(f"dataset {dataset}: encode= is for records in memory; give a list")
    if not str(dataset).strip():
        raise ConfigError("dataset is empty; give a dataset, or the name or place of one")
    places = find_records(str(dataset), packing, config.seed, shows=shows)
    return PlaceRecords(places, packing.transform)


def _of_rank(dataset: Any, packing: PackingConfig, config: LoaderConfig) -> Any:
    """What a rank reads. ConfigError for ranks' own parts where all ranks need all records."""
    has_ranks = config.ranks()[1] > 1
    if packing.measure == "own":
        is_part = packing.is_sharded and has_ranks and not is_stream(dataset)
        return ShuffledPart(dataset, config.seed) if is_part else as_stream(dataset)
    if packing.is_sharded is not None:
        raise ConfigError("is_sharded is for measure='own', where each rank packs its own items")
    if isinstance(dataset, IterableDataset) and has_ranks:
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}, which is iterated, and may have a part of its "
            "own on each rank; give measure='own'"
        )
    return dataset


def require_columns(records: Records, packing: PackingConfig, *, tells: bool) -> None:
    """ConfigError if no record in memory, of the first ones, has a column that is renamed.

    A warning for one to keep, if this process `tells`: later records may have it. Of a stream
    nobody knows before it is read.
    """
    columns = packing.columns or {}
    named = named_columns(columns.items()) if records.places is None else None
    theirs = named.theirs if named else set[str]()
    missing = theirs | set(packing.keep_columns) - {*columns, *columns.values()}
    keys = set[str]()
    if not missing or isinstance(records, StreamRecords):
        return
    for start in range(0, min(len(records), FIRST_RECORDS), CHECKED_TOGETHER):
        rows = np.arange(start, min(start + CHECKED_TOGETHER, len(records)))
        for record in records.take(rows):
            value = getattr(record, "value", record)  # of a `RawRecord` its content
            keys |= {str(key) for key in value} if isinstance(value, Mapping) else set()
        if not (missing := missing - keys):
            return
    has = ", ".join(sorted(keys))[:300]
    if wrong := sorted(missing & theirs):
        raise ConfigError(f"columns: no {wrong[0]!r} in the first records: {has}")
    if tells:
        line = f"no {min(missing)!r} (keep_columns) in the first records, which have {has}"
        warnings.warn(line, stacklevel=2)
