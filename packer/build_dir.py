"""The output directory of a build: its owner, its files and its manifest."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from isobatch.common.errors import ConfigError, DataError
from isobatch.common.plain_values import write_text
from isobatch.counting.records.fields import join_never_read
from isobatch.counting.records.user_map import load_map
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.models.presets import ModelPreset, model_to_dict
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions.partition import PackedPartition
from isobatch.packer.sources.dataset import SHARE_KEYS, Dataset
from isobatch.packer.sources.detect import Part
from isobatch.packer.write.energon_files import META, write_energon_files
from isobatch.shards.folders import absolute, open_folder
from isobatch.shards.index import IDS_NAME, INDEX_NAME, find_batches
from isobatch.shards.manifest import (
    MANIFEST_NAME,
    TABLES,
    BuildFile,
    hash_json,
    is_complete,
    read_manifest,
)
from isobatch.shards.stored_group import EXTRAS
from isobatch.shards.tables import COUNTS_NAME, GROUPS_NAME, REJECTED_NAME

REPORT_NAME = "report.html"
DEMO_FOLDER = "source"
BUILDING_NAME = "building.json"
"""While a build into an object store is unfinished: whose it is."""

ELSEWHERE = "choose another --out, or add --overwrite"
TABLE_NAMES = (INDEX_NAME, IDS_NAME, COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)
"""Files that the manifest lists, in its order; the shards have their own list. Of a build for
Energon the indexes of its tars follow.
"""

_MOST_BRIEF = 60
"""Characters of a setting in an error."""
_FOLDERS = ("shards", TABLES, "staging", DEMO_FOLDER, META)
_MADE_BY_A_BUILD = frozenset((MANIFEST_NAME, *TABLE_NAMES, REPORT_NAME, BUILDING_NAME, *_FOLDERS))


class BuildIdentity:
    """What decides the bytes of a build: settings, model and tokenizer."""

    def __init__(self, config: BuildConfig, model: ModelPreset, tokenizer: ChatTokenizer) -> None:
        self.config = config
        self.model = plain(model_to_dict(model))
        self.tokenizer = tokenizer
        self.is_cut = False
        """Whether there are several partitions."""

    def settings(self, dataset: Dataset) -> dict[str, Any]:
        """The settings, without paths of this machine."""
        parts = [
            {"name": part.name, "layout": part.located.layout}
            | {key: getattr(part, key) for key in SHARE_KEYS}
            | part.located.identity()
            for part in dataset.parts
        ]
        keys = ("limit", "format", "shard_mb", "check_images")
        return {
            "dataset": dataset.name,
            "parts": parts,
            "num_samples": dataset.num_samples,
            **{key: getattr(self.config, key) for key in keys},
            **({"map": load_map(self.config.map).identity()} if self.config.map else {}),
            **({"reading": reading} if (reading := self.config.reading.identity()) else {}),
            **({"keep_columns": list(columns)} if (columns := self.config.kept_columns) else {}),
            **_group_settings(self.config),
            **({"partition_samples": self.config.partition_samples} if self.is_cut else {}),
        }

    def key(self, dataset: Dataset, *more: str) -> str:
        """A name for the unfinished build: changes with its data, its settings and its cut."""
        files = [_state(part)["files"] for part in dataset.parts]
        cut = self.config.partition_samples, self.config.chunk_records
        what = [self.settings(dataset), self.model, self.tokenizer.hash, files, cut, *more]
        return hash_json(what)[:24]

    def raw(self, dataset: Dataset) -> list[dict[str, Any]]:
        """The raw files by part, as the manifest names them: without paths of this machine."""
        return [{"part": part.name, "files": part.open().describe()} for part in dataset.parts]

    def require_same(self, out: str, dataset: Dataset) -> dict[str, Any]:
        """The manifest of a finished build; DataError if it is of other data or settings.

        Compares annotations by content, containers by name and size, other files not at all.
        """
        manifest = read_manifest(out).values
        self.is_cut = "partition_samples" in manifest["config"]
        recorded = {name: manifest[name] for name in ("model", "raw_files")}
        recorded |= {"settings": manifest["config"], "tokenizer": manifest["tokenizer"]["hash"]}
        wanted = self._described(dataset) | {"raw_files": self.raw(dataset)}
        if recorded != wanted:
            raise _another(out, _differences(recorded, wanted))
        return manifest

    def require_named(self, out: str, name: str) -> None:
        """DataError if there is a finished build of another dataset: before one is drawn there."""
        if is_complete(out) and (was := read_manifest(out).values["config"]["dataset"]) != name:
            raise _another(out, f"dataset {was}, now {name}")

    def claim(self, staging: Path, dataset: Dataset) -> None:
        """Mark staged work as this build's; raises DataError if it is another's."""
        raw = [_state(part) for part in dataset.parts]
        identity = plain(
            self._described(dataset)
            | {"raw_files": raw, "chunk_records": self.config.chunk_records}
        )
        marker = staging / "build.json"
        staging.mkdir(parents=True, exist_ok=True)
        begun = json.loads(marker.read_text("utf-8")) if marker.exists() else None
        # a build that failed before it had counted anything blocks nobody
        if begun not in (None, identity) and any(staging.rglob("*.arrow")):
            raise unfinished_other(str(staging.parent), _differences(begun, identity))
        if begun != identity:
            write_text(marker, json.dumps(identity, indent=1))

    def _described(self, dataset: Dataset) -> dict[str, Any]:
        settings = self.settings(dataset)
        return {"settings": settings, "model": self.model, "tokenizer": self.tokenizer.hash}

    def manifest(
        self,
        out: Path,
        dataset: Dataset,
        packed: Sequence[PackedPartition],
    ) -> dict[str, Any]:
        """The manifest of the files in `out`, and of the shards of the partitions.

        Of a build for Energon its files are written first.
        """
        first = packed[0]
        settings = self.settings(dataset)
        data_root = absolute(dataset.parts[0].data_root)
        keys = ["hash", "image_token_id", "audio_token_id", "vocab_size", "added_tokens"]
        keys += ["video_token_id"] * (self.tokenizer.video_token_id is not None)
        keys += ["template_date"] * (self.tokenizer.template_date is not None)
        shards = [shard for of in packed for shard in of.shards]
        files = [describe_file(out, name) for name in TABLE_NAMES]
        if self.config.format == "energon":
            names = [shard["name"] for shard in shards]
            files += write_energon_indexes(out, names, first.limits["vision_unit"])
        extras = next((of.extras for of in packed if of.extras), {})
        never_read = join_never_read(of.never_read for of in packed)
        return {
            "isobatch_version": version("isobatch"),
            "format": self.config.format,
            "config": settings,
            "config_hash": hash_json([settings, self.model, self.tokenizer.hash]),
            "raw_files": self.raw(dataset),
            "model": self.model,
            "tokenizer": {key: getattr(self.tokenizer, key) for key in keys},
            "limits": first.limits,
            "limits_explained": first.limits_explained,
            "seed": self.config.seed,
            "totals": totals_of(packed),
            "shards": shards,
            "files": files,
            **({"data_root": data_root} if self.config.format == "refs" else {}),
            **({EXTRAS: extras} if extras else {}),
            **({"never_read": never_read} if never_read else {}),
            **({"has_videos": True} if any(of.has_videos for of in packed) else {}),
        }


def _group_settings(config: BuildConfig) -> dict[str, Any]:
    """What decides the groups; builds without padding are those of versions without the option."""
    settings = asdict(config.group_options)
    if config.pad_each_to == 1:
        del settings["pad_each_to"]
    return settings


def unfinished_other(place: str, differences: str = "") -> DataError:
    """The error for a place where another build was begun."""
    said = f" ({differences})" if differences else ""
    there = f"{place} holds an unfinished build of other data or settings{said}"
    return DataError(f"{there}: finish that one, {ELSEWHERE}")


def _another(out: str, differences: str) -> DataError:
    said = f"{out} is a finished build of other data or settings ({differences})"
    return DataError(f"{said}: {ELSEWHERE}")


def _differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """What of two descriptions differs, such as `seed 0, now 1`: three things at most."""
    both = [
        {name: value for name, value in of.items() if name != "settings"} | of.get("settings", {})
        for of in (was, now)
    ]
    names = [name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name)]
    briefs = [[_brief(of.get(name)) for of in both] for name in names[:3]]
    said = [
        f"{name} {before}, now {after}" if before != after else name
        for name, (before, after) in zip(names, briefs, strict=False)
    ]
    return "; ".join(said) + f"; {len(names) - 3} more" * (len(names) > 3)


def _brief(value: Any) -> str:
    """A setting in a few words: a name or a folder of a table, and the end of what is long."""
    if isinstance(value, dict):
        value = value.get("name") or value.get("data_root") or ""
    elif isinstance(value, list):
        value = ", ".join(filter(None, map(_brief, value)))
    text = "unset" if value is None else str(value)
    return text if len(text) <= _MOST_BRIEF else f"...{text[-_MOST_BRIEF:]}"


@contextmanager
def locked(out: Path, *, with_others: bool = False) -> Iterator[None]:
    """Keep other builds out of a directory, which is made if needed; DataError if one is in it.

    `with_others`: let in those that work on other partitions of the same build.
    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_SH if with_others else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"another packer is writing to {out}: wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)  # and with it the lock, also when the process is killed


def clear(out: Path) -> None:
    """Remove what a build made, and only that: --overwrite may be given a folder by mistake."""
    if not out.exists():
        return
    require_ours(str(out), [path.name for path in out.iterdir()])
    # the manifest first: without it the rest is an unfinished build, whatever happens now
    (out / MANIFEST_NAME).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def require_ours(place: str, names: Sequence[str]) -> None:
    """Raise ConfigError if a folder or URI holds anything that no build made."""
    first_names = {name.partition("/")[0] for name in names} - _MADE_BY_A_BUILD
    # a build that was killed while it wrote its manifest has left a part of that
    strangers = sorted(name for name in first_names if not name.startswith(f"{MANIFEST_NAME}-"))
    if strangers:
        also = f"also holds {', '.join(strangers[:5])}, which no build made"
        raise ConfigError(f"--overwrite: {place} {also}; nothing was removed")


def _state(part: Part) -> dict[str, Any]:
    """The places of a part's raw files, and their state."""
    return {
        "folder": absolute(part.located.folder),
        "data_root": absolute(part.data_root),
        "files": [[info.name, info.size, info.version] for info in part.open().files()],
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON would give them back: tuples as lists."""
    back: dict[str, Any] = json.loads(json.dumps(values))
    return back


def write_energon_indexes(out: Path, shards: list[str], vision_unit: str) -> list[dict[str, Any]]:
    """Write what Energon reads next to the shards of a build; -> entries of the manifest."""
    with pa.memory_map(str(out / INDEX_NAME)) as source:
        index = pa.ipc.open_file(source).read_all()
        names = write_energon_files(out, shards, index, vision_unit)
    return [describe_file(out, name) for name in names]


def totals_of(packed: Sequence[PackedPartition]) -> dict[str, int]:
    """The totals of a build of these partitions."""
    sums = {name: sum(of.index.sums[name] for of in packed) for name in packed[0].index.sums}
    num_read, num_repeated = (
        sum(getattr(of, name) for of in packed) for name in ("num_read", "num_repeated")
    )
    num_packed = sums.pop("num_samples")
    return {
        "num_read": num_read,
        "num_packed": num_packed,
        "num_repeated": num_repeated,
        "num_rejected": num_read + num_repeated - num_packed,
        "num_groups": sum(of.index.num_groups for of in packed),
        **sums,
    }


def describe_file(out: Path, name: str) -> dict[str, Any]:
    """The entry of the manifest for a table or another file of a build in a folder."""
    file = BuildFile.of(open_folder(str(out), follow_links=True), name)
    if name in {INDEX_NAME, IDS_NAME}:
        file = replace(file, batches=find_batches(out / name))
    if name == INDEX_NAME:
        with pa.ipc.open_file(out / name) as index:
            file = replace(file, types={field.name: str(field.type) for field in index.schema})
    return file.to_json()
