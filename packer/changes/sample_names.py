"""Samples that go, or have gone: by ids or sources, in tables and in shards."""

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.common.errors import ConfigError, first_line, os_reason
from isobatch.common.plain_values import parse_json, read_text
from isobatch.common.types import BoolArray
from isobatch.shards.folders import Folder
from isobatch.shards.manifest import TAR_FORMATS, Manifest

_COPY = r"#\d+$"
"""End of the ids of further samples of one id, `ID#2`."""
_LIST = ('["', "[\n")
"""How a JSON list of ids begins, whatever the file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNames:
    """Samples by their ids, or by their sources."""

    ids: tuple[str, ...] = ()
    """Each also stands for the further samples of that id, `ID#2`, `ID#3`, ..."""
    sources: tuple[str, ...] = ()

    def among(self, table: pa.Table) -> BoolArray:
        """Which rows of a table with `sample_id` and `source` are meant, (rows,)."""
        names, ids = table.column("sample_id"), pa.array(self.ids, pa.string())
        first_ids = pc.replace_substring_regex(names, _COPY, "")
        is_meant = pc.or_(pc.is_in(names, value_set=ids), pc.is_in(first_ids, value_set=ids))
        if self.sources:
            sources = pa.array(self.sources, pa.string())
            is_meant = pc.or_(is_meant, pc.is_in(table.column("source"), value_set=sources))
        return np.asarray(is_meant.to_numpy(), np.bool_)

    def unknown(self, tables: Sequence[pa.Table]) -> int:
        """How many of the ids and sources no row of the tables has."""
        known: set[str] = set()
        for table in tables:
            rows = table.filter(pa.array(self.among(table)))
            names = rows.column("sample_id")
            for column in (names, pc.replace_substring_regex(names, _COPY, "")):
                known.update(column.to_pylist())
        sources = {
            name for table in tables for name in pc.unique(table.column("source")).to_pylist()
        }
        return len({*self.ids} - known) + len({*self.sources} - sources)


def read_ids(path: Path) -> tuple[str, ...]:
    """The ids in a file: one per line, or a JSON list. ConfigError if there are none.

    Of lines blanks at the ends are left out, and of a JSON list nothing is.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else first_line(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    text = text.removeprefix("\ufeff")  # what editors of Windows begin a file with
    # not `splitlines`: ids may have other characters that end a line
    values: Any = [line.strip() for line in text.split("\n") if line.strip()]
    if path.suffix == ".json" or text.lstrip().startswith(_LIST):
        values = parse_json(text, f"{path}: not a list of ids", ConfigError)
        if not isinstance(values, list) or {type(value) for value in values} - {str, int}:
            raise ConfigError(f"{path}: not a list of ids; give one id per line, or a JSON list")
    ids = tuple(dict.fromkeys(map(str, values)))
    if not ids:
        raise ConfigError(f"{path}: no ids in it; give one id per line, or a JSON list")
    return ids


def ids_in_shard(root: Folder, manifest: Manifest, name: str) -> Iterator[str]:
    """The ids that the samples of a shard themselves say, whatever the index does.

    OSError, pa.ArrowException or ValueError for a damaged one.
    """
    with root.open(name) as file:
        if manifest.format in TAR_FORMATS:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                for member in archive:
                    if member.name.endswith(".json") and (content := archive.extractfile(member)):
                        yield str(json.loads(content.read())["sample_id"])
            return
        with pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield from reader.get_batch(number).column("sample_id").to_pylist()
