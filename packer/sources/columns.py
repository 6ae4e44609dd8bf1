"""Columns of files by our names: `parse_columns`, `RenamedChunk`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from isobatch.common.errors import ConfigError
from isobatch.counting.columns import Columns, named_columns
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.packer.sources.base import Located


def parse_columns(options: Iterable[str]) -> Columns | None:
    """What `--columns` says: `ours=theirs`, several with commas between; None if nothing."""
    pairs = [pair.strip() for text in options for pair in text.split(",") if pair.strip()]
    if bad := next((pair for pair in pairs if "=" not in pair), None):
        raise ConfigError(f"columns {bad!r}: give OURS=THEIRS, for example messages=my_conv")
    return named_columns([tuple(map(str.strip, pair.split("=", 1))) for pair in pairs])


def require_columns(located: Located, columns: Columns, existing: set[str], name: str) -> None:
    """ConfigError unless the first records have every column that is named."""
    if missing := sorted(columns.theirs - existing):
        has = ", ".join(sorted(existing))[:300]
        where = f"{name} ({located.folder})"
        raise ConfigError(f"columns: no {missing[0]!r} in the first records of {where}: {has}")


@dataclass(frozen=True, slots=True)
class RenamedChunk:
    """Records of a chunk, with our names."""

    chunk: Chunk
    columns: Columns

    def records(self) -> Iterator[RawRecord]:
        """The records, in order."""
        for record in self.chunk.records():
            if record.broken or not isinstance(record.value, Mapping):
                yield record
            else:
                value = self.columns.apply(record.value)
                yield replace(record, value=value, renamed=self.columns.renamed)
