"""`packer add`: more data for a finished build, as partitions of their own.

What is there is not read again but for its tables, and no reader of it is disturbed.
"""

from dataclasses import dataclass, replace
from typing import Any

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.fields import join_never_read
from isobatch.models.presets import model_to_dict
from isobatch.packer.build import CUT_NAME, Builder
from isobatch.packer.build_dir import plain, totals_of
from isobatch.packer.changes.target import (
    Target,
    changed_meanwhile,
    changed_values,
    new_tables,
    next_partition,
    sum_totals,
)
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions.cut import cut_to_json
from isobatch.packer.partitions.decide import needs_counts
from isobatch.packer.partitions.join import build_as_part, packed_parts
from isobatch.packer.partitions.pack_all import PartitionRun
from isobatch.packer.partitions.partition import Decisions, PackedPartition
from isobatch.packer.partitions.results import Results
from isobatch.packer.partitions.run import alone_in
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import Rejection, count_rejected, require_few
from isobatch.packer.sources.dataset import Dataset
from isobatch.shards.folders import absolute
from isobatch.shards.manifest import Manifest, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What `packer add` did."""

    is_new: bool
    """False: the build has had this data before."""
    totals: dict[str, int]
    """Of the new data alone."""
    rejected: dict[str, Rejection]
    manifest: Manifest


def grown_config(manifest: Manifest, config: BuildConfig) -> BuildConfig:
    """The options of new data with those that the build has. ConfigError for an Energon build."""
    if manifest.format == "energon":
        raise ConfigError(
            f"{manifest.place} is a build for Energon, whose files name its shards: pack the new"
            " data as a build of its own, and `packer merge` both"
        )
    settings, limits = manifest.values["config"], manifest.limits
    return replace(
        config,
        out=manifest.place,
        format=manifest.format,
        shard_mb=settings["shard_mb"],
        seed=settings["seed"],
        grouping=settings["grouping"],
        isf_iterations=settings["isf_iterations"],
        max_seq_len=limits.max_seq_len,
        max_vision=limits.max_vision,
        pad_each_to=limits.pad_each_to,
        keep_columns=tuple(manifest.extras),
    )


class Adder:
    """Data to be added to a finished build."""

    def __init__(self, config: BuildConfig, progress: StageProgress | None = None) -> None:
        """`config` is of `grown_config`. ConfigError for another model or tokenizer."""
        self.config = config
        manifest = read_manifest(config.out)
        self._builder = Builder(config, progress)
        self._target = Target(config.out, work_dir=config.work_dir)
        tokenizer = manifest.values["tokenizer"]
        if plain(model_to_dict(self._builder.model)) != manifest.values["model"]:
            name = manifest.model.name
            raise ConfigError(f"{config.out} was made for {name} with other settings: give --model")
        if self._builder.tokenizer.hash != tokenizer["hash"]:
            raise ConfigError(
                f"{config.out} was made with another tokenizer or chat template: give --tokenizer"
                " and --chat-template as for `packer build`"
            )

    def add(self, *, discard: bool = False) -> Addition | None:
        """Pack the data and grow the build; None if other shares of the partitions are missing.

        `discard`: give up a change that somebody began and did not finish.
        """
        config, builder = self.config, self._builder
        with builder.dataset() as dataset:
            base = read_manifest(config.out)  # now that nobody changes it
            entry = self._entry(base, dataset)
            first = {name: base.values[name] for name in entry}
            if _data(entry) in map(_data, [first, *base.values.get("added", [])]):
                return self._had(base)
            key = builder.identity.key(dataset, base.hash)
            results = Results(builder.place, key)
            target = self._target
            target.shared = key if config.share else None
            target.claim(base, {"change": "add", "key": key}, discard=discard)
            builder.note_surprises(dataset)
            cut = builder.cut(dataset, results)
            results.save_text(CUT_NAME, cut_to_json(cut))
            run = builder.run_of(dataset, cut, results, next_partition(base))
            try:
                others = run.pack(_decisions(base), count_first=needs_counts(config, dataset))
                if others:
                    builder.progress.note(others)
                    return None
                with alone_in(target.staging):
                    if (now := read_manifest(config.out)).hash == base.hash:
                        return self._join(base, run, entry)
            except (OSError, DataError):
                now = read_manifest(config.out)
                # a share on another machine may have completed it, and removed what it is made of
                if now.hash == base.hash:
                    raise
            if entry not in now.values.get("added", []):
                raise changed_meanwhile(config.out)
            return self._had(now)

    def _entry(self, base: Manifest, dataset: Dataset) -> dict[str, Any]:
        """What the manifest says of the new data. ConfigError if it cannot be part of the build."""
        root = absolute(dataset.parts[0].data_root)
        if base.format == "refs" and base.data_root != root:
            raise ConfigError(
                f"{base.place} refers to files under {base.data_root}, and the new data's are under"
                f" {root}: give --data-root, or pack a build of its own"
            )
        identity = self._builder.identity
        return {"config": plain(identity.settings(dataset)), "raw_files": identity.raw(dataset)}

    def _had(self, manifest: Manifest) -> Addition:
        """What is said of data that the build has; removes what a killed run may have left."""
        self._target.clean(manifest)
        zeros = dict.fromkeys(manifest.values["totals"], 0)
        return Addition(is_new=False, totals=zeros, rejected={}, manifest=manifest)

    def _join(self, base: Manifest, run: PartitionRun, entry: dict[str, Any]) -> Addition:
        packed = run.finish(_decisions(base))
        extras = next((of.extras for of in packed if of.extras), {})
        if extras != base.extras:
            raise DataError(
                f"the new data's kept columns are {dict(extras)}, the build's {dict(base.extras)}:"
                " make them alike, or pack a build of its own"
            )
        rejected = count_rejected(run.rejected())
        num_read = sum(of.num_read for of in packed)
        share, staged = self.config.max_rejected, self._target.staging / "partitions"
        require_few(rejected, num_read, share, staged, "--discard")
        totals = totals_of(packed)
        if not totals["num_packed"]:
            raise DataError(f"nothing to add: all {num_read:,} samples were rejected")
        with self._builder.progress.stage("finish", None, unit="shards") as stage:
            new = packed_parts(run.results, run.numbers, packed)
            tables = new_tables(base)
            files = self._target.write_tables([build_as_part(base), *new], tables)
            manifest = self._target.finish(_values(base, packed, tables, files, totals, entry))
            stage.count(sum(len(of.shards) for of in packed))
        return Addition(is_new=True, totals=totals, rejected=rejected, manifest=manifest)


def _data(entry: dict[str, Any]) -> list[Any]:
    """What says whether data is the same, of what the manifest says of it."""
    config = entry["config"]
    keys = ("parts", "num_samples", "limit", "map", "reading")
    return [entry["raw_files"], *(config.get(key) for key in keys)]


def _decisions(base: Manifest) -> Decisions:
    """What the build has decided for new data."""
    return Decisions(
        limits=base.limits,
        limits_explained=tuple(base.values["limits_explained"]),
        videos=base.has_videos,
        extras=None if base.extras else {},
    )


def _values(
    base: Manifest,
    packed: list[PackedPartition],
    tables: str,
    files: list[dict[str, Any]],
    totals: dict[str, int],
    entry: dict[str, Any],
) -> dict[str, Any]:
    values = base.values
    earlier = {
        "manifest_hash": base.hash,
        "num_groups": base.num_groups,
        "num_packed": base.num_packed,
        "tables": base.tables,
    }
    known = [values.get("never_read", {}), *(of.never_read for of in packed)]
    never_read = join_never_read(known)
    return changed_values(
        base,
        tables,
        totals=sum_totals([values["totals"], totals]),
        shards=[*values["shards"], *(shard for of in packed for shard in of.shards)],
        files=files,
        num_partitions=next_partition(base) + len(packed),
        added=[*values.get("added", []), entry],
        earlier=[*values.get("earlier", []), earlier],
        **({"never_read": never_read} if never_read else {}),
    )
