"""The raw layouts that are known, and how a place is recognised by looking at it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from balance.errors import ConfigError, DataError
from packer.sources.base import Source
from packer.sources.hub import fetch_parquet, parse_hub_id
from packer.sources.json_source import AnnotationSource
from packer.sources.splits import choose_files, choose_split
from packer.sources.table_source import TableSource
from packer.sources.tar_source import TarSource
from shards.folders import Folder, is_uri, join, open_folder, split

SUFFIXES = {
    ".json": "annotations",
    ".jsonl": "annotations",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
"""Suffix of a file, without `.gz` -> its layout."""

ABOUT_DATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|.*_stats\.json|config\.json"
)
"""JSON files that tools leave beside the data: `datasets`, img2dataset."""
DICT_NAME, STATE_NAME = "dataset_dict.json", "state.json"
"""What makes a folder one of `datasets.save_to_disk`: with several splits, and with one."""


@dataclass(frozen=True, slots=True)
class Located:
    """Files of one layout."""

    layout: str
    folder: str
    """Folder or URI."""
    names: tuple[str, ...]
    """Files under the folder, in order."""


def layout_of(name: str) -> str | None:
    """Layout of a file by its name; None if it has none.

    >>> layout_of("a/part-1.jsonl.gz"), layout_of("00012.tar"), layout_of("notes.txt")
    ('annotations', 'tar', None)
    """
    return SUFFIXES.get(PurePosixPath(name.removesuffix(".gz")).suffix)


def locate(place: str, *, known: Sequence[str]) -> Located:
    """The files at a place: one file, a folder of files of one layout, or a dataset on the Hugging
    Face Hub.

    A folder's JSON is one annotation file, or shards of one that differ in a number only; Parquet
    files and tars count all, also in folders below; so do the files that `datasets.save_to_disk`
    lists. Of several splits `train` is read, or the one behind an `@` at the end of the place.
    DataError or ConfigError if there is nothing, or more than one possibility; `known` are the
    names to mention then.
    """
    if is_uri(place):
        return _locate_uri(place)
    path, wanted = Path(place), None
    if not path.exists() and "@" in place:
        path, wanted = Path(place.rpartition("@")[0]), place.rpartition("@")[2]
    if path.is_dir():
        return _locate_folder(str(path), wanted)
    if path.exists():
        # what the user names is read as what its name says; anything else must look like
        # annotations
        return Located(layout_of(path.name) or "annotations", str(path.parent), (path.name,))
    dataset = parse_hub_id(place)
    if dataset is None or layout_of(dataset.repo) is not None:
        raise DataError(
            f"no dataset {place!r}: it is neither a file, a folder, a Hub id, nor a known name ({', '.join(known)})"
        )
    folder, names = fetch_parquet(dataset)
    return Located("parquet", folder, names)


def _locate_uri(place: str) -> Located:
    folder, name = split(place)
    if layout := layout_of(name):
        return Located(layout, folder, (name,))
    path, _, wanted = place.rpartition("@") if "@" in name else (place, "", None)
    return _locate_folder(path, wanted)


def _locate_folder(place: str, wanted: str | None) -> Located:
    root = open_folder(place, follow_links=True)
    names = root.names()
    if DICT_NAME in names:
        chosen = choose_split(_listed(root, DICT_NAME, "splits", str), wanted, place)
        return _saved(join(place, chosen))
    if STATE_NAME in names:
        return _saved(place)
    annotations = _annotations(root, names)
    if annotations:
        return Located("annotations", place, annotations)
    found = [
        info.name for info in root.files() if layout_of(info.name) in ("parquet", "tar", "arrow")
    ]
    layout = _one_layout(found, place)
    return Located(
        layout,
        place,
        choose_files([name for name in found if layout_of(name) == layout], wanted, place),
    )


def _one_layout(names: Sequence[str], place: str) -> str:
    """The layout of a folder's files. Parquet files beside tars of the same names only describe
    them (img2dataset).
    """
    stems = {
        layout: {PurePosixPath(name).with_suffix("") for name in names if layout_of(name) == layout}
        for layout in ("parquet", "tar", "arrow")
    }
    if stems["tar"] and stems["parquet"] <= stems["tar"]:
        stems["parquet"] = set()
    found = [layout for layout, those in stems.items() if those]
    if not found:
        raise DataError(
            f"no dataset in {place}: expected one .json or .jsonl file, Parquet files, tars, or `save_to_disk` output"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{place} holds files of several layouts ({', '.join(found)}): name a folder with one"
        )
    return found[0]


def _saved(place: str) -> Located:
    """A folder that `datasets.save_to_disk` wrote."""
    root = open_folder(place, follow_links=True)
    names = _listed(root, STATE_NAME, "_data_files", lambda entry: entry["filename"])
    return Located("arrow", place, tuple(names))


def _listed(root: Folder, name: str, key: str, read: Callable[[Any], str]) -> list[str]:
    """The list under a key of a JSON file that `datasets` wrote."""
    try:
        values = json.loads(root.read(name))
        listed = [str(read(entry)) for entry in values[key]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{join(root.uri, name)}: not as `datasets.save_to_disk` writes it: {error}"
        ) from None
    if not listed:
        raise DataError(f"{join(root.uri, name)}: lists no {key.strip('_').replace('_', ' ')}")
    if values.get("_indices_data_files"):
        raise ConfigError(
            f"{root.uri}: its rows are selected by an index; flatten_indices() and save it again"
        )
    return listed


def _annotations(root: Folder, names: Sequence[str]) -> tuple[str, ...]:
    """The annotation file of a folder, or its shards; empty if it has none."""
    found = [
        name
        for name in names
        if layout_of(name) == "annotations" and not ABOUT_DATA.fullmatch(name)
    ]
    named = [name for name in found if name.partition(".")[0] == "annotations"]
    if len(named) == 1:
        return (named[0],)
    if not _are_shards(found):
        some = ", ".join(found[:5]) + ("..." if len(found) > 5 else "")
        raise ConfigError(
            f"{len(found)} annotation files in {root.uri} ({some}): name the one to pack, and --data-root {root.uri}"
        )
    return tuple(sorted(found, key=_by_number))


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sorts `part-10` behind `part-9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+|^)(\d*)", name)]


def _are_shards(names: Sequence[str]) -> bool:
    """Whether files are one dataset in numbered pieces, some of which may be missing.

    >>> _are_shards(["part-7.jsonl", "part-8.jsonl", "part-10.jsonl"]), _are_shards(["mix558k.json", "mix665k.json"])
    (True, False)
    """
    if len(names) < 2:
        return True
    keys = [_by_number(name) for name in names]
    if len({tuple(text for text, _ in key) for key in keys}) > 1:
        return False
    columns = [{number for _, number in column} for column in zip(*keys, strict=True)]
    (numbers, *others) = [column for column in columns if len(column) > 1] or [set()]
    return not others and max(numbers, default=0) - min(numbers, default=0) < 2 * len(names)


def open_located(located: Located, name: str, data_root: str) -> Source:
    """The source that reads files of a layout."""
    if located.layout == "annotations":
        return AnnotationSource(name, located.folder, list(located.names), data_root)
    if located.layout == "tar":
        return TarSource(name, located.folder, located.names, data_root)
    return TableSource(located.layout, name, located.folder, located.names, data_root)
