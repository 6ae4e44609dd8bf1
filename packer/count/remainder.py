"""What partitions leave over: staged samples of several, to be packed as one.

A partition leaves its samples in a file of their own, and the content of files that came with their
records in another. So whoever packs them needs nothing else that the partition has staged.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.common.types import IntArray
from isobatch.counting.records.media import BLOB_SCHEME
from isobatch.counting.sample_counter import blob_name
from isobatch.packer.count.counted_samples import CountedSamples
from isobatch.packer.count.staging import StagedSamples, Staging
from isobatch.packer.sources.dataset import Dataset
from isobatch.shards.folders import Folder, open_folder
from isobatch.shards.stored_group import FRAMES

ROWS, CONTENT = "remainder.arrow", "remainder.bin"
NAMES = (ROWS, CONTENT)
_PLACE = ("name", "container", "offset", "size")


def save_remainder(
    staging: Staging, counts: pa.Table, parts: IntArray, folder: Path, number: int
) -> None:
    """Write samples to a folder, in the order of their parts of the dataset.

    `counts`: their rows, whose ids they keep, since copies differ in these alone. `number`: of
    their partition.
    """
    positions = counts.column("position").to_numpy()
    order = np.lexsort((positions, parts))
    rows = StagedSamples(staging.samples).take(positions[order])
    ids = counts.column("sample_id").take(pa.array(order)).combine_chunks()
    place = rows.schema.get_field_index("sample_id")
    rows = rows.set_column(place, rows.schema.field(place), ids)
    with (folder / CONTENT).open("wb") as content:
        bring = partial(_brought, open_folder(str(staging.blobs)), content, number)
        for name in ("images", "audios"):
            files = [_with_files(of, bring) for of in rows.column(name).to_pylist()]
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, name, pa.array(files, rows.schema.field(name).type))
    rows = rows.replace_schema_metadata(None)
    rows = rows.append_column("part", pa.array(parts[order], pa.int64()))
    rows = rows.append_column("position", pa.array(positions[order], pa.int64()))
    with pa.ipc.new_file(folder / ROWS, rows.schema) as writer:
        writer.write_batch(rows)


def _with_files(files: list[dict[str, Any]] | None, bring: Any) -> list[dict[str, Any]] | None:
    """Files of a staged sample, as `bring` gives their places."""
    if files is None:
        return None
    brought = []
    for file in files:
        place = [file[name] for name in _PLACE]
        if file["container"] == FRAMES:
            frames = [bring(frame) for frame in json.loads(file["name"])]
            place[0] = json.dumps(frames, ensure_ascii=False)
        else:
            place = bring(place)
        brought.append(file | dict(zip(_PLACE, place, strict=True)))
    return brought


def _brought(blobs: Folder, content: IO[bytes], number: int, place: list[Any]) -> list[Any]:
    """The place of a file; what is in a blob is added to `content`."""
    name, container, offset, size = place
    if not container.startswith(BLOB_SCHEME):
        return place
    start = content.tell()
    content.write(blobs.read(container.removeprefix(BLOB_SCHEME), offset, size))
    return [name, BLOB_SCHEME + blob_name(number), start, size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """The samples that some partitions have left over."""

    samples: CountedSamples
    positions: IntArray
    """Position of each in the dataset, as `samples` has them in order."""


def read_remainder(
    folders: Sequence[tuple[int, int, Path]], dataset: Dataset, part_sizes: list[int]
) -> Remainder:
    """What is in some folders, part of the dataset by part.

    `folders`: the number of each partition, the position of its first record in the dataset, and a
    folder with its files. `part_sizes`: the samples of each part of the dataset.
    """
    tables = [_read(folder / ROWS) for _, _, folder in folders]
    parts = [table.column("part").to_numpy() for table in tables]
    positions = [
        table.column("position").to_numpy() + first
        for table, (_, first, _) in zip(tables, folders, strict=True)
    ]
    order = np.argsort(np.concatenate(parts), kind="stable")

    def chunks() -> Iterator[tuple[pa.RecordBatch, dict[str, memoryview]]]:
        blobs = {blob_name(number): folder / CONTENT for number, _, folder in folders}
        blobs = {name: path for name, path in blobs.items() if path.stat().st_size}
        for part in range(len(part_sizes)):
            for table, (number, _, _) in zip(tables, folders, strict=True):
                rows = table.filter(pc.equal(table.column("part"), part))
                if not len(rows):
                    continue
                name = blob_name(number)
                blob = blobs.pop(name, None)
                staged = rows.drop_columns(["part", "position"])
                yield staged, {} if blob is None else {name: _mapped(blob)}

    return Remainder(
        samples=CountedSamples(dataset=dataset, part_sizes=part_sizes, chunks=chunks(), note=""),
        positions=np.concatenate(positions)[order],
    )


def _mapped(path: Path) -> memoryview:
    with pa.memory_map(str(path)) as source:
        return memoryview(source.read_buffer())


def _read(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).get_batch(0)
