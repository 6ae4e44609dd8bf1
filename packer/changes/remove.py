"""`packer remove`: samples leave a build, and every file of it that had them.

Groups that lose samples are packed again from what is left of them. Their shards are written again
without these groups, and the old ones deleted. Other shards stay as they are.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import COUNT_COLUMNS, Groups, IntArray
from isobatch.packer.changes.rewrite_shards import RewriteTask, StoredPart, rewrite_shard
from isobatch.packer.changes.sample_names import SampleNames
from isobatch.packer.changes.target import Target, changed_values, new_tables, next_partition
from isobatch.packer.count.process_pool import map_ordered
from isobatch.packer.group import group_within
from isobatch.packer.partitions.join import BuildPart
from isobatch.packer.partitions.partition import MOST_GROUPS, shard_entry
from isobatch.packer.progress import StageProgress
from isobatch.packer.write.write_shards import index_part, sample_bytes, shard_name
from isobatch.shards.index import IDS_NAME, INDEX_NAME, IndexFigures, open_index, read_rows
from isobatch.shards.manifest import (
    FolderFiles,
    Manifest,
    hash_json,
    read_manifest,
    tables_on_disk,
)
from isobatch.shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    read_groups,
    read_table,
    write_table,
)

MOST_WINDOW = 1 << 30
"""Bytes of samples at most that one process holds: offsets of Arrow's binaries are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What `packer remove` did."""

    num_samples: int
    """Samples that were packed, copies included."""
    num_rejected: int
    """Rejected samples whose rows are gone."""
    num_unknown: int
    """Ids and sources that are of no sample."""
    sources: list[str]
    """Sources that the build had."""
    num_groups: int
    """Groups that were packed again, or are gone."""
    num_shards: int
    """Shards that were written again, or are gone."""
    manifest: Manifest


def remove_samples(
    place: str,
    names: SampleNames,
    progress: StageProgress,
    *,
    workers: int,
    discard: bool = False,
    work_dir: str | None = None,
) -> Removal:
    """Take samples out of the build at a folder or URI.

    Run again, it goes on where it was stopped. ConfigError for a build for Energon, DataError if no
    sample would be left. Tables of the build are read whole.
    """
    if read_manifest(place).format == "energon":
        raise ConfigError(
            f"{place} is a build for Energon, whose files name its shards: pack it again from raw"
            " data without these samples"
        )
    target = Target(place, work_dir=work_dir)
    with target.locked():
        base = read_manifest(place)
        key = hash_json([sorted(names.ids), sorted(names.sources)])[:24]
        target.claim(base, {"change": "remove", "key": key}, discard=discard)
        change = _Change(base, names, target)
        if not (change.is_gone.any() or change.is_gone_rejected.any()):
            target.clean(base)  # what a killed run may have left
            return change.removal(base)
        if change.is_gone.all():
            raise DataError(f"{place}: no sample would be left; delete the whole build instead")
        with progress.stage("write", len(change.plan), unit="groups") as stage:
            at_once = min(workers, len(change.plan))
            for num_groups in map_ordered(rewrite_shard, change.tasks(), workers=at_once):
                stage.advance(1)
                stage.count(num_groups)
        with progress.stage("finish", None, unit="shards") as stage:
            manifest = target.finish(change.finish())
            stage.count(len(manifest.shards))
    return change.removal(manifest)


class _Change:
    """A build, and what it becomes without some samples."""

    def __init__(self, base: Manifest, names: SampleNames, target: Target) -> None:
        self._base, self._names, self._target = base, names, target
        tables = (COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)
        with tables_on_disk(base, [*tables, INDEX_NAME, IDS_NAME]) as folder:
            self._counts, groups, self._rejected = (read_table(folder / name) for name in tables)
            index = open_index(base, FolderFiles(base, folder))
            rows = list(index.rows(base.limits.pad_each_to))
        self._index = pa.concat_tables(rows).combine_chunks()
        self._groups = read_groups(groups)
        self.is_gone = names.among(self._counts)
        self.is_gone_rejected = names.among(self._rejected)
        self._is_torn = self._groups.sum(self.is_gone.astype(np.int64)) > 0
        """Whether each group loses samples."""
        shards = self._index.column("shard").to_numpy()  # ascending
        self._torn_shards = np.unique(shards[self._is_torn])
        self._borders = np.searchsorted(shards, np.arange(len(base.shards) + 1)).tolist()
        """Where the groups of each shard begin in the index, and where the last one's end."""
        self.plan = list(self._plan())

    def removal(self, manifest: Manifest) -> Removal:
        """What is said of it."""
        return Removal(
            num_samples=self._base.num_packed - manifest.num_packed,
            num_rejected=int(np.count_nonzero(self.is_gone_rejected)),
            num_unknown=self._names.unknown([self._counts, self._rejected]),
            sources=sorted(pc.unique(self._counts.column("source")).to_pylist()),
            num_groups=int(np.count_nonzero(self._is_torn)),
            num_shards=len(self._torn_shards),
            manifest=manifest,
        )

    # --- shards ---

    def _plan(self) -> Iterator[tuple[Groups, int | None]]:
        """Groups of each shard to write, and the torn shard that it replaces; those come first."""
        stays = ~self._is_torn
        for shard in self._torn_shards.tolist():
            first, last = self._borders[shard : shard + 2]
            rows = first + np.flatnonzero(stays[first:last])
            if len(rows):
                yield self._groups.take(rows), shard
        for window in self._windows():
            if len(groups := self._packed_again(window)):
                yield groups, None

    def tasks(self) -> Iterator[RewriteTask]:
        """The shards to write."""
        group_of, place_of = self._owners()
        first = 0
        for number, (groups, shard) in enumerate(self.plan):
            owners, places = group_of[groups.samples], place_of[groups.samples].tolist()
            if shard is None:
                stored = self._stored(owners)
                parts = [StoredPart(*of, place) for of, place in zip(stored, places, strict=True)]
                borders = pairwise(groups.offsets.tolist())
                contents = [tuple(parts[start:stop]) for start, stop in borders]
            else:
                contents = [(StoredPart(*of),) for of in self._stored(owners[groups.offsets[:-1]])]
            yield self._task(number, first, groups, contents)
            first += len(groups)

    def _task(
        self, number: int, first: int, groups: Groups, parts: list[tuple[StoredPart, ...]]
    ) -> RewriteTask:
        base, partition = self._base, next_partition(self._base)
        chosen = self._counts.take(pa.array(groups.samples))
        work = self._target.folder.absolute()
        (work / "staging" / "index").mkdir(parents=True, exist_ok=True)
        return RewriteTask(
            place=self._target.place,
            work=str(work),
            format=base.format,
            has_videos=base.has_videos,
            extras=dict(base.extras),
            pad_each_to=base.limits.pad_each_to,
            number=number,
            name=shard_name(number, base.format, partition),
            first_group=partition * MOST_GROUPS + first,
            groups=tuple(parts),
            group_offsets=groups.offsets,
            sample_ids=chosen.column("sample_id").to_pylist(),
            counts={name: chosen.column(name).to_numpy() for name in COUNT_COLUMNS},
        )

    def _stored(self, groups: IntArray) -> Iterator[tuple[str, int, int, int]]:
        """Shard, offset, length and checksum of stored groups."""
        rows = self._index.select(["shard", "offset", "length", "checksum"]).take(pa.array(groups))
        shards = self._base.shards
        for shard, *rest in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            yield shards[shard].name, *rest

    def _owners(self) -> tuple[IntArray, IntArray]:
        """Group of each sample, and its place there; -1 for one in no group. (samples,) each."""
        groups = self._groups
        group_of, place_of = np.full((2, len(self._counts)), -1)
        group_of[groups.samples] = np.repeat(np.arange(len(groups)), groups.sizes)
        place_of[groups.samples] = np.arange(len(groups.samples)) - np.repeat(
            groups.offsets[:-1], groups.sizes
        )
        return group_of, place_of

    def _windows(self) -> Iterator[IntArray]:
        """What is left of torn groups, about a shard's bytes at a time; rows of the counts.

        So each torn group is read once, for one new shard.
        """
        torn = self._groups.take(np.flatnonzero(self._is_torn))
        with_media = self._base.format != "refs"
        num_bytes = sample_bytes(self._counts, with_media=with_media) * ~self.is_gone
        sizes = torn.sum(num_bytes)
        most = min(int(self._config["shard_mb"]) << 20, MOST_WINDOW)
        window_of = (np.cumsum(sizes) - sizes) // most
        firsts = np.flatnonzero(np.diff(window_of, prepend=-1)).tolist()
        for first, last in pairwise([*firsts, len(torn)]):
            samples = torn.take(np.arange(first, last)).samples
            yield np.sort(samples[~self.is_gone[samples]])

    def _packed_again(self, rows: IntArray) -> Groups:
        """Groups of some rows of the counts, within the build's caps."""
        limits, config = self._base.limits, self._config
        options = GroupOptions(
            seed=config["seed"],
            max_seq_len=limits.max_seq_len,
            max_vision=limits.max_vision,
            grouping=config["grouping"],
            isf_iterations=config["isf_iterations"],
            pad_each_to=limits.pad_each_to,
        )
        if not len(rows):
            return Groups(rows, np.zeros(1, np.int64))
        counts = counts_arrays(self._counts.take(pa.array(rows)))
        grouping = group_within(counts, limits, options, [])
        if grouping.over:
            raise DataError(f"{self._base.place}: samples are above its caps; run `packer verify`")
        return Groups(rows[grouping.groups.samples], grouping.groups.offsets)

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._base.values["config"]
        return config

    # --- tables and manifest ---

    def finish(self) -> dict[str, Any]:
        """Write the new tables; -> the new manifest."""
        base, tables = self._base, new_tables(self._base)
        work = self._target.folder
        parts = [index_part(work, number) for number in range(len(self.plan))]
        entries = [shard_entry(part) for part in parts]
        replaced = {shard: task for task, (_, shard) in enumerate(self.plan) if shard is not None}
        # of each new shard: its entry and its rows of the index
        shards: list[tuple[dict[str, Any], list[pa.Table]]] = []
        torn = set(self._torn_shards.tolist())
        for shard, (first, last) in enumerate(pairwise(self._borders)):
            if shard in replaced:
                task = replaced[shard]
                shards.append((entries[task], list(read_rows(parts[task]))))
            elif shard not in torn:
                shards.append(
                    (base.values["shards"][shard], [self._index.slice(first, last - first)])
                )
        for task in range(len(replaced), len(self.plan)):
            shards.append((entries[task], list(read_rows(parts[task]))))
        rows = [_numbered(table, number) for number, (_, of) in enumerate(shards) for table in of]
        figures = IndexFigures.of_none(self._index.schema)
        for table in rows:
            figures = figures.with_rows(table)
        counts, rejected = self._write_tables(work / "staging" / "tables")
        part = BuildPart(
            in_row_groups=False,
            open=lambda _: nullcontext(work / "staging" / "tables"),
            rows=lambda _: iter(rows),
            row_files=(),
            figures=figures,
            num_shards=len(shards),
        )
        files = self._target.write_tables([part], tables)
        totals = _totals(counts, rejected, figures)
        removed = base.values.get("removed", 0) + base.num_packed - totals["num_packed"]
        return changed_values(
            base,
            tables,
            totals=totals,
            shards=[entry for entry, _ in shards],
            files=files,
            num_partitions=next_partition(base) + 1,
            removed=removed,
            earlier=[],
            never_read=self._never_read(),
        )

    def _write_tables(self, folder: Path) -> tuple[pa.Table, pa.Table]:
        """Write counts, rejected samples and groups; -> the first two."""
        folder.mkdir(exist_ok=True)
        stays = ~self.is_gone
        counts = self._counts.filter(pa.array(stays))
        rejected = self._rejected.filter(pa.array(~self.is_gone_rejected))
        whole = self._groups.take(np.flatnonzero(~self._is_torn))
        again = [groups for groups, shard in self.plan if shard is None]
        joined = Groups.joined([whole, *again])
        new_row = np.cumsum(stays) - 1
        groups = Groups(new_row[joined.samples], joined.offsets)
        write_table(counts, folder / COUNTS_NAME)
        write_table(rejected, folder / REJECTED_NAME)
        write_table(groups_table(groups, counts_arrays(counts)), folder / GROUPS_NAME)
        return counts, rejected

    def _never_read(self) -> dict[str, Any]:
        """What was never read, without values of the samples' sources: they may be theirs."""
        gone = [self._counts.filter(pa.array(self.is_gone))]
        gone.append(self._rejected.filter(pa.array(self.is_gone_rejected)))
        sources = {name for table in gone for name in table.column("source").to_pylist()}
        known: dict[str, Any] = self._base.values.get("never_read", {})
        return {
            source: {
                path: [number, "" if source in sources else example]
                for path, (number, example) in paths.items()
            }
            for source, paths in known.items()
            if source not in self._names.sources
        }


def _numbered(table: pa.Table, shard: int) -> pa.Table:
    """Rows of the index of one shard, with its number."""
    place = table.schema.get_field_index("shard")
    numbers = pa.array(np.full(len(table), shard), table.schema.field(place).type)
    return table.replace_schema_metadata(None).set_column(place, "shard", numbers)


def _totals(counts: pa.Table, rejected: pa.Table, figures: IndexFigures) -> dict[str, int]:
    sums = dict(figures.sums)
    num_packed = sums.pop("num_samples")
    num_repeated = len(counts) - pc.count_distinct(counts.column("position")).as_py()
    return {
        "num_read": num_packed + len(rejected) - num_repeated,
        "num_packed": num_packed,
        "num_repeated": num_repeated,
        "num_rejected": len(rejected),
        "num_groups": figures.num_groups,
        **sums,
    }
