"""What each stored sample costs, for those who pack anew: `SampleTable`, out of counts.parquet and
groups.parquet.

The index knows sums of groups only. A table holds 24 bytes per sample in every process; 1.2 million
samples are read and compared with the index in .3 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balance.errors import DamagedShard, DataError, first_line
from balance.types import COUNT_COLUMNS, Groups, IntArray, Limits
from loaders.read.build_files import BuildFiles
from shards.index import GroupIndex, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """The samples of a build in stored order: sample s is in the group g with `offsets[g] <= s <
    offsets[g + 1]`.
    """

    columns: dict[str, NDArray[np.int32]]
    """The six columns of `Counts`, shape (num_samples,)."""
    offsets: IntArray
    """Shape (num_groups + 1,)."""
    limits: Limits
    """The caps that the build's groups keep."""

    @property
    def groups(self) -> Groups:
        """The stored groups, as numbers of samples."""
        return Groups(np.arange(self.offsets[-1]), self.offsets)

    def column(self, name: str, samples: IntArray) -> IntArray:
        """Values of a column for `samples`, int64, same shape."""
        return self.columns[name][samples].astype(np.int64)

    def all(self, name: str) -> IntArray:
        """Values of a column for all samples, int64."""
        return self.columns[name].astype(np.int64)

    def seq_len(self, samples: IntArray) -> IntArray:
        """LLM tokens of `samples`, int64, same shape."""
        image, text, audio = (
            self.column(f"num_{kind}_tokens", samples) for kind in ("image", "text", "audio")
        )
        return image + text + audio


def read_samples(manifest: Manifest, index: GroupIndex, files: BuildFiles) -> SampleTable:
    """The samples of a build. DataError if its tables are missing, damaged, or of another build
    than its index.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415  (see `loaders`)

    try:
        groups = pq.read_table(files.open("groups.parquet"), columns=["samples", "num_samples"])
        counts = pq.read_table(files.open("counts.parquet"), columns=list(COUNT_COLUMNS))
        limits = Limits(**manifest.limits)
        sizes = groups.column("num_samples").to_numpy()
        rows = [chunk.flatten().to_numpy() for chunk in groups.column("samples").chunks]
        # rows of counts.parquet in stored order
        stored = np.concatenate([np.empty(0, np.int64), *rows])
        columns = {
            name: counts.column(name).to_numpy()[stored].astype(np.int32) for name in COUNT_COLUMNS
        }
    except (
        OSError,
        pa.ArrowException,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        DamagedShard,
    ) as error:
        raise DataError(
            f"{manifest.place}: regroup and planner need counts.parquet and groups.parquet of the build, which "
            f"cannot be read ({first_line(error)}); copy them beside the shards, or build again"
        ) from None
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    _check_fit(manifest, index, Groups(np.arange(len(stored)), offsets), columns)
    return SampleTable(columns=columns, offsets=offsets, limits=limits)


def _check_fit(
    manifest: Manifest, index: GroupIndex, groups: Groups, columns: dict[str, NDArray[np.int32]]
) -> None:
    """DataError unless groups and their sums are those of the index."""
    everyone = np.arange(len(index))
    fits = len(groups) == len(index) and groups.offsets[-1] == len(groups.samples)
    fits = fits and np.array_equal(groups.sizes, index.column("num_samples", everyone))
    fits = fits and all(
        np.array_equal(groups.sum(columns[name].astype(np.int64)), index.column(name, everyone))
        for name in columns
    )
    if not fits:
        raise DataError(
            f"{manifest.place}: counts.parquet and groups.parquet do not fit index.arrow; they are of another build: "
            "copy all files of one build, or build again"
        )
