"""The raw layouts that are known, and how a place is recognised by looking at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from balance.errors import ConfigError, DataError
from packer.sources.annotations import AnnotationSource
from packer.sources.source import Source
from packer.storage import Root, is_uri, open_root, split

SUFFIXES = {".json": "annotations", ".jsonl": "annotations", ".parquet": "parquet", ".tar": "tar"}
"""Suffix of a file, without `.gz` -> its layout."""


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
    """The files at a place: one file, or a folder of files of one layout.

    A folder's JSON is one annotation file; Parquet files and tars count all, also in folders below. DataError or
    ConfigError if there is nothing, or more than one possibility; `known` are the names to mention then.
    """
    if is_uri(place):
        folder, name = split(place)
        return Located(layout, folder, (name,)) if (layout := layout_of(name)) else _locate_folder(place)
    path = Path(place)
    if path.is_dir():
        return _locate_folder(place)
    if not path.exists():
        raise DataError(f"no dataset {place!r}: it is neither a file, a folder, nor a known name ({', '.join(known)})")
    # what the user names is read as what its name says; anything else must look like annotations
    return Located(layout_of(path.name) or "annotations", str(path.parent), (path.name,))


def _locate_folder(place: str) -> Located:
    root = open_root(place, follow_links=True)
    annotations = _annotations(root)
    if annotations is not None:
        return Located("annotations", place, (annotations,))
    for layout in ("parquet", "tar"):
        names = tuple(info.name for info in root.files() if layout_of(info.name) == layout)
        if names:
            return Located(layout, place, names)
    raise DataError(f"no annotations in {place}: expected one .json or .jsonl file, Parquet files or tars")


def _annotations(root: Root) -> str | None:
    found = [name for name in root.names() if layout_of(name) == "annotations"]
    named = [name for name in found if name.partition(".")[0] == "annotations"]
    if len(named) == 1 or len(found) == 1:
        return (named or found)[0]
    if found:
        names, place = ", ".join(found[:5]), root.uri
        raise ConfigError(
            f"{len(found)} annotation files in {place} ({names}...): name the one to pack, and --data-root {place}"
        )
    return None


def open_located(located: Located, name: str, data_root: str) -> Source:
    """The source that reads files of a layout."""
    return AnnotationSource(name, located.folder, list(located.names), data_root)
