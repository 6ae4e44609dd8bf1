"""Parquet files as tables of row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from packer.sources.files import damaged, opened
from shards.folders import Folder

READ_BYTES = 1 << 20
"""Column chunks are streamed in reads of this size, so that a large row group is never in memory as
a whole.
"""
BATCH_ROWS = 64
"""Rows decoded at once: few, because each may hold images of some megabytes."""


class ParquetTable:
    """An open Parquet file."""

    def __init__(self, file: pq.ParquetFile) -> None:
        self._file = file
        self.columns: list[str] = file.schema_arrow.names

    def blocks(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, decoded bytes of `columns`) of each row group."""
        metadata = self._file.metadata
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        return [(group.num_rows, _decoded_bytes(group, set(columns))) for group in groups]

    def batches(self, blocks: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of row groups, decoded a few at a time."""
        return self._file.iter_batches(  # type: ignore[no-any-return]
            BATCH_ROWS, row_groups=list(blocks), columns=list(columns), use_threads=False
        )


def _decoded_bytes(group: pq.RowGroupMetaData, columns: set[str]) -> int:
    parts = (group.column(number) for number in range(group.num_columns))
    return sum(
        part.total_uncompressed_size
        for part in parts
        if part.path_in_schema.partition(".")[0] in columns
    )


@contextmanager
def open_parquet(root: Folder, name: str) -> Iterator[ParquetTable]:
    """A Parquet file; DataError that names it if it is damaged, also when that comes out inside the
    `with`.
    """
    with opened(root, name) as file:
        try:
            yield ParquetTable(pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False))
        except (pa.ArrowException, EOFError) as error:
            raise damaged(root, name, error) from None
