"""`packer merge`: one build of several, whose shards are linked or copied.

On one file system shards are linked, in one bucket copied by the store. Nothing is packed again.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.fields import join_never_read
from isobatch.packer.build_dir import ELSEWHERE, write_energon_indexes
from isobatch.packer.changes.target import Target, sum_totals
from isobatch.packer.partitions.join import build_as_part
from isobatch.packer.progress import StageProgress
from isobatch.packer.write.energon_files import META_NAMES
from isobatch.packer.write.write_shards import shard_name
from isobatch.shards.folders import is_uri, join, open_folder, open_object_folder
from isobatch.shards.manifest import (
    BuildFile,
    Manifest,
    hash_json,
    is_complete,
    read_manifest,
)
from isobatch.shards.object_store import split_uri

COPIES_AT_ONCE = 8
_EQUAL = ("format", "model", "tokenizer", "limits", "extras", "has_videos", "data_root")
"""What builds that become one must have in common, by its key in the manifest."""
_ADVICE = "give both to one loader instead, which mixes builds"


def merge_builds(
    places: Sequence[str], out: str, progress: StageProgress, *, work_dir: str | None = None
) -> Manifest:
    """Make a build at `out` of those at `places`, in order; -> its manifest.

    ConfigError for builds that cannot be one, DataError if there is another one at `out`.
    """
    if len(places) < 2:
        raise ConfigError("packer merge needs two builds or more: packer merge A B --out C")
    bases = [read_manifest(place) for place in places]
    for base in bases[1:]:
        require_alike(bases[0], base)
    if len({base.hash for base in bases}) < len(bases):
        raise ConfigError("two of the builds are the same: each sample would be there twice")
    shards = [shard.checksum for base in bases for shard in base.shards]
    if len(set(shards)) < len(shards):
        raise ConfigError("two of the builds share shards: their samples would be there twice")
    target = Target(out, work_dir=work_dir)
    merged_of = [base.hash for base in bases]
    with target.locked():
        if is_complete(out):
            there = read_manifest(out)
            if there.values["config"].get("merged") == merged_of:
                target.clean(there)
                return there
            raise DataError(f"{out} is a finished build of other data or settings: {ELSEWHERE}")
        if target.publisher:
            target.publisher.claim()
        names = _bring_shards(bases, target, progress)
        parts = [build_as_part(base) for base in bases]
        with progress.stage("finish", None, unit="shards") as stage:
            values = _values(bases, names, merged_of) | {"files": target.write_tables(parts)}
            is_energon = bases[0].format == "energon"
            if is_energon:
                unit = bases[0].limits.vision_unit
                shards = [shard["name"] for shard in values["shards"]]
                (target.folder / "shards").mkdir(exist_ok=True)
                values["files"] += write_energon_indexes(target.folder, shards, unit)
            manifest = target.finish(values, META_NAMES if is_energon else ())
            stage.count(len(manifest.shards))
    return manifest


def require_alike(first: Manifest, other: Manifest) -> None:
    """ConfigError unless two builds can be one."""
    for key in _EQUAL:
        if first.values.get(key) != other.values.get(key):
            raise ConfigError(
                f"{other.place} was made with another {key.replace('_', ' ')} than {first.place}:"
                f" {_ADVICE}"
            )


def _bring_shards(
    bases: Sequence[Manifest], target: Target, progress: StageProgress
) -> list[list[str]]:
    """Link or copy all shards; -> their names in the new build, by build."""
    names = [
        [shard_name(shard, base.format, number) for shard in range(len(base.shards))]
        for number, base in enumerate(bases)
    ]
    jobs = [
        (base.place, shard, name)
        for base, new_names in zip(bases, names, strict=True)
        for shard, name in zip(base.shards, new_names, strict=True)
    ]
    if not is_uri(target.place):
        Path(target.place, "shards").mkdir(exist_ok=True)
    with (
        progress.stage("bring", len(jobs), unit="shards") as stage,
        ThreadPoolExecutor(COPIES_AT_ONCE) as pool,
    ):
        places, shards, new_names = zip(*jobs, strict=True)
        for _ in pool.map(_bring, places, shards, new_names, [target.place] * len(jobs)):
            stage.advance(1)
            stage.count(1)
    return names


def _bring(place: str, shard: BuildFile, name: str, out: str) -> None:
    """Bring a shard to `out`, unless it is there."""
    try:
        if open_folder(out, follow_links=True).info(name).size == shard.size:
            return
    except FileNotFoundError:
        pass
    if not is_uri(place) and not is_uri(out):
        _link(Path(place, shard.name), Path(out, name))
    elif is_uri(place) and is_uri(out) and split_uri(place)[0] == split_uri(out)[0]:
        open_object_folder(out).copy(join(place, shard.name), name)
    elif is_uri(out) and not is_uri(place):
        open_object_folder(out).put(name, Path(place, shard.name))
    else:
        with TemporaryDirectory(dir=None if is_uri(out) else out) as folder:
            copy = Path(folder, "shard")
            with open_folder(place).open(shard.name) as source, copy.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            if is_uri(out):
                open_object_folder(out).put(name, copy)
            else:
                copy.replace(Path(out, name))


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it where the file system cannot."""
    temporary = target.with_name(f"{target.name}-{os.urandom(4).hex()}.tmp")
    try:
        os.link(source.resolve(), temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def _values(
    bases: Sequence[Manifest], names: list[list[str]], merged_of: list[str]
) -> dict[str, Any]:
    """What the manifest says, but for the tables."""
    first = bases[0].values
    configs = [base.values["config"] for base in bases]
    config = configs[0] | {
        "dataset": " + ".join(str(config["dataset"]) for config in configs),
        "parts": [part for config in configs for part in config["parts"]],
        "num_samples": None,
        "merged": merged_of,
    }
    shards = [
        shard | {"name": name}
        for base, new_names in zip(bases, names, strict=True)
        for shard, name in zip(base.values["shards"], new_names, strict=True)
    ]
    never_read = join_never_read(base.values.get("never_read", {}) for base in bases)
    left_out = ("format_version", "content_hash", "tables", "generation", "never_read")
    sizes = {"num_groups": bases[0].num_groups, "num_packed": bases[0].num_packed}
    earlier = [*first.get("earlier", []), {"manifest_hash": bases[0].hash, **sizes, "tables": ""}]
    return {
        **{name: value for name, value in first.items() if name not in left_out},
        "config": config,
        "config_hash": hash_json([config, first["model"], first["tokenizer"]["hash"]]),
        "raw_files": [files for base in bases for files in base.values["raw_files"]],
        "added": [entry for base in bases for entry in base.values.get("added", [])],
        "num_partitions": len(bases),
        "earlier": earlier,
        "totals": sum_totals([base.values["totals"] for base in bases]),
        "shards": shards,
        **({"never_read": never_read} if never_read else {}),
    }
