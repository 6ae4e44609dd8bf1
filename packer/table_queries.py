"""Questions about a build's Parquet tables, answered lazily by polars.

polars takes 0.2 s to load, so it is loaded with the first question: `packer build` asks none.
"""

# ruff: noqa: PLC0415 - see above

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from isobatch.common.errors import DataError, first_line

if TYPE_CHECKING:
    import polars as pl


def query_table(path: Path, question: "Callable[[pl.LazyFrame], pl.LazyFrame]") -> "pl.DataFrame":
    """The answer to a question about one table; DataError when that is missing or damaged."""
    import polars as pl

    try:
        return question(pl.scan_parquet(path, glob=False)).collect()
    except FileNotFoundError:
        hint = "is it the output of `packer build` or `packer group`?"
        raise DataError(f"no {path.name} in {path.parent}: {hint}") from None
    # a panic of its Parquet reader is no Exception
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise DataError(f"{path}: damaged: {first_line(error)}") from None


def read_rows(path: Path, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a table in the order asked for; reads only the row groups that hold them."""
    import polars as pl

    def chosen(table: "pl.LazyFrame") -> "pl.LazyFrame":
        return pl.concat([table.select(columns).slice(row, 1) for row in rows])

    return query_table(path, chosen).to_dicts()


def find_rows(path: Path, column: str, value: str) -> list[int]:
    """Numbers of the rows of a table that have this value."""
    import polars as pl

    def matching(table: "pl.LazyFrame") -> "pl.LazyFrame":
        return table.select(column).with_row_index("row").filter(pl.col(column) == value)

    return query_table(path, matching)["row"].to_list()


def count_reasons(rejected: "pl.LazyFrame") -> "pl.LazyFrame":
    """Rejections by reason, most frequent first, with the first sample's details."""
    import polars as pl

    return (
        rejected.group_by("reason", maintain_order=True)
        .agg(pl.len().alias("number"), pl.first("sample_id"), pl.first("detail"))
        .sort("number", descending=True, maintain_order=True)
    )


def as_frame(table: pa.Table) -> "pl.LazyFrame":
    """A table in memory as polars sees it, without a copy."""
    import polars as pl

    return pl.DataFrame(table).lazy()
