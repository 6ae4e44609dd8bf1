"""Records of a dataset by number, for counting them in any order: `RecordTable`.

For loading without a build. What `--dataset` names is read once, in its order, into an Arrow file
in the user's cache folder, which all processes of a machine map and later runs find again. That
takes the disk space of the records, with the images that are inside of them (Parquet); files that
records name, and those in tars, stay where they are. In memory are some bytes per record. The cache
has a limit (`common.cache_files`): files that were used longest ago go.
"""

import fcntl
import hashlib
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from isobatch.common.cache_files import MAX_BYTES, RECORDS, note_use, remove_files
from isobatch.common.errors import DataError, first_line
from isobatch.counting.records.record import RawRecord
from isobatch.counting.records.schemas import id_of
from isobatch.packer.count.mixture_sampling import copies_per_sample, numbered_ids
from isobatch.packer.demo.dataset import DEMO_SAMPLES
from isobatch.packer.demo.kept_demo import demo_key, place_demo
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.columns import parse_columns
from isobatch.packer.sources.dataset import (
    DEMO,
    Dataset,
    demo_dataset,
    find_dataset,
    no_records,
)
from isobatch.shards.folders import absolute, cache_folder, naming_full_disk

BATCH_RECORDS = 256
"""Records of a batch of the file: few, because each may have images of some megabytes."""
_CLEAN = "make room there, for example with packer cache --clean"
_SCHEMA = pa.schema([("part", pa.int32()), ("id", pa.string()), ("record", pa.large_binary())])


class RecordTable:
    """The records of all parts of a dataset, a mixture's as often as they go in."""

    def __init__(self, dataset: Dataset, seed: int, progress: StageProgress) -> None:
        """Reads the dataset unless its records are in the cache; processes wait for one another.

        `seed` draws the samples of a fractional repeat. DataError for files that cannot be read,
        and where there are no records.
        """
        self.dataset = dataset
        self.identity = _identity(dataset)
        """Changes when the files do."""
        self._file = cache_folder("records") / (self.identity + RECORDS)
        with _locked(self._file.with_suffix(".lock")):
            if not self._file.exists():
                with naming_full_disk(self._file.parent, _CLEAN):
                    _read_all(dataset, self._file, progress)
            note_use(self._file)
            reader = pa.ipc.open_file(pa.memory_map(str(self._file)))
        remove_files(self._file.parent, RECORDS, MAX_BYTES[RECORDS], keep=self._file)
        self._batches = [reader.get_batch(place) for place in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *map(len, self._batches)])
        table = pa.Table.from_batches(self._batches, _SCHEMA)
        parts = table.column("part").to_numpy().astype(np.int64)
        self.part_sizes = np.bincount(parts, minlength=len(dataset.parts)).tolist()
        """Records of each part."""
        copies = copies_per_sample(dataset, parts, seed)
        self.rows = np.repeat(np.arange(len(parts)), copies)
        """Record of each number, shape (numbers,), not decreasing."""
        self.parts = parts[self.rows]
        """Part of each number, shape (numbers,)."""
        ids = table.column("id").combine_chunks().take(pa.array(self.rows))
        numbered = numbered_ids(ids).items()
        self.suffixes = {row: name[len(ids[row].as_py()) :] for row, name in numbered}
        """Number -> what its id gets, where an earlier one has the same: `#2`."""

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> RawRecord:
        """A record by its place among all that were read."""
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        value = self._batches[batch].column("record")[row - int(self._starts[batch])]
        record: RawRecord = pickle.loads(value.as_buffer())
        return record


def read_records(
    place: str,
    data_root: str | None,
    keep: tuple[str, ...],
    seed: int,
    progress: StageProgress,
    columns: tuple[str, ...] = (),
) -> RecordTable:
    """The records of what `packer build --dataset` takes, with the columns `keep`.

    Errors as of `find_dataset`.
    """
    names = parse_columns(columns)
    if place == DEMO:
        drawn = cache_folder("demo") / demo_key(DEMO_SAMPLES)
        folder = Path(data_root) if data_root else drawn
        with _locked(cache_folder("records") / "demo.lock"):
            if not (folder / "annotations.json").exists():
                place_demo(folder, num_samples=DEMO_SAMPLES)
        dataset = demo_dataset(folder)
    else:
        dataset = find_dataset(place, data_root, columns=names)
    return RecordTable(dataset.keeping(keep, seed), seed, progress)


def _read_all(dataset: Dataset, file: Path, progress: StageProgress) -> None:
    """Write the records of all parts, the whole file or none."""
    temporary = file.with_suffix(".tmp")
    sources = [part.open() for part in dataset.parts]
    total = sum(info.size for source in sources for info in source.files())
    num_records = 0
    types = [field.type for field in _SCHEMA]
    with (
        progress.stage("read", total, "records") as stage,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, _SCHEMA) as writer,
    ):
        for number, (part, source) in enumerate(zip(dataset.parts, sources, strict=True)):
            chunks = source.chunks(BATCH_RECORDS, stage.advance)
            records = islice(chain.from_iterable(chunk.records() for chunk in chunks), part.limit)
            while rows := list(islice(records, BATCH_RECORDS)):
                columns = [
                    [number] * len(rows),
                    [id_of(row.value, f"{part.name}:{row.position}") for row in rows],
                    [pickle.dumps(row, pickle.HIGHEST_PROTOCOL) for row in rows],
                ]
                arrays = list(map(pa.array, columns, types))
                writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
                stage.count(len(rows))
                num_records += len(rows)
    if not num_records:
        temporary.unlink()
        raise no_records(dataset)
    temporary.replace(file)


def _identity(dataset: Dataset) -> str:
    """A hash of the files, of what is read of them and how, and of this version."""
    parts = []
    for part in dataset.parts:
        located = part.located
        places = [absolute(located.folder), absolute(part.data_root)]
        files = [[info.name, info.size, info.version] for info in part.open().files()]
        how = [part.name, part.limit, located.layout, located.options, located.keep]
        how += [] if located.columns is None else [located.columns]
        parts.append([places, how, files])
    values = json.dumps([version("isobatch"), parts], default=repr)
    return hashlib.sha256(values.encode()).hexdigest()[:24]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Wait until no other process holds this lock."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = file.open("w")
    except OSError as error:
        reason = f"{file.parent}: {first_line(error)}"
        raise DataError(f"{reason}; set XDG_CACHE_HOME to a folder that can be written") from None
    with descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
