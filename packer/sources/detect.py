"""A place of raw data -> its layout and files, by looking at it; its splits."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.packer.sources.base import Located, Source
from isobatch.packer.sources.build_source import PackedBuildSource, locate_build
from isobatch.packer.sources.columns import RenamedChunk
from isobatch.packer.sources.datasets_source import DatasetsSource, find_files
from isobatch.packer.sources.hub import fetch_files, parse_hub_id
from isobatch.packer.sources.json_source import AnnotationSource
from isobatch.packer.sources.table_source import TableSource
from isobatch.packer.sources.tar_source import TarSource
from isobatch.packer.sources.trainers.auxiliary import AuxChunk
from isobatch.packer.sources.trainers.energon import is_energon, locate_energon
from isobatch.packer.sources.trainers.llama_factory import (
    INFO_NAME,
    DatasetInfo,
    dataset_of,
    read_info,
)
from isobatch.packer.sources.trainers.mds import MdsSource, find_mds
from isobatch.shards.folders import Folder, is_uri, join, open_folder, split
from isobatch.shards.index import INDEX_NAME
from isobatch.shards.manifest import MANIFEST_NAME, TABLES

SUFFIXES = {
    ".json": "annotations",
    ".jsonl": "annotations",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
"""Suffix of a file, without `.gz` -> its layout."""
DATASETS_SUFFIXES = (".csv", ".tsv", ".txt")
"""Suffixes of a file that is read through `datasets` when it is named itself."""

ABOUT_DATA = re.compile(r"(dataset_(infos?|dict)|state|.*_stats|config)\.json")
"""JSON files that tools leave next to the data: `datasets`, img2dataset."""
DICT_NAME, STATE_NAME = "dataset_dict.json", "state.json"
"""Files of a folder by `datasets.save_to_disk`: with several splits, and with one."""
METADATA_NAME, METADATA_KEY = "metadata.jsonl", b'"file_name"'
"""The table of an image or audio folder of `datasets`, and the key that tells it."""

TRAIN = "train"
PARTIAL = "partial-"
"""The Hub's prefix of a split of which only the first 5 GB were converted to Parquet."""
_SPLIT = "(?:partial-)?(?:train|training|test|testing|validation|valid|val|dev|eval)"
_NUMBERED = re.compile(r"(.+?)-\d{5}-of-\d{5}.*\.parquet")
"""Names of files by `push_to_hub`."""
_CONVERTED = re.compile(r"[^/]+/([^/]+)/\d{4}\.parquet")
"""Names of files by the Hub's own conversion: configuration/split/0000.parquet."""
_NAMED = re.compile(rf"({_SPLIT})(?:$|[-_.0-9])", re.IGNORECASE)


def layout_of(name: str) -> str | None:
    """Layout of a file by its name; None if it has none.

    >>> layout_of("a/part-1.jsonl.gz"), layout_of("00012.tar"), layout_of("notes.md")
    ('annotations', 'tar', None)
    """
    return SUFFIXES.get(PurePosixPath(name.removesuffix(".gz")).suffix)


def locate(place: str, *, known: Sequence[str]) -> Located:
    """The files at a place: a file, a folder of files of one layout, or a dataset on the Hub.

    A folder's JSON is one annotation file, or shards of one that differ in a number only. Parquet
    files and tars count all, also in folders below; so do the files that `datasets.save_to_disk`
    lists. In any other folder, `datasets` finds the files. Of several splits `train` is read, or
    the one after an `@` at the end. DataError or ConfigError unless there is exactly one
    possibility; `known` are the names to mention then.
    """
    if is_uri(place):
        return _locate_uri(place)
    path = Path(place)
    wanted = None
    if not path.exists() and "@" in place:
        path, wanted = Path(place.rpartition("@")[0]), place.rpartition("@")[2]
    info = path / INFO_NAME if path.is_dir() else path
    if info.name == INFO_NAME and (datasets := read_info(info)) is not None:
        return _described(dataset_of(datasets, wanted, info), known)
    if path.is_dir():
        return _locate_folder(str(path), wanted)
    if path.exists():
        if path.suffix in DATASETS_SUFFIXES:
            return _locate_with_datasets(str(path.parent), None, path.name)
        # a named file is what its name says; anything else must look like annotations
        return Located(layout_of(path.name) or "annotations", str(path.parent), (path.name,))
    dataset = parse_hub_id(place)
    if dataset is None or layout_of(dataset.repo) is not None:
        raise DataError(
            f"no dataset {place!r}: it is neither a file, a folder, a Hub id, nor a known name"
            f" ({', '.join(known)})"
        )
    located = fetch_files(dataset, lambda splits: choose_split(splits, dataset.split, str(dataset)))
    layout, *others = {layout_of(name) for name in located.names}
    return located if others or layout is None else Located(layout, located.folder, located.names)


def _described(info: DatasetInfo, known: Sequence[str]) -> Located:
    """The files of a dataset of LLaMA-Factory's."""
    located = replace(locate(info.place, known=known), columns=info.columns, name=info.name)
    if info.sampling is None:
        return located
    if located.layout != "annotations":
        raise ConfigError(f"{info.name}: num_samples is for JSON files; give --limit instead")
    return replace(located, options=(*located.options, ("sampling", info.sampling)))


def _locate_uri(place: str) -> Located:
    folder, name = split(place)
    if layout := layout_of(name):
        return Located(layout, folder, (name,))
    path, _, wanted = place.rpartition("@") if "@" in name else (place, "", None)
    return _locate_folder(path, wanted)


def _locate_folder(place: str, wanted: str | None) -> Located:
    folder = open_folder(place, follow_links=True)
    names = folder.names()
    indexed = _indexed(folder, names, place, wanted)
    if indexed is not None:
        return indexed
    if DICT_NAME in names or STATE_NAME in names:
        if DICT_NAME in names:
            splits = _listed(folder, DICT_NAME, "splits", str)
            place = join(place, choose_split(splits, wanted, place))
            folder = open_folder(place, follow_links=True)
        files = _listed(folder, STATE_NAME, "_data_files", lambda entry: entry["filename"])
        return Located("arrow", place, tuple(files))
    if METADATA_NAME in names and METADATA_KEY in folder.read(METADATA_NAME, 0, 1 << 16):
        return _locate_with_datasets(place, wanted)
    if annotations := _annotations(folder, names):
        return Located("annotations", place, annotations)
    files = [info.name for info in folder.files()]
    tables = [name for name in files if layout_of(name) in ("parquet", "tar", "arrow")]
    if not tables and files and not is_uri(place):
        return _locate_with_datasets(place, wanted)
    layout = _one_layout(tables, place)
    chosen_files = [name for name in tables if layout_of(name) == layout]
    return Located(layout, place, choose_files(chosen_files, wanted, place))


def _indexed(
    folder: Folder, names: Sequence[str], place: str, wanted: str | None
) -> Located | None:
    """The files of a folder with an index of its samples: a build, Energon's or MosaicML's."""
    if MANIFEST_NAME in names and (INDEX_NAME in names or folder.has_folder(TABLES)):
        return locate_build(place, wanted)

    def choose(splits: Sequence[str]) -> str:
        return choose_split(splits, wanted, place)

    return (
        locate_energon(folder, place, choose)
        if is_energon(folder)
        else find_mds(folder, wanted, choose)
    )


def _one_layout(names: Sequence[str], place: str) -> str:
    """The layout of a folder's files. Parquet next to tars of the same names describes them."""
    stems = {
        layout: {PurePosixPath(name).with_suffix("") for name in names if layout_of(name) == layout}
        for layout in ("parquet", "tar", "arrow")
    }
    if stems["tar"] and stems["parquet"] <= stems["tar"]:  # img2dataset
        stems["parquet"] = set()
    layouts = [layout for layout, those in stems.items() if those]
    if not layouts:
        raise _nothing_in(place)
    if len(layouts) > 1:
        has = f"{place} holds files of several layouts ({', '.join(layouts)})"
        raise ConfigError(f"{has}: name a folder with one")
    return layouts[0]


def _nothing_in(place: str, why: str = "") -> DataError:
    return DataError(
        f"no dataset in {place}: expected one .json or .jsonl file, Parquet files, tars,"
        f" `save_to_disk` output, or a format that `datasets` knows{why}"
    )


def _locate_with_datasets(place: str, wanted: str | None, name: str | None = None) -> Located:
    """What `datasets` finds in a folder, or in the file `name` of it."""
    try:
        files = find_files(str(Path(place).resolve()), name=name)
    except ConfigError as error:
        raise _nothing_in(place, f" ({error})") from None
    except Exception as error:  # its own types, fsspec's and the parsers' among them
        raise _nothing_in(place, f": {first_line(error)}") from None
    chosen = files.splits[choose_split(list(files.splits), wanted, place)]
    names = [PurePosixPath(path).relative_to(Path(place).resolve()).as_posix() for path in chosen]
    return Located(files.builder, place, tuple(names), files.options)


def _listed(folder: Folder, name: str, key: str, read: Callable[[Any], str]) -> list[str]:
    """The list under a key of a JSON file by `datasets`."""
    path = join(folder.uri, name)
    try:
        values = json.loads(folder.read(name))
        listed = [str(read(entry)) for entry in values[key]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not as `datasets.save_to_disk` writes it: {error}") from None
    if not listed:
        raise DataError(f"{path}: lists no {key.strip('_').replace('_', ' ')}")
    if values.get("_indices_data_files"):
        raise ConfigError(
            f"{folder.uri}: its rows are selected by an index; flatten_indices() and save it again"
        )
    return listed


# --- annotation files ---


def _annotations(folder: Folder, names: Sequence[str]) -> tuple[str, ...]:
    """The annotation file of a folder, or its shards; empty if it has none."""
    json_names = [name for name in names if layout_of(name) == "annotations"]
    candidates = [name for name in json_names if not ABOUT_DATA.fullmatch(name)]
    named = [name for name in candidates if name.partition(".")[0] == "annotations"]
    if len(named) == 1:
        return (named[0],)
    if not _are_shards(candidates):
        some = ", ".join(candidates[:5]) + ("..." if len(candidates) > 5 else "")
        hint = f"name the one to pack, and --data-root {folder.uri}"
        raise ConfigError(f"{len(candidates)} annotation files in {folder.uri} ({some}): {hint}")
    return tuple(sorted(candidates, key=_by_number))


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sort key of a name, by which `part-10` comes after `part-9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+|^)(\d*)", name)]


def _are_shards(names: Sequence[str]) -> bool:
    """Whether files are one dataset in numbered pieces, some of which may be missing.

    >>> _are_shards(["part-7.jsonl", "part-8.jsonl", "part-10.jsonl"])
    True
    >>> _are_shards(["mix558k.json", "mix665k.json"])
    False
    """
    if len(names) < 2:
        return True
    keys = [_by_number(name) for name in names]
    if len({tuple(text for text, _ in key) for key in keys}) > 1:
        return False
    columns = [{number for _, number in column} for column in zip(*keys, strict=True)]
    (numbers, *others) = [column for column in columns if len(column) > 1] or [set()]
    return not others and max(numbers, default=0) - min(numbers, default=0) < 2 * len(names)


# --- splits ---


def split_of(name: str) -> str:
    """The split of a file; empty if its name does not tell."""
    path = PurePosixPath(name)
    match = _NUMBERED.fullmatch(path.name) or _NAMED.match(path.name) or _CONVERTED.fullmatch(name)
    if match:
        return match[1]
    folders = [folder for folder in path.parts[:-1] if re.fullmatch(_SPLIT, folder, re.IGNORECASE)]
    return folders[-1] if folders else ""


def choose_split(splits: Sequence[str], wanted: str | None, where: str) -> str:
    """The wanted split, `train`, or the only one. ConfigError if that names none."""
    has = f"{where} has the splits {', '.join(sorted(split or 'none' for split in splits))}"
    if wanted is not None:
        if wanted not in splits:
            raise ConfigError(f"{has}, and no {wanted!r}")
        return wanted
    if TRAIN in splits:
        return TRAIN
    if len(splits) != 1:
        raise ConfigError(f"{has}; say which one: {where}@SPLIT")
    if splits[0].startswith(PARTIAL):
        hint = f"{where}@{splits[0]} is that part"
        raise ConfigError(f"{where}: the Hub has only the first 5 GB of it as Parquet; {hint}")
    return splits[0]


def choose_files(names: Sequence[str], wanted: str | None, where: str) -> tuple[str, ...]:
    """The files of the split to read, in their order."""
    splits = {name: split_of(name) for name in names}
    split_names = sorted(set(splits.values()))
    if wanted is None and TRAIN in split_names and "" in split_names:
        stray = next(name for name in names if not splits[name])
        hint = f"name the files, or {where}@{TRAIN}"
        raise ConfigError(f"{where}: {stray} belongs to no split, others to {TRAIN}; {hint}")
    chosen = choose_split(split_names, wanted, where)
    return tuple(name for name in names if splits[name] == chosen)


def open_located(located: Located, name: str, data_root: str) -> Source:
    """The source that reads files of a layout."""
    kinds: dict[str, type[Source]] = {"annotations": AnnotationSource, "tar": TarSource}
    kinds |= {"parquet": TableSource, "arrow": TableSource, "mds": MdsSource}
    kinds["build"] = PackedBuildSource
    source = kinds.get(located.layout, DatasetsSource)(located, name, data_root)
    if located.columns is not None:
        source.changes.append(partial(RenamedChunk, columns=located.columns))
    aux = dict(located.options).get("aux")
    if aux is not None:
        source.changes.append(partial(AuxChunk, places=aux))
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One raw dataset, and how much of it goes into the mixture."""

    name: str
    located: Located
    data_root: str
    """Folder or URI that the paths of images and audio files are relative to."""
    weight: float | None = None
    """Share of the mixture's samples, relative to the other parts' weights."""
    repeat: float = 1.0
    """Times that each sample goes in, without weights: 2.5 is twice, and half of them a third."""
    limit: int | None = None

    def open(self) -> Source:
        """The source that reads it."""
        return open_located(self.located, self.name, self.data_root)
