"""Energon's metadatasets: YAML files that blend datasets by weight or repetitions.

As megatron-energon 7 reads them, of both versions and nested: `blend` (or V1's `datasets`) gives
each dataset a share, `blend_epochized` a number of repetitions, `subset` a stretch of its samples,
`aux` where else the files of its records are. A `join` needs code of its user, and is refused.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.fields import example_of
from isobatch.packer.sources.base import Located, has_file, prefix_under, require_known
from isobatch.packer.sources.build_source import locate_build
from isobatch.packer.sources.detect import Part, choose_split
from isobatch.packer.sources.trainers.auxiliary import AuxPlace
from isobatch.packer.sources.trainers.energon import (
    INFO_NAMES,
    META,
    locate_energon,
    read_yaml,
)
from isobatch.packer.sources.trainers.subset import Subset
from isobatch.shards.folders import is_uri, open_folder, split
from isobatch.shards.manifest import MANIFEST_NAME

BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
"""Key of several datasets -> the key of each that says how much of it goes in."""
BLEND_FIELDS = {"weight": "weight", "repetitions": "repeat"}
"""Such a key -> the field of a `Part`."""
REPORTED = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier")
REFERENCE_KEYS = frozenset({"path", "split_part", "dataset_config", "split_config", "aux"})
COMMON_KEYS = frozenset({*REPORTED, "subset"})
MOST_NESTED = 16
_URL = re.compile(r"(?:(filesystem)(?:\+([a-z0-9]+))?|([a-z][a-z0-9+.-]*))://(.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Share:
    """What the files around a dataset say of it."""

    split: str
    key: str = ""
    """`weight` or `repetitions`; empty outside of a blend."""
    value: float = 1.0
    subset: Subset | None = None
    unread: tuple[tuple[str, Any], ...] = ()
    depth: int = 0
    data_root: str | None = None
    """That of all datasets, if it is not the folder of each."""


def split_of_place(place: str) -> tuple[str, str | None]:
    """The file of `FILE@SPLIT`, and the split.

    >>> split_of_place("mix.yaml@val"), split_of_place("mix.yaml")
    (('mix.yaml', 'val'), ('mix.yaml', None))
    """
    file, _, wanted = place.rpartition("@")
    is_split = file.endswith((".yaml", ".yml")) and "/" not in wanted
    return (file, wanted) if is_split else (place, None)


def is_metadataset(place: str) -> bool:
    """Whether a place is a YAML file with the `splits` of a metadataset, maybe with `@SPLIT`."""
    file, _ = split_of_place(place)
    if not file.endswith((".yaml", ".yml")):
        return False
    folder, name = split(file)
    return has_file(open_folder(folder), name) and "splits" in _values(file)


def read_metadataset(place: str, data_root: str | None) -> list[Part]:
    """The datasets of a metadataset's split, flat.

    Without a data root each has its own, which holds its shards and the files of its `aux`.

    ConfigError for what is not read, for shares that do not fit together, and for an `aux` outside
    of the data root; DataError for datasets that are not there.
    """
    file, wanted = split_of_place(place)
    parts = list(_parts_of_file(file, _Share(split="", data_root=data_root), wanted))
    if len({part.weight is None for part in parts}) > 1:
        raise ConfigError(f"{file}: some of its datasets have weights, others repetitions")
    return _numbered(parts)


def _numbered(parts: list[Part]) -> list[Part]:
    """The parts, a dataset that comes again with a number after its name."""
    places: dict[tuple[str, str], int] = {}
    numbered = []
    for part in parts:
        key = part.name, part.located.folder
        places[key] = times = places.get(key, 0) + 1
        numbered.append(part if times == 1 else replace(part, name=f"{part.name}-{times}"))
    return numbered


def _values(file: str) -> dict[str, Any]:
    folder, name = split(file)
    return read_yaml(open_folder(folder), name)


def _parts_of_file(file: str, share: _Share, wanted: str | None) -> Iterator[Part]:
    if share.depth > MOST_NESTED:
        raise ConfigError(f"{file}: metadatasets are nested more than {MOST_NESTED} deep")
    values = _values(file)
    kind = str(values.get("__class__", "Metadataset"))
    if kind not in ("Metadataset", "MetadatasetV2"):
        raise ConfigError(f"{file}: a {kind}; read are Metadataset and MetadatasetV2")
    require_known(values, {"__module__", "__class__", "splits"}, file)
    splits = values.get("splits", {})
    if not isinstance(splits, dict) or not splits:
        raise ConfigError(f"{file}: `splits` has no datasets")
    name = choose_split([str(key) for key in splits], wanted, file)
    where = f"{file}, {name}"
    entry = splits[name]
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is a {type(entry).__name__}, not an object with keys")
    yield from _parts(entry, file, where, replace(share, split=name, depth=share.depth + 1))


def _parts(entry: dict[str, Any], file: str, where: str, share: _Share) -> Iterator[Part]:
    """The datasets of an entry: a blend, or one dataset."""
    if "join" in entry:
        raise ConfigError(f"{where}: `join` joins samples by code, which is not run here")
    key = next((key for key in BLENDS if key in entry), None)
    share = _with_common(entry, share, where, Path(file).name)
    if key is None:
        require_known(entry, REFERENCE_KEYS | COMMON_KEYS | ({share.key} - {""}), where)
        yield from _reference(entry, file, where, share)
        return
    require_known(entry, {key, "subset"}, where)
    entries = entry[key]
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ConfigError(f"{where}: `{key}` is not a list of datasets")
    if not entries:
        raise ConfigError(f"{where}: `{key}` has no datasets; give one, or leave it out")
    amount_key = BLENDS[key]
    if share.key not in ("", amount_key):
        raise ConfigError(f"{where}: a `{key}` inside of a blend by {share.key}")
    amounts = [
        _amount(one.get(amount_key, 1), f"{where}, dataset {number}: {amount_key}")
        for number, one in enumerate(entries, 1)
    ]
    total = sum(amounts) if amount_key == "weight" else 1.0
    for number, (one, amount) in enumerate(zip(entries, amounts, strict=True), 1):
        inner = replace(share, key=amount_key, value=share.value * amount / total)
        yield from _parts(one, file, f"{where}, dataset {number}", inner)


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        hint = "give a number above 0, or leave the dataset out"
        raise ConfigError(f"{where} is {str(value)[:40]}; {hint}")
    return float(value)


def _with_common(entry: dict[str, Any], share: _Share, where: str, name: str) -> _Share:
    """The share with an entry's own subset and what nothing reads of it."""
    subset = share.subset
    if entry.get("subset") is not None:
        subset = Subset.parse(entry["subset"], where).within(share.subset, where)
    said = [(key, entry.get(key)) for key in REPORTED]
    # 1 is the default, so it says nothing
    unread = [(f"{key} of {name}", value) for key, value in said if value not in (None, 1, {})]
    return replace(share, subset=subset, unread=(*share.unread, *unread))


def _reference(entry: dict[str, Any], file: str, where: str, share: _Share) -> Iterator[Part]:
    place = entry.get("path")
    if not isinstance(place, str) or not place:
        raise ConfigError(f"{where}: no `path` of a dataset")
    place = _beside(file, place)
    wanted = str(entry.get("split_part") or share.split)
    if place.endswith((".yaml", ".yml")):
        if extra := [key for key in ("aux", "dataset_config", "split_config") if entry.get(key)]:
            raise ConfigError(f"{where}: {extra[0]} is for a dataset, not for a metadataset")
        if not is_metadataset(place):
            raise DataError(f"{where}: no metadataset {place}")
        yield from _parts_of_file(place, share, wanted)
        return
    located = _located(place, wanted, entry, where)
    if share.subset is not None:
        if located.layout == "build":
            raise ConfigError(f"{where}: a subset of a build, which is not read; take all of it")
        located = replace(located, options=(*located.options, ("subset", share.subset)))
    unread = [(key, example_of(value)) for key, value in share.unread]
    located = replace(located, unread=(*located.unread, *unread))
    name = place.rstrip("/").rpartition("/")[2].removesuffix(".jsonl")
    amount: dict[str, Any] = {BLEND_FIELDS[share.key]: share.value} if share.key else {}
    root = share.data_root or located.folder
    part = Part(name=name, located=located, data_root=root, **amount)
    yield _with_aux(part, entry.get("aux"), file, where, share.data_root)


def _located(place: str, wanted: str, entry: dict[str, Any], where: str) -> Located:
    """The files of one dataset: a prepared folder, or JSON lines."""
    if place.endswith(".jsonl"):
        parent, name = split(place)
        if not has_file(open_folder(parent, follow_links=True), name):
            raise DataError(f"{where}: no file {place}")
        return Located("annotations", parent, (name,))
    folder = open_folder(place, follow_links=True)
    if has_file(folder, MANIFEST_NAME):
        return locate_build(place, None if wanted == "train" else wanted)
    if not any(has_file(folder, f"{META}/{name}") for name in INFO_NAMES):
        raise DataError(f"{where}: {place} is no dataset that `energon prepare` has prepared")
    return locate_energon(
        folder,
        place,
        lambda splits: choose_split(splits, wanted, place),
        dataset_config=entry.get("dataset_config"),
        split_config=entry.get("split_config"),
    )


def _beside(file: str, place: str) -> str:
    """A place, relative to the folder of the file that names it."""
    if is_uri(place):
        return place
    scheme, separator, path = file.rpartition("://")
    folder = posixpath.dirname(path if separator else os.path.abspath(file))
    return f"{scheme}{separator}{posixpath.normpath(posixpath.join(folder, place))}"


def _with_aux(part: Part, aux: Any, file: str, where: str, data_root: str | None) -> Part:
    """The part with the places of its records' files, and a data root that holds all of them."""
    if not aux:
        return part
    if not isinstance(aux, dict) or not all(isinstance(one, str | dict) for one in aux.values()):
        raise ConfigError(f"{where}: `aux` is no object of places")
    places = {str(name): _aux_place(one, file, f"{where}, aux {name}") for name, one in aux.items()}
    folders = [part.located.folder, *(place for place, _ in places.values())]
    root = data_root or _common_folder(folders, where)
    found = tuple(
        AuxPlace(name, place, prefix_under(place, root, f"datasets of `aux` ({name})"), is_files)
        for name, (place, is_files) in places.items()
    )
    options = (*part.located.options, ("aux", found))
    return replace(part, located=replace(part.located, options=options), data_root=root)


def _aux_place(value: str | dict[str, Any], file: str, where: str) -> tuple[str, bool]:
    """Folder of an auxiliary dataset, and whether it has plain files in place of shards."""
    if isinstance(value, dict):
        keys = [key for key in ("path", "fs_path") if isinstance(value.get(key), str)]
        if len(keys) != 1:
            raise ConfigError(f"{where}: give `path` or `fs_path`")
        require_known(value, {"__module__", "__class__", keys[0]}, where)
        place, is_files = _beside(file, value[keys[0]]), keys[0] == "fs_path"
    else:
        match = _URL.fullmatch(value)
        is_files = bool(match and match[1])
        if match and is_files:
            value = f"{match[2]}://{match[4]}" if match[2] else match[4]
        place = _beside(file, value)
    if not is_files and not has_file(open_folder(place), f"{META}/index.sqlite"):
        raise DataError(f"{where}: {place} has no {META}/index.sqlite; run `energon prepare` there")
    if is_files and not is_uri(place) and not os.path.isdir(place):
        raise DataError(f"{where}: no folder {place}")
    return place, is_files


def _common_folder(places: Sequence[str], where: str) -> str:
    """The deepest folder that holds all of these."""
    if not any(map(is_uri, places)):
        return os.path.commonpath([os.path.abspath(place) for place in places])
    pieces = [place.rstrip("/").split("/") for place in places]
    shared = [names[0] for names in takewhile(lambda x: len({*x}) == 1, zip(*pieces, strict=False))]
    if len(shared) < 3:  # scheme:, nothing, bucket
        raise ConfigError(f"{where}: its `aux` is in another bucket or on disk; put both in one")
    return "/".join(shared)
