"""Datasets by Hugging Face Hub id: finding and downloading their files.

An id is `org/name`, `org/name:configuration`, `org/name@split`, or both. `datasets` finds the files
of the configuration and the split. They are downloaded into the Hub's cache and read from there, in
their own format and without another copy. Network access happens in `fetch_files` only.
"""

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.models.folder.files import quiet_hub
from isobatch.packer.sources.base import Located
from isobatch.packer.sources.datasets_source import (
    CARD_NAME,
    BuilderFiles,
    find_files,
    import_datasets,
    require_inside,
)

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.-]+))?")
_URL = re.compile(r"hf://datasets/[^/]+/[^/@]+(?:@(?P<revision>[^/]+))?/(?P<name>.+)")


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


def fetch_files(dataset: HubId, choose: Callable[[Sequence[str]], str]) -> Located:
    """Download the files of a dataset's split, which `choose` selects.

    ConfigError if the id is not precise enough, DataError if the Hub gives no such dataset.
    """
    import_datasets(f"{dataset.repo} is no file or folder, and looking for it on the Hub")
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - comes with datasets

    files = _find(HfApi(), dataset)
    urls = files.splits[choose(list(files.splits))]
    parsed = [_URL.fullmatch(url) for url in urls]
    if not all(parsed):
        raise DataError(f"{dataset}: its files are not in the repository, but at {urls[0][:120]}")
    names = [unquote(match["name"]) for match in parsed if match]
    revisions = {unquote(match["revision"] or "") for match in parsed if match}
    try:
        with quiet_hub():
            folder = snapshot_download(
                dataset.repo,
                repo_type="dataset",
                revision=revisions.pop() or None,
                allow_patterns=[glob.escape(name) for name in names],
            )
    except Exception as error:
        raise DataError(
            f"{dataset.repo} could not be downloaded from the Hugging Face Hub: {first_line(error)}"
        ) from None
    return Located(files.builder, str(folder), tuple(names), files.options)


def _find(hub: Any, dataset: HubId) -> BuilderFiles:
    try:
        with quiet_hub():
            # `datasets` would try for half a minute
            about = hub.repo_info(dataset.repo, repo_type="dataset")
            require_inside(_cards_of(hub, about), dataset.repo)
            return find_files(dataset.repo, dataset.config)
    except ConfigError:
        raise
    # the clients raise some twenty types, network libraries' own among them
    except Exception as error:
        if isinstance(error, ValueError) and "onfig" in str(error):  # and the list of those there
            detail = " ".join(str(error).splitlines()[:2])
            raise ConfigError(
                f"{dataset}: {detail}; say which one: {dataset.repo}:CONFIGURATION"
            ) from None
        raise DataError(
            f"no file or folder {dataset.repo}, and the Hugging Face Hub gave no such dataset:"
            f" {first_line(error)}"
        ) from None


def _cards_of(hub: Any, about: Any) -> Iterator[Any]:
    """The descriptions of a repository that `datasets` reads."""
    if (card := getattr(about, "card_data", None)) is not None:
        yield card.to_dict()
    if any(file.rfilename == CARD_NAME for file in about.siblings or ()):
        path = hub.hf_hub_download(about.id, CARD_NAME, repo_type="dataset", revision=about.sha)
        yield yaml.safe_load(Path(path).read_text("utf-8"))
