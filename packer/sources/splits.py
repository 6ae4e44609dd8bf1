"""Which split a file belongs to, by its name, and which files are meant: the train split, unless
another is named.

Datasets on the Hugging Face Hub, clones of them and `datasets.save_to_disk` folders lie in splits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from balance.errors import ConfigError

TRAIN = "train"
PARTIAL = "partial-"
"""The Hub converts only the first 5 GB of a large dataset, and calls that split so."""

_KNOWN = "(?:partial-)?(?:train|training|test|testing|validation|valid|val|dev|eval)"
_NUMBERED = re.compile(r"(.+?)-\d{5}-of-\d{5}.*\.parquet")
"""As `push_to_hub` names files."""
_CONVERTED = re.compile(r"[^/]+/([^/]+)/\d{4}\.parquet")
"""As the Hub's own conversion to Parquet does: configuration/split/0000.parquet."""
_NAMED = re.compile(rf"({_KNOWN})(?:$|[-_.0-9])", re.IGNORECASE)


def split_of(name: str) -> str:
    """The split of a file; empty if its name does not tell.

    >>> split_of("data/train-00000-of-00003.parquet"), split_of("default/test/0000.parquet"), split_of("a/00017.tar")
    ('train', 'test', '')
    """
    path = PurePosixPath(name)
    if (
        match := _NUMBERED.fullmatch(path.name)
        or _NAMED.match(path.name)
        or _CONVERTED.fullmatch(name)
    ):
        return match[1]
    folders = [folder for folder in path.parts[:-1] if re.fullmatch(_KNOWN, folder, re.IGNORECASE)]
    return folders[-1] if folders else ""


def choose_split(splits: Sequence[str], wanted: str | None, where: str) -> str:
    """The split to read: the one that is wanted, `train`, or the only one. ConfigError if that
    names none.
    """
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
        raise ConfigError(
            f"{where}: the Hub holds only the first 5 GB of it as Parquet; {where}@{splits[0]} is that part"
        )
    return splits[0]


def choose_files(names: Sequence[str], wanted: str | None, where: str) -> tuple[str, ...]:
    """The files of the split to read, in their order."""
    splits = {name: split_of(name) for name in names}
    found = sorted(set(splits.values()))
    if wanted is None and TRAIN in found and "" in found:
        stray = next(name for name in names if not splits[name])
        raise ConfigError(
            f"{where}: {stray} belongs to no split, others to {TRAIN}; name the files, or {where}@{TRAIN}"
        )
    chosen = choose_split(found, wanted, where)
    return tuple(name for name in names if splits[name] == chosen)
