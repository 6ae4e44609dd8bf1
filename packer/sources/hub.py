"""Datasets by Hugging Face Hub id: `org/name`, `org/name:configuration`, `org/name@split`, or both.

Their Parquet files are downloaded into the Hub's cache and read from there; a dataset in another
format is read from the Hub's own conversion to Parquet. Network access happens in `fetch_parquet`
only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from balance.errors import ConfigError, DataError, first_line
from packer.sources.splits import choose_files, split_of

CONVERTED = "refs/convert/parquet"
"""Branch of every dataset repository that the Hub could convert."""
DEFAULT = "default"

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """A dataset on the Hub."""

    repo: str
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return self.repo + (f":{self.config}" if self.config else "")


def parse_hub_id(place: str) -> HubId | None:
    """The Hub id that a place has the form of.

    >>> parse_hub_id("HuggingFaceM4/the_cauldron:ai2d@train")
    HubId(repo='HuggingFaceM4/the_cauldron', config='ai2d', split='train')
    >>> parse_hub_id("data/coco/images") is None
    True
    """
    match = _ID.fullmatch(place)
    if match is None or place.startswith((".", "-")):
        return None
    return HubId(match["repo"], match["config"], match["split"])


def fetch_parquet(dataset: HubId) -> tuple[str, tuple[str, ...]]:
    """Download the Parquet files of a dataset's split: -> their folder, and their names in it.

    ConfigError if the id is not precise enough, DataError if the Hub cannot be reached or has no
    such dataset.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise ConfigError(
            f"{dataset.repo} is no file or folder, and to look for it on the Hugging Face Hub needs huggingface_hub:"
            " pip install 'isobatch[hub]'"
        ) from None
    try:
        revision = None
        names = _parquet(HfApi().list_repo_files(dataset.repo, repo_type="dataset"))
        if not names:
            revision = CONVERTED
            names = _parquet(
                HfApi().list_repo_files(dataset.repo, repo_type="dataset", revision=revision)
            )
    except (
        Exception
    ) as error:  # the Hub client raises some twenty types, network libraries' own among them
        raise DataError(
            f"no file or folder {dataset.repo}, and the Hugging Face Hub gave no such dataset: {first_line(error)}"
        ) from None
    chosen = choose_parquet(names, dataset)
    try:
        folder = snapshot_download(
            dataset.repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[_literal(name) for name in chosen],
        )
    except Exception as error:
        raise DataError(
            f"{dataset.repo} could not be downloaded from the Hugging Face Hub: {first_line(error)}"
        ) from None
    return str(folder), chosen


def choose_parquet(names: Sequence[str], dataset: HubId) -> tuple[str, ...]:
    """The files of the configuration and the split that are meant."""
    if not names:
        raise DataError(
            f"{dataset.repo} on the Hugging Face Hub has no Parquet files, of its own or converted"
        )
    configs = {name: _config_of(name) for name in names}
    found = sorted(set(configs.values()))
    config = dataset.config or (DEFAULT if DEFAULT in found else found[0])
    if config not in found or (dataset.config is None and len(found) > 1 and config != DEFAULT):
        raise ConfigError(
            f"{dataset.repo} has the configurations {', '.join(found)}; say which one: {dataset.repo}:CONFIGURATION"
        )
    return choose_files(
        [name for name in names if configs[name] == config], dataset.split, str(dataset)
    )


def _parquet(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".parquet"))


def _config_of(name: str) -> str:
    """The configuration that a file belongs to: its first folder, unless that only says `data` or a
    split.
    """
    folders = PurePosixPath(name).parts[:-1]
    if not folders or folders[0] == "data" or split_of(f"{folders[0]}/x") == folders[0]:
        return DEFAULT
    return folders[0]


def _literal(name: str) -> str:
    """A pattern that matches this name only."""
    return re.sub(r"([*?\[])", r"[\1]", name)
