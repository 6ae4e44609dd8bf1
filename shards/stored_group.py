"""One group out of a finished build, as it is stored: for `packer inspect`, not for training.

Reads the group's byte range alone, whatever the size of the build. Files of a refs build stay where
they are: the caller gets their paths.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import DamagedShard, first_line
from balance.types import COUNT_COLUMNS
from shards._index_writer import INDEX_BATCH_ROWS
from shards.arrow_shards import shard_schema
from shards.folders import Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """Where a group lies and what it costs."""

    shard: int
    offset: int
    length: int
    """Bytes."""
    num_samples: int
    counts: dict[str, int]
    """The six `num_*` columns, summed over the group."""
    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as its shard holds it."""

    sample_id: str
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    image_names: tuple[str, ...]
    """Paths under the data root (refs), members of the tar (webdataset), or empty: Arrow shards
    hold no names.
    """
    images: tuple[bytes, ...] | None
    """The original files' bytes; None with refs."""
    image_sizes: tuple[tuple[int, int], ...]
    """(width, height) of each image as counted, upright."""
    audio_lengths: tuple[int, ...]
    """Samples of each clip at the model's rate."""


def read_index_row(path: Path, group: int) -> IndexRow:
    """Row `group` of an index, which must have it. DamagedShard if the file cannot be read."""
    batch_number, row = divmod(group, INDEX_BATCH_ROWS)
    try:
        with pa.memory_map(str(path)) as source:
            values = pa.ipc.open_file(source).get_batch(batch_number).slice(row, 1).to_pylist()[0]
    except (pa.ArrowException, OSError, IndexError) as error:
        raise DamagedShard(
            f"{path}: not readable ({first_line(error)}); run `packer verify`"
        ) from None
    return IndexRow(
        **{name: values[name] for name in ("shard", "offset", "length", "num_samples")},
        counts={name: values[name] for name in COUNT_COLUMNS},
        sample_ids=tuple(values["sample_ids"]),
    )


def read_stored(root: Folder, shard: str, row: IndexRow, shard_format: str) -> list[StoredSample]:
    """The samples of a group of the shard named `shard`, in order; DamagedShard if it holds other
    bytes than expected.

    Reads the group's range and nothing else, also from an object store.
    """
    where = f"{shard}, bytes {row.offset:,} to {row.offset + row.length:,}"
    try:
        content = root.read(shard, row.offset, row.length)
        if len(content) != row.length:
            raise EOFError("the file ends before")
        if shard_format == "webdataset":
            samples = _read_tar(content)
        else:
            samples = _read_arrow(content, refs=shard_format == "refs")
    # what damaged bytes make of either format's parser
    except (
        pa.ArrowException,
        tarfile.TarError,
        OSError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        problem = (
            error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        )
        raise DamagedShard(f"{where}: not readable ({problem}); run `packer verify`") from None
    found = tuple(sample.sample_id for sample in samples)
    if found != row.sample_ids:
        raise DamagedShard(
            f"{where}: holds samples {list(found)[:3]}, not those of the index; run `packer verify`"
        )
    return samples


def _read_arrow(message: bytes, *, refs: bool) -> list[StoredSample]:
    schema = shard_schema(refs=refs)
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
    batch.validate(full=True)  # damaged offsets would otherwise be followed outside of the message
    return [
        _from_arrow({name: batch.column(name)[k] for name in schema.names}, refs=refs)
        for k in range(len(batch))
    ]


def _from_arrow(cells: dict[str, Any], *, refs: bool) -> StoredSample:
    return StoredSample(
        sample_id=cells["sample_id"].as_py(),
        input_ids=_numbers(cells["input_ids"]),
        labels=_numbers(cells["labels"]),
        image_names=tuple(cells["image_paths"].as_py()) if refs else (),
        images=None if refs else tuple(cells["images"].as_py()),
        image_sizes=tuple(
            zip(cells["image_widths"].as_py(), cells["image_heights"].as_py(), strict=True)
        ),
        audio_lengths=tuple(cells["audio_lengths"].as_py()),
    )


def _read_tar(content: bytes) -> list[StoredSample]:
    members = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            data = archive.extractfile(member)
            members[member.name] = b"" if data is None else data.read()
    return [
        _from_members(name.removesuffix(".json"), members)
        for name in members
        if name.endswith(".json")
    ]


def _from_members(key: str, members: dict[str, bytes]) -> StoredSample:
    about = json.loads(members[f"{key}.json"])
    return StoredSample(
        sample_id=about["sample_id"],
        input_ids=np.load(io.BytesIO(members[f"{key}.input_ids.npy"])),
        labels=np.load(io.BytesIO(members[f"{key}.labels.npy"])),
        image_names=tuple(f"{key}.{name}" for name in about["images"]),
        images=tuple(members[f"{key}.{name}"] for name in about["images"]),
        image_sizes=tuple(zip(about["image_widths"], about["image_heights"], strict=True)),
        audio_lengths=tuple(about["audio_lengths"]),
    )


def _numbers(cell: pa.ListScalar) -> NDArray[np.int32]:
    return np.asarray(cell.values.to_numpy(), dtype=np.int32)
