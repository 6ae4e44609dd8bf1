"""Parquet tables of counts, groups and rejected samples, written and read.

Rejections come from counting, the caps and writing; `rejected.parquet` holds all so far.
pyarrow.parquet is imported where it is used: most loaders do not need it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError, DamagedShard, DataError, first_line
from isobatch.common.types import COUNT_COLUMNS, Counts, Groups, IntArray, index_dtype
from isobatch.shards.checksums import group_checksum
from isobatch.shards.index import INDEX_NAME, GroupIndex
from isobatch.shards.manifest import Manifest

if TYPE_CHECKING:
    import pyarrow.parquet as pq

COUNTS_NAME = "counts.parquet"
GROUPS_NAME = "groups.parquet"
REJECTED_NAME = "rejected.parquet"

OpenFile = Callable[[str], pa.NativeFile]
"""Opens a table by its name."""

_SAMPLE = [("position", pa.int64()), ("sample_id", pa.string()), ("source", pa.string())]
_LOADS = [(name, pa.int32()) for name in (*COUNT_COLUMNS, "seq_len")]
COUNTS_SCHEMA = pa.schema([*_SAMPLE, *_LOADS, ("media_bytes", pa.int64())])
REJECTED_SCHEMA = pa.schema([*_SAMPLE, ("reason", pa.string()), ("detail", pa.string())])
GROUPS_SCHEMA = pa.schema([("samples", pa.list_(pa.int64())), ("num_samples", pa.int32()), *_LOADS])


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet table, whole or not at all."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_table(
    path: Path, columns: Sequence[str] | None = None, row_groups: Sequence[int] | None = None
) -> pa.Table:
    """Read a Parquet table (None: all of it); DataError if it is missing or damaged."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with _reading(path), pq.ParquetFile(path) as file:
        if lost := set(columns or ()) - set(file.schema_arrow.names):
            raise DataError(f"{path}: damaged: no column {min(lost)}")
        if row_groups is None:
            return file.read(columns)
        return file.read_row_groups(row_groups, columns)


def read_row_groups(path: Path, numbers: Sequence[int] | None = None) -> Iterator[pa.Table]:
    """Row groups of a Parquet table one by one (None: all); DataError as `read_table`."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with _reading(path), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if path.name == REJECTED_NAME and (lost := set(REJECTED_SCHEMA.names) - set(names)):
            raise DataError(f"{path}: damaged: no column {min(lost)}")
        for number in range(file.num_row_groups) if numbers is None else numbers:
            yield file.read_row_group(number)


def row_group_sizes(path: Path) -> list[int]:
    """Rows of each row group of a Parquet table; DataError as `read_table`."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with _reading(path):
        metadata = pq.read_metadata(path)
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of a table as DataError."""
    try:
        yield
    except FileNotFoundError:
        what = "is it the output of `packer build` or `packer group`?"
        raise DataError(f"no {path.name} in {path.parent}: {what}") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # its damage, or the disk's
        raise DataError(f"{path}: damaged: {first_line(error)}") from None


def counts_arrays(table: pa.Table) -> Counts:
    """The counts columns of a table as arrays."""
    columns = {name: table.column(name).to_numpy().astype(np.int64) for name in COUNT_COLUMNS}
    return Counts(**columns)


def source_numbers(table: pa.Table) -> IntArray:
    """The `source` of each row of a counts table as a number from 0, in order of appearance."""
    encoded = table.column("source").cast(pa.string()).dictionary_encode()
    parts = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def reject_rows(counts: pa.Table, rows: Sequence[tuple[int, str, str]]) -> pa.Table:
    """Rejections of counted samples, given as (row of `counts`, reason, detail)."""
    chosen = counts.select([name for name, _ in _SAMPLE])
    chosen = chosen.take(pa.array([row for row, _, _ in rows], pa.int64()))
    for place, name in enumerate(("reason", "detail"), start=1):
        chosen = chosen.append_column(name, pa.array([row[place] for row in rows], pa.string()))
    return chosen.cast(REJECTED_SCHEMA)


def groups_table(groups: Groups, counts: Counts) -> pa.Table:
    """One row per group: its samples (rows of the counts table) and its loads."""
    loads = {name: groups.sum(getattr(counts, name)) for name, _ in _LOADS}
    offsets = pa.array(groups.offsets, pa.int32())
    samples = pa.ListArray.from_arrays(offsets, pa.array(groups.samples, pa.int64()))
    columns = {"num_samples": groups.sizes, **loads}
    arrays = {name: pa.array(values, pa.int32()) for name, values in columns.items()}
    return pa.table({"samples": samples, **arrays}, schema=GROUPS_SCHEMA)


def read_groups(table: pa.Table) -> Groups:
    """The groups of a groups table: the inverse of `groups_table`. DataError if it is damaged."""
    if lacking := {"samples", "num_samples"}.difference(table.column_names):
        raise DataError(f"{GROUPS_NAME}: damaged: it has no column {min(lacking)}; build again")
    rows = [chunk.flatten().to_numpy() for chunk in table.column("samples").chunks]
    samples = np.concatenate([np.empty(0, np.int64), *rows])
    sizes = table.column("num_samples").to_numpy()
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if offsets[-1] != len(samples) or min(sizes, default=0) < 0:
        raise DataError(f"{GROUPS_NAME}: damaged: its groups list other samples; build again")
    return Groups(samples, offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Counts of a build's samples in stored order; group g has `offsets[g]:offsets[g + 1]`."""

    columns: dict[str, NDArray[np.int32]]
    """Columns of `Counts`, each of shape (num_samples,)."""
    offsets: IntArray
    """Borders of the groups, shape (num_groups + 1,)."""
    _padded_texts: dict[int, NDArray[np.int32]] = field(default_factory=dict, init=False)

    @property
    def groups(self) -> Groups:
        """The stored groups, as numbers of samples."""
        num_samples = int(self.offsets[-1])
        return Groups(np.arange(num_samples, dtype=index_dtype(num_samples)), self.offsets)

    def column(self, name: str, samples: IntArray | None = None) -> IntArray:
        """Values of a column for `samples` (None: all), int64, same shape."""
        values = self.columns[name]
        return (values if samples is None else values[samples]).astype(np.int64)

    def padded_text(self, multiple: int) -> NDArray[np.int32]:
        """`num_text_tokens` with each sample's padding to a multiple, (num_samples,)."""
        if multiple not in self._padded_texts:
            counts = Counts(
                **{name: values.astype(np.int64) for name, values in self.columns.items()}
            )
            texts = counts.padded(multiple).num_text_tokens.astype(np.int32)
            self._padded_texts[multiple] = texts
        return self._padded_texts[multiple]


def read_samples(
    manifest: Manifest, index: GroupIndex, open_file: OpenFile | None = None
) -> SampleTable:
    """The counts of each stored sample; the index has sums only.

    `open_file` opens a table by its name; without it they are next to the manifest. DataError if
    they are missing, damaged, or of another build than its index. 1.2 million samples take .3 s.
    """
    try:
        groups = read_groups(
            _open(manifest, GROUPS_NAME, open_file).read(["samples", "num_samples"])
        )
        counts = _open(manifest, COUNTS_NAME, open_file).read(list(COUNT_COLUMNS))
        loads = {name: counts.column(name).to_numpy()[groups.samples] for name in COUNT_COLUMNS}
        columns = {name: values.astype(np.int32) for name, values in loads.items()}
    except _UNREADABLE as error:
        raise _unreadable(manifest, error) from None
    _check_fit(manifest, index, groups.offsets, columns)
    return SampleTable(columns=columns, offsets=groups.offsets)


def read_sample_values(
    manifest: Manifest, name: str, open_file: OpenFile | None = None
) -> NDArray[Any]:
    """A column of counts.parquet for each stored sample: int64, floats, or str objects for texts.

    ConfigError names the columns there are; DataError as `read_samples`.
    """
    column, rows = _column(manifest, name, open_file)
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy()[rows].astype(np.int64))
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy()[rows])
    # each distinct text once, and not by `to_numpy`, which imports pandas
    encoded = column.combine_chunks().dictionary_encode()
    texts = np.array([*encoded.dictionary.to_pylist(), None], object)
    return np.asarray(texts[encoded.indices.fill_null(len(texts) - 1).to_numpy()[rows]])


def read_id_hashes(manifest: Manifest, open_file: OpenFile | None = None) -> NDArray[np.uint64]:
    """XXH3 (64 bits) of each stored sample's id in UTF-8; .3 s per million. DataError as above."""
    column, rows = _column(manifest, "sample_id", open_file)
    hashes = np.empty(len(column), np.uint64)
    first = 0
    for ids in column.cast(pa.binary()).chunks:
        hashes[first : first + len(ids)] = [
            group_checksum(sample_id) for sample_id in ids.to_pylist()
        ]
        first += len(ids)
    return hashes[rows]


def _column(
    manifest: Manifest, name: str, open_file: OpenFile | None
) -> tuple[pa.ChunkedArray, IntArray]:
    """A column of counts.parquet, and the row of each stored sample."""
    try:
        counts = _open(manifest, COUNTS_NAME, open_file)
        known = counts.schema_arrow.names
        column = counts.read([name]).column(name) if name in known else None
        rows = read_groups(_open(manifest, GROUPS_NAME, open_file).read(["samples", "num_samples"]))
    except _UNREADABLE as error:
        raise _unreadable(manifest, error) from None
    if column is None:
        # kept columns are read with their groups; for a filter every shard would have to be read
        where = " (kept columns are in the shards, not here)" if name in manifest.extras else ""
        raise ConfigError(
            f"{manifest.place}: samples have no column {name!r}{where}; they have "
            f"{', '.join(known)}"
        )
    return column, rows.samples


def _open(manifest: Manifest, name: str, open_file: OpenFile | None) -> "pq.ParquetFile":
    import pyarrow.parquet as pq  # noqa: PLC0415

    table = Path(manifest.place, manifest.table_path(name))
    return pq.ParquetFile(open_file(name) if open_file else table)


_UNREADABLE = (OSError, pa.ArrowException, DamagedShard, LookupError, TypeError, ValueError)


def _unreadable(manifest: Manifest, error: Exception) -> DataError:
    return DataError(
        f"{manifest.place}: regrouping, planning, choosing samples and loss weights need "
        f"{COUNTS_NAME} and {GROUPS_NAME} of the build, which cannot be read "
        f"({first_line(error)}); copy them next to {INDEX_NAME}, or build again"
    )


def _check_fit(
    manifest: Manifest, index: GroupIndex, offsets: IntArray, columns: dict[str, NDArray[np.int32]]
) -> None:
    """DataError unless groups and their sums are those of the index."""
    num_samples = len(columns[COUNT_COLUMNS[0]])
    groups = Groups(np.arange(num_samples), offsets)
    fits = len(groups) == len(index) and offsets[-1] == num_samples
    fits = fits and np.array_equal(groups.sizes, index.column("num_samples"))
    sums = ((name, groups.sum(values.astype(np.int64))) for name, values in columns.items())
    if not (fits and all(np.array_equal(counts, index.column(name)) for name, counts in sums)):
        raise DataError(
            f"{manifest.place}: {COUNTS_NAME} and {GROUPS_NAME} do not fit {INDEX_NAME}; they are "
            "of another build: copy all files of one build, or build again"
        )
