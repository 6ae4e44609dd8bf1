"""Formats that only the `datasets` library knows: CSV, text, image folders.

`datasets` finds the files of a folder or a Hub repository, their builder and their splits, and
streams the rows; images and audio stay undecoded. It is an extra, and takes a second to import.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.common.visible_text import shown
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.packer.sources.base import (
    FIRST_ROWS,
    FilePiece,
    Located,
    OnBytes,
    Source,
    cut,
    examples,
    known_columns,
    prefix_under,
)
from isobatch.shards.folders import is_uri, join

README_NAME, CARD_NAME = "README.md", ".huggingface.yaml"
"""Files of a dataset in which `datasets` looks for its description."""
_FILES_KEYS = ("data_files", "data_dir")
FOLDER_BUILDERS = frozenset({"imagefolder", "audiofolder", "videofolder"})
"""Builders that join a table of metadata with the files it names."""


@dataclass(frozen=True, slots=True)
class BuilderFiles:
    """What `datasets` finds in a folder or a repository."""

    builder: str
    """Name of the builder that reads the files: `csv`, `text`, `imagefolder`, ..."""
    splits: dict[str, tuple[str, ...]]
    """Split -> its files, as paths or URLs."""
    options: tuple[tuple[str, Any], ...]
    """Options of the builder that the dataset's own README sets."""


def import_datasets(what: str) -> Any:
    """The library; ConfigError if it is not installed, for `what` needs it."""
    try:
        import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise ConfigError(f"{what} needs datasets: pip install huggingface_hub datasets") from None
    datasets.disable_progress_bars()
    return datasets


def find_files(place: str, config: str | None = None, name: str | None = None) -> BuilderFiles:
    """What is in a folder or a Hub repository, or one file of it; raises what `datasets` does."""
    datasets = import_datasets(place)
    if Path(place).is_dir() and name is None:
        require_inside(_card_of(Path(place)), place)
    builder = datasets.load_dataset_builder(place, config, data_files=name)
    common = {field.name for field in fields(datasets.BuilderConfig)}
    builder_fields = [field for field in fields(builder.config) if field.name not in common]
    options = ((field.name, getattr(builder.config, field.name)) for field in builder_fields)
    defaults = {field.name: field.default for field in builder_fields}
    return BuilderFiles(
        builder.name,
        {str(split): tuple(map(str, urls)) for split, urls in builder.config.data_files.items()},
        tuple((key, value) for key, value in options if value != defaults[key]),
    )


def _card_of(folder: Path) -> list[Any]:
    """The descriptions of a folder that `datasets` reads."""
    from huggingface_hub import DatasetCard  # noqa: PLC0415 - comes with datasets

    cards: list[Any] = []
    if (folder / README_NAME).is_file():
        cards.append(DatasetCard.load(folder / README_NAME).data.to_dict())
    if (folder / CARD_NAME).is_file():
        cards.append(yaml.safe_load((folder / CARD_NAME).read_text("utf-8")))
    return cards


def require_inside(cards: Iterable[Any], where: str) -> None:
    """ConfigError where a dataset's description names files elsewhere, which would be fetched."""
    for card in cards:
        configs = card.get("configs") if isinstance(card, Mapping) else None
        for text in _texts_in([] if configs is None else configs):
            if "://" in text or "::" in text or text.startswith("/") or ".." in text.split("/"):
                raise ConfigError(
                    f"{where}: its README names files elsewhere, {shown(text)}, which are not"
                    " fetched: get them yourself and name their folder"
                )


def _texts_in(value: Any) -> Iterator[str]:
    """Texts under `data_files` and `data_dir`, at any depth."""
    waiting = [(value, False)]
    known: set[tuple[int, bool]] = set()  # YAML may put a list into itself
    while waiting:
        item, is_file = waiting.pop()
        if (id(item), is_file) in known:
            continue
        known.add((id(item), is_file))
        if isinstance(item, Mapping):
            waiting += [(inner, is_file or key in _FILES_KEYS) for key, inner in item.items()]
        elif isinstance(item, list | tuple):
            waiting += [(inner, is_file) for inner in item]
        elif is_file and isinstance(item, str):
            yield item


class DatasetsSource(Source):
    """Records of files that a builder of `datasets` reads."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """ConfigError for image folders outside the data root."""
        super().__init__(located, name, data_root)
        self._together = located.layout in FOLDER_BUILDERS
        what = "image folders"
        self._prefix = prefix_under(located.folder, data_root, what) if self._together else ""
        # `datasets` names files by the whole path
        self._folder = located.folder if is_uri(located.folder) else os.path.abspath(located.folder)

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """The records, streamed here: only the builder finds where one ends."""
        pieces = list(self.pieces())
        for group in [pieces] if self._together else [[piece] for piece in pieces]:
            yield from cut(self._records([piece.name for piece in group]), num_records)
            on_bytes(sum(piece.size for piece in group))

    def cut(self, num_bytes: int) -> list[FilePiece] | None:
        """Files; those of a folder whose table of metadata names the others stay together."""
        return None if self._together else list(self.pieces())

    def bytes_per_record(self) -> float:
        """By the first records; of a folder, whose records are files, by these."""
        if not self._together:
            return super().bytes_per_record()
        sizes = [info.size for info in self.files()]
        return max(1.0, sum(sizes) / max(1, len(sizes)))

    def columns(self) -> set[str]:
        """Columns of the first row, also those that no record is read from."""
        names = self.read_names()
        return set(next(self._rows(names if self._together else names[:1], self.name), ()))

    def unread_columns(self) -> dict[str, str]:
        """Columns of the first rows that no record is read from."""
        names = self.read_names()
        rows = islice(self._rows(names if self._together else names[:1], self.name), FIRST_ROWS)
        values = examples(rows)
        known = known_columns(self.columns(), self.name, self.located)
        return {column: value for column, value in values.items() if column not in known}

    def _records(self, names: list[str]) -> Iterator[RawRecord]:
        where = self.located.folder if len(names) > 1 else join(self.located.folder, names[0])
        rows = self._rows(names, where)
        columns: tuple[str, ...] = ()
        for position, row in enumerate(rows):
            columns = columns or known_columns(row, where, self.located)
            value = {name: self._media(row[name]) for name in columns}
            if value == {"text": ""}:
                continue  # a blank line between texts
            if value.get("id") is None and len(names) == 1:
                value["__key__"] = f"{names[0]}:{position}"
            yield RawRecord(position, value)

    def _rows(self, names: list[str], where: str) -> Iterator[dict[str, Any]]:
        datasets = import_datasets(where)
        paths = [join(self._folder, name) for name in names]
        try:
            rows = datasets.load_dataset(
                self.located.layout,
                data_files=paths,
                split="train",
                streaming=True,
                **dict(self.located.options),
            )
            yield from rows.decode(False) if rows.features else rows
        except Exception as error:  # whatever pandas, lxml or another parser raises
            cause = error.__cause__
            reason = first_line(cause if isinstance(cause, Exception) else error)
            raise DataError(
                f"{where}: `datasets` cannot read it as {self.located.layout}: {reason}"
            ) from None

    def _media(self, value: Any) -> Any:
        """A value; of a file in the folder, its path under the data root."""
        path = value.get("path") if isinstance(value, dict) else None
        if not self._together or not path or value.get("bytes"):
            return value
        return self._prefix + Path(path).relative_to(self._folder).as_posix()
